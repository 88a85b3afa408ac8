"""How many programs share one query's keys, chosen from tensor sizes alone (attention spec 4.3).

A captured graph bakes the count in, so it may depend on capacities and never on lengths that live on the device; the
kernels deal out only as many shares as a row has tiles.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitTraits:
    """What the split count depends on, per architecture.

    max_splits        upper bound of the count
    programs_per_unit programs that one compute unit holds at once
    tile_keys         keys that a program handles at a time
    setup_tiles       cost of starting a program, in tiles: loading the query, writing partial results
    reduce_tiles      cost of merging one more split, in tiles of the whole row
    crowding          how much longer programs take for each further one on their unit: 0 = they wait for memory and do
                      not notice, 1 = they take turns
    """

    max_splits: int
    programs_per_unit: int
    tile_keys: int
    setup_tiles: float
    reduce_tiles: float
    crowding: float = 0.0


def plan_splits(
    num_queries: int, head_blocks: int, main_capacity: int, extra_capacity: int, num_units: int, traits: SplitTraits
) -> int:
    """The split count S >= 1 that minimises `estimate_time`; ties go to the smaller S.

    main_capacity, extra_capacity  entries of the two index lists over all queries (view lengths, not true counts)
    num_units                      compute units (multiprocessors) of the device
    Splitting once costs a whole reduction pass, hence S = 1 wins as soon as the device is full.
    """
    rows = max(1, num_queries)
    tiles = max(1, sum(_ceil_div(_ceil_div(c, rows), traits.tile_keys) for c in (main_capacity, extra_capacity)))
    best, best_cost = 1, float("inf")
    for splits in range(1, min(traits.max_splits, tiles) + 1):
        cost = estimate_time(splits, tiles, rows * head_blocks, num_units, traits)
        if cost < best_cost - 1e-9:
            best, best_cost = splits, cost
    return best


def estimate_time(splits: int, tiles: int, programs: int, num_units: int, traits: SplitTraits) -> float:
    """Time of `programs` rows of `tiles` tiles, each row shared by `splits`, in units of one tile's time.

    Rounds of resident programs, each (setup + tiles of a share) long and longer where units hold several, then the
    merge. A count whose last shares are empty costs more than the smaller count with the same shares.
    """
    share = traits.setup_tiles + _ceil_div(tiles, splits)
    full, left = divmod(programs * splits, num_units * traits.programs_per_unit)
    time = share * (full * _crowded(traits.programs_per_unit, traits) + _crowded(_ceil_div(left, num_units), traits))
    if splits == 1:
        return time
    return time + traits.reduce_tiles * (2.0 + splits * max(1.0, programs / (num_units * traits.programs_per_unit)))


def _crowded(programs_on_unit: int, traits: SplitTraits) -> float:
    return 1.0 + traits.crowding * (programs_on_unit - 1) if programs_on_unit else 0.0


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)
