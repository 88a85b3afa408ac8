"""Measure; every row has medians and the machine it is from."""

from __future__ import annotations

from typing import Annotated

import typer

from dsv4dist.cli.output import JsonOption

app = typer.Typer(help=__doc__, rich_markup_mode=None, no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Measure; every row has medians and the machine it is from."""


@app.command("scheduler")
def scheduler(
    requests: Annotated[str, typer.Option(help="Numbers of running requests, comma-separated.")] = "1,64,256",
    context: Annotated[int, typer.Option(help="Tokens of each request.", min=1)] = 4096,
    repeats: Annotated[int, typer.Option(help="Timed steps.", min=1)] = 500,
    as_json: JsonOption = False,
) -> None:
    """Time the driver's planning of a decode step."""
    from dsv4dist.bench.report import show
    from dsv4dist.bench.scheduler import bench_scheduler

    show(bench_scheduler(_numbers(requests), context, repeats), as_json)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"expected positive numbers like 1,64,256, found {text!r}")
    return numbers
