"""Sharding rules as data: which slice of a full tensor a rank owns."""

from __future__ import annotations

from enum import Enum

from dsv4dist.distributed.tp import TpInfo


class Shard(Enum):
    """How a parameter is spread over tensor-parallel ranks."""

    REPLICATED = "replicated"  # every rank holds all of it
    ROWS = "rows"  # dimension 0: heads, output groups, expert inner rows, vocabulary
    COLUMNS = "columns"  # dimension 1: inputs of a row-parallel product; its outputs are all-reduced


def shard_slices(shape: tuple[int, ...], shard: Shard, tp: TpInfo) -> tuple[slice, ...]:
    """The slice of each dimension of a tensor of the full `shape` that this rank owns."""
    whole = tuple(slice(0, size) for size in shape)
    if shard is Shard.ROWS:
        return (tp.split(shape[0]), *whole[1:])
    if shard is Shard.COLUMNS:
        return (whole[0], tp.split(shape[1]), *whole[2:])
    return whole


def shard_shape(shape: tuple[int, ...], shard: Shard, tp: TpInfo) -> tuple[int, ...]:
    """The shape of this rank's slice."""
    return tuple(part.stop - part.start for part in shard_slices(shape, shard, tp))
