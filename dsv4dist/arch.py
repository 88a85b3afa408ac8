"""What kernels and caches need to know of a device, as data: nothing else asks a device for its name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dsv4dist.kernels.paged_cache import Fp8Format


@dataclass(frozen=True)
class ArchTraits:
    """One kind of device (attention spec 7).

    name           gfx942, sm90, cpu, ...
    fp8_format     encoding of the fp8 caches that this package writes: the one that the device converts in hardware
    compute_units  processors that run thread blocks; split plans aim to fill them
    lds_bytes      shared memory of one thread block
    warp_size      lanes of a wave
    main_first_tokens  decode steps of at most so many tokens enqueue a layer's main chain first (spec 5.3)
    """

    name: str
    fp8_format: Fp8Format
    compute_units: int
    lds_bytes: int
    warp_size: int
    main_first_tokens: int = 0


_KNOWN = {
    "cpu": ArchTraits("cpu", Fp8Format.OCP, 1, 0, 1),
    "gfx942": ArchTraits("gfx942", Fp8Format.FNUZ, 304, 64 * 1024, 64),
    "gfx950": ArchTraits("gfx950", Fp8Format.OCP, 256, 160 * 1024, 64, main_first_tokens=24),
    "gfx1250": ArchTraits("gfx1250", Fp8Format.OCP, 256, 320 * 1024, 32),
    "sm90": ArchTraits("sm90", Fp8Format.OCP, 132, 227 * 1024, 32),
}


def traits_by_name(name: str) -> ArchTraits:
    """Traits of an architecture by name; an unknown one gets the conservative values of spec 7's column "other"."""
    return _KNOWN.get(name, ArchTraits(name, Fp8Format.OCP, 256, 64 * 1024, 32))


def arch_name(properties: Any) -> str:
    """gfx942, sm90, ...: the architecture in torch's description of a GPU."""
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    # CUDA builds of torch have a gcnArchName too, but there it is the product's name.
    return f"sm{properties.major}{properties.minor}"


def arch_of(device: torch.device) -> ArchTraits:
    """Traits of a device that is present, with its true number of compute units."""
    if device.type == "cpu":
        return _KNOWN["cpu"]
    properties = torch.cuda.get_device_properties(device)
    return replace(traits_by_name(arch_name(properties)), compute_units=properties.multi_processor_count)
