"""Which requests run in the next step, and with how many tokens each. Pure; first come, first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from dsv4dist.cache.blocks import BlockManager, BlockTables
from dsv4dist.cache.groups import PREFIX_BLOCK_TOKENS
from dsv4dist.cache.prefix_cache import PrefixCache, PrefixHit, extend_digests
from dsv4dist.engine.chunking import chunk_tokens
from dsv4dist.engine.request import Request
from dsv4dist.workers.packet import RowKind


class ScheduledRequest(NamedTuple):
    """Tokens num_computed .. num_computed + num_tokens - 1 of a request run in this step."""

    request: Request
    num_tokens: int


class Scheduler:
    """Decode rows first, then prompts in order of arrival, cut to the token budget.

    A request gets blocks for what it computes next. It starts when its prompt fits what is available then; when a
    running one finds no block later, the youngest gives its blocks up and waits, in front, to be computed again. The
    oldest always advances, and no more requests run than the token budget has rows, so none starves.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: PrefixCache | None = None,
    ) -> None:
        self.blocks = blocks
        self.prefix_cache = prefix_cache
        self.max_running = min(max_num_seqs, max_num_batched_tokens)
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Request] = deque()
        """In order of service; requests that were aborted here stay until they come up."""
        self.running: list[Request] = []
        """The oldest first."""
        self.num_waiting = 0
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        """Queue a request that fits an empty cache."""
        self.waiting.append(request)
        self.num_waiting += 1

    def take_over(self, before: Scheduler) -> None:
        """Queue all that another scheduler left unfinished when its caches were lost, and its counts."""
        for request in before.unfinished:
            request.restart()
            request.tables = BlockTables()
            self.add(request)
        self.take_counts(before)

    def take_counts(self, before: Scheduler) -> None:
        """Go on with the counts of another scheduler."""
        self.num_preemptions = before.num_preemptions
        for name, pool in self.blocks.pools.items():
            pool.evictions = before.blocks.pools[name].evictions
        if self.prefix_cache is not None and before.prefix_cache is not None:
            self.prefix_cache.stats = before.prefix_cache.stats

    @property
    def has_unfinished(self) -> bool:
        """Whether any request runs or waits."""
        return bool(self.running) or self.num_waiting > 0

    @property
    def unfinished(self) -> list[Request]:
        """All requests that run or wait, in order of service."""
        return [*self.running, *(request for request in self.waiting if request.finish_reason is None)]

    def abort(self, request: Request) -> None:
        """End a request that has not ended, between two steps; its blocks are free at once."""
        request.finish("abort")
        if request in self.running:
            self.running.remove(request)
            self.blocks.free(request.tables)
        else:
            self.num_waiting -= 1

    def plan(self) -> list[ScheduledRequest]:
        """Choose the next step's requests and give them their blocks; empty when nothing is left to do."""
        preempted: list[Request] = []
        chosen = self._decodes(preempted)
        budget = self.max_num_batched_tokens - sum(one.num_tokens for one in chosen)
        prefills = self._prefills(budget, preempted)
        if preempted:
            # One that was chosen before an older one needed its blocks does not run after all.
            return [one for one in (*chosen, *prefills) if one.request not in preempted]
        budget -= sum(one.num_tokens for one in prefills)
        prefills += self._admissions(budget, is_first=not prefills)
        return chosen + prefills

    def run_ahead(self, chosen: Sequence[ScheduledRequest], limit: int) -> int:
        """How many steps the ranks can take from a planned one without the driver, at most `limit`; blocks included.

        More than 1 only while nobody waits to join, all requests go on by one token, none reaches its length before
        the last of the steps, and blocks are there without preemption. A request that stops earlier costs the rest of
        its rows.
        """
        if limit == 1 or self.num_waiting or len(chosen) < len(self.running):
            return 1
        if not all(one.num_tokens == 1 and one.request.is_decoding for one in chosen):
            return 1
        left = min(one.request.max_total_tokens - one.request.num_tokens for one in chosen)
        steps = min(limit, left, max(1, self.max_num_batched_tokens // len(chosen)))
        while steps > 1 and not self.blocks.fit_together((r.tables, r.num_computed + steps) for r, _ in chosen):
            steps -= 1
        for request, _ in chosen:
            self.blocks.extend(request.tables, request.num_computed + steps)
        return steps

    def advance(self, chosen: Sequence[ScheduledRequest], kept: Sequence[int] | None = None) -> None:
        """Account for an executed step, after sampled tokens were appended and finished requests marked.

        kept  how many of each request's tokens stay computed: fewer than ran where drafts were rejected (default: all)
        """
        any_finished = False
        for i, one in enumerate(chosen):
            request = one.request
            if request.finish_reason is not None:
                any_finished = True
            if not request.tables:
                continue
            before = request.num_computed
            request.num_computed = now = before + (one.num_tokens if kept is None else kept[i])
            if self.prefix_cache is not None and now // PREFIX_BLOCK_TOKENS > before // PREFIX_BLOCK_TOKENS:
                digests = self._digests(request, now)
                self.prefix_cache.publish(request.tables, digests, before, now)
            if now >= request.tables.release_at:
                self.blocks.release_passed(request.tables, now)
        if any_finished:
            for request in self.running:
                if request.finish_reason is not None:
                    self.blocks.free(request.tables)
            self.running = [request for request in self.running if request.finish_reason is None]

    def _decodes(self, preempted: list[Request]) -> list[ScheduledRequest]:
        """The newest token of every request whose prompt is through, and drafts as far as the budget goes.

        Of what is left of it, drafts leave half to prompts that could be computed: they save steps, prompts need them.
        """
        decodes = [request for request in self.running if request.is_decoding]
        spare = self.max_num_batched_tokens - len(decodes)
        if len(decodes) < len(self.running) or (self.num_waiting and len(self.running) < self.max_running):
            spare //= 2
        chosen: list[ScheduledRequest] = []
        for request in decodes:
            if preempted and request in preempted:
                break  # so are all that are younger
            tokens = 1
            if request.draft_token_ids:
                drafts = self._usable_drafts(request, spare)
                spare -= drafts
                tokens += drafts
            end = request.num_computed + tokens
            if end <= request.tables.covered or self._make_room(request, end, preempted):
                chosen.append(ScheduledRequest(request, tokens))
        return chosen

    def _usable_drafts(self, request: Request, spare: int) -> int:
        """Keep the drafts that fit the budget, the request's length and the blocks there are without preemption."""
        drafts = min(len(request.draft_token_ids), spare, request.max_total_tokens - request.num_tokens - 1)
        if drafts and not self.blocks.extend(request.tables, request.num_tokens + drafts):
            drafts = 0
        del request.draft_token_ids[drafts:]
        return drafts

    def _prefills(self, budget: int, preempted: list[Request]) -> list[ScheduledRequest]:
        """The next chunk of running requests that are not decoding."""
        chosen: list[ScheduledRequest] = []
        index = 0
        while budget > 0 and index < len(self.running):
            request = self.running[index]
            index += 1
            if request.is_decoding:
                continue
            left = request.num_tokens - request.num_computed
            tokens = chunk_tokens(request.num_computed, left, budget, is_first=not chosen)
            if tokens and self._make_room(request, request.num_computed + tokens, preempted):
                chosen.append(ScheduledRequest(request, tokens))
                budget -= tokens
        return chosen

    def _admissions(self, budget: int, is_first: bool) -> list[ScheduledRequest]:
        """The first chunk of waiting requests, in order, while there is room for them."""
        chosen: list[ScheduledRequest] = []
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            request = self.waiting[0]
            if request.finish_reason is not None:
                self.waiting.popleft()
                continue
            tokens = self._start(request, budget, is_first and not chosen)
            if not tokens:
                break
            self.waiting.popleft()
            self.num_waiting -= 1
            self.running.append(request)
            chosen.append(ScheduledRequest(request, tokens))
            budget -= tokens
        return chosen

    def _start(self, request: Request, budget: int, is_first: bool) -> int:
        """Give a waiting request the blocks of its first chunk; the chunk's tokens, or 0 and nothing done."""
        hit = self._lookup(request)
        start = hit.num_tokens if hit is not None else 0
        tokens = chunk_tokens(start, request.num_tokens - start, budget, is_first)
        if not tokens:
            return 0
        if hit is not None and start:
            self.blocks.adopt(request.tables, start, hit.blocks)
        if not self.blocks.fits(request.tables, request.num_tokens):
            self.blocks.free(request.tables)
            return 0
        self.blocks.extend(request.tables, start + tokens)
        request.num_computed = start
        if request.num_cached is None:
            request.num_cached = start
            if self.prefix_cache is not None and _reads_cache(request):
                self.prefix_cache.count(len(request.prompt_token_ids), hit)
        return tokens

    def _lookup(self, request: Request) -> PrefixHit | None:
        """Where a request can resume, with at least one token left to compute."""
        if self.prefix_cache is None or not _reads_cache(request) or request.num_tokens <= PREFIX_BLOCK_TOKENS:
            return None
        digests = self._digests(request, request.num_tokens)
        return self.prefix_cache.match(digests[: (request.num_tokens - 1) // PREFIX_BLOCK_TOKENS])

    def _make_room(self, request: Request, num_tokens: int, preempted: list[Request]) -> bool:
        """Extend a running request, at the cost of the youngest ones; False if it was the youngest itself."""
        while not self.blocks.extend(request.tables, num_tokens):
            youngest = self.running.pop()
            self.blocks.free(youngest.tables)
            youngest.restart()
            youngest.num_preemptions += 1
            self.num_preemptions += 1
            self.waiting.appendleft(youngest)
            self.num_waiting += 1
            preempted.append(youngest)
            if youngest is request:
                return False
        return True

    def _digests(self, request: Request, num_tokens: int) -> list[bytes]:
        if request.digests is None:
            request.digests = []
        extend_digests(request.digests, request.tokens, num_tokens)
        return request.digests


def _reads_cache(request: Request) -> bool:
    """Whether a request may skip tokens: scores need the logits of every row."""
    return request.row_kind is RowKind.SAMPLE
