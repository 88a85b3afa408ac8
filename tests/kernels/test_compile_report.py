"""Compiling kernels for absent GPUs: in a process of its own, since kernels are interpreted in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dsv4dist.errors import UnsupportedError
from dsv4dist.kernels.compile_report import CompileRow, check_archs, read_amd

COMPILE = """
import json
from dsv4dist.kernels.compile_report import compile_rows, production_specs
specs = [spec for spec in production_specs() if spec.name.startswith(NAMES)]
print(json.dumps([row.as_dict() | {"problems": row.problems()} for row in compile_rows(specs, ARCHS)]))
"""


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=own | environment, capture_output=True, text=True, check=False
    )


def test_a_kernel_for_three_architectures() -> None:
    pytest.importorskip("triton")
    archs = ("gfx942", "gfx950", "sm90")
    code = COMPILE.replace("NAMES", repr("compress_state hca")).replace("ARCHS", repr(archs))
    ended = python(code)
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    assert [row["arch"] for row in rows] == list(archs)  # the order, although several compile at once
    for row in rows:
        assert row["problems"] == []
        assert row["vgprs"] > 0
        assert row["wide_loads"] > 0
        assert row["matrix_instructions"] == 0


def test_interpreted_kernels_are_not_compiled() -> None:
    pytest.importorskip("triton")
    ended = python("from dsv4dist.kernels.compile_report import *\nproduction_specs()", TRITON_INTERPRET="1")
    assert "TRITON_INTERPRET is set" in ended.stderr


def test_what_counts_as_a_problem() -> None:
    assert CompileRow("k", "gfx942", lds_bytes=65_536, wide_loads=1).problems() == []
    assert CompileRow("k", "gfx942", lds_bytes=65_537, wide_loads=1).problems() == [
        "needs 65537 bytes of shared memory, 65536 exist"
    ]
    assert CompileRow("k", "gfx950", spills=3, scratch_bytes=12, sgpr_spills=9, wide_loads=1).problems() == [
        "spills 3 registers",
        "uses 12 bytes of scratch",
    ]
    assert CompileRow("k", "sm90", spills=3, scratch_bytes=12, spills_because="timed", wide_loads=1).problems() == []
    assert CompileRow("k", "gfx950", has_dot=True, loads=5).problems() == [
        "multiplies without the matrix unit",
        "never loads 16 bytes at once",
    ]
    assert CompileRow("k", "gfx950", has_dot=True, matrix_instructions=1, narrow_because="short rows").problems() == []
    assert CompileRow("k", "sm90", error="no").problems() == ["does not compile: no"]


def test_the_code_is_read_for_what_it_has() -> None:
    code = """
        .vgpr_count:     96
        .vgpr_spill_count: 2
        .sgpr_spill_count: 5
        .private_segment_fixed_size: 24
    \tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen
    \tglobal_load_lds_dwordx4 v[0:1], off
    \tglobal_load_async_to_lds_b128 v1, v[2:3], off
    \tbuffer_load_dwordx4 v0, s[0:3], 0 offen lds
    \tglobal_load_dwordx2 v[0:1], v2, s[0:1]
    \tbuffer_load_ubyte v1, v2, s[0:3], 0 offen
    \tv_mfma_f32_16x16x16_f16 v[0:3], v[4:5], v[6:7], v[0:3]
    \tds_read_b128 v[0:3], v4
    """
    assert read_amd({"amdgcn": code}) == {
        "vgprs": 96, "spills": 2, "sgpr_spills": 5, "scratch_bytes": 24, "matrix_instructions": 1, "loads": 6,
        "wide_loads": 4,
    }  # fmt: skip


def test_a_compiler_that_dies_is_named() -> None:
    pytest.importorskip("triton")
    code = """
import os
from dsv4dist.kernels import compile_report
compile_report._compile = lambda spec, arch: os._exit(1)
list(compile_report.compile_rows(compile_report.production_specs()[:2], ["gfx942"]))
"""
    ended = python(code)
    assert "WorkerError: a compiler process was killed or aborted at" in ended.stderr
    assert "dsv4dist compile --arch gfx942 --kernel" in ended.stderr


def test_unknown_architectures_are_named_together() -> None:
    check_archs(["gfx942", "sm90", "gfx90a"])
    with pytest.raises(UnsupportedError, match="'mi300', 'hopper'"):
        check_archs(["mi300", "gfx950", "hopper"])
