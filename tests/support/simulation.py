"""An engine without a model: an executor that keeps tokens in simulated pages and derives each next token from them.

Every page slot of every cache group holds the token that was written there. A row's next token is a hash of the whole
context that the packet's block tables lead to, and every group must lead to the same tokens for all that a real layer
would read there. A wrong table, a block with two owners or a stale or unwritten slot gives another token or an error.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import numpy as np

from dsv4dist.cache.groups import (
    COMPRESSED,
    GROUP_NAMES,
    STATE,
    STATE_BLOCK_TOKENS,
    WINDOW,
    CacheGroup,
    cache_groups,
    plan_num_blocks,
)
from dsv4dist.config.model import LayerKind, parse_model_config
from dsv4dist.config.resolve import RunConfig
from dsv4dist.engine.core import EngineCore
from dsv4dist.step.sections import split_sections
from dsv4dist.workers.executor import NO_TOKEN, StepResult, WorkerReport
from dsv4dist.workers.packet import Int32Array, RowKind, read_header
from tests.config.test_model import FLASH

UNWRITTEN = -7
VOCAB = 50
EOS = 1
MODEL = parse_model_config(FLASH | {"vocab_size": VOCAB, "eos_token_id": EOS})


def next_token(context: Int32Array) -> int:
    """The token that follows a context."""
    return int.from_bytes(blake2b(context.astype(np.int32).tobytes(), digest_size=4).digest(), "little") % VOCAB


def alone(prompt: list[int], max_tokens: int, ignore_eos: bool = False) -> list[int]:
    """What a request generates when nothing else exists."""
    context = list(prompt)
    while len(context) < len(prompt) + max_tokens:
        context.append(next_token(np.array(context)))
        if context[-1] == EOS and not ignore_eos:
            break
    return context[len(prompt) :]


@dataclass
class SimulatedExecutor:
    """Runs packets over pages of tokens; `draft_luck` is the chance that a proposed token is right."""

    config: RunConfig
    num_blocks: dict[str, int]
    draft_luck: float = 0.7
    generation: int = 0
    steps: int = 0
    rows: int = 0
    pages: dict[str, Int32Array] = field(default_factory=dict)
    _packet: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    _num_left: int = 0

    def start(self) -> WorkerReport:
        for group in groups_of(self.config):
            self.pages[group.name] = np.full((self.num_blocks[group.name], group.block_tokens), UNWRITTEN, np.int32)
        return WorkerReport(self.num_blocks, [], 0, 0.0)

    def restart(self) -> WorkerReport:
        self.generation += 1
        return self.start()

    def check(self) -> None:
        """All is well."""

    def submit(self, packet: Int32Array, num_steps: int = 1) -> None:
        self._packet, self._num_left = packet.copy(), num_steps

    def collect(self) -> StepResult:
        assert self._num_left > 0, "nothing was submitted"
        self._num_left -= 1
        result = self.execute(self._packet)
        sections = split_sections(self._packet, read_header(self._packet, 1 << 20, 1 << 20).shape)
        if self._num_left:
            sections["token_ids"][:] = np.maximum(result.token_ids, 0)
            sections["seq_lens"] += 1
        return result

    def shutdown(self) -> None:
        pass

    def execute(self, packet: Int32Array) -> StepResult:
        header = read_header(packet, self.config.max_num_seqs, self.config.max_num_batched_tokens)
        sections = split_sections(packet, header.shape)
        starts = sections["query_start_loc"]
        words: list[int] = []
        for req in range(header.shape.num_requests):
            tokens = sections["token_ids"][starts[req] : starts[req + 1]]
            end = int(sections["seq_lens"][req])
            context = self._advance(sections, req, tokens, end - len(tokens), end)
            if sections["row_kind"][req] == RowKind.SAMPLE:
                words += self._sample(context, int(sections["num_drafts"][req]))
        self.steps += 1
        self.rows += header.shape.num_tokens
        empty = np.empty(0, np.float32)
        return StepResult(
            header.generation, header.step_id, np.array(words, np.int32), empty, empty.reshape(0, VOCAB), 0
        )

    def _advance(
        self, sections: dict[str, Int32Array], req: int, tokens: Int32Array, begin: int, end: int
    ) -> Int32Array:
        """Write a request's rows to every group, check all that layers would read, and return its whole context."""
        for name in self.pages:
            self._page_view(sections, name, req, begin, end, tokens)
        context = self._page_view(sections, COMPRESSED, req, 0, end)
        assert (context >= 0).all(), "an entry was never written"
        for position in range(begin, end):
            self._check(sections, WINDOW, req, context, position, MODEL.sliding_window)
            for kind in (LayerKind.CSA, LayerKind.HCA):
                if (position + 1) % kind.compress_ratio == 0:
                    self._check(sections, STATE[kind], req, context, position, kind.overlap * kind.compress_ratio)
        return context

    def _check(
        self, sections: dict[str, Int32Array], name: str, req: int, context: Int32Array, position: int, window: int
    ) -> None:
        first = max(0, position + 1 - window)
        read = self._page_view(sections, name, req, first, position + 1)
        assert (read == context[first : position + 1]).all(), f"{name} of position {position} holds other tokens"

    def _page_view(
        self,
        sections: dict[str, Int32Array],
        name: str,
        req: int,
        begin: int,
        end: int,
        write: Int32Array | None = None,
    ) -> Int32Array:
        pages = self.pages[name]
        position = np.arange(begin, end)
        column = position // pages.shape[1] - sections[f"{name}.first_block"][req]
        table = sections[f"{name}.blocks"][req]
        assert (column >= 0).all(), f"{name}: a block that was given back is used"
        assert (column < len(table)).all(), f"{name}: no block for a token"
        blocks = table[column]
        assert (blocks >= 0).all(), f"{name}: no block for a token"
        if write is not None:
            pages[blocks, position % pages.shape[1]] = write
        found: Int32Array = pages[blocks, position % pages.shape[1]]
        return found

    def _sample(self, context: Int32Array, num_drafts: int) -> list[int]:
        """The words of one request: chosen tokens while drafts are right, and new proposals."""
        k = self.config.speculative_tokens
        known, chosen = len(context) - num_drafts, []
        for right in range(num_drafts + 1):
            chosen.append(next_token(context[: known + right]))
            if right < num_drafts and chosen[-1] != context[known + right]:
                break
        future = np.concatenate((context[:known], chosen))
        drafts: list[int] = []
        rng = random.Random(len(future) * 31 + int(future[-1]))
        for _ in range(k):
            drafts.append(next_token(future) if rng.random() < self.draft_luck else rng.randrange(VOCAB))
            future = np.append(future, drafts[-1])
        return chosen + [NO_TOKEN] * (1 + k - len(chosen)) + drafts


def groups_of(config: RunConfig) -> tuple[CacheGroup, ...]:
    """The cache groups of a simulated run."""
    return cache_groups(config.model, config.kv_cache_dtype, config.num_draft_layers)


def simulated_engine(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 256,
    max_model_len: int = 2048,
    compressed_blocks: int | None = None,
    retained_points: int | None = None,
    prefix_caching: bool = True,
    speculative_tokens: int = 0,
    draft_luck: float = 0.7,
    run_ahead: int = 4,
) -> EngineCore:
    """An engine over simulated pages; few `compressed_blocks` make requests compete for memory."""
    config = RunConfig(
        directory=Path("simulated"),
        model=MODEL,
        tp_size=1,
        device="cpu",
        dtype="float32",
        kv_cache_dtype="float32",
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        speculative_tokens=speculative_tokens,
        run_ahead=1 if speculative_tokens else run_ahead,
        enforce_eager=False,
        gpu_memory_utilization=0.9,
        kv_cache_memory_bytes=None,
        kernels="reference",
        poison_memory=False,
    )
    groups = groups_of(config)
    num_blocks = plan_num_blocks(
        groups, 1 << 50, max_num_seqs, max_num_batched_tokens, max_model_len, retain=prefix_caching
    )
    for group in groups:
        if retained_points is not None and group.window is not None:
            live = group.live_blocks(max_num_seqs, max_num_batched_tokens, max_model_len)
            num_blocks[group.name] = live + retained_points * group.resume_blocks()
    if compressed_blocks is not None:
        num_blocks[COMPRESSED] = compressed_blocks
    assert set(num_blocks) <= set(GROUP_NAMES)
    assert STATE_BLOCK_TOKENS
    return EngineCore(config, SimulatedExecutor(config, num_blocks, draft_luck), tokenizer=None)
