"""Compile every Triton kernel for the given GPUs, none of which need be there, and show what the code costs."""

from __future__ import annotations

import json
import sys
from typing import Annotated

import typer

from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import JsonOption, json_on_stdout
from dsv4dist.errors import UnsupportedError, WorkerError

_DEFAULT_ARCHS = "gfx942,gfx950,gfx1250,sm90"


def command(
    *,
    arch: Annotated[str, typer.Option(metavar="NAME,...", help="Architectures to compile for.")] = _DEFAULT_ARCHS,
    kernel: Annotated[str, typer.Option(metavar="TEXT", help="Only kernels whose name contains this.")] = "",
    as_json: JsonOption = False,
) -> None:
    """Print a row per kernel and architecture; exit 1 if one is refused, spills, or misses what it is held to."""
    from dsv4dist.kernels.compile_report import check_archs, compile_rows, production_specs

    archs = [name.strip() for name in arch.split(",") if name.strip()]
    try:
        check_archs(archs)
    except UnsupportedError as error:
        raise OptionError(str(error)) from None
    specs = production_specs()
    chosen = [spec for spec in specs if kernel in spec.name]
    if not archs or not chosen:
        what = f"--kernel {kernel!r} names none of {len(specs)} kernels" if archs else "--arch names no architecture"
        raise OptionError(f"{what}; leave it out for all")
    width = max(len(spec.name) for spec in chosen)
    bad = total = spilling = 0
    with json_on_stdout() as stream:
        if not as_json:
            columns = ("vgprs", "spills", "sgprs", "scratch", "lds", "matrix", "loads", "16-byte")
            stream.write(f"{'kernel':<{width}}  {'arch':<8}" + "".join(f"{one:>9}" for one in columns) + "\n")
        for row in compile_rows(chosen, archs):
            problems = row.problems()
            total, bad, spilling = total + 1, bad + bool(problems), spilling + bool(row.spills)
            notes = problems or ([f"may spill: {row.spills_because}"] if row.spills else [])
            if as_json:
                stream.write(json.dumps(row.as_dict() | ({"problems": problems} if problems else {})) + "\n")
            else:
                values = (
                    row.vgprs, row.spills, row.sgpr_spills, row.scratch_bytes, row.lds_bytes, row.matrix_instructions,
                    row.loads, row.wide_loads,
                )  # fmt: skip
                numbers = "".join(f"{value:>9}" for value in values)
                stream.write(f"{row.kernel:<{width}}  {row.arch:<8}{numbers}  {'; '.join(notes)}".rstrip() + "\n")
            stream.flush()
    if bad:
        raise WorkerError(f"{bad} of {total} compiled kernels cannot be used as they are; see their rows")
    spills = f"; {spilling} spill and may, see their rows" if spilling else ""
    print(f"{total} compiled, all within limits{spills}", file=sys.stderr)
