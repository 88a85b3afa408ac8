"""Which request owns which block: free lists and block tables on the driver. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from dsv4dist.cache.groups import CacheGroup

NO_BLOCK = -1
"""Fills block tables behind a request's last block."""


@dataclass
class GroupBlocks:
    """One request's blocks in one group: blocks[i] holds the tokens of block number first_block + i."""

    first_block: int = 0
    blocks: list[int] = field(default_factory=list)


class BlockManager:
    """Hands out blocks of every group; a request's blocks live in the dictionary that the request carries.

    Groups with a window are sized for the largest step, so only groups without one can run out: `reserve` sets aside
    all that a request can ever need of those before it starts.
    """

    def __init__(self, groups: tuple[CacheGroup, ...], num_blocks: dict[str, int]) -> None:
        self.groups = groups
        self.num_blocks = num_blocks
        self._free = {group.name: list(range(num_blocks[group.name] - 1, -1, -1)) for group in groups}
        self._reserved = {group.name: 0 for group in groups}

    def max_tokens(self) -> int | None:
        """The longest request that fits an empty cache; None where nothing limits it."""
        limits = [self.num_blocks[g.name] * g.block_tokens for g in self.groups if g.window is None]
        return min(limits) if limits else None

    def reserve(self, num_tokens: int) -> bool:
        """Set aside what a request of `num_tokens` needs at most; False, and nothing done, if that is not there."""
        need = self._reservation(num_tokens)
        if any(self._reserved[name] + count > self.num_blocks[name] for name, count in need.items()):
            return False
        for name, count in need.items():
            self._reserved[name] += count
        return True

    def extend(self, tables: dict[str, GroupBlocks], num_tokens: int) -> None:
        """Give a request the blocks that its first `num_tokens` tokens need and it has not got yet."""
        for group in self.groups:
            table = tables.setdefault(group.name, GroupBlocks())
            free = self._free[group.name]
            for _ in range(-(-num_tokens // group.block_tokens) - table.first_block - len(table.blocks)):
                assert free, f"cache group {group.name} ran out of blocks in spite of its reservation"
                table.blocks.append(free.pop())

    def release_passed(self, tables: dict[str, GroupBlocks], num_tokens: int) -> None:
        """Take back the blocks that no later token of a request with `num_tokens` computed tokens can read."""
        for group in self.groups:
            if group.window is None or group.name not in tables:
                continue
            table = tables[group.name]
            first_needed = max(0, num_tokens - (group.window - 1)) // group.block_tokens
            passed = min(first_needed - table.first_block, len(table.blocks))
            if passed > 0:
                self._free[group.name].extend(table.blocks[:passed])
                del table.blocks[:passed]
                table.first_block += passed

    def free(self, tables: dict[str, GroupBlocks], reserved_tokens: int) -> None:
        """Take back all blocks of a request, and its reservation."""
        for name, table in tables.items():
            self._free[name].extend(table.blocks)
        tables.clear()
        for name, count in self._reservation(reserved_tokens).items():
            self._reserved[name] -= count

    def num_free(self, name: str) -> int:
        """Free blocks of a group, reserved ones among them."""
        return len(self._free[name])

    def _reservation(self, num_tokens: int) -> dict[str, int]:
        return {g.name: -(-num_tokens // g.block_tokens) for g in self.groups if g.window is None}
