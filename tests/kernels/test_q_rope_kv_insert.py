"""Head norm and rotation of q, rotation and insertion of kv: values, bytes, absent slots, gaps, far blocks."""

from __future__ import annotations

import pytest
import torch

from dsv4dist.errors import ShapeError, UnsupportedError
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from tests.kernels.implementations import Implementation, implementations
from tests.support.pages import (
    SENTINEL,
    fp8_cache,
    memory_of,
    padded_rows,
    quantisation_error,
    read_slot,
    rotated,
)
from tests.support.poison import uninitialised_memory_poisoned

EPS = 1e-6
IMPLEMENTATIONS = implementations("q_rope_kv_insert.q_rope_kv_insert")
DS_MLA = CacheFormat.FP8_DS_MLA


def inputs(count: int, heads: int, width: int, rotary: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    source = torch.Generator().manual_seed(count * 100 + heads)
    sizes = torch.logspace(-6, 3, max(count, 1))[:count].unsqueeze(1)
    return {
        "q": (torch.randn(count, heads, width, generator=source) * 5).to(dtype),
        "kv": (torch.randn(count, width, generator=source) * sizes).to(dtype),
        "positions": torch.randint(0, 50, (count,), generator=source),
        "cos_sin": torch.randn(50, rotary, generator=source),
    }


def on(impl: Implementation, data: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [data[name].to(impl.device) for name in ("q", "kv", "positions", "cos_sin")]


def check_q(got: torch.Tensor, data: dict[str, torch.Tensor]) -> None:
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 4e-6}[got.dtype]
    for token, position in enumerate(data["positions"].tolist()):
        x = data["q"][token].double()
        expected = rotated(x / (x.square().mean(-1, keepdim=True) + EPS).sqrt(), data["cos_sin"][position])
        torch.testing.assert_close(got[token].cpu().double(), expected, rtol=step * 1.01, atol=1e-5)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
@pytest.mark.parametrize(("count", "heads"), [(0, 2), (1, 8), (4, 3), (65, 1)])
def test_fp8_pages(impl: Implementation, fp8_format: Fp8Format, count: int, heads: int) -> None:
    data = inputs(count, heads, 512, 64, torch.bfloat16)
    cache = fp8_cache(3, 64, DS_MLA, fp8_format, impl.device)
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(1))[:count]
    if count > 3:
        slots[1], slots[2] = -1, 3 * 64 + 5
    with uninitialised_memory_poisoned():
        out = impl.op(*on(impl, data), cache, slots.to(impl.device), EPS)
    check_q(out, data)
    written = torch.zeros(memory_of(cache).numel(), dtype=torch.bool)
    for token, slot in enumerate(slots.tolist()):
        if not 0 <= slot < cache.num_slots:
            continue
        expected = rotated(data["kv"][token], data["cos_sin"][data["positions"][token]])
        got = read_slot(cache, slot, written)
        assert ((got - expected).abs()[:448] <= quantisation_error(expected[:448], 64)).all()
        torch.testing.assert_close(got[448:], expected[448:], rtol=2**-8 * 1.01, atol=1e-6)
    assert (memory_of(cache)[~written] == SENTINEL).all(), "bytes outside the written entries changed"
    if fp8_format is Fp8Format.FNUZ:
        codes = memory_of(cache).as_strided((3, 64, 448), (cache.data.stride(0), 576, 1))
        assert not (codes == 0x80).any()


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rows_of_any_width(impl: Implementation, dtype: torch.dtype) -> None:
    data = inputs(5, 3, 96, 16, dtype)
    cache = padded_rows(2, 4, 96, dtype, impl.device)
    slots = torch.tensor([7, -1, 0, 8, 3], device=impl.device)
    with uninitialised_memory_poisoned():
        out = impl.op(*on(impl, data), cache, slots, EPS)
    check_q(out, data)
    rows = cache.data.cpu()
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 4e-6}[dtype]
    for token, slot in ((0, 7), (2, 0), (4, 3)):
        expected = rotated(data["kv"][token], data["cos_sin"][data["positions"][token]])
        atol = 1e-3 if dtype is torch.float16 else 1e-4
        torch.testing.assert_close(rows[slot // 4, slot % 4].double(), expected, rtol=step * 1.01, atol=atol)
    assert rows.isnan().all(-1).sum() == 5, "only the three present slots are written"


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
@pytest.mark.parametrize("fp8_format", list(Fp8Format))
def test_bytes_equal_those_of_the_reference(impl: Implementation, fp8_format: Fp8Format) -> None:
    from dsv4dist.kernels.reference.q_rope_kv_insert import q_rope_kv_insert

    data = inputs(64, 1, 512, 64, torch.bfloat16)
    groups = [0.0, 1.75, 3.5, 224.0, 448.0, 449.0, 1e-30]
    data["kv"][:7, :64] = torch.tensor(groups).unsqueeze(1)
    data["kv"][7, 70], data["kv"][7, 140] = float("nan"), float("inf")
    slots = torch.arange(64)
    caches = [fp8_cache(1, 64, DS_MLA, fp8_format, device) for device in ("cpu", impl.device)]
    q_rope_kv_insert(*(data[name] for name in ("q", "kv", "positions", "cos_sin")), caches[0], slots, EPS)
    impl.op(*on(impl, data), caches[1], slots.to(impl.device), EPS)
    assert torch.equal(memory_of(caches[0]), memory_of(caches[1]))


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_an_empty_group_decodes_to_zero(impl: Implementation) -> None:
    data = inputs(1, 1, 512, 64, torch.bfloat16)
    data["kv"][0, :64], data["kv"][0, 64:128] = 0.0, 1e-30
    for fp8_format, byte in ((Fp8Format.OCP, 105), (Fp8Format.FNUZ, 106)):
        cache = fp8_cache(1, 64, DS_MLA, fp8_format, impl.device)
        impl.op(*on(impl, data), cache, torch.tensor([0], device=impl.device), EPS)
        assert not read_slot(cache, 0)[:128].any()
        assert memory_of(cache)[64 * 576 : 64 * 576 + 2].tolist() == [byte, byte]


@pytest.mark.parametrize("impl", implementations("q_rope_kv_insert.q_rope_kv_insert")[:2])
def test_blocks_beyond_32_bit_offsets(impl: Implementation, tmp_path: object) -> None:
    """Block times page distance passes 2^31 and 2^32; the file behind it is sparse."""
    stride, blocks = 37_440, [0, 57_358, 57_359, 114_717, 114_718]  # the second and fourth begin just below a limit
    size = stride * (blocks[-1] + 1)
    memory = torch.from_file(f"{tmp_path}/pages", shared=True, size=size, dtype=torch.uint8)
    cache = PagedCache(memory.view(-1, stride), 64, DS_MLA, Fp8Format.OCP)
    data = inputs(len(blocks), 1, 512, 64, torch.bfloat16)
    data["kv"] = data["kv"].sign() + data["kv"].sign() * torch.arange(len(blocks)).unsqueeze(1)
    slots = torch.tensor([block * 64 + 63 for block in blocks])
    impl.op(*on(impl, data), cache, slots, EPS)
    for token, block in enumerate(blocks):
        page = cache.data[block]
        codes = page[63 * 576 : 63 * 576 + 448]
        assert codes.any(), f"nothing was written to block {block}"
        assert page[: 63 * 576].any() == 0
        expected = rotated(data["kv"][token], data["cos_sin"][data["positions"][token]])[448:]
        rope = page[63 * 576 + 448 : 64 * 576].clone().view(torch.bfloat16).double()
        torch.testing.assert_close(rope, expected, rtol=2**-8 * 1.01, atol=1e-6)


@pytest.mark.gpu
def test_blocks_beyond_32_bit_offsets_in_a_real_pool() -> None:
    from dsv4dist.kernels._triton.q_rope_kv_insert import q_rope_kv_insert

    stride, blocks = 37_440, [0, 57_358, 57_359, 114_717, 114_718, 114_999]
    cache = PagedCache(torch.full((115_000, stride), 255, dtype=torch.uint8, device="cuda"), 64, DS_MLA, Fp8Format.OCP)
    data = {name: one.cuda() for name, one in inputs(len(blocks), 1, 512, 64, torch.bfloat16).items()}
    slots = torch.tensor([block * 64 + 63 for block in blocks], device="cuda")
    q_rope_kv_insert(data["q"], data["kv"], data["positions"], data["cos_sin"], cache, slots, EPS)
    touched = (cache.data != 255).any(1).nonzero().flatten().tolist()
    assert touched == blocks


@pytest.mark.parametrize("impl", IMPLEMENTATIONS[1:])
def test_wrong_input_is_refused(impl: Implementation) -> None:
    data = inputs(2, 1, 128, 64, torch.bfloat16)
    slots = torch.tensor([0, 1], device=impl.device)
    cache = fp8_cache(1, 64, DS_MLA, Fp8Format.OCP, impl.device)
    with pytest.raises(UnsupportedError, match="stores 512 channels, these entries have 128"):
        impl.op(*on(impl, data), cache, slots, EPS)
    data = inputs(2, 1, 512, 64, torch.bfloat16)
    with pytest.raises(ShapeError, match="slots"):
        impl.op(*on(impl, data), cache, slots[:1], EPS)
    small = PagedCache(cache.data[:, :1000], 64, DS_MLA, Fp8Format.OCP)
    with pytest.raises(ShapeError, match="37376"):
        impl.op(*on(impl, data), small, slots, EPS)
