"""The planned split count: bounds, coverage, optimality against a simulated device, and what was measured."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tests.kernels.implementations  # noqa: F401  # before triton
from dsv4dist.kernels._triton import sparse_decode
from dsv4dist.kernels._triton.decode_traits import traits_for
from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.segments import Segment
from dsv4dist.kernels.split_plan import SplitTraits, estimate_time, plan_splits

import triton.language as tl  # isort: skip

TRAITS = st.builds(
    SplitTraits,
    max_splits=st.integers(1, 32),
    programs_per_unit=st.integers(1, 4),
    tile_keys=st.sampled_from((16, 32, 64)),
    setup_tiles=st.floats(0.0, 4.0),
    reduce_tiles=st.floats(0.01, 1.0),
    crowding=st.floats(0.0, 1.0),
)
SIZES = {
    "queries": st.integers(0, 600),
    "head_blocks": st.integers(1, 8),
    "main": st.integers(0, 300),
    "extra": st.integers(0, 9000),
    "units": st.integers(1, 304),
    "traits": TRAITS,
}


def tiles_of(keys: int, traits: SplitTraits) -> int:
    return -(-keys // traits.tile_keys)


def simulated_time(splits: int, tiles: int, programs: int, units: int, traits: SplitTraits) -> float:
    """Fill the device round by round, program by program."""
    share = traits.setup_tiles + -(-tiles // splits)
    left, time = programs * splits, 0.0
    while left > 0:
        on_unit = [0] * units
        for place in range(min(left, units * traits.programs_per_unit)):
            on_unit[place % units] += 1
        left -= sum(on_unit)
        time += share * (1 + traits.crowding * (max(on_unit) - 1))
    waves = max(1.0, programs / (units * traits.programs_per_unit))
    return time + (0.0 if splits == 1 else traits.reduce_tiles * (2 + splits * waves))


@given(**SIZES)
def test_bounds_and_coverage(
    queries: int, head_blocks: int, main: int, extra: int, units: int, traits: SplitTraits
) -> None:
    splits = plan_splits(queries, head_blocks, main * queries, extra * queries, units, traits)
    tiles = max(1, tiles_of(main, traits) + tiles_of(extra, traits)) if queries else 1
    assert 1 <= splits <= min(traits.max_splits, tiles)
    share = -(-tiles // splits)
    dealt = [tile for i in range(splits) for tile in range(i * share, min((i + 1) * share, tiles))]
    assert dealt == list(range(tiles))
    assert (splits - 1) * share < tiles, "the last share has no tile"


@given(
    programs=st.integers(1, 60), tiles=st.integers(1, 40), splits=st.integers(1, 32), units=st.integers(1, 20),
    traits=TRAITS,
)  # fmt: skip
def test_the_estimate_is_that_of_a_device_filled_program_by_program(
    programs: int, tiles: int, splits: int, units: int, traits: SplitTraits
) -> None:
    expected = simulated_time(splits, tiles, programs, units, traits)
    assert estimate_time(splits, tiles, programs, units, traits) == pytest.approx(expected)


@given(**SIZES)
def test_no_other_count_is_estimated_faster(
    queries: int, head_blocks: int, main: int, extra: int, units: int, traits: SplitTraits
) -> None:
    queries = max(1, queries)
    tiles = max(1, tiles_of(main, traits) + tiles_of(extra, traits))

    def time(splits: int) -> float:
        return estimate_time(splits, tiles, queries * head_blocks, units, traits)

    chosen = plan_splits(queries, head_blocks, main * queries, extra * queries, units, traits)
    others = range(1, min(traits.max_splits, tiles) + 1)
    assert time(chosen) <= min(time(one) for one in others) + 1e-6
    assert all(time(one) > time(chosen) - 1e-6 for one in others if one < chosen)


@given(**SIZES)
def test_more_work_is_never_estimated_faster(
    queries: int, head_blocks: int, main: int, extra: int, units: int, traits: SplitTraits
) -> None:
    def planned_time(queries: int, extra: int, units: int) -> float:
        splits = plan_splits(queries, head_blocks, main * queries, extra * queries, units, traits)
        tiles = max(1, tiles_of(main, traits) + tiles_of(extra, traits))
        return estimate_time(splits, tiles, queries * head_blocks, units, traits)

    queries = max(1, queries)
    base = planned_time(queries, extra, units)
    assert planned_time(queries + 1, extra, units) >= base - 1e-6
    assert planned_time(queries, extra + traits.tile_keys, units) >= base - 1e-6
    assert planned_time(queries, extra, units + 1) <= base + 1e-6


@given(**{name: SIZES[name] for name in ("head_blocks", "main", "extra", "units", "traits")}, rounds=st.integers(1, 5))
def test_a_full_device_does_not_split(
    head_blocks: int, main: int, extra: int, units: int, traits: SplitTraits, rounds: int
) -> None:
    queries = units * traits.programs_per_unit * rounds
    assert plan_splits(queries, head_blocks, main * queries, extra * queries, units, traits) == 1


@given(extra=st.integers(1, 9000), traits=TRAITS)
def test_queries_that_do_not_meet_do_not_change_each_other_s_count(extra: int, traits: SplitTraits) -> None:
    units = 8 * traits.max_splits
    counts = {plan_splits(queries, 1, 128 * queries, extra * queries, units, traits) for queries in range(1, 9)}
    assert len(counts) == 1


@pytest.mark.parametrize(
    ("heads", "selected", "queries", "measured"),
    [
        (8, 512, 1, 5), (8, 512, 8, 5), (8, 512, 32, 3), (8, 512, 128, 1), (8, 512, 512, 1), (8, 1024, 32, 3),
        (8, 8192, 8, 13), (8, 8192, 32, 4), (16, 512, 8, 5), (16, 512, 32, 3), (16, 512, 128, 1), (16, 1024, 32, 3),
        (32, 512, 32, 4), (32, 8192, 8, 13), (64, 512, 32, 4), (64, 512, 128, 1), (64, 512, 512, 1), (64, 8192, 8, 16),
    ],
)  # fmt: skip
def test_the_best_counts_measured_on_an_h200(heads: int, selected: int, queries: int, measured: int) -> None:
    """Window 128 + selected keys (docs/performance.md). A count is as good as another with the same shares."""
    traits = traits_for("sm90", 132)
    tile = next(one for one in traits.fp8_tiles if one.heads >= heads)
    planned = plan_splits(queries, 1, 128 * queries, selected * queries, traits.num_units, tile.splits)
    tiles = tiles_of(128, tile.splits) + tiles_of(selected, tile.splits)
    assert -(-tiles // planned) == -(-tiles // measured)


@pytest.mark.parametrize(("arch", "units"), [("gfx942", 304), ("gfx950", 256)])
def test_cdna_is_not_fitted_to_another_device(arch: str, units: int) -> None:
    """Programs that share a unit are not counted as slower there: nothing was measured that says so."""
    (tile,) = traits_for(arch, units).tiles
    assert tile.splits.crowding == 0.0
    assert plan_splits(1, 1, 128, 512, units, tile.splits) == 10
    assert plan_splits(512, 1, 128 * 512, 512 * 512, units, tile.splits) == 1


def test_true_lengths_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal list capacities give equal counts, whatever the lists hold; otherwise graphs could not be replayed."""
    found = []
    monkeypatch.setattr(sparse_decode, "plan_splits", lambda *sizes: found.append(sizes) or 1)
    cache = PagedCache(torch.randn(4, 16, 512), 16)
    for length in (0, 1, 40):
        indices, indptr = torch.zeros(80, dtype=torch.int32), torch.tensor([0, length, 2 * length], dtype=torch.int32)
        segment = Segment(cache, indices, indptr)
        sparse_decode.sparse_attention(torch.randn(2, 1, 512), segment, segment, None, 1.0)
    assert len(found) == 3
    assert found[0] == found[1] == found[2]


def test_few_queries_take_few_heads_a_program() -> None:
    """Heads are spread while each tile of keys and block of heads finds a unit of its own."""
    traits = traits_for("sm90", 132)
    sizes = (1, 3, 4, 6, 7, 13, 14, 512)
    heads = {queries: traits.tile(64, tl.float16, True, num_keys=640 * queries).heads for queries in sizes}
    assert heads == {1: 8, 3: 8, 4: 16, 6: 16, 7: 32, 13: 32, 14: 64, 512: 64}
    assert traits.tile(16, tl.float16, True, num_keys=640).heads == 8
    assert traits.tile(16, tl.float16, True, num_keys=640 * 512).heads == 16
    assert traits_for("gfx950", 256).tile(64, tl.float16, True, num_keys=1).heads == 16
