"""Check every node and GPU of a cluster, and what they do together; exit 1 if anything is wrong."""

from __future__ import annotations

import json
from contextlib import closing
from typing import Annotated

import typer

from dsv4dist.cli.options import HELP, OptionError
from dsv4dist.cli.output import JsonOption, json_on_stdout
from dsv4dist.cli.progress import waiting
from dsv4dist.cli.session import no_orphans
from dsv4dist.cli.signals import take_signals
from dsv4dist.config.runtime import CHOICES
from dsv4dist.errors import MeasurementError


def command(
    *,
    tp: Annotated[
        int | None, typer.Option("--tp", "--tensor-parallel-size", help="Only this number of ranks (default: all).")
    ] = None,
    device: Annotated[str, typer.Option(metavar="|".join(CHOICES["device"]), help=HELP["device"])] = "auto",
    address: Annotated[str, typer.Option(help=HELP["address"])] = "auto",
    timeout: Annotated[float, typer.Option(help="Seconds that each part may take on each node.", min=1.0)] = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Print a row per check as they come: JSON lines, or a table with the next command under what is wrong."""
    if device not in CHOICES["device"]:
        raise OptionError(f"--device is {device!r}; choose from {', '.join(CHOICES['device'])}")
    if tp is not None:
        from dsv4dist.smoke.model import TP_SIZES

        if tp not in TP_SIZES:
            raise OptionError(f"--tp is {tp}; the tiny model divides by {', '.join(map(str, TP_SIZES))}")
    with json_on_stdout() as stream:
        with waiting("joining Ray"), no_orphans():
            from dsv4dist.workers.ray_cluster import connect_ray

            connection = connect_ray(address, max(tp or 0, 2))
        take_signals()  # Ray installs a SIGTERM handler of its own when it starts
        with closing(connection):
            from dsv4dist.smoke.cluster import SmokeOptions, smoke_rows

            failed, total = [], 0
            with closing(smoke_rows(SmokeOptions(tp, device, timeout), connection)) as rows:
                for row in rows:
                    stream.write((json.dumps(row.as_dict()) if as_json else row.as_text()) + "\n")
                    stream.flush()
                    total += 1
                    failed += [] if row.ok else [row]
    if failed:
        first = failed[0]
        where = first.node + (f", GPU {first.gpu}" if first.gpu is not None else "")
        raise MeasurementError(
            f"{len(failed)} of {total} checks failed; the first: {first.check} on {where}: {first.value}; "
            f"next: {first.hint}"
        )
