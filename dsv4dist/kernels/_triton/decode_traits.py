"""What sparse decode needs to know of a GPU: number formats and tile shapes, as a table (attention spec 7)."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from dsv4dist.kernels.paged_cache import Fp8Format
from dsv4dist.kernels.split_plan import SplitTraits


@dataclass(frozen=True)
class Tile:
    """One compiled shape of the partial kernel: `heads` x `keys` a step, how to split, which of the kernels.

    warpgroup  the Hopper kernel; cdna  the CDNA kernel, for this generation; neither: the portable one
    """

    heads: int
    keys: int
    warps: int
    stages: int
    splits: SplitTraits
    warpgroup: bool = False
    cdna: int = 0


@dataclass(frozen=True)
class DecodeTraits:
    """One architecture.

    native_fp8  encodings that its instructions convert; the others are decoded with integer arithmetic
    only_fp32   multiply in fp32 only (the interpreter, whose bf16 product is wrong)
    num_units   compute units of the device
    tiles       shapes by their number of heads, ascending
    wide_tile   the shape for fp32 keys, which need four times the registers
    fp8_tiles   as tiles, for caches in native fp8 alone; empty where `tiles` serve these too
    """

    native_fp8: frozenset[Fp8Format]
    only_fp32: bool
    num_units: int
    tiles: tuple[Tile, ...]
    wide_tile: Tile
    fp8_tiles: tuple[Tile, ...] = ()

    def tile(self, num_heads: int, dtype: tl.dtype, fp8_only: bool, num_keys: int) -> Tile:
        """The shape for `num_heads` local heads multiplied in `dtype`, and `num_keys` listed keys over all queries.

        fp8_only: all keys are fp8 the device converts. Where a unit could be had for each tile of keys and a few heads,
        they are: a program then has less to do, and that the same keys are read more often costs nothing.
        """
        if dtype == tl.float32:
            return self.wide_tile
        tiles = self.fp8_tiles if fp8_only and self.fp8_tiles else self.tiles
        for tile in tiles:
            programs = triton.cdiv(num_heads, tile.heads) * triton.cdiv(num_keys, tile.keys)
            if tile.heads >= num_heads or programs <= self.num_units:
                return tile
        return tiles[-1]


def _tile(heads: int, keys: int, warps: int, stages: int = 1, **splits: float) -> Tile:
    plan = {"max_splits": 32, "programs_per_unit": 2, "setup_tiles": 1.0, "reduce_tiles": 0.1} | splits
    return Tile(heads, keys, warps, stages, SplitTraits(tile_keys=keys, **plan))  # type: ignore[arg-type]


_OCP, _FNUZ = frozenset({Fp8Format.OCP}), frozenset({Fp8Format.FNUZ})
_TILES = {
    "gfx942": (_FNUZ, (_tile(16, 32, 2),), _tile(16, 16, 4)),
    "gfx950": (_OCP, (_tile(16, 64, 4),), _tile(16, 16, 4)),
    "sm90": (_OCP, (_tile(16, 64, 4),), _tile(16, 16, 4)),
    "gfx1250": (_OCP, (_tile(16, 32, 4),), _tile(16, 16, 4)),
    "other": (frozenset(), (_tile(16, 32, 4),), _tile(16, 16, 4)),
}


_WHOLE_UNIT: dict[str, float] = {"programs_per_unit": 1}
_FP8_TILES = {
    "sm90": tuple(
        replace(_tile(heads, keys, 8, **_WHOLE_UNIT), warpgroup=True)
        for heads, keys in ((8, 128), (16, 128), (32, 128), (64, 64))
    ),
    # Vector registers and shared memory hold one program on gfx942, two on gfx950. Not fitted to any time.
    "gfx942": (replace(_tile(16, 64, 4, **_WHOLE_UNIT), cdna=3),),
    "gfx950": (replace(_tile(16, 64, 4), cdna=4),),
}


def traits_for(arch: str, num_units: int) -> DecodeTraits:
    """The traits of an architecture name as Triton spells it (gfx950, sm90), with defaults for unknown ones."""
    native, tiles, wide = _TILES.get(arch, _TILES["other"])
    return DecodeTraits(native, False, num_units, tiles, wide, _FP8_TILES.get(arch, ()))


@functools.cache
def traits_of(device: torch.device) -> DecodeTraits:
    """The traits of the device that a tensor lies on; on a CPU those of Triton's interpreter."""
    if device.type == "cpu":
        tile = _tile(16, 32, 1)
        return DecodeTraits(frozenset(), True, 256, (tile,), tile)
    target = triton.runtime.driver.active.get_current_target()
    arch = str(target.arch) if target.backend == "hip" else f"sm{target.arch}"
    return traits_for(arch.split(":")[0], torch.cuda.get_device_properties(device).multi_processor_count)
