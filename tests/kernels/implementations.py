"""Every implementation of an operation that this machine can run, as pytest parameters: one test body for all.

Import this before anything that imports triton: Triton decides at import whether its kernels are interpreted, and they
are wherever there is no GPU, unless this process emulates AMD GPUs (see emulation.py).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.kernels import emulation

HAS_GPU = torch.cuda.is_available()
if emulation.ARCHS:
    os.environ["TRITON_INTERPRET"] = "0"
elif not HAS_GPU and os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    # Functions of triton.language were decorated for compilation; interpreted kernels cannot call them.
    raise RuntimeError("triton was imported before tests.kernels.implementations; import that first")


@dataclass(frozen=True)
class Implementation:
    """`op` is called with tensors on `device`; everything a test creates for it must lie there.

    arch  the GPU architecture that a CPU emulates, if any
    """

    name: str
    module: str
    function: str
    device: torch.device
    arch: str | None = None

    @property
    def op(self) -> Callable[..., Any]:
        op: Callable[..., Any] = getattr(importlib.import_module(self.module), self.function)
        return op if self.arch is None else emulation.on_arch(self.arch, op)

    @property
    def is_reference(self) -> bool:
        return self.name == "reference"

    def __str__(self) -> str:
        return self.name


def implementations(op_name: str, triton: str | None = None) -> list[Any]:
    """Parameters `reference`, `triton-interpret` (CPU) and `triton` (marker gpu) of one operation.

    In a process that emulates AMD GPUs there are also `emulated-gfx942` and `emulated-gfx950` (marker emulated).

    op_name  "stem.function", the same under kernels.reference and kernels._triton; `triton` names another stem there
    """
    stem, function = op_name.split(".")
    kernels, cpu = "dsv4dist.kernels", torch.device("cpu")
    kernel_module = f"{kernels}._triton.{triton or stem}"
    reference = Implementation("reference", f"{kernels}.reference.{stem}", function, cpu)
    interpreted = Implementation("triton-interpret", kernel_module, function, cpu)
    compiled = Implementation("triton", kernel_module, function, torch.device("cuda"))
    no_interpreter = pytest.mark.skipif(HAS_GPU or bool(emulation.ARCHS), reason="kernels are compiled here")
    emulated = [Implementation(f"emulated-{arch}", kernel_module, function, cpu, arch) for arch in emulation.ARCHS]
    return [
        pytest.param(reference, id=reference.name),
        pytest.param(interpreted, id=interpreted.name, marks=no_interpreter),
        pytest.param(compiled, id=compiled.name, marks=pytest.mark.gpu),
        *(pytest.param(one, id=one.name, marks=pytest.mark.emulated) for one in emulated),
    ]
