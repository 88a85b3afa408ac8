"""Generate tokens for prompts, or for every line of a file."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsv4dist.cli.inputs import InputOption, PromptIdsOption, PromptOption, gather_requests
from dsv4dist.cli.jsonl import InputRequest
from dsv4dist.cli.options import OptionError, check_options, engine_options
from dsv4dist.cli.output import JsonOption, OutputOption, OverwriteOption, check_outputs, complain, open_results
from dsv4dist.cli.progress import progress_bar
from dsv4dist.cli.results import Results
from dsv4dist.cli.session import open_engine
from dsv4dist.config.runtime import EngineConfig
from dsv4dist.errors import RequestError

if TYPE_CHECKING:
    from dsv4dist.engine.engine import Engine
    from dsv4dist.engine.request import RequestOutput, SamplingParams


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
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Only the likeliest tokens of this total probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Only so many likeliest tokens; 0: all.")] = 0,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False,
) -> int:
    """Check everything that can be checked, then serve; returns the exit code."""
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "top_k": top_k}
    sampling["ignore_eos"] = ignore_eos
    requests = gather_requests(prompt, prompt_ids, input_file)
    check_outputs({"--output": output, "--trace": config.trace}, overwrite, input_file)
    check_options(config)
    try:
        make_sampling_params(sampling)
    except RequestError as error:
        raise OptionError(str(error)) from None
    with open_results(output, to_stdout=as_json) as lines:
        results = Results(lines, empty={"prompt_token_ids": [], "token_ids": []})
        good = results.servable(requests)
        if good:
            with open_engine(config) as engine:
                serve(engine, good, sampling, results, readable=not as_json and output is None)
    return results.close(output)


def serve(
    engine: Engine, requests: list[InputRequest], sampling: dict[str, Any], results: Results, readable: bool
) -> None:
    """Generate for all requests, each written as it ends; what the engine refuses is rejected, the others go on."""
    started = time.monotonic()
    by_id: dict[str, InputRequest] = {}
    for request in requests:
        try:
            engine.submit(request.prompt, make_sampling_params({**sampling, **request.sampling}), request.id)
        except RequestError as error:
            results.reject(request, str(error))
        else:
            by_id[request.id] = request
    num_tokens = 0
    failures: list[str] = []
    with progress_bar("generating", engine.progress, "tokens"):
        # When the ranks are lost, each unfinished request ends with "error" and then the engine raises: told once.
        for result in engine.stream_all():
            request = by_id[result.id]
            if result.finish_reason == "error":
                results.fail(request, result.error or "unknown", output_record(result))
                failures.append(f"error: {request.source}: {result.error}")
                continue
            num_tokens += len(result.token_ids)
            results.add(output_record(result))
            if readable:
                _print_result(request, result)
    for failure in failures:
        complain(failure)
    if readable:
        right, drafts = engine.acceptance()
        speculation = f", {right} of {drafts} drafts right" if drafts else ""
        elapsed_s = time.monotonic() - started
        print(f"{results.done} requests, {num_tokens} new tokens in {elapsed_s:.3g} s{speculation}", flush=True)


def make_sampling_params(values: dict[str, Any]) -> SamplingParams:
    """SamplingParams of these values.  Raises: RequestError for values out of range."""
    from dsv4dist.engine.request import SamplingParams

    params = SamplingParams(**values)
    params.check()
    return params


def output_record(result: RequestOutput) -> dict[str, Any]:
    """The output line of the contract; text is there only when the model has a tokenizer."""
    text = {} if result.text is None else {"text": result.text}
    return {
        "id": result.id,
        "prompt_token_ids": result.prompt_token_ids,
        "token_ids": result.token_ids,
        **text,
        "finish_reason": result.finish_reason,
        "metrics": result.metrics,
    }


def _print_result(request: InputRequest, result: RequestOutput) -> None:
    prompt = repr(request.prompt) if isinstance(request.prompt, str) else _ids(request.prompt)
    decode_s, later = result.metrics["decode_s"], len(result.token_ids) - 1
    speed = f", then {later / decode_s:.3g} tokens/s" if later and decode_s > 0 else ""
    print(f"[{result.id}] {prompt}")
    if result.text is not None:
        print(f"    text:   {result.text!r}")
    print(f"    tokens: {_ids(result.token_ids)}")
    print(f"    ended:  {result.finish_reason}; first token after {result.metrics['ttft_s']:.3g} s{speed}", flush=True)


def _ids(token_ids: list[int], limit: int = 64) -> str:
    more = f" ... ({len(token_ids)} tokens)" if len(token_ids) > limit else ""
    return " ".join(map(str, token_ids[:limit])) + more
