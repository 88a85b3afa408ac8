"""The blocks of one cache group: who uses them, which hold known contents, which go first when one is needed. Pure.

Every operation is O(1). A block has users (requests), or is retained (nobody uses it, but its contents have a key and
may be used again), or is free.
"""

from __future__ import annotations

from collections import OrderedDict


class BlockPool:
    """Counts users per block, and finds blocks by the key of their contents.

    A retained block is given to a new owner only when no free one is left, the longest unused first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.evictions = 0
        self._num_users = [0] * num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._retained: OrderedDict[int, None] = OrderedDict()
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_available(self) -> int:
        """Blocks that `take` can give: free and retained ones."""
        return len(self._free) + len(self._retained)

    @property
    def num_used(self) -> int:
        """Blocks with users."""
        return self.num_blocks - self.num_available

    def take(self) -> int:
        """A block for one new user, its old contents forgotten; only while `num_available` is not 0."""
        if self._free:
            block = self._free.pop()
        else:
            assert self._retained, "no block is available"
            block, _ = self._retained.popitem(last=False)
            del self._block_of[self._key_of.pop(block)]
            self.evictions += 1
        self._num_users[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a user to a block that was found by its key."""
        if not self._num_users[block]:
            del self._retained[block]
        self._num_users[block] += 1

    def release(self, block: int) -> None:
        """Take one user away; the last one leaves the block retained if its contents have a key, else free."""
        self._num_users[block] -= 1
        if self._num_users[block]:
            return
        if block in self._key_of:
            self._retained[block] = None
        else:
            self._free.append(block)

    def publish(self, block: int, key: bytes) -> None:
        """Let a block in use be found by `key`, unless another one is already, or it has a key."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def find(self, key: bytes) -> int | None:
        """The block whose contents have this key."""
        return self._block_of.get(key)

    def num_users(self, block: int) -> int:
        """How many requests use a block."""
        return self._num_users[block]
