"""What a user asks for, what comes back, and one request's state in between."""

from __future__ import annotations

import struct
import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dsv4dist.cache.blocks import BlockTables
from dsv4dist.engine.tokenizer import IncrementalDecoder
from dsv4dist.errors import RequestError, one_error
from dsv4dist.workers.packet import RowKind

_PARAMS = struct.Struct("<ffiQ")
_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
_MAX_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen. Temperature 0 is greedy; top_k 0 means no limit; seed None takes the engine's next one."""

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    ignore_eos: bool = False

    def check(self) -> None:
        """Refuse values of the wrong type or out of range.  Raises: RequestError naming each."""
        problems = []
        for name in ("max_tokens", "top_k", "seed"):
            value = getattr(self, name)
            if not (isinstance(value, (int, np.integer)) or (name == "seed" and value is None)):
                problems.append(f"{name} is {value!r}; expected an integer")
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.integer, np.floating)):
                problems.append(f"{name} is {value!r}; expected a number")
        if problems:
            raise one_error(RequestError, "sampling parameters", problems)
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not 0 <= self.temperature <= _MAX_TEMPERATURE:
            problems.append(f"temperature is {self.temperature}; expected 0 to {_MAX_TEMPERATURE:.3g}")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; expected above 0, at most 1")
        if not 0 <= self.top_k <= _MAX_TOP_K:
            problems.append(f"top_k is {self.top_k}; expected 0 (no limit) to {_MAX_TOP_K}")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            problems.append(f"seed is {self.seed}; expected 0 to 2^64 - 1")
        if problems:
            raise one_error(RequestError, "sampling parameters", problems)


@dataclass(frozen=True)
class RequestOutput:
    """A request's tokens so far; finish_reason is None while it runs, then "stop", "length", "abort" or "error".

    While it runs, the text ends with a whole character. All outputs of a request share one list prompt_token_ids.
    """

    id: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str | None
    finish_reason: str | None
    error: str | None
    metrics: dict[str, float]


@dataclass(frozen=True)
class ScoreOutput:
    """Natural-log probability of every token given those before it; the first has none. logits fp32 [tokens, vocab]."""

    id: str
    token_ids: list[int]
    token_logprobs: list[float | None]
    logits: npt.NDArray[np.float32] | None


@dataclass(eq=False, slots=True)
class Request:
    """One request while it is served; identity is the object, so that ids only need to be unique for the user.

    A queued one is small: blocks, digests and packed parameters come when it is scheduled.
    """

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    """Prompt and output tokens at most."""
    row_kind: RowKind = RowKind.SAMPLE
    output_token_ids: list[int] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    """Proposals for the tokens after the last one; the next step verifies them."""
    num_computed: int = 0
    """Tokens whose rows are in the caches and final."""
    num_counted: int = 0
    """The most that num_computed ever was: a preemption takes nothing away from what progress shows."""
    tables: BlockTables = field(default_factory=BlockTables)
    digests: list[bytes] | None = None
    """Of its whole prefix blocks (cache.prefix_cache), as far as they were needed."""
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    arrived_s: float = field(default_factory=time.monotonic)
    token_times_s: list[float] | None = None
    """When each output token came; None before the first."""
    finished_s: float | None = None
    num_cached: int | None = None
    """Prompt tokens that were not computed since they were found in the cache; None before the first start."""
    num_preemptions: int = 0
    shown_prompt: list[int] | None = None
    """The prompt as outputs have it, whose readers may change it."""
    text: IncrementalDecoder | None = None
    _packed_params: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, without drafts."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that have not been computed."""
        return max(0, len(self.prompt_token_ids) - self.num_computed)

    @property
    def is_decoding(self) -> bool:
        """Whether only its newest output token, and drafts, are left to compute."""
        num_outputs = len(self.output_token_ids)
        return num_outputs > 0 and self.num_computed + 1 == len(self.prompt_token_ids) + num_outputs

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt, output and draft tokens start .. stop - 1, as far as there are so many."""
        begin = start - len(self.prompt_token_ids)
        end = stop - len(self.prompt_token_ids)
        if begin < 0:
            found = self.prompt_token_ids[start:stop]
            return found + self.output_token_ids[:end] if end > 0 else found
        behind = end - len(self.output_token_ids)
        found = self.output_token_ids[begin:end]
        return found + self.draft_token_ids[:behind] if behind > 0 else found

    def packed_params(self) -> bytes:
        """Sampling parameters as little-endian words: temperature and top_p (float32 bits), top_k, seed (low, high)."""
        if self._packed_params is None:
            params = self.params
            self._packed_params = _PARAMS.pack(params.temperature, params.top_p, params.top_k, self.seed)
        return self._packed_params

    def finish(self, reason: str, error: str | None = None) -> None:
        """End it; what it has so far stays."""
        self.finish_reason, self.error, self.finished_s = reason, error, time.monotonic()

    def restart(self) -> None:
        """Forget what was computed, not what was sampled: it is computed again from prompt and output tokens."""
        self.num_computed = 0
        self.draft_token_ids.clear()
        self.logprobs.clear()
        self.logits.clear()

    def metrics(self) -> dict[str, float]:
        """What a user wants to know of its service; times in seconds.

        ttft_s, decode_s                 to the first token, and from there to the last, as far as they are known
        cached_tokens                    prompt tokens found in the cache
        preemptions                      how often its blocks were given to others
        itl_mean_s, itl_p50_s, itl_p99_s between tokens; only of a finished request with at least two
        """
        now = self.finished_s if self.finished_s is not None else time.monotonic()
        times = self.token_times_s or []
        first, last = (times[0], times[-1]) if times else (now, now)
        found = {
            "ttft_s": first - self.arrived_s,
            "decode_s": last - first,
            "cached_tokens": self.num_cached or 0,
            "preemptions": self.num_preemptions,
        }
        if self.finish_reason is not None and len(times) > 1:
            gaps = np.diff(times)
            p50, p99 = np.percentile(gaps, (50, 99))
            found |= {"itl_mean_s": float(gaps.mean()), "itl_p50_s": float(p50), "itl_p99_s": float(p99)}
        return found
