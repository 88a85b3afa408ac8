"""fp8 pages written and read byte by byte from the formats' definition (attention spec 2.3, 2.5), and block tables."""

from __future__ import annotations

import torch

from dsv4dist.kernels.block_table import BlockTable
from dsv4dist.kernels.paged_cache import CacheFormat, Fp8Format, PagedCache
from tests.support.e4m3 import byte_values

SENTINEL = 0xA5


def fp8_cache(
    num_blocks: int, block_size: int, kind: CacheFormat, fp8_format: Fp8Format, device: torch.device | str = "cpu"
) -> PagedCache:
    """A cache full of SENTINEL whose pages have a tail and a gap behind them."""
    content = block_size * (584 if kind is CacheFormat.FP8_DS_MLA else 132)
    stride = -(-content // 576) * 576 + 576
    memory = torch.full((num_blocks * stride,), SENTINEL, dtype=torch.uint8, device=device)
    return PagedCache(memory.as_strided((num_blocks, content + 8), (stride, 1)), block_size, kind, fp8_format)


def padded_rows(num_blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> PagedCache:
    """A rows cache full of NaN with gaps between rows and between blocks."""
    memory = torch.full((num_blocks, block_size + 1, width + 16), float("nan"), dtype=dtype, device=device)
    return PagedCache(memory[:, :block_size, :width], block_size)


def memory_of(cache: PagedCache) -> torch.Tensor:
    """All bytes behind an fp8 cache, gaps included, on the CPU."""
    whole = cache.data.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=cache.data.device).set_(whole).cpu()


def read_slot(cache: PagedCache, slot: int, mask: torch.Tensor | None = None) -> torch.Tensor:
    """float64 channels of one entry; `mask` [bytes of memory_of] is set True where the entry's bytes lie."""
    assert cache.fp8_format is not None
    memory, table = memory_of(cache), byte_values(cache.fp8_format)
    page, place = divmod(slot, cache.block_size)
    start = page * cache.data.stride(0)
    if cache.format is CacheFormat.FP8_DS_MLA:
        data, scale = start + place * 576, start + cache.block_size * 576 + place * 8
        spans = [(data, 576), (scale, 8)]
        exponents = memory[scale : scale + 7].double() - 127
        nope = table[memory[data : data + 448].long()].view(7, 64) * 2.0 ** exponents.unsqueeze(1)
        rope = memory[data + 448 : data + 576].clone().view(torch.bfloat16).double()
        assert memory[scale + 7] == 0, "the eighth scale byte is 0"
        values = torch.cat((nope.flatten(), rope))
    else:
        data, scale = start + place * 128, start + cache.block_size * 128 + place * 4
        spans = [(data, 128), (scale, 4)]
        factor = memory[scale : scale + 4].clone().view(torch.float32).double()
        values = table[memory[data : data + 128].long()] * factor
    for first, count in spans if mask is not None else ():
        mask[first : first + count] = True  # type: ignore[index]
    return values


def quantisation_error(values: torch.Tensor, group: int) -> torch.Tensor:
    """The most that storing float64 `values` [n * group] may move each: half a step of e4m3, and of bf16 before it.

    The scale is at most 2 / 448 of the group's largest magnitude, so a code step is at most 2^-4 of the value or
    2^-9 scales.
    """
    amax = values.abs().view(-1, group).amax(1, keepdim=True).clamp_min(1e-4).expand(-1, group).flatten()
    return values.abs() * (2**-4 + 2**-8) * 1.01 + amax * (2 / 448) * 2**-10 * 1.01 + 1e-12


def random_table(
    lens: list[int], block_size: int, generator: torch.Generator, device: torch.device, first: int = 0
) -> tuple[BlockTable, int]:
    """Blocks for requests of `lens` entries in random order, the first ones given up; and how many blocks there are."""
    columns = [-(-length // block_size) for length in lens]
    order = torch.randperm(sum(columns) + 1, generator=generator).int().tolist()
    rows = torch.full((len(lens), max([*columns, 1])), -1, dtype=torch.int32)
    firsts = torch.zeros(len(lens), dtype=torch.int32)
    for req, count in enumerate(columns):
        blocks = [order.pop() for _ in range(count)]
        firsts[req] = min(first, max(count - 1, 0))
        kept = blocks[int(firsts[req]) :]
        rows[req, : len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return BlockTable(rows.to(device), firsts.to(device), block_size), sum(columns) + 1


def slot_of(table: BlockTable, req: int, entry: int) -> int:
    """One lookup, in plain Python; -1 where there is no slot."""
    column = entry // table.block_size - int(table.first_block[req])
    if entry < 0 or not 0 <= column < table.blocks.shape[1] or int(table.blocks[req, column]) < 0:
        return -1
    return int(table.blocks[req, column]) * table.block_size + entry % table.block_size


def rotated(values: torch.Tensor, row: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """float64 rotation of the last channels of `values` [..., D] by one row of a table, pair by pair (spec 1.3)."""
    pairs = row.numel() // 2
    out = values.double().clone()
    first = values.shape[-1] - 2 * pairs
    for i in range(pairs):
        cos, sin = row[i].double(), row[pairs + i].double() * (-1 if inverse else 1)
        even, odd = values[..., first + 2 * i].double(), values[..., first + 2 * i + 1].double()
        out[..., first + 2 * i], out[..., first + 2 * i + 1] = even * cos - odd * sin, odd * cos + even * sin
    return out
