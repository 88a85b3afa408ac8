"""Write a small random checkpoint whose every parameter matters, with config.json and tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dsv4dist.cli.options import OptionError
from dsv4dist.cli.output import JsonOption, json_on_stdout
from dsv4dist.cli.progress import waiting
from dsv4dist.errors import ConfigError


def command(
    *,
    directory: Annotated[Path, typer.Argument(help="Where to write; new, empty, or written by this command before.")],
    preset: Annotated[
        str, typer.Option(metavar="tiny|...", help="Sizes of the model; an unknown name lists all.")
    ] = "tiny",
    seed: Annotated[int, typer.Option(help="The same seed gives the same values.")] = 0,
    format: Annotated[
        str, typer.Option("--format", metavar="release|transformers", help="Names and config.json as which of them.")
    ] = "release",
    quant: Annotated[bool, typer.Option("--quant", help="Store fp8 and fp4 matrices with scales.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the checkpoint and say where it is and how large."""
    with waiting("writing the checkpoint"):
        from dsv4dist.checkpoint.random_checkpoint import make_checkpoint

        try:
            make_checkpoint(directory, preset=preset, seed=seed, format=format, quant=quant)
        except ConfigError as error:  # its only subjects are the options above
            raise OptionError(str(error)) from None
    num_bytes = sum(file.stat().st_size for file in directory.iterdir())
    if as_json:
        row = {"directory": str(directory), "preset": preset, "seed": seed, "format": format, "quant": quant}
        with json_on_stdout() as stream:
            stream.write(json.dumps({**row, "bytes": num_bytes}) + "\n")
    else:
        print(f"{directory}: {preset}, {format} format, {num_bytes / 1e6:.1f} MB")
