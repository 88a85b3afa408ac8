"""Compile Triton kernels for GPUs that are not there, and read what the machine code costs.

The production launches are what each module of `kernels._triton` lists in its `compile_specs()`.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pkgutil
import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsv4dist.arch import traits_by_name
from dsv4dist.env import DEBUG_SWITCH, debug_wanted
from dsv4dist.errors import UnsupportedError, WorkerError

if TYPE_CHECKING:
    from dsv4dist.kernels._triton.compile_spec import CompileSpec

DEFAULT_ARCHS = ("gfx942", "gfx950", "gfx1250", "sm90")

KNOWN_ARCHS = (
    *("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1101", "gfx1102", "gfx1150", "gfx1151", "gfx1200", "gfx1201"),
    *("gfx1250", "sm80", "sm86", "sm89", "sm90", "sm100", "sm103", "sm120"),
)
"""Names that Triton's compilers take; others make them abort, or print pages of code."""

MAX_COMPILERS = 8
"""Variants compiled at once, at most: each takes some hundred megabytes."""

_AMD_WIDE_LOAD = re.compile(r"^\s*(?:global|buffer|flat)_load_(?:lds_|async_to_lds_)?(?:dwordx4|b128)\b", re.MULTILINE)
_AMD_LOAD = re.compile(r"^\s*(?:global|buffer|flat)_load_", re.MULTILINE)
_AMD_MATRIX = re.compile(r"^\s*v_(?:mfma|smfmac|wmma|swmmac)_", re.MULTILINE)
_SASS_WIDE_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.[\w.]*128\b")
_SASS_LOAD = re.compile(r"\b(?:LDG|LDGSTS)\.")
_SASS_MATRIX = re.compile(r"\b(?:HMMA|HGMMA|QMMA|QGMMA|IMMA|IGMMA|DMMA)\.")
_SASS_SPILL = re.compile(r"\bSTL(?:\.[\w.]+)?\s")


@dataclass(frozen=True)
class CompileRow:
    """One kernel variant on one architecture.

    vgprs                vector registers of a thread (on NVIDIA: registers)
    spills               vector registers that went to memory (on NVIDIA: store instructions that did it)
    sgpr_spills          scalar registers that went to lanes of vector registers, which is cheap (0 on NVIDIA)
    scratch_bytes        private memory of a thread
    lds_bytes            shared memory of a thread block
    matrix_instructions, loads, wide_loads  instructions in the code: matrix; from global memory; 16 bytes of those
    has_dot, narrow_because, spills_because  as in CompileSpec: what the code is held to
    error                what the compiler said, if it refused
    """

    kernel: str
    arch: str
    vgprs: int = 0
    spills: int = 0
    sgpr_spills: int = 0
    scratch_bytes: int = 0
    lds_bytes: int = 0
    matrix_instructions: int = 0
    loads: int = 0
    wide_loads: int = 0
    has_dot: bool = False
    narrow_because: str = ""
    spills_because: str = ""
    error: str | None = None

    def problems(self) -> list[str]:
        """What keeps this variant from production: a refusal, spills, too much shared memory, or slow instructions."""
        if self.error is not None:
            return [f"does not compile: {self.error}"]
        limit = traits_by_name(self.arch).lds_bytes
        found = []
        if self.spills and not self.spills_because:
            found.append(f"spills {self.spills} registers")
        if self.scratch_bytes and not self.spills_because:
            found.append(f"uses {self.scratch_bytes} bytes of scratch")
        if self.lds_bytes > limit:
            found.append(f"needs {self.lds_bytes} bytes of shared memory, {limit} exist")
        if self.has_dot and not self.matrix_instructions:
            found.append("multiplies without the matrix unit")
        if not self.narrow_because and not self.wide_loads:
            found.append("never loads 16 bytes at once")
        return found

    def as_dict(self) -> dict[str, Any]:
        """The fields by name, without an `error` of None."""
        return {key: value for key, value in asdict(self).items() if not (key == "error" and value is None)}


def check_archs(archs: Iterable[str]) -> None:
    """Refuse names that are not in KNOWN_ARCHS.  Raises: UnsupportedError naming all of them."""
    unknown = [arch for arch in archs if arch not in KNOWN_ARCHS]
    if unknown:
        raise UnsupportedError(
            f"--arch: kernels are not compiled for {', '.join(map(repr, unknown))}; "
            f"choose from {', '.join(KNOWN_ARCHS)}"
        )


def production_specs() -> list[CompileSpec]:
    """The specs of every module of `kernels._triton`, by module name.  Raises: UnsupportedError without a compiler."""
    try:
        import triton
    except ImportError:
        raise UnsupportedError("triton is not installed; install dsv4dist[cpu], or PyTorch for a GPU") from None
    if triton.knobs.runtime.interpret:
        raise UnsupportedError("TRITON_INTERPRET is set, so kernels are interpreted, not compiled; unset it")
    package = importlib.import_module("dsv4dist.kernels._triton")
    specs: list[CompileSpec] = []
    for name in sorted(module.name for module in pkgutil.iter_modules(package.__path__)):
        module = importlib.import_module(f"{package.__name__}.{name}")
        if hasattr(module, "compile_specs"):
            specs += module.compile_specs()
    return specs


def compile_rows(specs: Iterable[CompileSpec], archs: Iterable[str]) -> Iterator[CompileRow]:
    """Compile every spec for every architecture that launches it, and yield the rows in that order.

    Raises: WorkerError if a compiler takes its process down.
    """
    archs = tuple(archs)
    variants = [(spec, arch) for spec in specs for arch in archs if spec.used_on(arch)]
    # Forked, since jit functions can be inherited but not sent. Threads would not help: compilers hold Python's lock.
    pool = ProcessPoolExecutor(
        max(1, min(MAX_COMPILERS, os.cpu_count() or 1, len(variants))),
        multiprocessing.get_context("fork"),
        initializer=_start_compiler,
        initargs=(variants,),
    )
    done = 0
    with pool:
        try:
            for row in pool.map(_compile_variant, range(len(variants))):
                yield row
                done += 1
        except BrokenProcessPool:
            spec, arch = variants[done]
            raise WorkerError(
                f"a compiler process was killed or aborted at {spec.name} for {arch} or soon after; run that alone: "
                f"{DEBUG_SWITCH}=1 dsv4dist compile --arch {arch} --kernel {spec.name!r}"
            ) from None


_variants: list[tuple[CompileSpec, str]] = []
"""In a compiler process: what there is to compile."""


def _start_compiler(variants: list[tuple[CompileSpec, str]]) -> None:
    """Prepare a compiler process; what a compiler prints beside its error, pages of code, is for debugging only."""
    _variants.extend(variants)
    if not debug_wanted():
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _compile_variant(index: int) -> CompileRow:
    return _compile(*_variants[index])


def _compile(spec: CompileSpec, arch: str) -> CompileRow:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    amd = arch.startswith("gfx")
    source = (GluonASTSource if spec.kernel.is_gluon() else ASTSource)(
        spec.kernel,
        signature={name: spec.signature.get(name, "constexpr") for name in spec.kernel.arg_names},
        constexprs=dict(spec.constexprs),
        attrs=spec.attributes(amd),
    )
    target = GPUTarget("hip" if amd else "cuda", arch if amd else int(arch[2:]), traits_by_name(arch).warp_size)
    stages = {} if spec.num_stages is None else {"num_stages": spec.num_stages}
    options = {"num_warps": spec.num_warps, **stages, **spec.options}
    gates: dict[str, Any] = {
        "has_dot": spec.has_dot, "narrow_because": spec.narrow_because, "spills_because": spec.spills_because
    }  # fmt: skip
    try:
        compiled = triton.compile(source, target=target, options=options)
    except Exception as error:  # whatever a compiler raises is its verdict on this variant
        return CompileRow(spec.name, arch, error=_first_line(error), **gates)
    read = read_amd if amd else _read_nvidia
    return CompileRow(spec.name, arch, lds_bytes=int(compiled.metadata.shared), **read(compiled.asm), **gates)


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:  # in a function that calls another, Triton first says where the call is
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else 'no message'}"


def read_amd(asm: Any) -> dict[str, Any]:
    """The fields of a CompileRow that AMD assembly, asm["amdgcn"], tells."""
    text: str = asm["amdgcn"]

    def field(name: str) -> int:
        found = re.search(rf"\.{name}:\s*(\d+)", text)
        return int(found.group(1)) if found else 0

    return {
        "vgprs": field("vgpr_count"),
        "spills": field("vgpr_spill_count"),
        "sgpr_spills": field("sgpr_spill_count"),
        "scratch_bytes": field("private_segment_fixed_size"),
        "matrix_instructions": len(_AMD_MATRIX.findall(text)),
        "loads": len(_AMD_LOAD.findall(text)),
        "wide_loads": len(_AMD_WIDE_LOAD.findall(text)),
    }


def _read_nvidia(asm: Any) -> dict[str, Any]:
    import triton

    with tempfile.TemporaryDirectory() as directory:
        cubin = Path(directory) / "kernel.cubin"
        cubin.write_bytes(asm["cubin"])
        tools = triton.knobs.nvidia
        usage = _run(tools.cuobjdump.path, "--dump-resource-usage", str(cubin))
        sass = _run(tools.nvdisasm.path, "-c", str(cubin))

    def field(name: str) -> int:
        found = re.search(rf"\b{name}:(\d+)", usage)
        return int(found.group(1)) if found else 0

    return {
        "vgprs": field("REG"),
        "spills": len(_SASS_SPILL.findall(sass)),
        "scratch_bytes": field("STACK") + field("LOCAL"),
        "matrix_instructions": len(_SASS_MATRIX.findall(sass)),
        "loads": len(_SASS_LOAD.findall(sass)),
        "wide_loads": len(_SASS_WIDE_LOAD.findall(sass)),
    }


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
