"""Reuse of computed prefixes: blocks are found by a digest of all tokens up to their end. Pure.

A prefix counts in blocks of PREFIX_BLOCK_TOKENS. A request can resume behind n of its tokens, a multiple of that, when
every group still has the blocks that later tokens read (`CacheGroup.first_needed`): of the compressed group all of
them, of the window group those of the last window, of CSA states those that the next entry pools, of HCA states none
(attention spec 2.6). Losing a window or state block makes its boundary no resume point, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from dsv4dist.cache.blocks import BlockManager, BlockTables
from dsv4dist.cache.groups import PREFIX_BLOCK_TOKENS, CacheGroup

DIGEST_BYTES = 16

Tokens = Callable[[int, int], list[int]]
"""tokens(start, stop): token ids start .. stop - 1 of a request."""


@dataclass
class PrefixStats:
    """Counts since the start. Requests and tokens count once, when a request first starts.

    queries, hits                   requests looked up; those that found a resume point
    queried_tokens, reused_tokens   their prompt tokens; those that were not computed again
    shortened_hits                  requests whose prefix is stored further than they could resume, since windows or
                                    states are gone
    """

    queries: int = 0
    hits: int = 0
    queried_tokens: int = 0
    reused_tokens: int = 0
    shortened_hits: int = 0


@dataclass(frozen=True)
class PrefixHit:
    """A resume point: behind num_tokens tokens, with these blocks of each group (see BlockManager.adopt)."""

    num_tokens: int
    blocks: dict[str, list[int]]
    shortened: bool


def extend_digests(digests: list[bytes], tokens: Tokens, num_tokens: int) -> None:
    """Append the digests of the whole blocks among a request's first `num_tokens` tokens that are not there yet.

    digests[i] depends on tokens 0 .. (i + 1) * PREFIX_BLOCK_TOKENS - 1.
    """
    for block in range(len(digests), num_tokens // PREFIX_BLOCK_TOKENS):
        start = block * PREFIX_BLOCK_TOKENS
        ids = np.asarray(tokens(start, start + PREFIX_BLOCK_TOKENS), dtype="<i4")
        previous = digests[-1] if digests else b""
        digests.append(blake2b(previous + ids.tobytes(), digest_size=DIGEST_BYTES).digest())


class PrefixCache:
    """Finds and publishes blocks in the pools of a BlockManager."""

    def __init__(self, blocks: BlockManager) -> None:
        self.stats = PrefixStats()
        self._blocks = blocks

    @property
    def evictions(self) -> int:
        """Blocks of known contents that were given to a new owner."""
        return sum(pool.evictions for pool in self._blocks.pools.values())

    def match(self, digests: list[bytes]) -> PrefixHit | None:
        """The furthest point behind whole blocks with these digests where a request can resume now."""
        stored = len(digests)
        for group in self._blocks.groups:
            if group.window is None:
                find = self._blocks.pools[group.name].find
                keys = _keys(group, digests, 0, stored * PREFIX_BLOCK_TOKENS)
                missing = next((block for block, key in keys if find(key) is None), None)
                if missing is not None:
                    stored = missing * group.block_tokens // PREFIX_BLOCK_TOKENS
        for num_blocks in range(stored, 0, -1):
            blocks = self._resume_blocks(digests, num_blocks * PREFIX_BLOCK_TOKENS)
            if blocks is not None:
                return PrefixHit(num_blocks * PREFIX_BLOCK_TOKENS, blocks, shortened=num_blocks < stored)
        return PrefixHit(0, {}, shortened=True) if stored and self._has_unbounded else None

    def publish(self, tables: BlockTables, digests: list[bytes], start: int, stop: int) -> None:
        """Let others find what lies before each boundary in start + 1 .. stop, all of it computed and final.

        Call it before windows are released; digests cover `stop` tokens.
        """
        first = start // PREFIX_BLOCK_TOKENS + 1
        for boundary in range(first * PREFIX_BLOCK_TOKENS, stop + 1, PREFIX_BLOCK_TOKENS):
            for group in self._blocks.groups:
                table, pool = tables[group.name], self._blocks.pools[group.name]
                begin = boundary - PREFIX_BLOCK_TOKENS if group.window is None else group.first_needed(boundary)
                for block, key in _keys(group, digests, begin, boundary):
                    pool.publish(table.blocks[block - table.first_block], key)

    def count(self, prompt_tokens: int, hit: PrefixHit | None) -> None:
        """Account for the start of a request that was looked up."""
        self.stats.queries += 1
        self.stats.queried_tokens += prompt_tokens
        if hit is not None:
            self.stats.hits += hit.num_tokens > 0
            self.stats.reused_tokens += hit.num_tokens
            self.stats.shortened_hits += hit.shortened

    @property
    def _has_unbounded(self) -> bool:
        return any(group.window is None for group in self._blocks.groups)

    def _resume_blocks(self, digests: list[bytes], boundary: int) -> dict[str, list[int]] | None:
        found: dict[str, list[int]] = {}
        for group in self._blocks.groups:
            pool, blocks = self._blocks.pools[group.name], []
            for _, key in _keys(group, digests, group.first_needed(boundary), boundary):
                block = pool.find(key)
                if block is None:
                    return None
                blocks.append(block)
            found[group.name] = blocks
        return found


def _keys(group: CacheGroup, digests: list[bytes], begin: int, end: int) -> Iterator[tuple[int, bytes]]:
    """Number and key of each block of a group that holds tokens of begin .. end - 1; `end` ends a prefix block.

    A key is the digest of the prefix block that a block lies in, and its place there: the digest fixes all tokens
    before too, and those behind do not change what is stored.
    """
    per_prefix_block = PREFIX_BLOCK_TOKENS // group.block_tokens
    for block in range(begin // group.block_tokens, end // group.block_tokens):
        yield block, digests[block // per_prefix_block] + bytes([block % per_prefix_block])
