"""Which requests run in the next step, and with how many tokens each. Pure; first come, first served."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dsv4dist.cache.blocks import BlockManager
from dsv4dist.engine.request import Request


@dataclass(frozen=True)
class ScheduledRequest:
    """Tokens num_computed .. num_computed + num_tokens - 1 of a request run in this step."""

    request: Request
    num_tokens: int


class Scheduler:
    """Decode rows first, then prompts in order of arrival, cut to the token budget.

    A request starts only when its whole length can be reserved, so a running one never waits for memory; and no more
    run than the token budget has rows, so each running one advances in every step once its prompt is through.
    """

    def __init__(self, blocks: BlockManager, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self.blocks = blocks
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    @property
    def unfinished(self) -> list[Request]:
        return [*self.running, *self.waiting]

    def plan(self) -> list[ScheduledRequest]:
        """Choose the next step's requests and give them their blocks; empty when nothing is left to do."""
        decodes = [r for r in self.running if not r.num_prompt_left]
        prefills = [r for r in self.running if r.num_prompt_left]
        chosen = [ScheduledRequest(request, 1) for request in decodes]
        budget = self.max_num_batched_tokens - len(decodes)
        while self._admit_next():
            prefills.append(self.running[-1])
        for request in prefills:
            if budget <= 0:
                break
            num_tokens = min(request.num_prompt_left, budget)
            chosen.append(ScheduledRequest(request, num_tokens))
            budget -= num_tokens
        for one in chosen:
            self.blocks.extend(one.request.tables, one.request.num_computed + one.num_tokens)
        return chosen

    def advance(self, chosen: list[ScheduledRequest]) -> None:
        """Account for an executed step: count its tokens, take back what fell out of windows and what is finished."""
        for one in chosen:
            one.request.num_computed += one.num_tokens
            self.blocks.release_passed(one.request.tables, one.request.num_computed)
        for request in [r for r in self.running if r.finish_reason is not None]:
            self.running.remove(request)
            self.blocks.free(request.tables, request.max_total_tokens)

    def _admit_next(self) -> bool:
        """Move the first waiting request to the running ones if there is room for all of it."""
        if not self.waiting or len(self.running) >= self.max_running:
            return False
        if not self.blocks.reserve(self.waiting[0].max_total_tokens):
            return False
        self.running.append(self.waiting.popleft())
        return True
