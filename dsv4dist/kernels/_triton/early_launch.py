"""Kernels that are launched before the one ahead of them ends: programmatic dependent launch, on Hopper and later.

A kernel of a decode step takes a few microseconds, of which starting it is a good part. Launched early, its programs are
in place and may load what no earlier kernel writes, weights above all, before they wait.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon

try:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError:  # a build of Triton for other GPUs alone
    gdc_launch_dependents = gdc_wait = None


@triton.jit
def wait_for_previous():
    """Wait until everything that was enqueued before this kernel is done and visible; let the next kernel start.

    Every program must pass here before it reads what an earlier kernel wrote and before it writes anything, also if it
    has nothing to do: the kernel behind this one relies on it for all kernels ahead of both. Elsewhere it does nothing.
    The next kernel starts no sooner than this: programs that only wait would keep places from kernels that could run.
    """
    if tl.target_info.cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@gluon.jit
def wait_for_previous_gluon():
    """`wait_for_previous` for kernels in Gluon."""
    if tl.target_info.cuda_capability_geq(9, 0):
        gdc_wait()
        gdc_launch_dependents()


@functools.cache
def early_launch(device: torch.device) -> dict[str, bool]:
    """Launch options for a kernel that calls `wait_for_previous`."""
    is_cuda = device.type == "cuda" and torch.version.hip is None
    return {"launch_pdl": True} if is_cuda and torch.cuda.get_device_capability(device) >= (9, 0) else {}
