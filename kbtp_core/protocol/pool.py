"""The block pool: who owns each block, and how many an initiator may own (draft sections 3.1 and 3.4).

A RING pool owns its blocks. One owner state per block, moved only by the calls below:

    FREE --take--> TAKEN --bound--> BOUND --drain--> DRAINING --give_back--> FREE
                   TAKEN --give_back--> FREE         (a store that failed)

1. Only a FREE block is listed in the ring, and every FREE block is.
2. FREE + TAKEN + BOUND + DRAINING = F. A session's usage counts its blocks in the last three states, so an allocation
   within a quota always finds a block: the sum of quotas is at most F.
3. A DRAINING block still has readers. It leaves that state when they have ended or were fenced, never by a timer.

An owner that allocates by itself (DIRECT_ALLOC) has a ring of its own over a partition as large as its quota; its blocks come from
the shared ring and return there when the partition is dissolved. A ticket that it was seen to take makes the block TAKEN, although
its slot still lists it.

A *cache* may hold blocks beside the sessions (the keyed store does): at most those that are left when every session has its quota, so
rule 2 holds for the sessions as before. Whoever grants a quota tells it first how many it may keep.

Blocks can be *parked*: taken out of use, so that their memory serves somebody else, and back into use later. A parked block is in no ring
and belongs to nobody, and is not counted in what may be promised.

A LENT pool belongs to somebody else, such as an inference engine: no ring, no quota, and several handles may name one block.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.partition import Partition
from kbtp_core.protocol.ring import FreeRing


class BlockState(IntEnum):
    FREE = 0
    TAKEN = 1
    BOUND = 2
    DRAINING = 3
    PARKED = 4


class Allowance:
    """What one session may own, and what it owns. `cell` holds the latter, for an executor to count in."""

    def __init__(self, quota: int) -> None:
        self.quota = quota
        self.cell: NDArray[np.uint64] = np.zeros(1, np.uint64)

    @property
    def usage(self) -> int:
        return int(self.cell[0])

    @usage.setter
    def usage(self, count: int) -> None:
        self.cell[0] = count


class BlockCache(Protocol):
    """Holds blocks of a pool that no session owns."""

    @property
    def used_count(self) -> int: ...

    def set_limit(self, blocks: int) -> int:
        """Keep at most so many blocks from now on; returns how many it may have now, which is more if it can't let go of enough."""


class LentPool:
    """Blocks of `block_bytes` that their owner binds itself, in a region of `region_bytes`."""

    def __init__(self, block_bytes: int, region_bytes: int) -> None:
        if not 0 < block_bytes <= 0xFFFF_FFFF or region_bytes < block_bytes:
            raise ValueError(f"blocks of {block_bytes} octets in a region of {region_bytes}")
        self.block_bytes = block_bytes
        self.region_bytes = region_bytes
        self.block_count = min(region_bytes // block_bytes, 0xFFFF_FFFF)


class BlockPool:
    """F = `block_count` blocks in `memory`, at Block Offsets `base_offset + i * block_bytes`, owned by the ring.

    `memory` is the pool's octets (uint8, C-contiguous, F * block_bytes of them), which the target writes inline data into and clears.
    """

    def __init__(self, block_bytes: int, memory: NDArray[np.uint8], *, base_offset: int = 0, masked: bool = True) -> None:
        if not 0 < block_bytes <= 0xFFFF_FFFF or memory.size < block_bytes or memory.size % block_bytes:
            raise ValueError(f"{memory.size} octets are no whole number of blocks of {block_bytes}")
        self.block_bytes = block_bytes
        self.block_count = memory.size // block_bytes
        self.base_offset = base_offset
        self.memory = memory
        self._blocks = memory.reshape(self.block_count, block_bytes)
        self.ring = FreeRing(base_offset + np.arange(self.block_count, dtype=np.uint64) * block_bytes, masked=masked)
        self._state = bytearray(self.block_count)  # a BlockState each
        self.cache: BlockCache | None = None
        self._parked: NDArray[np.uint64] = np.zeros(0, np.uint64)
        self._allowances: dict[int, Allowance] = {}
        self._partitions: dict[int, Partition] = {}

    @property
    def live_count(self) -> int:
        """Blocks that are in use or may be: all but the parked ones."""
        return self.block_count - len(self._parked)

    @property
    def free_count(self) -> int:
        """Blocks in a ring. While nothing is under way they are all live ones together with the cache's and the sessions'."""
        return self.ring.free_count + sum(partition.ring.free_count for partition in list(self._partitions.values()))

    @property
    def owned_count(self) -> int:
        """Blocks of sessions."""
        return sum(allowance.usage for allowance in list(self._allowances.values()))

    @property
    def states(self) -> NDArray[np.uint8]:
        """(F,) The BlockState of each block, writable: an executor moves them too."""
        return np.frombuffer(self._state, np.uint8)

    def usage_cell(self, owner: int) -> NDArray[np.uint64]:
        """(1,) Where the owner's usage is counted."""
        return self._allowances[owner].cell

    @property
    def quota_left(self) -> int:
        """Blocks that no session has been promised; beside a cache, which has half of the pool for itself, as many of the other half."""
        share = self.live_count if self.cache is None else self.live_count // 2
        return max(share - self._promised_count, 0)

    @property
    def _promised_count(self) -> int:
        return sum(allowance.quota for allowance in self._allowances.values())

    def grant(self, owner: int, wanted: int) -> int:
        """Promise `owner` up to `wanted` blocks; returns how many."""
        if owner in self._allowances:
            raise ValueError(f"owner {owner} has a quota already")
        quota = min(wanted, self.quota_left)
        if self.cache is not None:
            rest = self.live_count - self._promised_count - quota
            quota -= self.cache.set_limit(rest) - rest
        self._allowances[owner] = Allowance(quota)
        return quota

    def carve(self, owner: int, wanted: int, *, masked: bool, timeout_s: float) -> Partition | None:
        """As `grant`, as a partition with a ring of its own; None, with nothing promised, if no block is left to promise."""
        if self.quota_left == 0 or wanted == 0:
            return None
        offsets = []
        for _ in range(self.grant(owner, wanted)):
            offset = self.ring.allocate()
            assert offset is not None, "the ring holds less than what was not promised"
            offsets.append(offset)
        partition = self._partitions[owner] = Partition(offsets, masked=masked, timeout_s=timeout_s)
        return partition

    def dissolve(self, owner: int, *, clear: bool) -> None:
        """Return what is free of the owner's partition to the shared ring; the rest follows by `give_back`. Nobody writes there now."""
        partition = self._partitions.pop(owner)
        for offset in partition.taken_offsets:
            self.unticketed(owner, offset)
        for offset in partition.ring.listed_offsets():
            if clear:
                self._blocks[self._index(offset)] = 0
            self.ring.give_back(offset)

    def ticketed(self, owner: int, offset: int) -> None:
        """FREE -> TAKEN: the owner of a partition was seen to have taken the ticket of this block."""
        self._move(offset, BlockState.FREE, BlockState.TAKEN)
        self._allowances[owner].usage += 1

    def unticketed(self, owner: int, offset: int) -> None:
        """TAKEN -> FREE: that ticket was abandoned."""
        self._move(offset, BlockState.TAKEN, BlockState.FREE)
        self._allowances[owner].usage -= 1

    def revoke(self, owner: int) -> None:
        """End the promise to an owner that owns nothing any more."""
        allowance = self._allowances.pop(owner)
        assert allowance.usage == 0, f"owner {owner} still owns {allowance.usage} blocks"
        if self.cache is not None:
            self.cache.set_limit(self.live_count - self._promised_count)

    def park(self, count: int) -> NDArray[np.uint64]:
        """FREE -> PARKED: up to `count` blocks that no session was promised and that the cache can let go of; their Block Offsets."""
        limit = self.live_count - self._promised_count
        count = min(count, limit)
        if self.cache is not None:
            count = limit - self.cache.set_limit(limit - count)
        offsets = self.ring.allocate_many(max(count, 0))
        self._move_all(offsets, BlockState.FREE, BlockState.PARKED)
        self._parked = np.concatenate((self._parked, offsets))
        if self.cache is not None and len(offsets) < count:
            self.cache.set_limit(self.live_count - self._promised_count)
        return offsets

    def unpark(self, count: int) -> int:
        """PARKED -> FREE; returns how many blocks."""
        offsets, self._parked = self._parked[:count], self._parked[count:]
        self._move_all(offsets, BlockState.PARKED, BlockState.FREE)
        self.ring.give_back_many(offsets)
        if self.cache is not None:
            self.cache.set_limit(self.live_count - self._promised_count)
        return len(offsets)

    def usage(self, owner: int) -> int:
        return self._allowances[owner].usage

    def take(self, owner: int) -> int | None:
        """FREE -> TAKEN: a Block Offset, or None if the quota or the ring is exhausted."""
        allowance = self._allowances[owner]
        if allowance.usage >= allowance.quota:
            return None
        partition = self._partitions.get(owner)
        offset = self.ring.allocate() if partition is None else partition.allocate()
        if offset is None:
            return None
        allowance.usage += 1
        self._move(offset, BlockState.FREE, BlockState.TAKEN)
        return offset

    def bound(self, offset: int) -> None:
        """TAKEN -> BOUND, once the entry is written."""
        self._move(offset, BlockState.TAKEN, BlockState.BOUND)

    def drain(self, offset: int) -> None:
        """BOUND -> DRAINING, once the entry is cleared."""
        self._move(offset, BlockState.BOUND, BlockState.DRAINING)

    def give_back(self, owner: int, offset: int, *, clear: bool) -> None:
        """TAKEN or DRAINING -> FREE: nothing reads or writes the block any more. With `clear` its octets are zeroed first."""
        index = self._index(offset)
        if self._state[index] not in (BlockState.TAKEN, BlockState.DRAINING):
            raise ValueError(f"block {offset:#x} is {BlockState(self._state[index]).name} and can't be given back")
        if clear:
            self._blocks[index] = 0
        self._state[index] = BlockState.FREE
        partition = self._partitions.get(owner)
        (self.ring if partition is None else partition.ring).give_back(offset)
        self._allowances[owner].usage -= 1

    def write(self, offset: int, data: bytes) -> None:
        """Copy inline data to the start of a block."""
        octets = np.frombuffer(data, np.uint8)
        self._blocks[self._index(offset), : octets.size] = octets

    def octets(self, offset: int, length: int) -> bytes:
        """The first `length` octets of a block."""
        return self._blocks[self._index(offset), :length].tobytes()

    def ticket_count(self) -> int:
        """Tickets that were seen to be taken in partitions and are neither bound nor abandoned."""
        return sum(len(partition.taken_offsets) for partition in self._partitions.values())

    def count(self, state: BlockState) -> int:
        return self._state.count(state)

    def check_integrity(self) -> None:
        """Assert rules 1 and 2."""
        self.ring.check_integrity()
        listed = list(self.ring.listed_offsets())
        for partition in self._partitions.values():
            partition.check_integrity()
            offsets, taken = partition.ring.listed_offsets(), set(partition.taken_offsets)
            assert taken <= set(offsets) <= set(partition.block_offsets), "a partition lists blocks of others"
            listed += [offset for offset in offsets if offset not in taken]
        free = {self._index(offset) for offset in listed}
        assert len(free) == len(listed), "two rings list one block"
        assert free == {index for index, state in enumerate(self._state) if state == BlockState.FREE}, (
            "the ring and the owner states differ"
        )
        assert sum(self.count(state) for state in BlockState) == self.block_count
        assert {self._index(offset) for offset in self._parked.tolist()} == {
            index for index, state in enumerate(self._state) if state == BlockState.PARKED
        }
        owned = self.live_count - self.count(BlockState.FREE)
        cached = 0 if self.cache is None else self.cache.used_count
        assert owned == cached + sum(allowance.usage for allowance in self._allowances.values()), "usage miscounted"
        assert all(0 <= allowance.usage <= allowance.quota for allowance in self._allowances.values()), "a quota is exceeded"
        assert self._promised_count <= self.live_count, "more blocks were promised than there are"

    def _index(self, offset: int) -> int:
        index, rest = divmod(offset - self.base_offset, self.block_bytes)
        if rest or not 0 <= index < self.block_count:
            raise ValueError(f"{offset:#x} is no Block Offset of this pool")
        return index

    def _move_all(self, offsets: NDArray[np.uint64], before: BlockState, after: BlockState) -> None:
        indexes = (offsets - np.uint64(self.base_offset)) // np.uint64(self.block_bytes)
        assert (self.states[indexes] == before).all(), f"a block is not {before.name}"
        self.states[indexes] = after

    def _move(self, offset: int, before: BlockState, after: BlockState) -> None:
        index = self._index(offset)
        if self._state[index] != before:
            raise ValueError(f"block {offset:#x} is {BlockState(self._state[index]).name}, not {before.name}")
        self._state[index] = after
