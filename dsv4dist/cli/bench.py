"""Measure; every row has medians and the machine it is from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4dist.cli.output import JsonOption, json_on_stdout
from dsv4dist.errors import MeasurementError

if TYPE_CHECKING:
    from dsv4dist.bench.cases import Sizes

app = typer.Typer(help=__doc__, rich_markup_mode=None)

HeadsOption = Annotated[
    str, typer.Option(metavar="N,...", help="Local heads; prefill takes 8,16,64 where this is left out.")
]
ReplaysOption = Annotated[int, typer.Option(help="Timed replays of each captured graph.", min=1)]
JobsOption = Annotated[int, typer.Option(help="Processes that compile kernels first; 0 = as many as useful.", min=0)]
FromOption = Annotated[
    Path | None,
    typer.Option("--from", metavar="F.jsonl", exists=True, dir_okay=False, help="Print a recorded run as markdown."),
]


@app.callback(invoke_without_command=True)
def _root(context: typer.Context) -> None:
    """Measure; every row has medians and the machine it is from."""
    if context.invoked_subcommand is None:
        print(context.get_help())


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


@app.command("kernels")
def kernels(
    op: Annotated[str, typer.Option(metavar="NAME,...", help="Only these operations.")] = "",
    heads: HeadsOption = "",
    tp: Annotated[str, typer.Option(metavar="N,...", help="Ranks that share the projections out.")] = "1,8",
    replays: ReplaysOption = 20,
    jobs: JobsOption = 0,
    recorded: FromOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time every kernel on this machine's GPU, beside the floor that its bytes and operations set.

    The median, p10 and p90 are of replays of one graph that holds a call for each of several input sets, so that
    inputs come from device memory, not from a cache; `cold` says where they were large enough for that. The floor is
    the larger of bytes over the rate of a 1 GiB copy and operations over that of an 8192^3 product, both measured in
    the same run.
    """
    from dsv4dist.bench.cases import model_linears
    from dsv4dist.bench.kernels import bench_kernels, op_names
    from dsv4dist.bench.report import markdown, read_rows

    if recorded is not None:
        print(markdown(read_rows(recorded)))
        return
    ops = tuple(name.strip() for name in op.split(",") if name.strip())
    unknown = [name for name in ops if name not in op_names()]
    if unknown:
        raise typer.BadParameter(f"--op {unknown[0]!r} is none of {', '.join(op_names())}")
    sizes = replace(_sizes(heads), linears=model_linears(tuple(_numbers(tp))))
    _show_all(bench_kernels("kernels", sizes, ops, replays, jobs), as_json)


@app.command("attention")
def attention(
    heads: HeadsOption = "",
    sweep: Annotated[
        bool, typer.Option("--sweep-splits", help="Time many split counts; show the best beside the planned one.")
    ] = False,
    replays: ReplaysOption = 20,
    jobs: JobsOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Time sparse decode attention on this machine's GPU, as `kernels` does."""
    from dsv4dist.bench.kernels import bench_kernels, sweep_splits

    if sweep:
        rows = sweep_splits("attention", _sizes(heads), replays)
    else:
        rows = bench_kernels("attention", _sizes(heads), ("sparse_attention",), replays, jobs)
    _show_all(rows, as_json)


@app.command("prefill")
def prefill(
    heads: HeadsOption = "", replays: ReplaysOption = 20, jobs: JobsOption = 0, as_json: JsonOption = False
) -> None:
    """Time prefill attention, 4,096 tokens of one request, on this machine's GPU, as `kernels` does."""
    from dsv4dist.bench.kernels import bench_kernels

    _show_all(bench_kernels("prefill", _sizes(heads), ("sparse_prefill",), replays, jobs), as_json)


@app.command("decode")
def decode(
    model: Annotated[str, typer.Option(help="Released sizes: flash or pro.")] = "flash",
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Required: there is no other kind of this measurement.")
    ] = False,
    shard_of: Annotated[str, typer.Option(metavar="N,...", help="Run as one rank of a group of N.")] = "1,8",
    tokens: Annotated[str, typer.Option(metavar="N,...", help="Requests of the step.")] = "1,8,32,128",
    context: Annotated[str, typer.Option(metavar="N,...", help="Tokens of each request.")] = "8192,131072",
    by_kernel: Annotated[bool, typer.Option(help="Also time each kernel of one layer of each kind.")] = False,
    replays: ReplaysOption = 20,
    as_json: JsonOption = False,
) -> None:
    """Time a decode step of all attention layers on this machine's GPU: captured, in sequence, and eagerly.

    Weights and caches are random, in the sizes and types of the release; collectives are not part of it.
    """
    from dsv4dist.bench.decode import bench_decode
    from dsv4dist.bench.kernels import gpu_for
    from dsv4dist.config.presets import RELEASE_NAMES, preset_config
    from dsv4dist.kernels.ops import triton_ops

    if model not in RELEASE_NAMES:
        raise typer.BadParameter(f"--model {model!r} is none of {', '.join(RELEASE_NAMES)}")
    if not random_weights:
        raise typer.BadParameter(
            "add --random-weights: checkpoints are measured by `generate`, which reports its speed"
        )
    sizes = (_numbers(shard_of), _numbers(tokens), _numbers(context))
    _show_all(
        bench_decode(model, preset_config(model), triton_ops(), gpu_for("decode"), *sizes, replays, by_kernel), as_json
    )


@app.command("control")
def control(
    ranks: Annotated[int, typer.Option(help="Actors that get every packet.", min=1)] = 2,
    packet_bytes: Annotated[int, typer.Option(help="Bytes of a packet.", min=4)] = 65536,
    k: Annotated[str, typer.Option(metavar="N,...", help="Steps per packet.")] = "1,8",
    repeats: Annotated[int, typer.Option(help="Timed packets.", min=1)] = 300,
    as_json: JsonOption = False,
) -> None:
    """Time an empty step from the driver to every rank and back, beside plain Ray actor calls."""
    from dsv4dist.bench.control import bench_control
    from dsv4dist.workers.channel import MAX_IN_FLIGHT

    steps = _numbers(k)
    if max(steps) > MAX_IN_FLIGHT:
        raise typer.BadParameter(f"--k {max(steps)}: a packet has at most {MAX_IN_FLIGHT} steps")
    _show_all(bench_control(ranks, packet_bytes, steps, repeats), as_json)


def _show_all(rows: Iterator[dict[str, Any]], as_json: bool) -> None:
    """Show rows as they come.  Raises: MeasurementError when some of them hold an error."""
    from dsv4dist.bench.report import show

    with json_on_stdout() as stream:
        shown = show(rows, as_json, stream)
    failed = sum("error" in row for row in shown)
    if failed:
        raise MeasurementError(f"{failed} of {len(shown)} measurements failed; their rows say why")


def _sizes(heads: str) -> Sizes:
    from dsv4dist.bench.cases import Sizes

    return Sizes().with_heads(tuple(_numbers(heads))) if heads else Sizes()


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise typer.BadParameter(f"expected positive numbers like 1,64,256, found {text!r}")
    return numbers
