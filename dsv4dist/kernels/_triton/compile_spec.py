"""What a production launch of a Triton kernel compiles: enough to compile it for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv4dist.arch import traits_by_name
from dsv4dist.kernels.paged_cache import Fp8Format

POINTER_OF = {
    "uint8": "*u8",
    "int32": "*i32",
    "int64": "*i64",
    "bfloat16": "*bf16",
    "float16": "*fp16",
    "float32": "*fp32",
    "float8_e4m3fn": "*fp8e4nv",
    "float8_e4m3fnuz": "*fp8e4b8",
}
"""Triton's type of a pointer to elements of a torch dtype, by its name."""

OTHER = "other"
TUNED_ARCHS = ("gfx942", "gfx950", "gfx1250", "sm90")
ARCHS = (*TUNED_ARCHS, OTHER)
"""Architectures whose launches differ; OTHER stands for all the rest."""


@dataclass(frozen=True)
class CompileSpec:
    """One variant of one kernel.

    kernel      the jit function
    name        kernel and variant, for people: "rms_norm 1024 bf16"
    signature   Triton type of every run-time argument: "*bf16", "i64", "fp32", ...
    constexprs  value of every compile-time argument, and of run-time ones that production gives as 1 or None
    divisible   run-time arguments that are multiples of 16 in production (pointers, strides), which widens loads
    num_stages  as the launch gives it; None = the target's own default
    archs       those of ARCHS that launch this variant; empty = all
    large       pointers to memory that may exceed 2 GiB, which AMD GPUs address differently
    has_dot     the kernel multiplies matrices, so its code must use the matrix unit
    narrow_because  why there may be no 16-byte load from global memory; empty = there must be one
    spills_because  why registers may spill; empty = none may
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ()
    large: frozenset[str] = frozenset()
    has_dot: bool = False
    narrow_because: str = ""
    spills_because: str = ""

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names)
        given = set(self.signature) | set(self.constexprs)
        assert given == names, f"{self.name}: arguments {sorted(given ^ names)} are missing or unknown"
        for group in (self.divisible, self.large):
            assert group <= set(self.signature), f"{self.name}: unknown {sorted(group - set(self.signature))}"
        assert set(self.archs) <= set(ARCHS), f"{self.name}: {self.archs} are not all among {ARCHS}"

    def used_on(self, arch: str) -> bool:
        return not self.archs or (arch if arch in TUNED_ARCHS else OTHER) in self.archs

    def attributes(self, amd: bool) -> dict[tuple[int, ...], list[list[Any]]]:
        """Triton's attributes of the run-time arguments, by their place, as a launch on this kind of GPU finds them."""
        found: dict[tuple[int, ...], list[list[Any]]] = {}
        for name, kind in self.signature.items():
            attributes = [["tt.divisibility", 16]] if name in self.divisible else []
            if amd and kind.startswith("*") and name not in self.large:
                attributes.append(["tt.pointer_range", 32])
            if attributes:
                found[(self.kernel.arg_names.index(name),)] = attributes
        return found


def archs_of(fp8_format: Fp8Format) -> tuple[str, ...]:
    """The architectures on which this package keeps its fp8 data in that encoding."""
    return tuple(arch for arch in ARCHS if traits_by_name(arch).fp8_format is fp8_format)


def spec(
    kernel: Any,
    name: str,
    signature: Mapping[str, str],
    *,
    constexprs: Mapping[str, Any],
    unaligned: tuple[str, ...] = (),
    aligned: tuple[str, ...] = (),
    large: tuple[str, ...] = (),
    **rest: Any,
) -> CompileSpec:
    """A CompileSpec whose pointers and strides are all divisible by 16, except `unaligned`, and `aligned` numbers too."""
    multiples = {
        key
        for key, kind in signature.items()
        if (kind.startswith("*") or key.startswith("stride_")) and key not in unaligned
    }
    divisible = frozenset(multiples) | frozenset(aligned)
    return CompileSpec(kernel, name, signature, constexprs, divisible, large=frozenset(large), **rest)
