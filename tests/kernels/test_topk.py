"""Top-k of ragged rows against a sort of Python numbers: ties, NaN, every kind of length, several passes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.implementations import HAS_GPU, Implementation, implementations
from tests.support.pages import random_table, slot_of
from tests.support.poison import uninitialised_memory_poisoned

from dsv4dist.errors import ShapeError  # isort: skip
from dsv4dist.kernels._triton import topk as triton_topk  # isort: skip
from dsv4dist.kernels.block_table import BlockTable  # isort: skip

TOPK = implementations("indexer.topk_entries", triton="topk")
SLOTS = implementations("indexer.topk_slots", triton="topk")[1:]
LENGTHS = (0, 1, 3, 4, 63, 64, 65, 127, 128, 129, 511, 512, 513)
INF, NAN = math.inf, math.nan


def expected(row: list[float], k: int) -> list[int]:
    """The `k` best entries of `row`: larger first, NaN as -inf, then the lower entry; ascending, padded with -1."""
    rank = sorted(range(len(row)), key=lambda i: (-row[i] if row[i] == row[i] else INF, i))
    return sorted(rank[:k]) + [-1] * (k - min(k, len(row)))


def check(implementation: Implementation, rows: list[list[float]], k: int, pitch: int = 0, **tuning: int) -> None:
    """Run `rows` as one call with poison behind every row's end, and compare each with the sort."""
    width = max((len(row) for row in rows), default=0)
    logits = torch.full((len(rows), max(width, pitch)), NAN)
    for i, row in enumerate(rows):
        logits[i, : len(row)] = torch.tensor(row, dtype=torch.float64).float()
        logits[i, len(row) :: 2] = INF  # undefined columns hold the best logits
    lens = torch.tensor([len(row) for row in rows], dtype=torch.int64)
    device = implementation.device
    with uninitialised_memory_poisoned():
        found = implementation.op(logits.to(device)[:, :width], lens.to(device), k, **tuning).cpu()
    assert found.dtype == torch.int32
    for i, row in enumerate(rows):
        assert found[i].tolist() == expected(logits[i, : len(row)].tolist(), k), f"row {i} of length {len(row)}"


def random_row(length: int, seed: int, levels: int = 0) -> list[float]:
    """Normal numbers, rounded to multiples of 1 / levels so that many are equal."""
    row = torch.randn(length, generator=torch.Generator().manual_seed(seed))
    return (row * levels).round().div(levels).tolist() if levels else row.tolist()


@pytest.mark.parametrize("implementation", TOPK)
@pytest.mark.parametrize("k", [8, 128])
def test_every_length(implementation: Implementation, k: int) -> None:
    check(implementation, [random_row(n, seed=n) for n in LENGTHS], k)


@pytest.mark.parametrize("implementation", TOPK)
def test_ties_go_to_the_lowest_entry(implementation: Implementation) -> None:
    tied = random_row(300, seed=1)
    bound = sorted(tied)[-64]
    tied[50:150] = [bound] * 100
    tiny = [s * m * 2.0**-149 for m in range(4) for s in (1.0, -1.0)] * 40  # denormals, and both zeros
    check(implementation, [[0.0] * 300, [-0.0, 0.0] * 150, tied, tiny, random_row(300, 2, levels=2), [-INF] * 200], 64)


@pytest.mark.parametrize("implementation", TOPK)
def test_nan_and_infinity(implementation: Implementation) -> None:
    some = random_row(300, seed=3)
    for place in (0, 17, 63, 64, 128, 255, 299):
        some[place] = NAN
    few = [NAN] * 300
    few[100:110] = random_row(10, seed=4)
    endless = random_row(300, seed=5)
    endless[7], endless[250] = INF, INF
    mixed = [NAN, -INF, -3e38, NAN, -INF] * 20
    check(implementation, [some, [NAN] * 300, few, endless, [-INF] * 300, mixed], 64)


def test_nan_of_either_sign_ranks_last() -> None:
    bits = torch.tensor([[0x7FC00000, 0x3F800000, -0x400000, 0x7F800001, -0x800000, 0x40000000]], dtype=torch.int32)
    device = torch.device("cuda" if HAS_GPU else "cpu")
    logits = bits.view(torch.float32).to(device)
    found = triton_topk.topk_entries(logits, torch.tensor([6], device=device), 3)
    assert found.tolist() == [[0, 1, 5]]  # 1.0, 2.0 and the first of those that count as -inf


@pytest.mark.parametrize("implementation", TOPK[1:])
def test_several_passes_equal_one(implementation: Implementation) -> None:
    """Rows longer than a tile: the winners of tiles compete again, and ties still go to the lowest entry."""
    rows = [random_row(300, seed=6), random_row(301, 7, levels=2), [0.5] * 257, []]
    check(implementation, rows, 32, tile=64)
    assert [tiles for _, tiles in triton_topk.plan_tiles(301, 32, 64)] == [5, 3, 2, 1]


@pytest.mark.parametrize("implementation", TOPK[1:])
def test_the_largest_tile(implementation: Implementation) -> None:
    """Counts of a tile share words: one that all of 32,768 keys reach must leave its neighbour alone."""
    k, width = triton_topk.MAX_TILE // 2, triton_topk.MAX_TILE
    check(implementation, [[1.0] * width, random_row(width, 14), random_row(width, 15, levels=1)], k)


@pytest.mark.parametrize("implementation", TOPK)
@pytest.mark.parametrize("k", [0, 1, 100])
def test_k_beside_the_width(implementation: Implementation, k: int) -> None:
    check(implementation, [random_row(100, seed=9), random_row(99, seed=10)], k)
    check(implementation, [[], []], k)
    check(implementation, [], k)


@pytest.mark.parametrize("implementation", TOPK)
def test_rows_with_a_pitch(implementation: Implementation) -> None:
    check(implementation, [random_row(100, seed=11), random_row(37, seed=12)], 16, pitch=161)


@pytest.mark.parametrize("implementation", SLOTS)
@pytest.mark.parametrize("tile", [0, 64])
@pytest.mark.parametrize("cuts", [[0, 13], [0, 1, 6, 13]], ids=["whole", "slices"])
def test_slots_as_a_ragged_list(implementation: Implementation, tile: int, cuts: list[int]) -> None:
    """Each row's slots lie behind those of all earlier rows, also of earlier slices; what has no slot is -1."""
    k, width, device = 32, 130 if tile else 513, implementation.device
    source = torch.Generator().manual_seed(16)
    table, _ = random_table([700, 600, 520], 16, source, torch.device("cpu"), first=1)
    table.blocks[1, 3] = -1
    lens = [*LENGTHS[1:9], 0, -5, 31, 32, 600]
    reqs = [0] * 5 + [1] * 6 + [2] * 2
    rows = [random_row(max(n, 0), seed=n) for n in lens]
    logits = torch.full((len(rows), width), NAN)
    for row, values in zip(logits, rows, strict=True):
        row[: len(values)] = torch.tensor(values[:width])
        row[len(values) :: 2] = INF
    entries = [
        [e for e in expected(row[: max(n, 0)].tolist(), k) if e >= 0] for row, n in zip(logits, lens, strict=True)
    ]
    on_device = BlockTable(table.blocks.to(device), table.first_block.to(device), table.block_size)
    indices = torch.full((len(rows) * k,), 77, dtype=torch.int32, device=device)
    indptr = torch.full((len(rows) + 1,), 77, dtype=torch.int32, device=device)
    whole = (torch.tensor(lens, device=device), torch.tensor(reqs, device=device))
    with uninitialised_memory_poisoned():
        for first, end in itertools.pairwise(cuts):
            part = logits[first:end].clone().to(device)  # memory of its own, as a slice's logits have
            implementation.op(part, whole[0], k, on_device, whole[1], indices, indptr, first, tile=tile)
    ends = [0, *itertools.accumulate(map(len, entries))]
    assert indptr.tolist() == ends
    slots = [slot_of(table, req, entry) for req, row in zip(reqs, entries, strict=True) for entry in row]
    assert -1 in slots
    assert indices[: ends[-1]].tolist() == slots
    assert set(indices[ends[-1] :].tolist()) <= {77}, "something is written behind the list"


@pytest.mark.parametrize("implementation", SLOTS)
def test_slots_of_thousands_of_rows(implementation: Implementation) -> None:
    """More earlier rows than are added up at once, and rows without any entry."""
    count, k, device = 2100, 2, implementation.device
    table, _ = random_table([8], 4, torch.Generator().manual_seed(17), torch.device("cpu"))
    on_device = BlockTable(table.blocks.to(device), table.first_block.to(device), table.block_size)
    lens = torch.arange(count) % 4
    logits = torch.tensor([[3.0, 1.0, 2.0]]).expand(3, 3).contiguous().to(device)
    indices = torch.full((count * k,), 77, dtype=torch.int32, device=device)
    indptr = torch.full((count + 1,), 77, dtype=torch.int32, device=device)
    reqs = torch.zeros(count, dtype=torch.int64, device=device)
    implementation.op(logits, lens.to(device), k, on_device, reqs, indices, indptr, count - 3)
    ends = lens.clamp_max(k).cumsum(0).tolist()
    assert indptr.tolist() == [77] * (count - 2) + ends[-3:]
    chosen = [slot_of(table, 0, entry) for entries in ([0], [0, 1], [0, 2]) for entry in entries]
    assert indices[ends[-4] : ends[-1]].tolist() == chosen


@pytest.mark.parametrize("implementation", SLOTS)
@pytest.mark.parametrize(("k", "width"), [(0, 5), (4, 0)])
def test_lists_of_nothing(implementation: Implementation, k: int, width: int) -> None:
    device = implementation.device
    zeros = torch.zeros(3, dtype=torch.int32, device=device)
    table, rows = BlockTable(zeros[None, :2], zeros[:1], 4), (torch.tensor([2, 0, 1], device=device), zeros.long())
    indices, indptr = zeros.new_empty(3 * k), zeros.new_full((4,), 9)
    implementation.op(torch.zeros(3, width, device=device), rows[0], k, table, rows[1], indices, indptr)
    assert indptr.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("implementation", TOPK)
def test_shards_merge_to_the_whole(implementation: Implementation) -> None:
    """The winners of a row's shards, compared by logit and then entry, hold the winners of the row."""
    row, k = random_row(257, 13, levels=4), 16
    bounds = [0, 64, 129, 200, 257]
    shards = [row[a:b] for a, b in itertools.pairwise(bounds)]
    logits = torch.zeros(len(shards), 80)
    for i, shard in enumerate(shards):
        logits[i, : len(shard)] = torch.tensor(shard)
    lens = torch.tensor([len(shard) for shard in shards])
    found = implementation.op(logits.to(implementation.device), lens.to(implementation.device), k).tolist()
    candidates = [bounds[i] + entry for i, entries in enumerate(found) for entry in entries if entry >= 0]
    assert sorted(sorted(candidates, key=lambda e: (-row[e], e))[:k]) == expected(row, k)


@settings(max_examples=12, deadline=None)
@given(
    row=st.lists(st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, NAN, INF, -INF])), max_size=40),
    k=st.integers(1, 20),
)
@pytest.mark.parametrize("implementation", TOPK)
def test_any_floats(implementation: Implementation, row: list[float], k: int) -> None:
    check(implementation, [row], k)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [8, 512, 1000, 1024])
def test_long_rows(k: int) -> None:
    generator = torch.Generator(device="cuda").manual_seed(k)
    lens = torch.tensor([0, 8192, 262144, 100_000, k, k + 1, 32_768, 4097], device="cuda")
    logits = torch.randn(8, 262_144, device="cuda", generator=generator)
    logits[3] = (logits[3] * 4).round()
    logits[4:, 5::7] = NAN
    first = triton_topk.topk_entries(logits, lens, k)
    for i, length in enumerate(lens.tolist()):
        assert first[i].tolist() == expected(logits[i, :length].tolist(), k), f"row {i}"
    for _ in range(100):
        assert torch.equal(triton_topk.topk_entries(logits, lens, k), first)


@pytest.mark.gpu
def test_replays_with_other_lengths() -> None:
    logits = torch.randn(4, 20_000, device="cuda")
    lens = torch.full((4,), 20_000, device="cuda")
    triton_topk.topk_entries(logits, lens, 512)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = triton_topk.topk_entries(logits, lens, 512)
    lens.copy_(torch.tensor([0, 3, 511, 9000], device="cuda"))
    logits.normal_()
    out.fill_(99)
    graph.replay()
    for i, length in enumerate(lens.tolist()):
        assert out[i].tolist() == expected(logits[i, :length].tolist(), 512)


def test_refuses_what_it_cannot_do() -> None:
    logits, lens = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ShapeError, match="logits: expected fp32"):
        triton_topk.topk_entries(logits.double(), lens, 4)
    with pytest.raises(ShapeError, match="lens: expected int32 or int64"):
        triton_topk.topk_entries(logits, lens[:1], 4)
    with pytest.raises(ShapeError, match="k: expected 0 to"):
        triton_topk.topk_entries(logits, lens, -1)
    with pytest.raises(ShapeError, match="tile: expected a power of two"):
        triton_topk.topk_entries(logits, lens, 40, tile=64)
    table = BlockTable(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), 4)
    indices, indptr = torch.empty(8, dtype=torch.int32), torch.empty(3, dtype=torch.int32)
    with pytest.raises(ShapeError, match="rows of logits: expected at most 2"):
        triton_topk.topk_slots(logits, lens, 4, table, lens, indices, indptr, 1)
    with pytest.raises(ShapeError, match="token_to_req"):
        triton_topk.topk_slots(logits, lens, 4, table, lens[:1], indices, indptr)
    with pytest.raises(ShapeError, match="indices: expected contiguous int32, 8 or more"):
        triton_topk.topk_slots(logits, lens, 4, table, lens, indices[:7], indptr)
