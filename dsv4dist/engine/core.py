"""The serving loop: checks requests, plans steps, has the ranks run them, and turns results into outputs."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dsv4dist.cache.blocks import BlockManager
from dsv4dist.cache.groups import cache_groups
from dsv4dist.cache.prefix_cache import PrefixCache
from dsv4dist.config.resolve import RunConfig
from dsv4dist.engine.metrics import Metrics
from dsv4dist.engine.prompts import Prompt, check_list, prompt_ids
from dsv4dist.engine.recovery import Recovery
from dsv4dist.engine.request import Request, RequestOutput, SamplingParams, ScoreOutput
from dsv4dist.engine.scheduler import ScheduledRequest, Scheduler
from dsv4dist.engine.step_plan import build_step_plan
from dsv4dist.engine.tokenizer import Tokenizer
from dsv4dist.engine.trace import StepTrace
from dsv4dist.errors import NOT_FINITE, RequestError, WorkerError, one_error
from dsv4dist.workers.executor import NO_TOKEN, Executor, StepResult
from dsv4dist.workers.packet import RowKind, StepPlan

log = logging.getLogger(__name__)


_LAST_STEP = 1 << 30
"""Step numbers are 32-bit words of a packet; they begin again behind this one."""


@dataclass
class Awaited:
    """The requests that one call of generate, stream or score serves: those left, and those with a new state."""

    left: set[Request]
    changed: list[Request] = field(default_factory=list)


@dataclass
class SentPacket:
    """Steps that the ranks have been given; the results of the last `num_left` of them are to come."""

    chosen: list[ScheduledRequest]
    plan: StepPlan
    num_left: int

    @property
    def num_rows(self) -> int:
        """Rows of each of its steps."""
        return sum(one.num_tokens for one in self.chosen)

    @property
    def is_over(self) -> bool:
        """Whether all of its requests have ended, so that nobody wants the rest."""
        return all(one.request.finish_reason is not None for one in self.chosen)


class EngineCore:
    """The serving loop over an executor: what there is of an engine once its ranks can be started."""

    def __init__(
        self,
        config: RunConfig,
        executor: Executor,
        tokenizer: Tokenizer | None,
        seed: int = 0,
        trace: Path | None = None,
        max_recoveries: int = 0,
    ) -> None:
        """Start the ranks; they are ended again if that fails.  Raises: ConfigError, PlacementError, WorkerError."""
        self.config, self.tokenizer, self._executor = config, tokenizer, executor
        self._default_seeds = itertools.count(seed)
        self._recovery = Recovery(executor, max_recoveries)
        self._trace = StepTrace(None)
        try:
            self._trace = StepTrace(trace)
            self.report = self._recovery.start()
            log.info("%d ranks are ready; decode steps: %s", max(1, len(self.report.ranks)), self.report.decode)
            self._scheduler = self._make_scheduler()
        except BaseException:
            executor.shutdown()
            self._trace.close()
            raise
        self._next_step = 0
        self._sent: SentPacket | None = None
        self._finished: list[Request] = []
        """Those that nobody awaits, until they are asked for."""
        self._awaited: dict[Request, Awaited] = {}
        self._tokens_done = self._tokens_max = 0
        self._drafts_proposed = self._drafts_accepted = 0
        self.metrics = Metrics()
        self.metrics.record_recoveries(self._recovery.used, self._recovery.seconds)

    def shutdown(self) -> None:
        """End every rank, finish the trace; safe to call twice and from an exception handler."""
        try:
            self._executor.shutdown()
        finally:
            self._trace.close()

    def submit(self, prompt: Prompt, params: SamplingParams, request_id: str) -> None:
        """Queue a request.  Raises: RequestError naming what is wrong with it; nothing is queued then."""
        self.queue_request(prompt, params, request_id)

    def queue_request(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Request:
        """The same as `submit`; returns the request, whose state changes with every step."""
        request = self._generation_request(request_id, prompt, params)
        self._queue(request)
        return request

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs or waits."""
        return self._scheduler.has_unfinished

    def abort(self, request_id: str) -> bool:
        """End the unfinished requests with this id, between two steps; False if there is none. Tokens so far stay."""
        found = [request for request in self._scheduler.unfinished if request.id == request_id]
        for request in found:
            self.abort_request(request)
        return bool(found)

    def abort_request(self, request: Request) -> None:
        """The same for one that `queue_request` gave; nothing happens to one that has ended."""
        if request.finish_reason is None:
            self._scheduler.abort(request)
            self._account_finished(request)

    def step(self) -> list[RequestOutput]:
        """Run one step, or if nothing is left to do look after the ranks; returns the requests that ended, aborted ones
        included.

        Ranks that are lost are started again, and requests go on where they were.
        Raises: WorkerError when that fails; every unfinished request has ended with "error" then, and comes from the
        next call.
        """
        self._advance()
        return self.take_finished()

    def take_finished(self) -> list[RequestOutput]:
        """The requests that ended since they were last asked for, but for those that stream and generate serve."""
        finished, self._finished = self._finished, []
        return [self.output_of(request) for request in finished]

    def stream_all(self) -> Iterator[RequestOutput]:
        """Serve everything that was submitted; yields each request when it has ended.

        Raises: WorkerError when the ranks are lost for good, after an "error" output for each unfinished request.
        """
        while self._scheduler.has_unfinished or self._finished:
            try:
                if not self._finished:
                    self._advance()
            finally:
                while self._finished:
                    yield self.output_of(self._finished.pop(0))

    def stream(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Iterator[RequestOutput]:
        """Serve `prompts`; yields a request's state after every step that gave it tokens, the finished state last.

        Raises: RequestError, before any of them is queued; WorkerError.
        """
        requests = self._submit_many(prompts, params)
        seen: dict[Request, tuple[int, str | None]] = dict.fromkeys(requests, (0, None))
        with closing(self._serve(requests)) as steps:
            for changed in steps:
                for request in changed:
                    state = (len(request.output_token_ids), request.finish_reason)
                    if state != seen[request]:
                        seen[request] = state
                        yield self.output_of(request)

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Serve `prompts` to the end; outputs in their order.  Raises: RequestError, WorkerError."""
        requests = self._submit_many(prompts, SamplingParams() if params is None else params)
        for _ in self._serve(requests):
            pass
        return [self.output_of(request) for request in requests]

    def score(
        self,
        sequences: Sequence[Prompt],
        return_logits: bool = False,
        request_ids: Sequence[str] | None = None,
    ) -> list[ScoreOutput]:
        """Log-probability of every token of `sequences`, and on demand the logits of every position.

        Raises: RequestError before anything runs; WorkerError.
        """
        ids = list(request_ids) if request_ids is not None else [str(i) for i in range(len(sequences))]
        check_list("sequences", sequences)
        if len(ids) != len(sequences):
            raise RequestError(f"{len(ids)} ids for {len(sequences)} sequences; give one for each")
        kind = RowKind.SCORE_LOGITS if return_logits else RowKind.SCORE
        requests = []
        for request_id, sequence in zip(ids, sequences, strict=True):
            tokens = self._prompt_ids(sequence)
            if len(tokens) > self.config.max_model_len:
                raise RequestError(
                    f"the sequence has {len(tokens)} tokens; max_model_len is {self.config.max_model_len}"
                )
            requests.append(self._request(request_id, tokens, SamplingParams(), len(tokens), kind))
        for request in requests:
            self._queue(request)
        for _ in self._serve(requests):
            pass
        lost = [f"sequence {one.id} {one.error or 'was aborted'}" for one in requests if one.finish_reason != "length"]
        if lost:
            raise one_error(WorkerError, "scores", lost)
        return [_score_output(request, return_logits) for request in requests]

    def progress(self) -> tuple[int, int]:
        """Tokens computed, and tokens that everything submitted so far needs at most."""
        return self._tokens_done, self._tokens_max

    def acceptance(self) -> tuple[int, int]:
        """Draft tokens that turned out right, and all that were verified."""
        return self._drafts_accepted, self._drafts_proposed

    def _serve(self, requests: Sequence[Request]) -> Generator[list[Request], None, None]:
        """Run steps until `requests` have ended, yielding those with a new state after each; aborts what is left when
        it is closed. What else ends stays for `take_finished`."""
        awaited = Awaited(set(requests))
        self._awaited.update(dict.fromkeys(requests, awaited))
        try:
            while awaited.left or awaited.changed:
                if not awaited.changed:  # there are some when other calls ran steps meanwhile
                    self._advance()
                changed, awaited.changed = awaited.changed, []
                yield list(dict.fromkeys(changed))
        finally:
            for request in list(awaited.left):
                self.abort_request(request)

    def _advance(self) -> None:
        """Run one step, or if nothing is left to do look after the ranks; the only place that meets their loss.

        A step whose result did not arrive has changed no request but for its place in the caches, which is lost too.
        """
        try:
            while self._sent is not None and self._sent.is_over:
                self._executor.collect()  # what came behind the end of all of its requests
                self.metrics.record_rows(self._sent.num_rows)
                self._sent.num_left -= 1
                self._sent = self._sent if self._sent.num_left else None
            if self._scheduler.has_unfinished:
                self._step()
            else:
                self._executor.check()
                self.metrics.record_state(self._scheduler)
        except WorkerError as error:
            self._recover(error)

    def _recover(self, error: WorkerError) -> None:
        """Start the ranks again and queue what is unfinished, or end it with "error" and raise."""
        self._sent = None
        try:
            with self._trace.span("recover"):
                self.report = self._recovery.recover(error)
        except WorkerError as final:
            self._fail_unfinished(str(final))
            raise
        finally:
            self.metrics.record_recoveries(self._recovery.used, self._recovery.seconds)
        before, self._scheduler = self._scheduler, self._make_scheduler()
        self._scheduler.take_over(before)
        capacity = self._scheduler.blocks.max_tokens()
        for request in self._scheduler.unfinished:
            if capacity is not None and request.max_total_tokens > capacity:
                self._scheduler.abort(request)
                request.finish(
                    "error", f"needs {request.max_total_tokens} tokens of cache; after a recovery {capacity} fit"
                )
                self._account_finished(request)

    def _step(self) -> None:
        """Plan a packet of steps and send it if none is under way; wait for one step and account for what came back."""
        started = time.monotonic()
        sent = self._sent = self._sent or self._send()
        chosen, plan = sent.chosen, sent.plan
        num_rows = sent.num_rows
        step_id = plan.step_id + plan.num_steps - sent.num_left
        with self._trace.span(
            "execute", step=step_id, kind=plan.kind.name, requests=len(chosen), tokens=num_rows
        ) as args:
            result = self._executor.collect()
            args["rank_us"] = result.elapsed_us
        sent.num_left -= 1
        if not sent.num_left:
            self._sent = None
        # The others ended in an earlier step of the packet, or were aborted since it was sent.
        running = [one.request for one in chosen if one.request.finish_reason is None]
        num_before = sum(len(request.output_token_ids) for request in running)
        with self._trace.span("account", step=step_id):
            kept = self._accept(chosen, plan, result)
            self._scheduler.advance(chosen, kept)
        num_new = sum(len(request.output_token_ids) for request in running) - num_before
        self.metrics.record_step(self._scheduler, time.monotonic() - started, num_rows, num_new, self.acceptance())
        for request in running:
            self._tokens_done += max(0, request.num_computed - request.num_counted)
            request.num_counted = max(request.num_counted, request.num_computed)
            if request in self._awaited:
                self._awaited[request].changed.append(request)
            if request.finish_reason is not None:
                self._account_finished(request)

    def _send(self) -> SentPacket:
        """Plan the next step, and those that follow from it alone, and send them to the ranks."""
        step_id = self._next_step
        with self._trace.span("plan", step=step_id):
            chosen = self._scheduler.plan()
            num_steps = self._scheduler.run_ahead(chosen, self.config.run_ahead)
        assert chosen, "an unfinished request is waiting, yet nothing can run"
        with self._trace.span("pack", step=step_id, steps=num_steps):
            plan = build_step_plan(chosen, self._executor.generation, step_id, num_steps)
            packet = plan.pack()
        self._next_step = step_id + num_steps if step_id < _LAST_STEP else 0
        self._executor.submit(packet, num_steps)
        return SentPacket(chosen, plan, num_steps)

    def _accept(self, chosen: Sequence[ScheduledRequest], plan: StepPlan, result: StepResult) -> list[int]:
        """Give every request its new tokens, drafts and scores; returns how many of its tokens stay computed."""
        k = self.config.speculative_tokens
        tokens = iter(result.token_ids.reshape(-1, 1 + 2 * k).tolist())
        logprobs, logits, kept = result.logprobs, result.logits, []
        now = time.monotonic()
        for (request, num_tokens), row_kind in zip(chosen, plan.sections["row_kind"].tolist(), strict=True):
            kept.append(num_tokens)
            if row_kind == RowKind.SAMPLE:
                words = next(tokens)
                if request.finish_reason is not None:
                    continue  # it ended in an earlier step of the packet, or was aborted
                new = [token for token in words[: 1 + k] if token != NO_TOKEN]
                self._drafts_proposed += max(0, request.num_computed + num_tokens - request.num_tokens)
                self._drafts_accepted += max(0, len(new) - 1)
                self._append_tokens(request, new, words[1 + k :], now)
                # What was chosen last is not computed yet, and neither are drafts that it replaces.
                kept[-1] = min(num_tokens, request.num_tokens - 1 - request.num_computed)
            elif row_kind >= RowKind.SCORE:
                request.logprobs += logprobs[:num_tokens].tolist()
                logprobs = logprobs[num_tokens:]
                if row_kind == RowKind.SCORE_LOGITS:
                    request.logits.append(logits[:num_tokens])
                    logits = logits[num_tokens:]
                if request.num_prompt_left == num_tokens:
                    request.finish("length")
        return kept

    def _append_tokens(self, request: Request, new: list[int], drafts: list[int], now: float) -> None:
        """Append tokens up to the request's end, those behind it are dropped; keep the drafts of the next ones.

        A request that got none ends with an error: there was no finite logit to choose."""
        if not new:
            request.finish("error", NOT_FINITE)
            return
        if request.token_times_s is None:
            request.token_times_s = []
        for token in new:
            request.output_token_ids.append(token)
            request.token_times_s.append(now)
            if token in self.config.model.eos_token_ids and not request.params.ignore_eos:
                request.finish("stop")
                return
            if request.num_tokens >= request.max_total_tokens:
                request.finish("length")
                return
        request.draft_token_ids = drafts

    def _account_finished(self, request: Request) -> None:
        self._tokens_max -= request.max_total_tokens - request.num_counted  # what it did not need
        awaited = self._awaited.pop(request, None)
        if awaited is None:
            self._finished.append(request)
        else:
            awaited.left.discard(request)
            awaited.changed.append(request)

    def _fail_unfinished(self, message: str) -> None:
        for request in self._scheduler.unfinished:
            request.finish("error", message)
            self._account_finished(request)
        before, self._scheduler = self._scheduler, self._make_scheduler()
        self._scheduler.take_counts(before)

    def output_of(self, request: Request) -> RequestOutput:
        """A request's state as its user sees it."""
        if request.shown_prompt is None:
            request.shown_prompt = list(request.prompt_token_ids)
        text = self._text(request) if self.tokenizer is not None else None
        return RequestOutput(
            id=request.id,
            prompt_token_ids=request.shown_prompt,
            token_ids=list(request.output_token_ids),
            text=text,
            finish_reason=request.finish_reason,
            error=request.error,
            metrics=request.metrics(),
        )

    def _text(self, request: Request) -> str:
        """The text so far, up to the last whole character while more may come."""
        assert self.tokenizer is not None
        if request.finish_reason is not None:
            return self.tokenizer.decode(request.output_token_ids)
        if request.text is None:
            request.text = self.tokenizer.stream()
        request.text.push(request.output_token_ids[request.text.num_tokens :])
        return request.text.shown

    def _submit_many(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[Request]:
        """Queue all prompts or, if one of them is refused, none."""
        check_list("prompts", prompts)
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise RequestError(f"{len(each)} sampling parameters for {len(prompts)} prompts; give one, or one for each")
        requests = [
            self._generation_request(str(index), prompt, one)
            for index, (prompt, one) in enumerate(zip(prompts, each, strict=True))
        ]
        for request in requests:
            self._queue(request)
        return requests

    def _generation_request(self, request_id: str, prompt: Prompt, params: SamplingParams) -> Request:
        params.check()
        prompt_ids = self._prompt_ids(prompt)
        limit = self.config.max_model_len
        if len(prompt_ids) >= limit:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens; with max_model_len = {limit} it may have {limit - 1}"
            )
        total = min(len(prompt_ids) + int(params.max_tokens), limit)
        return self._request(request_id, prompt_ids, params, total, RowKind.SAMPLE)

    def _request(
        self, request_id: str, tokens: list[int], params: SamplingParams, max_total_tokens: int, kind: RowKind
    ) -> Request:
        capacity = self._scheduler.blocks.max_tokens()
        if capacity is not None and max_total_tokens > capacity:
            raise RequestError(
                f"prompt and output need {max_total_tokens} tokens of cache; {capacity} fit: lower max_tokens or give "
                "more memory (--kv-cache-memory-bytes)"
            )
        return Request(request_id, tokens, params, params.seed or 0, max_total_tokens, kind)

    def _queue(self, request: Request) -> None:
        if request.params.seed is None and request.row_kind is RowKind.SAMPLE:
            request.seed = next(self._default_seeds) % 2**64
        self._tokens_max += request.max_total_tokens
        self._scheduler.add(request)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        return prompt_ids(prompt, self.tokenizer, self.config.directory, self.config.model.vocab_size)

    def _make_scheduler(self) -> Scheduler:
        config = self.config
        groups = cache_groups(config.model, config.kv_cache_dtype, config.num_draft_layers)
        blocks = BlockManager(groups, self.report.num_cache_blocks)
        prefix_cache = PrefixCache(blocks) if config.enable_prefix_caching else None
        return Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, prefix_cache)


def _score_output(request: Request, with_logits: bool) -> ScoreOutput:
    logits = np.concatenate(request.logits) if with_logits else None
    return ScoreOutput(request.id, request.prompt_token_ids, [None, *request.logprobs[:-1]], logits)
