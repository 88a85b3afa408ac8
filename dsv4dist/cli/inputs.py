"""Where the requests of `generate` and `score` come from: prompts on the command line or a file of JSON lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from dsv4dist.cli.jsonl import BadRequest, InputRequest, parse_token_ids, read_requests
from dsv4dist.cli.options import OptionError

PromptOption = Annotated[
    list[str] | None,
    typer.Option("--prompt", help="A text; may be given several times.", metavar="TEXT"),
]
PromptIdsOption = Annotated[
    list[str] | None,
    typer.Option("--prompt-ids", help="Token ids; may be given several times.", metavar="1,2,3"),
]
InputOption = Annotated[
    str | None,
    typer.Option(
        "--input",
        help='A file with one request a line: {"id": "a", "prompt": "text"} or {"id": "a", "prompt_token_ids": [1, 2]}'
        ", and sampling keys; - reads standard input.",
        metavar="F.jsonl",
    ),
]


def gather_requests(
    prompts: list[str] | None, prompt_ids: list[str] | None, input_file: str | None
) -> list[InputRequest | BadRequest]:
    """The requests that the three options name; those of the command line get the ids 0, 1, 2, ...

    Raises: OptionError unless there is input, from the command line or from a file but not both, that can be read."""
    if input_file is not None and (prompts or prompt_ids):
        raise OptionError("--input cannot be combined with --prompt or --prompt-ids; give one kind of input")
    if input_file is not None:
        return _read_file(input_file)
    if not prompts and not prompt_ids:
        raise OptionError("there is no input; give --prompt TEXT, --prompt-ids 1,2,3 or --input F.jsonl")
    found: list[InputRequest | BadRequest] = []
    for number, text in enumerate(prompts or [], start=1):
        found.append(InputRequest(str(len(found)), f"--prompt {number}", text))
    for number, text in enumerate(prompt_ids or [], start=1):
        try:
            ids = parse_token_ids(text)
        except ValueError as error:
            raise OptionError(f"--prompt-ids {number}: {error}") from None
        found.append(InputRequest(str(len(found)), f"--prompt-ids {number}", ids))
    return found


def _read_file(name: str) -> list[InputRequest | BadRequest]:
    try:
        if name == "-":
            if sys.stdin is None:
                raise OptionError("--input -: standard input is closed; give a file of JSON lines")
            return read_requests(sys.stdin.buffer)
        with Path(name).open("rb") as lines:
            return read_requests(lines)
    except OSError as error:
        raise OptionError(f"--input {name}: {error.strerror}; give a file of JSON lines") from None
