"""Every Triton kernel, compiled as production launches it, for GPUs that are not here: what its code must have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from dsv4dist.kernels.compile_report import DEFAULT_ARCHS

pytest.importorskip("triton")

COMPILE = """
import json, re, sys
from dsv4dist.kernels.compile_report import compile_rows, production_specs
specs = [spec for spec in production_specs() if not re.search(sys.argv[2], spec.name)]
for row in compile_rows(specs, sys.argv[1].split(",")):
    print(json.dumps(row.as_dict() | {"problems": row.problems()}))
"""
NOTHING = "(?!)"
WHOLE_DECODE = "^sparse_decode (swa|.* whole)"
"""The decode shapes whose loops another compiled shape has too; they are half of all compile time."""
AMD = ("gfx942", "gfx950")


def run(*arguments: str) -> str:
    """The output of a Python process in which kernels are compiled, not interpreted as in this one."""
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", *arguments]
    ended = subprocess.run(command, env=own, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def rows_without_problems(archs: tuple[str, ...], left_out: str) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in run("-c", COMPILE, ",".join(archs), left_out).splitlines()]
    bad = [f"{row['kernel']} on {row['arch']}: {'; '.join(row['problems'])}" for row in rows if row["problems"]]
    assert not bad, "\n".join(bad)
    return rows


@pytest.mark.timeout(900)
def test_every_kernel_passes_on_cdna() -> None:
    rows = rows_without_problems(AMD, WHOLE_DECODE)
    for arch in AMD:
        mine = [row for row in rows if row["arch"] == arch]
        assert len(mine) > 60
        # The report's own numbers: what it reads from the code is there, and gates hold where they should.
        assert all(row["vgprs"] > 0 and row["loads"] >= row["wide_loads"] for row in mine)
        assert {row["kernel"].split()[0] for row in mine if row["has_dot"]} >= {
            "block_matmul", "grouped_matmul", "indexer_logits", "sparse_decode",
        }  # fmt: skip
        assert all(row["matrix_instructions"] > 0 for row in mine if row["has_dot"])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("arch", DEFAULT_ARCHS)
def test_every_shape_passes_everywhere(arch: str) -> None:
    rows_without_problems((arch,), NOTHING)


@pytest.mark.parametrize("arch", AMD)
def test_specs_say_what_launchers_launch(arch: str) -> None:
    *differences, count = run("-m", "tests.kernels.recorded_launches", arch).splitlines()
    assert not differences, "\n".join(differences)
    assert int(count.split()[0]) > 50
