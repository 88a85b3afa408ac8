"""Log-probability of every token of given sequences, and on demand the logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4dist.cli.inputs import InputOption, PromptIdsOption, PromptOption, gather_requests
from dsv4dist.cli.jsonl import InputRequest
from dsv4dist.cli.options import OptionError, check_options, engine_options
from dsv4dist.cli.output import JsonOption, OutputOption, OverwriteOption, check_outputs, open_results
from dsv4dist.cli.progress import progress_bar
from dsv4dist.cli.results import Results
from dsv4dist.cli.session import open_engine
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.errors import NOT_FINITE, RequestError

if TYPE_CHECKING:
    from dsv4dist.cli.logits_file import LogitsFile
    from dsv4dist.engine.engine import Engine
    from dsv4dist.engine.request import ScoreOutput

RESERVED_NAME = "__metadata__"
"""Safetensors files use it for themselves."""


@engine_options
def command(
    *,
    config: EngineConfig,
    prompt: PromptOption = None,
    prompt_ids: PromptIdsOption = None,
    input_file: InputOption = None,
    output: OutputOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    dump_logits: Annotated[
        Path | None,
        typer.Option(
            help="Also write float32 logits [tokens, vocabulary] under each request's id.", metavar="F.safetensors"
        ),
    ] = None,
) -> int:
    """Check everything that can be checked, then score; returns the exit code."""
    requests = gather_requests(prompt, prompt_ids, input_file)
    check_outputs({"--output": output, "--dump-logits": dump_logits, "--trace": config.trace}, overwrite, input_file)
    if dump_logits is not None and dump_logits.exists() and not dump_logits.is_file():
        raise OptionError(f"--dump-logits {dump_logits} is no regular file, which safetensors needs; choose another")
    check_options(config)
    with open_results(output, to_stdout=as_json) as lines:
        results = Results(lines, empty={"token_ids": [], "token_logprobs": []})
        good = results.servable(requests)
        if dump_logits is not None and any(request.id == RESERVED_NAME for request in good):
            raise OptionError(f"--dump-logits cannot hold the id {RESERVED_NAME!r}; rename that request")
        if good:
            with _logits_file(dump_logits, good) as logits, open_engine(config) as engine:
                budget = config.max_num_batched_tokens
                score_all(engine, good, budget, results, logits, readable=not as_json and output is None)
    return results.close(output)


def score_all(
    engine: Engine,
    requests: list[InputRequest],
    budget: int,
    results: Results,
    logits: LogitsFile | None,
    readable: bool,
) -> None:
    """Score in groups of about `budget` tokens; what the engine refuses is rejected, the others go on."""
    done = 0
    with progress_bar("scoring", lambda: (done, len(requests)), "sequences"):
        for group in _groups(requests, budget):
            for request, result in _score(engine, group, logits is not None, results):
                if any(value is not None and not math.isfinite(value) for value in result.token_logprobs):
                    results.reject(request, NOT_FINITE)
                    continue
                if logits is not None and result.logits is not None:
                    logits.add(result.id, result.logits)
                results.add(_record(result))
                if readable:
                    _print_result(result)
            done += len(group)


def _score(
    engine: Engine, group: list[InputRequest], with_logits: bool, results: Results
) -> list[tuple[InputRequest, ScoreOutput]]:
    """The scores of a group; where the engine refuses it as a whole, those of its members one by one."""
    try:
        scores = engine.score([one.prompt for one in group], with_logits, [one.id for one in group])
    except RequestError as error:
        if len(group) == 1:
            results.reject(group[0], str(error))
            return []
        return [pair for one in group for pair in _score(engine, [one], with_logits, results)]
    return list(zip(group, scores, strict=True))


def _groups(requests: list[InputRequest], budget: int) -> Iterator[list[InputRequest]]:
    """Consecutive requests whose prompts' lengths, in tokens or characters, sum up to at most `budget`."""
    group: list[InputRequest] = []
    used = 0
    for request in requests:
        if group and used + len(request.prompt) > budget:
            yield group
            group, used = [], 0
        group.append(request)
        used += len(request.prompt)
    if group:
        yield group


def _logits_file(path: Path | None, requests: list[InputRequest]) -> LogitsFile | nullcontext[None]:
    if path is None:
        return nullcontext()
    from dsv4dist.cli.logits_file import LogitsFile

    return LogitsFile(path, [request.id for request in requests])


def _record(result: ScoreOutput) -> dict[str, Any]:
    return {"id": result.id, "token_ids": result.token_ids, "token_logprobs": result.token_logprobs}


def _print_result(result: ScoreOutput) -> None:
    known = [value for value in result.token_logprobs if value is not None]
    mean = sum(known) / len(known) if known else 0.0
    print(
        f"[{result.id}] {len(result.token_ids)} tokens: log-probability {sum(known):.6g}, "
        f"mean {mean:.6g}, perplexity {math.exp(min(-mean, 700)):.6g}",
        flush=True,
    )
