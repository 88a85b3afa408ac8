"""Gathering cache entries into a workspace: every byte, both encodings, rows that must stay as they were."""

from __future__ import annotations

import pytest
import torch

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from tests.kernels.implementations import Implementation, implementations
from tests.support.e4m3 import random_bytes
from tests.support.pages import fp8_cache, padded_rows, random_table, read_slot, slot_of

IMPLEMENTATIONS = implementations("gather_dequant.gather_dequant")
DS_MLA = CacheFormat.FP8_DS_MLA
CPU = torch.device("cpu")
STALE = -7.0


def filled(num_blocks: int, size: int, fp8_format: Fp8Format, device: torch.device) -> PagedCache:
    """Pages with random codes and scales of 2^-20 to 2^20."""
    source = torch.Generator().manual_seed(num_blocks)
    cache = fp8_cache(num_blocks, size, DS_MLA, fp8_format, device)
    for block in range(num_blocks):
        codes = random_bytes((size, 576), fp8_format, source)
        codes[:, 448:] = torch.randn(size, 64, generator=source).to(torch.bfloat16).view(torch.uint8)
        scales = torch.randint(107, 148, (size, 8), generator=source, dtype=torch.uint8)
        scales[:, 7] = 0
        cache.data[block, : size * 576] = codes.flatten().to(device)
        cache.data[block, size * 576 : size * 584] = scales.flatten().to(device)
    return cache


def gather(
    impl: Implementation, cache: PagedCache, table: BlockTable, lens: list[int], last: list[int] | None,
    out: torch.Tensor, offset: int,
) -> torch.Tensor:  # fmt: skip
    device = impl.device
    moved = BlockTable(table.blocks.to(device), table.first_block.to(device), table.block_size)
    counts = None if last is None else torch.tensor(last, dtype=torch.int32, device=device)
    impl.op(cache, moved, torch.tensor(lens, dtype=torch.int32, device=device), counts, out, offset)
    return out.cpu()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize(("size", "lens"), [(64, [0, 1, 65]), (2, [3, 7, 0, 4])])
@pytest.mark.parametrize("partial", [False, True])
def test_fp8_pages(impl: Implementation, fp8_format: Fp8Format, size: int, lens: list[int], partial: bool) -> None:
    table, count = random_table(lens, size, torch.Generator().manual_seed(3), CPU)
    cache = filled(count, size, fp8_format, impl.device)
    last = [min(length, 3) for length in lens] if partial else None
    out = torch.full((len(lens), 72, 512), STALE, dtype=torch.bfloat16, device=impl.device)
    got = gather(impl, cache, table, lens, last, out, 5)
    for req, length in enumerate(lens):
        number = length if last is None else last[req]
        for i in range(number):
            expected = read_slot(cache, slot_of(table, req, length - number + i))
            assert torch.equal(got[req, 5 + i].double(), expected), "codes times powers of two are exact in bf16"
        assert (got[req, :5] == STALE).all()
        assert (got[req, 5 + number :] == STALE).all()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_every_code_and_scale(impl: Implementation, fp8_format: Fp8Format) -> None:
    """One token per scale byte, with all 256 codes in it; NaN where either says so."""
    from tests.support.e4m3 import byte_values

    cache = fp8_cache(4, 64, DS_MLA, fp8_format, impl.device)
    codes = torch.arange(448, dtype=torch.int64).remainder(256).to(torch.uint8)
    for slot in range(256):
        page, place = divmod(slot, 64)
        cache.data[page, place * 576 : place * 576 + 448] = codes.to(impl.device)
        cache.data[page, 64 * 576 + place * 8 : 64 * 576 + place * 8 + 8] = slot
    table = BlockTable(torch.arange(4, dtype=torch.int32).view(1, 4), torch.zeros(1, dtype=torch.int32), 64)
    out = torch.empty(1, 256, 512, device=impl.device)
    got = gather(impl, cache, table, [256], None, out, 0)[0, :, :448].double()
    values = byte_values(fp8_format)[codes.long()]
    for byte in range(256):
        scale = float("nan") if byte == 255 else 2.0 ** (byte - 127)
        # fp32 ends at 2^128: what is larger is infinite there.
        expected = (values * scale).to(torch.float32).double()
        torch.testing.assert_close(got[byte], expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_rows_and_missing_blocks(impl: Implementation) -> None:
    table, count = random_table([20, 9], 4, torch.Generator().manual_seed(0), CPU, first=1)
    table.blocks[0, 2] = -1
    cache = padded_rows(count, 4, 48, torch.float32, impl.device)
    cache.data.copy_(torch.randn(count, 4, 48))
    out = torch.full((2, 18, 48), STALE, device=impl.device)
    got = gather(impl, cache, table, [20, 9], None, out, 0)
    for req, length in enumerate((18, 9)):  # the first request's last two rows do not fit
        for i in range(length):
            slot = slot_of(table, req, i)
            expected = torch.zeros(48) if slot < 0 else cache.data[slot // 4, slot % 4].cpu()
            assert torch.equal(got[req, i], expected)
    assert (got[1, 9:] == STALE).all()


@pytest.mark.gpu
def test_blocks_beyond_32_bit_offsets() -> None:
    from dsv4dist.kernels._triton.gather_dequant import gather_dequant

    blocks = [0, 57_358, 57_359, 114_717, 114_718, 114_999]
    data = torch.full((115_000, 37_440), 255, dtype=torch.uint8, device="cuda")
    for i, block in enumerate(blocks):
        data[block, : 64 * 576] = 0x38
        data[block, 64 * 576 :] = 127 + i
    cache = PagedCache(data, 64, DS_MLA, Fp8Format.OCP)
    table = BlockTable(torch.tensor([blocks], dtype=torch.int32).cuda(), torch.zeros(1, dtype=torch.int32).cuda(), 64)
    out = torch.empty(1, 64 * 6, 512, device="cuda")
    gather_dequant(cache, table, torch.tensor([64 * 6]).cuda(), None, out, 0)
    expected = 2.0 ** torch.arange(6).repeat_interleave(64)
    assert torch.equal(out[0, :, :448].cpu(), expected.unsqueeze(1).expand(-1, 448))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    table, count = random_table([4], 64, torch.Generator().manual_seed(0), CPU)
    cache = fp8_cache(count, 64, DS_MLA, Fp8Format.OCP, impl.device)
    with pytest.raises(ShapeError, match="offset: expected 0 to 4, got 5"):
        gather(impl, cache, table, [4], None, torch.empty(1, 4, 512, device=impl.device), 5)
    index = fp8_cache(1, 64, CacheFormat.FP8_INDEX, Fp8Format.OCP, impl.device)
    with pytest.raises(UnsupportedError, match="fp8_index"):
        gather(impl, index, table, [4], None, torch.empty(1, 4, 128, device=impl.device), 0)
