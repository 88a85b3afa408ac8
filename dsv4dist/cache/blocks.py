"""Which request uses which blocks: the block tables of every cache group, on the driver. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from dsv4dist.cache.block_pool import BlockPool
from dsv4dist.cache.groups import CacheGroup

NO_BLOCK = -1
"""Fills block tables behind a request's last block."""


def _no_blocks() -> array[int]:
    return array("i")


@dataclass(slots=True)
class GroupBlocks:
    """One request's blocks in one group: blocks[i] (int32) holds the tokens of block number first_block + i."""

    first_block: int = 0
    blocks: array[int] = field(default_factory=_no_blocks)


class BlockTables(dict[str, GroupBlocks]):
    """One request's blocks by group name; empty until it has some.

    covered     tokens whose blocks are there in every group
    release_at  computed tokens below which no block can be taken back
    """

    __slots__ = ("covered", "release_at")

    def __init__(self) -> None:
        super().__init__()
        self.covered = self.release_at = 0


class BlockManager:
    """Gives requests the blocks of every group and takes them back.

    Groups with a window are sized for the largest step (`plan_num_blocks`), so only groups without one can run out.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: Mapping[str, int]) -> None:
        self.groups = groups
        self.pools = {group.name: BlockPool(num_blocks[group.name]) for group in groups}
        self._extending = [(group.name, self.pools[group.name], group.block_tokens) for group in groups]
        self._unbounded = [group for group in groups if group.window is None]
        self._windowed = [(group, self.pools[group.name], group.window) for group in groups if group.window is not None]

    def max_tokens(self) -> int | None:
        """The longest request that fits an empty cache; None where nothing limits it."""
        limits = [self.pools[group.name].num_blocks * group.block_tokens for group in self._unbounded]
        return min(limits) if limits else None

    def fits(self, tables: BlockTables, num_tokens: int) -> bool:
        """Whether the blocks that the first `num_tokens` tokens of a request still need are available."""
        return self.fit_together([(tables, num_tokens)])

    def fit_together(self, wanted: Iterable[tuple[BlockTables, int]]) -> bool:
        """The same for the first so many tokens of several requests at once."""
        wanted = [(tables, num_tokens) for tables, num_tokens in wanted if num_tokens > tables.covered]
        for group in self._unbounded:
            missing = 0
            for tables, num_tokens in wanted:
                table = tables.get(group.name)
                owned = table.first_block + len(table.blocks) if table is not None else 0
                missing += max(0, -(-num_tokens // group.block_tokens) - owned)
            if missing > self.pools[group.name].num_available:
                return False
        return True

    def extend(self, tables: BlockTables, num_tokens: int) -> bool:
        """Give a request the blocks that its first `num_tokens` tokens still need; False, and nothing done, if some
        are not available."""
        if num_tokens <= tables.covered:
            return True
        if not self.fits(tables, num_tokens):
            return False
        if not tables:
            for group in self.groups:
                tables[group.name] = GroupBlocks()
        covered = None
        for name, pool, block_tokens in self._extending:
            table = tables[name]
            end = (table.first_block + len(table.blocks)) * block_tokens
            while end < num_tokens:
                table.blocks.append(pool.take())
                end += block_tokens
            if covered is None or end < covered:
                covered = end
        tables.covered = covered or 0
        return True

    def adopt(self, tables: BlockTables, num_tokens: int, shared: Mapping[str, Sequence[int]]) -> None:
        """Begin a request behind `num_tokens` computed tokens of others, sharing their blocks.

        num_tokens  a multiple of every group's block size
        shared      per group the blocks from the first that a later token reads (`CacheGroup.first_needed`)
        """
        assert not tables, "only a request without blocks can adopt some"
        for group in self.groups:
            blocks = array("i", shared[group.name])
            for block in blocks:
                self.pools[group.name].share(block)
            tables[group.name] = GroupBlocks(num_tokens // group.block_tokens - len(blocks), blocks)
        tables.covered = num_tokens

    def release_passed(self, tables: BlockTables, num_computed: int) -> None:
        """Take back the blocks that no token after the first `num_computed` of a request can read."""
        if num_computed < tables.release_at or not tables:
            return
        release_at = []
        for group, pool, window in self._windowed:
            table = tables[group.name]
            passed = min(group.first_needed(num_computed) // group.block_tokens - table.first_block, len(table.blocks))
            if passed > 0:
                for block in table.blocks[:passed]:
                    pool.release(block)
                del table.blocks[:passed]
                table.first_block += passed
            # The smallest num_computed with first_needed(num_computed) at the end of the first block.
            end = (table.first_block + 1) * group.block_tokens
            release_at.append((-(-(end + window) // group.period) - 1) * group.period)
        tables.release_at = min(release_at, default=num_computed)

    def free(self, tables: BlockTables) -> None:
        """Take back all blocks of a request; of those that stay findable, the last ones are given away first."""
        for name, table in tables.items():
            release = self.pools[name].release
            for block in reversed(table.blocks):
                release(block)
        tables.clear()
        tables.covered = tables.release_at = 0

    def num_free(self, name: str) -> int:
        """Blocks of a group that nobody uses."""
        return self.pools[name].num_available
