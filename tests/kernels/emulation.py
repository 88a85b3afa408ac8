"""Launches of Triton kernels executed as gfx942 or gfx950 machine code on the CPU, where no AMD GPU is at hand.

Triton gets a driver whose device is the emulator, so everything in front of it is production's own: launchers, tiles of
the architecture, specialisation of arguments (divisible by 16, equal to 1, pointer ranges: caches count as large, as in
a server, all else as what it is), compiler and code object.

A pass says: this machine code, from these arguments, computes what the test expects; it keeps to its arguments' memory,
to its LDS and to 32-bit buffer offsets; the bytes that it writes do not depend on whether the waves of a program run
forwards or backwards between barriers. It says nothing of time, of missing waits, of waves and programs that really run
at once (programs run in order), or of the last bits of matrix products, which are added up in double.

Set AMD_EMU_DIR (where amd_emu.py lies) and TINYGRAD_DIR (a checkout of tinygrad's source); `make amd-emulate` does.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from dsv4dist.kernels.paged_cache import PagedCache
from dsv4dist.kernels.segments import Segment

EMULATOR = os.environ.get("AMD_EMU_DIR", "")
ARCHS = ("gfx942", "gfx950") if EMULATOR else ()
"""Architectures that this process emulates: none without AMD_EMU_DIR."""

MAX_SPAN_BYTES = 64 << 20
"""Tests with arguments larger than this are skipped: every launch copies them, and programs run one after another."""

KINDS = ("VALU", "MFMA", "LDS", "memory", "scalar")


@dataclass(frozen=True)
class Launch:
    """One executed launch.

    vgprs   vector registers of a lane, accumulators included
    vgpr_spills, sgpr_spills  vector and scalar registers that found no place
    counts  wave-instructions (64 lanes) by kind, waves running forwards
    """

    kernel: str
    arch: str
    grid: tuple[int, ...]
    warps: int
    vgprs: int
    vgpr_spills: int
    sgpr_spills: int
    counts: dict[str, int]

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())


launches: list[Launch] = []
"""Every launch of this process, in order."""


def kind_of(instruction: str) -> str:
    """Which of KINDS an instruction is; `scalar` is all that one lane does for a wave, loads and branches included."""
    name = instruction.lower()
    if name.startswith(("v_mfma", "v_smfmac")):
        return "MFMA"
    for prefix, kind in (("v_", "VALU"), ("ds_", "LDS"), ("s_", "scalar")):
        if name.startswith(prefix):
            return kind
    assert name.startswith(("global_", "buffer_", "flat_", "scratch_")), f"{instruction} is of no known kind"
    return "memory"


@contextmanager
def emulated(arch: str) -> Iterator[None]:
    """Inside, launches on CPU tensors run as `arch` code, and launchers choose tiles and encodings for `arch`."""
    from triton.runtime import driver

    from dsv4dist.arch import traits_by_name
    from dsv4dist.kernels._triton.decode_traits import traits_for

    traits = traits_by_name(arch)
    decode_traits = traits_for(arch, traits.compute_units)
    seen = {
        "arch_of": lambda device: traits,
        "arch_traits": lambda device: traits,
        "traits_of": lambda device: decode_traits,
    }
    with ExitStack() as stack:
        for module in [one for name, one in sys.modules.items() if name.startswith("dsv4dist.kernels._triton.")]:
            for name in seen.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, seen[name]))
        before = driver._active
        driver.set_active(_driver(arch))
        stack.callback(driver.set_active, before)
        yield


def on_arch(arch: str, op: Callable[..., Any]) -> Callable[..., Any]:
    """`op`, with its launches emulated, and compiled for caches beyond 2 GiB, as a server's are."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        caches = [one.cache if isinstance(one, Segment) else one for one in (*args, *kwargs.values())]
        memory = {one.data.untyped_storage().data_ptr() for one in caches if isinstance(one, PagedCache)}
        with emulated(arch), _beyond_2_gib(memory):
            return op(*args, **kwargs)

    return call


@contextmanager
def _beyond_2_gib(memory: Collection[int]) -> Iterator[None]:
    """Inside, Triton takes storages at these addresses for larger than the offsets of AMD's buffer instructions."""
    from triton.backends.amd.compiler import HIPBackend

    small = HIPBackend.is_within_2gb

    def is_within_2gb(argument: Any) -> bool:
        at = argument.untyped_storage().data_ptr() if isinstance(argument, torch.Tensor) else 0
        return at not in memory and bool(small(argument))

    with mock.patch.object(HIPBackend, "is_within_2gb", staticmethod(is_within_2gb)):
        yield


@functools.cache
def _emulator() -> Any:
    """The module amd_emu, with what these kernels need beyond it."""
    sys.path.insert(0, EMULATOR)
    module = importlib.import_module("amd_emu")
    _propagate_nan(module.emulator())
    _accept_literals(module.emulator(), module.fixes)
    _wrap_lds_addresses(module)
    return module


def _propagate_nan(emulator: Any) -> None:
    """Let IEEE 754's maximum and minimum, instructions of gfx950, return NaN; tinygrad's drop it."""
    functions = emulator._FUNCS
    is_nan = functions["isNAN"]
    for name in ("v_maximum_f32", "v_minimum_f32"):
        functions[name] = lambda a, b, number=functions[name]: is_nan(a).where(a, is_nan(b).where(b, number(a, b)))


def _accept_literals(emulator: Any, fixes: Any) -> None:
    """Let 16-bit instructions with a literal and a register above 127 run, which amd_emu refuses.

    Such an instruction runs in the longer encoding that has no literal, and reads it from a reserved operand number,
    which in the emulator is a place among the scalar registers.
    """
    native, init_wave = fixes.native, emulator._init_wave
    places: dict[int, int] = {}
    waves: deque[Any] = deque(maxlen=16)  # at most those of one program

    def init(*args: Any) -> Any:
        waves.append(init_wave(*args))
        for literal, place in places.items():
            waves[-1]._write_sgpr(place, literal)
        return waves[-1]

    def with_literals(inst: Any, name: str, word: int, size: int, arch: str) -> Any:
        form = type(inst).__name__.split("_")
        if form[0] not in ("VOP1", "VOP2", "VOPC") or form[-1] != "LIT" or "16" not in name or "MAD" in name:
            return native(inst, name, word, size, arch)
        place = places.setdefault(word >> 32, 209 + len(places))
        assert place <= 234, "more literals than reserved operand numbers"
        for wave in waves:
            wave._write_sgpr(place, word >> 32)
        return "REENC", [], fixes._as_vop3(form[0], (word & 0xFFFFFE00) | place)

    fixes.native, emulator._init_wave = with_literals, init


def _wrap_lds_addresses(module: Any) -> None:
    """Let the address and the offset of an LDS access add up in 32 bits, on which compiled code relies.

    The register may be negative; amd_emu, which adds in 64 bits, calls such an access out of range.
    """
    wide, wrapped = "u64 a = (u64)v[p[1] * 64 + l] + p[2 + h];", "u64 a = (u32)(v[p[1] * 64 + l] + p[2 + h]);"
    source = Path(module.__file__).with_name("amd_emu_native.c").read_text()
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "amd_emu_native.c").write_text(source.replace(wide, wrapped))
        with mock.patch.object(module, "__file__", f"{directory}/amd_emu.py"):  # beside which it looks for its C source
            module._loop()


@functools.cache
def _driver(arch: str) -> Any:
    """What Triton asks of a device driver, for one architecture."""
    from triton.backends.compiler import GPUTarget

    from dsv4dist.arch import traits_by_name

    traits = traits_by_name(arch)
    properties = {"max_shared_mem": traits.lds_bytes, "multiprocessor_count": traits.compute_units}
    utils = SimpleNamespace(
        get_device_properties=lambda device: properties,
        load_binary=lambda name, code, shared, device: (name, code, 0, 0, 1024),  # registers, spills, most threads
        unload_module=lambda module: None,
    )
    return SimpleNamespace(
        get_current_target=lambda: GPUTarget("hip", arch, traits.warp_size),
        get_current_device=lambda: ARCHS.index(arch),
        get_current_stream=lambda device: 0,
        launcher_cls=_Launcher,
        utils=utils,
    )


class _Launcher:
    """Executes one code object; Triton makes one for each variant of a kernel that it compiles."""

    def __init__(self, src: Any, metadata: Any) -> None:
        self.src, self.metadata = src, metadata
        self.kernel: Any = None

    def __call__(self, grid_x: int, grid_y: int, grid_z: int, _stream: int, code: bytes, *rest: Any) -> None:
        if self.kernel is None:
            compiled = SimpleNamespace(asm={"hsaco": code}, metadata=self.metadata, src=self.src)
            self.kernel = _emulator().Kernel(compiled)
        names = list(self.src.signature)
        values = dict(zip(names, rest[-len(names) :], strict=True))
        arguments = [values[name] for name, _ in self.kernel.params]
        counts = self._run((grid_x, grid_y, grid_z), arguments)
        name, arch, warps = self.metadata.name, self.metadata.target.arch, self.metadata.num_warps
        registers = [self.kernel.co.meta[f".{one}_count"] for one in ("vgpr", "vgpr_spill", "sgpr_spill")]
        launches.append(Launch(name, arch, (grid_x, grid_y, grid_z), warps, *registers, counts))

    def _run(self, grid: Sequence[int], arguments: list[Any]) -> dict[str, int]:
        """Run on copies, in both orders of waves; then write what changed, once, to the memory of the arguments."""
        where = [_span(one) if isinstance(one, torch.Tensor) else None for one in arguments]
        largest = max(span[1] for span in where if span is not None)
        if largest > MAX_SPAN_BYTES:
            pytest.skip(f"an argument spans {largest} bytes; the emulator copies {MAX_SPAN_BYTES} at most")
        before = [None if span is None else ctypes.string_at(*span) for span in where]
        results, executed = [], []
        orders = ("forward", "reverse") if self.metadata.num_warps > 1 else ("forward",)
        for order in orders:
            memory = [None if old is None else torch.frombuffer(bytearray(old or b"\0"), dtype=torch.uint8)[: len(old)]
                      for old in before]  # fmt: skip
            call = [one if new is None else new for one, new in zip(arguments, memory, strict=True)]
            with mock.patch.dict(os.environ, AMD_EMU_WAVE_ORDER=order):
                stats = self.kernel(grid, call)
            assert stats.wraps == 0, f"{self.metadata.name}: {stats.wraps} buffer offsets leave 32 bits"
            results.append([None if new is None else new.numpy().tobytes() for new in memory])
            executed.append(stats)
        assert all(one == results[0] for one in results), f"{self.metadata.name} depends on the order of its waves"
        for span, old, new in zip(where, before, results[0], strict=True):
            if span is not None and new != old:  # unchanged: perhaps a stand-in for an absent argument
                assert new is not None
                ctypes.memmove(span[0], new, span[1])
        counts: Counter[str] = Counter()
        for instruction, times in executed[0].by_op.items():
            counts[kind_of(instruction)] += times
        return {kind: counts[kind] for kind in KINDS}


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes from a tensor's first element to its last, gaps between rows included."""
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), (steps + 1) * tensor.element_size() if tensor.numel() else 0
