"""One budget of RAM for pools of several block sizes.

The first pool gets all of it. One that is opened later gets what the others don't use, and a sixteenth at least; from then on memory goes
where it is missed: every half second the pool that evicted or refused most is given a step, by the one that did so least. A pool that
nobody fills keeps its floor, a sixteenth. Blocks change hands by being parked in one pool and put to use in another (`protocol.pool`);
parked memory is given back to the system in between.

Rule: the octets of all live blocks together never exceed the budget.

One caller at a time: the server that drives the pools' targets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

_FLOOR_SHARE: Final = 16
_STEP_SHARE: Final = 32
_FLOOR_BLOCKS: Final = 4
_EVERY_S: Final = 0.5
_CLEARLY: Final = 2  # how many times more a pool misses memory than the one that gives it


class Pool(Protocol):
    """What the budget asks of a store (`store.ram.RamStore`)."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def live_bytes(self) -> int: ...

    @property
    def idle_bytes(self) -> int:
        """Octets of live blocks that hold nothing and are promised to nobody."""

    @property
    def missed_count(self) -> int:
        """Values that were evicted or refused for want of memory, ever."""

    def park(self, count: int) -> int: ...
    def unpark(self, count: int) -> int: ...


class RamBudget:
    """`total_bytes` for the pools that are added."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes: Final = total_bytes
        self._pools: dict[int, Pool] = {}
        self._missed: dict[int, int] = {}
        self._next_look = 0.0

    def fits(self, block_bytes: int) -> bool:
        """Whether a pool of such blocks can be added and be of use."""
        return self._floor(block_bytes) * (len(self._pools) + 1) <= self.total_bytes

    def add(self, pool: Pool) -> None:
        """A new pool, of the whole budget's size: all of it but its share is parked. Raises ValueError if it does not fit."""
        if not self.fits(pool.block_bytes) or pool.block_bytes in self._pools:
            raise ValueError(f"a pool of blocks of {pool.block_bytes} octets does not fit into {self.total_bytes} octets of RAM")
        if self._pools:
            pool.park(pool.live_bytes // pool.block_bytes)
            for donor in self._pools.values():
                self._take(donor, donor.idle_bytes)
            for donor in sorted(self._pools.values(), key=lambda one: one.live_bytes, reverse=True):
                self._take(donor, self._floor(pool.block_bytes) - self._left(also=pool))
        self._pools[pool.block_bytes] = pool
        self._missed[pool.block_bytes] = pool.missed_count
        pool.unpark(self._left() // pool.block_bytes)

    def share_evenly(self) -> None:
        """Among the pools that there are, as far as they let go of what they have."""
        share = self.total_bytes // max(1, len(self._pools))
        for pool in self._pools.values():
            self._take(pool, pool.live_bytes - share)
        for pool in self._pools.values():
            pool.unpark(max(0, min(share - pool.live_bytes, self._left())) // pool.block_bytes)

    def rebalance(self, now: float) -> None:
        """Call often; it looks twice a second."""
        if now < self._next_look or len(self._pools) < 2:
            return
        self._next_look = now + _EVERY_S
        missed = {size: (pool.missed_count - self._missed[size]) * size for size, pool in self._pools.items()}
        self._missed = {size: pool.missed_count for size, pool in self._pools.items()}
        needy = self._pools[max(missed, key=lambda size: missed[size])]
        if not missed[needy.block_bytes]:
            return
        step = max(self.total_bytes // _STEP_SHARE, needy.block_bytes)
        for size in sorted(missed, key=lambda size: missed[size]):
            if self._left() >= step or missed[size] * _CLEARLY > missed[needy.block_bytes]:
                break
            self._take(self._pools[size], step)
        needy.unpark(min(step, self._left()) // needy.block_bytes)

    def check_integrity(self) -> None:
        """Assert the rule."""
        assert self._left() >= 0, f"the pools take {-self._left()} octets more than the budget has"

    def _take(self, donor: Pool, wanted_bytes: int) -> None:
        """Park so much of a pool, as far as it is above its floor."""
        octets = min(wanted_bytes, donor.live_bytes - self._floor(donor.block_bytes))
        if octets > 0:
            donor.park(-(-octets // donor.block_bytes))

    def _floor(self, block_bytes: int) -> int:
        return max(self.total_bytes // _FLOOR_SHARE, _FLOOR_BLOCKS * block_bytes)

    def _left(self, also: Pool | None = None) -> int:
        pools: Iterable[Pool] = [*self._pools.values(), also] if also is not None else self._pools.values()
        return self.total_bytes - sum(pool.live_bytes for pool in pools)
