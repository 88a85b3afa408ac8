"""Compiling kernels for absent GPUs: in a process of its own, since kernels are interpreted in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from dsv4dist.errors import UnsupportedError
from dsv4dist.kernels.compile_report import CompileRow, check_archs

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
    assert [row["arch"] for row in rows] == list(archs)
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
    assert CompileRow("k", "gfx942", lds_bytes=65_536).problems() == []
    assert CompileRow("k", "gfx942", lds_bytes=65_537).problems() == ["needs 65537 bytes of shared memory, 65536 exist"]
    assert CompileRow("k", "gfx950", spills=3, scratch_bytes=12).problems() == [
        "spills 3 registers",
        "uses 12 bytes of scratch",
    ]
    assert CompileRow("k", "sm90", error="no").problems() == ["does not compile: no"]


def test_unknown_architectures_are_named_together() -> None:
    check_archs(["gfx942", "sm90", "gfx90a"])
    with pytest.raises(UnsupportedError, match="'mi300', 'hopper'"):
        check_archs(["mi300", "gfx950", "hopper"])
