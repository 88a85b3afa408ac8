"""The emulator in front of which kernels are tested: what it must refuse, and the instructions that it is taught."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kernels import emulation

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402  # isort: skip

pytestmark = pytest.mark.emulated
each_arch = pytest.mark.parametrize("arch", emulation.ARCHS)


@triton.jit
def _copy_kernel(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < count))


@triton.jit
def _last_writer_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at * 0, tl.load(x_ptr + at))


@triton.jit
def _relu_kernel(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.maximum(tl.load(x_ptr + at), 0.0, propagate_nan=tl.PropagateNan.ALL))


@triton.jit
def _fill_kernel(y_ptr, value, BLOCK: tl.constexpr):
    tl.store(y_ptr + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32) + value)


@each_arch
def test_a_store_behind_the_end_is_refused(arch: str) -> None:
    x, y = torch.randn(1000), torch.zeros(1000)
    with emulation.emulated(arch), pytest.raises(RuntimeError, match="out-of-bounds"):
        _copy_kernel[(4,)](x, y, 1000, BLOCK=256)


@each_arch
def test_results_that_depend_on_the_order_of_waves_are_refused(arch: str) -> None:
    x, y = torch.randn(256), torch.zeros(1)
    with emulation.emulated(arch), pytest.raises(AssertionError, match="order of its waves"):
        _last_writer_kernel[(1,)](x, y, BLOCK=256, num_warps=4)


@each_arch
def test_large_arguments_are_skipped(arch: str) -> None:
    y = torch.empty(emulation.MAX_SPAN_BYTES + 1, dtype=torch.uint8)
    with emulation.emulated(arch), pytest.raises(pytest.skip.Exception, match="spans 67108865 bytes"):
        _copy_kernel[(1,)](y, y, 4, BLOCK=64)


@each_arch
def test_views_are_written_and_what_lies_between_is_kept(arch: str) -> None:
    whole = torch.full((4, 70), 7.0)
    with emulation.emulated(arch):
        _fill_kernel[(1,)](whole[2, 3:67], 1.5, BLOCK=64)
    assert (whole[2, 3:67] == 1.5).all()
    assert (whole == 7.0).sum() == 4 * 70 - 64
    launch = emulation.launches[-1]
    assert (launch.kernel, launch.arch, launch.grid) == ("_fill_kernel", arch, (1, 1, 1))
    assert launch.counts["memory"] > 0
    assert launch.counts["MFMA"] == 0


@each_arch
def test_a_maximum_returns_nan(arch: str) -> None:
    x, y = torch.tensor([math.nan, -1.0, 2.0, math.inf] * 16), torch.zeros(64)
    with emulation.emulated(arch):
        _relu_kernel[(1,)](x, y, BLOCK=64, num_warps=1)
    torch.testing.assert_close(y[:4], torch.tensor([math.nan, 0.0, 2.0, math.inf]), equal_nan=True)
