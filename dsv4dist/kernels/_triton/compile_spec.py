"""What a production launch of a Triton kernel compiles: enough to compile it for a GPU that is not there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class CompileSpec:
    """One variant of one kernel.

    kernel      the jit function
    name        kernel and variant, for people: "rms_norm 1024 bf16"
    signature   Triton type of every run-time argument: "*bf16", "i64", "fp32", ...
    constexprs  value of every compile-time argument
    divisible   run-time arguments that are multiples of 16 in production (pointers, strides), which widens loads
    archs       architectures that launch this variant; empty = all
    """

    kernel: Any
    name: str
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    archs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names)
        given = set(self.signature) | set(self.constexprs)
        assert given == names, f"{self.name}: arguments {sorted(given ^ names)} are missing or unknown"
        assert self.divisible <= set(self.signature), f"{self.name}: unknown {self.divisible - set(self.signature)}"

    def used_on(self, arch: str) -> bool:
        return not self.archs or arch in self.archs


def spec(
    kernel: Any,
    name: str,
    signature: Mapping[str, str],
    *,
    constexprs: Mapping[str, Any],
    unaligned: tuple[str, ...] = (),
    aligned: tuple[str, ...] = (),
    **rest: Any,
) -> CompileSpec:
    """A CompileSpec whose pointers and strides are all divisible by 16, except `unaligned`, and `aligned` numbers too."""
    multiples = {
        key
        for key, kind in signature.items()
        if (kind.startswith("*") or key.startswith("stride_")) and key not in unaligned
    }
    return CompileSpec(kernel, name, signature, constexprs, frozenset(multiples) | frozenset(aligned), **rest)
