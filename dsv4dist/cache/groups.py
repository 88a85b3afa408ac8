"""The cache groups of a model: caches of one group share block numbers and block tables (attention spec 2.7). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dsv4dist.cache.layout import index_page_bytes, page_bytes
from dsv4dist.config.model import LayerKind, ModelConfig
from dsv4dist.errors import ConfigError

WINDOW_BLOCK_TOKENS = 64
COMPRESSED_BLOCK_TOKENS = 256
STATE_BLOCK_TOKENS = {LayerKind.CSA: 4, LayerKind.HCA: 8}

WINDOW, COMPRESSED = "window", "compressed"
STATE = {LayerKind.CSA: "csa_state", LayerKind.HCA: "hca_state"}
GROUP_NAMES = (WINDOW, COMPRESSED, STATE[LayerKind.CSA], STATE[LayerKind.HCA])
"""Every group there can be, in the order used wherever groups are listed."""

STATE_BYTES = 4

PREFIX_BLOCK_TOKENS = COMPRESSED_BLOCK_TOKENS
"""Requests can resume behind multiples of this many tokens of an equal prefix; every block size divides it."""
RETAINED_SHARE = 4
"""Where memory is short, one part in so many of what running requests leave keeps windows and states for reuse."""


@dataclass(frozen=True)
class CacheGroup:
    """Caches with one block table.

    block_tokens  tokens per block (a compressed cache stores block_tokens / ratio entries)
    window        tokens back from a reading one that must stay readable, itself included; None = all of them
    block_bytes   bytes of one block over all layers of the group
    period        only tokens that end a run of this many read: 1 = all of them; of a compressor's states the last of
                  each `ratio`, which pools an entry
    """

    name: str
    block_tokens: int
    window: int | None
    block_bytes: int
    period: int = 1

    def first_needed(self, num_computed: int) -> int:
        """The first token that a token after the first `num_computed` of a request can read."""
        if self.window is None:
            return 0
        first_reader = (num_computed // self.period + 1) * self.period - 1
        return max(0, first_reader + 1 - self.window)

    def resume_blocks(self) -> int:
        """Blocks that a request needs which resumes behind many whole blocks of PREFIX_BLOCK_TOKENS tokens."""
        boundary = PREFIX_BLOCK_TOKENS * (1 + (self.window or 0))
        return (boundary - self.first_needed(boundary) // self.block_tokens * self.block_tokens) // self.block_tokens

    def live_blocks(self, num_requests: int, num_step_tokens: int, max_model_len: int) -> int:
        """Blocks that `num_requests` requests hold at most, with `num_step_tokens` new tokens among them."""
        if self.window is None:
            return num_requests * -(-max_model_len // self.block_tokens)
        per_request = -(-(self.window - 1) // self.block_tokens) + 2
        return num_requests * per_request + -(-num_step_tokens // self.block_tokens)


def cache_groups(config: ModelConfig, cache_dtype: str, num_draft_layers: int = 0) -> tuple[CacheGroup, ...]:
    """The groups that this model needs, for caches of `cache_dtype` (an option of RunConfig); states are fp32.

    Draft layers see their window only, so they are further layers of the window group.
    """
    count = {kind: config.layer_kinds.count(kind) for kind in LayerKind}
    csa, hca = count[LayerKind.CSA], count[LayerKind.HCA]

    def row_page(entries: int) -> int:
        return page_bytes(cache_dtype, entries, config.head_dim)

    window_bytes = (config.num_hidden_layers + num_draft_layers) * row_page(WINDOW_BLOCK_TOKENS)
    groups = [CacheGroup(WINDOW, WINDOW_BLOCK_TOKENS, config.sliding_window, window_bytes)]
    if csa or hca:
        csa_entries = COMPRESSED_BLOCK_TOKENS // LayerKind.CSA.compress_ratio
        csa_bytes = row_page(csa_entries) + index_page_bytes(cache_dtype, csa_entries, config.index_head_dim)
        hca_bytes = row_page(COMPRESSED_BLOCK_TOKENS // LayerKind.HCA.compress_ratio)
        groups.append(CacheGroup(COMPRESSED, COMPRESSED_BLOCK_TOKENS, None, csa * csa_bytes + hca * hca_bytes))
    for kind, dims in ((LayerKind.CSA, config.head_dim + config.index_head_dim), (LayerKind.HCA, config.head_dim)):
        if count[kind]:
            tokens = STATE_BLOCK_TOKENS[kind]
            width = 2 * kind.overlap * dims
            window = kind.overlap * kind.compress_ratio
            state_bytes = count[kind] * tokens * width * STATE_BYTES
            groups.append(CacheGroup(STATE[kind], tokens, window, state_bytes, period=kind.compress_ratio))
    return tuple(groups)


def plan_num_blocks(
    groups: tuple[CacheGroup, ...],
    memory_bytes: int,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    retain: bool = False,
) -> dict[str, int]:
    """How many blocks of each group to allocate in `memory_bytes` of one rank.

    Groups with a window get what the largest step can need, so that they never run out; the compressed group gets the
    rest, at most what max_num_seqs requests of max_model_len need.  With `retain`, groups with a window get room for
    points where later requests can resume: at most one per PREFIX_BLOCK_TOKENS tokens of all those requests, in at
    most one RETAINED_SHARE-th of the rest.  Where the windows alone do not fit, counts are negative.
    """
    need = {group.name: group.live_blocks(max_num_seqs, max_num_batched_tokens, max_model_len) for group in groups}
    windowed = [group for group in groups if group.window is not None]
    left = memory_bytes - sum(need[group.name] * group.block_bytes for group in windowed)
    if left < 0:
        return {group.name: -1 if group.window is not None else left // group.block_bytes for group in groups}
    if retain:
        point_bytes = sum(group.resume_blocks() * group.block_bytes for group in windowed)
        points = min(
            max_num_seqs * -(-max_model_len // PREFIX_BLOCK_TOKENS), left // RETAINED_SHARE // max(1, point_bytes)
        )
        left -= points * point_bytes
        for group in windowed:
            need[group.name] += points * group.resume_blocks()
    for group in groups:
        if group.window is None:
            need[group.name] = min(need[group.name], left // group.block_bytes)
    return need


def check_num_blocks(num_blocks: dict[str, int]) -> None:
    """Refuse a plan that leaves a group without blocks.  Raises: ConfigError naming the groups and the options."""
    short = [name for name, count in num_blocks.items() if count < 1]
    if short:
        raise ConfigError(
            f"cache memory is too small for the groups {', '.join(short)}; raise --kv-cache-memory-bytes or "
            "--gpu-memory-utilization, or lower --max-num-seqs or --max-num-batched-tokens"
        )
