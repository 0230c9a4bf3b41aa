"""Bounds how long a peer may keep the target waiting: for blocks that it reads, and for data that it was asked for.

A block drains while a peer still reads it, and a peer decides by itself how fast it reads. So an entry that drains for longer than
the limit ends the connections that read it: once they are gone nothing of theirs touches the block, and it has drained.

A store holds a block, and its session a place, until the peer has answered the RDMA Read for its data. So a connection whose stores
stand still for longer than the limit ends too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import QueuePair, ReportsReaders
from kbtp_core.protocol.target import Target
from kbtp_core.protocol.target_session import TargetSession

_LONGEST_PAUSE_S: Final = 0.25
_LONGEST_LOOK_S: Final = 2.0  # between two looks at stores
_LOOKS: Final = 8  # in the time of the limit


class Reader(Protocol):
    """A connection, as far as it may read blocks."""

    qp: QueuePair
    session: TargetSession
    has_executor: bool


class DrainFence:
    """Looks at the draining entries of `target` now and then; see the module."""

    def __init__(self, target: Target, limit_s: float) -> None:
        self._target = target
        self._limit_s = limit_s
        self._next_look = 0.0
        # By entry: since when it was seen draining, and at which generation, which tells one drain from the next.
        self._since: NDArray[np.float64] = np.full(target.table.entry_count, np.inf)
        self._generation: NDArray[np.uint16] = np.zeros(target.table.entry_count, np.uint16)

    def overdue_entries(self, now: float) -> NDArray[np.intp]:
        """Entries (indexes) that drain for longer than the limit; none when it is not yet time to look again."""
        if not self._target.leaving_count or now < self._next_look:
            return np.arange(0)
        self._next_look = now + min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S)
        draining = self._target.leaving_indexes
        generation = self._target.table.entries["generation"][draining].astype(np.uint16)
        is_new = (generation != self._generation[draining]) | np.isinf(self._since[draining])
        self._since[draining[is_new]] = now
        self._generation[draining] = generation
        return np.asarray(draining[now - self._since[draining] >= self._limit_s], np.intp)


class StoreFence:
    """Looks at the stores of connections now and then; see the module."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._next_look = 0.0
        self._seen: dict[int, tuple[int, float]] = {}  # queue pair -> stores finished when they last moved, and when that was

    def overdue(self, stores: Callable[[], Iterable[tuple[int, int, int]]], now: float) -> set[int]:
        """Numbers of the queue pairs whose stores stand still for longer than the limit; none when it is not yet time to look again.

        `stores` lists (number, stores under way, stores ever finished) of each.
        """
        if now < self._next_look:
            return set()
        self._next_look = now + min(self._limit_s / _LOOKS, _LONGEST_LOOK_S)
        before, self._seen = self._seen, {}
        for number, under_way, finished in stores():
            if under_way:
                seen = before.get(number)
                self._seen[number] = seen if seen is not None and seen[0] == finished else (finished, now)
        return {number for number, (_, since) in self._seen.items() if now - since >= self._limit_s}


def is_reading(reader: Reader, target: Target, entries: NDArray[np.intp]) -> bool:
    """Whether `reader` reads the block of one of these entries, or may: a provider that can't tell is taken to."""
    if reader.session.is_reading(entries):
        return True
    if not reader.has_executor or target.readers is None:
        return False
    if isinstance(reader.qp, ReportsReaders):
        return bool(np.isin(reader.qp.reading(), entries.astype(np.uint64)).any())
    return bool(target.readers(entries.astype(np.uint64)).any())
