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
    """

    max_splits: int
    programs_per_unit: int
    tile_keys: int
    setup_tiles: float
    reduce_tiles: float


def plan_splits(
    num_queries: int, head_blocks: int, main_capacity: int, extra_capacity: int, num_units: int, traits: SplitTraits
) -> int:
    """The split count S >= 1 that minimises an estimated time; ties go to the smaller S.

    main_capacity, extra_capacity  entries of the two index lists over all queries (view lengths, not true counts)
    num_units                      compute units (multiprocessors) of the device
    The estimate, in units of one tile's time: rounds of resident programs, times (setup + tiles of a share), plus the
    merge. Splitting once costs a whole reduction pass, hence S = 1 wins as soon as the device is full.
    """
    rows = max(1, num_queries)
    tiles = max(1, sum(_ceil_div(_ceil_div(c, rows), traits.tile_keys) for c in (main_capacity, extra_capacity)))
    programs = rows * head_blocks
    resident = num_units * traits.programs_per_unit
    best, best_cost = 1, float("inf")
    for splits in range(1, min(traits.max_splits, tiles) + 1):
        share = _ceil_div(tiles, splits)
        if _ceil_div(tiles, share) < splits:
            continue  # fewer splits give the same share
        rounds = _ceil_div(programs * splits, resident)
        merge = 0.0 if splits == 1 else traits.reduce_tiles * (2.0 + splits * max(1.0, programs / resident))
        cost = rounds * (traits.setup_tiles + share) + merge
        if cost < best_cost - 1e-9:
            best, best_cost = splits, cost
    return best


def _ceil_div(value: int, by: int) -> int:
    return -(-value // by)
