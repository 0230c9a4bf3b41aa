"""Bounds how long readers may hold a block that its owner wants back.

A block drains while a peer still reads it, and a peer decides by itself how fast it reads. So an entry that drains for longer than
the limit ends the connections that read it: once they are gone nothing of theirs touches the block, and it has drained.
"""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import QueuePair, ReportsReaders
from kbtp_core.protocol.target import Target
from kbtp_core.protocol.target_session import TargetSession

_LONGEST_PAUSE_S: Final = 0.25
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
        if not self._target.draining_count or now < self._next_look:
            return np.arange(0)
        self._next_look = now + min(self._limit_s / _LOOKS, _LONGEST_PAUSE_S)
        draining = self._target.draining_indexes
        generation = self._target.table.entries["generation"][draining].astype(np.uint16)
        is_new = (generation != self._generation[draining]) | np.isinf(self._since[draining])
        self._since[draining[is_new]] = now
        self._generation[draining] = generation
        return np.asarray(draining[now - self._since[draining] >= self._limit_s], np.intp)


def is_reading(reader: Reader, target: Target, entries: NDArray[np.intp]) -> bool:
    """Whether `reader` reads the block of one of these entries, or may: a provider that can't tell is taken to."""
    if reader.session.is_reading(entries):
        return True
    if not reader.has_executor or target.readers is None:
        return False
    if isinstance(reader.qp, ReportsReaders):
        return bool(np.isin(reader.qp.reading(), entries.astype(np.uint64)).any())
    return bool(target.readers(entries.astype(np.uint64)).any())
