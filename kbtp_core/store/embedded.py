"""A keyed cache in this process's own memory: what a client uses where there is no server.

Values live in blocks of one size inside one budget. The first writer of a key wins. When no block is free, CLOCK chooses a victim:
the hand passes over values that were read since it last came by, and takes the first that was not. A value that is read is copied
out under the lock, so an eviction never shows through.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass
class _Value:
    block: int
    length: int


class EmbeddedStore:
    """At most `ram_bytes // block_bytes` values of at most `block_bytes` octets each. Any thread."""

    def __init__(self, ram_bytes: int, block_bytes: int) -> None:
        if not 0 < block_bytes <= ram_bytes:
            raise ValueError(f"blocks of {block_bytes} octets do not fit into a budget of {ram_bytes}")
        self.block_bytes = block_bytes
        self.block_count = ram_bytes // block_bytes
        self._memory: NDArray[np.uint8] = np.zeros((self.block_count, block_bytes), np.uint8)
        self._lock = threading.Lock()  # guards all below
        self._index: dict[bytes, _Value] = {}
        self._owner: list[bytes | None] = [None] * self.block_count
        self._was_read = np.zeros(self.block_count, np.bool_)
        self._free = list(range(self.block_count - 1, -1, -1))
        self._hand = 0

    def put(self, object_id: bytes, octets: memoryview) -> bool:
        """Keep a copy of `octets`; False if the key is there already. Raises ValueError if the value is empty or larger than a block."""
        if not 0 < octets.nbytes <= self.block_bytes:
            raise ValueError(f"a value has 1 to {self.block_bytes} octets, not {octets.nbytes}")
        with self._lock:
            if object_id in self._index:
                return False
            block = self._free.pop() if self._free else self._evict()
            self._memory[block, : octets.nbytes] = np.frombuffer(octets, np.uint8)
            self._index[object_id] = _Value(block, octets.nbytes)
            self._owner[block] = object_id
            self._was_read[block] = False
            return True

    def get_into(self, object_id: bytes, out: memoryview) -> int:
        """Copy a value to the start of `out`; returns its length, or -1 if it is not there.

        Raises ValueError if `out` is too small for it.
        """
        with self._lock:
            value = self._index.get(object_id)
            if value is None:
                return -1
            if out.nbytes < value.length:
                raise ValueError(f"the value has {value.length} octets, the buffer {out.nbytes}")
            out.cast("B")[: value.length] = memoryview(self._memory[value.block])[: value.length]
            self._was_read[value.block] = True
            return value.length

    def has(self, object_id: bytes) -> bool:
        """Whether a value is there; does not count as a read."""
        with self._lock:
            return object_id in self._index

    def remove(self, object_id: bytes) -> bool:
        """Forget a value; whether it was there."""
        with self._lock:
            value = self._index.pop(object_id, None)
            if value is None:
                return False
            self._owner[value.block] = None
            self._free.append(value.block)
            return True

    def check_integrity(self) -> None:
        """Assert that every block is free or owned by exactly the value that names it."""
        with self._lock:
            owned = {value.block for value in self._index.values()}
            assert len(owned) == len(self._index), "two values share a block"
            assert owned.isdisjoint(self._free), "a block is free and owned"
            assert len(owned) + len(self._free) == self.block_count, "a block is lost"
            assert all(self._owner[value.block] == key for key, value in self._index.items()), "a block has another owner"

    def _evict(self) -> int:
        """With the lock, and no block free: the block of a value that was not read lately, which is forgotten."""
        while True:
            block, self._hand = self._hand, (self._hand + 1) % self.block_count
            if self._was_read[block]:
                self._was_read[block] = False
                continue
            owner = self._owner[block]
            assert owner is not None, "no block is free, so every block has an owner"
            del self._index[owner]
            self._owner[block] = None
            return block
