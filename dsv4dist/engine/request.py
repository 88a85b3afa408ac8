"""What a user asks for, what comes back, and one request's state in between."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from dsv4dist.cache.blocks import GroupBlocks
from dsv4dist.errors import RequestError, one_error
from dsv4dist.workers.packet import RowKind


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
        """Refuse values out of range.  Raises: RequestError naming each."""
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}; expected at least 1")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}; expected 0 or more")
        if not 0 < self.top_p <= 1:
            problems.append(f"top_p is {self.top_p}; expected above 0, at most 1")
        if self.top_k < 0:
            problems.append(f"top_k is {self.top_k}; expected 0 (no limit) or more")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            problems.append(f"seed is {self.seed}; expected 0 to 2^64 - 1")
        if problems:
            raise one_error(RequestError, "sampling parameters", problems)


@dataclass(frozen=True)
class RequestOutput:
    """A request's tokens so far; finish_reason is None while it runs, then "stop", "length" or "error"."""

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


@dataclass(eq=False)
class Request:
    """One request while it is served; identity is the object, so that ids only need to be unique for the user."""

    id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    max_total_tokens: int
    """Prompt and output tokens at most."""
    row_kind: RowKind = RowKind.SAMPLE
    output_token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    """Tokens whose rows are in the caches."""
    tables: dict[str, GroupBlocks] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[float] = field(default_factory=list)
    logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    arrived_s: float = field(default_factory=time.monotonic)
    first_token_s: float | None = None
    finished_s: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_prompt_left(self) -> int:
        """Prompt tokens that have not been computed."""
        return max(0, len(self.prompt_token_ids) - self.num_computed)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and output tokens start..stop-1."""
        prompt = len(self.prompt_token_ids)
        if start >= prompt:
            return self.output_token_ids[start - prompt : stop - prompt]
        return self.prompt_token_ids[start:stop] + self.output_token_ids[: max(0, stop - prompt)]

    def metrics(self) -> dict[str, float]:
        """Seconds to the first token and from there to the last, as far as they are known, and reused prompt tokens."""
        now = self.finished_s if self.finished_s is not None else time.monotonic()
        first = self.first_token_s if self.first_token_s is not None else now
        return {"ttft_s": first - self.arrived_s, "decode_s": now - first, "cached_tokens": 0}
