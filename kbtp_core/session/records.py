"""Completion records of one initiator session (draft section 6.5): where the target writes them, and which one has come.

The target writes a record and tells by an immediate that it did; the immediate is the low 32 bits of the record's Tagged Offset, so
a slot is found without looking at memory that may still be written. A slot is in use from the moment its request is sent until then.
"""

from __future__ import annotations

from collections import deque
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Access, ProtectionDomain
from kbtp_core.protocol.constants import RECORD_BYTES

STRIDE: Final = 32


class RecordSlots:
    """As many slots as requests may be outstanding."""

    def __init__(self, pd: ProtectionDomain, count: int) -> None:
        self._memory: NDArray[np.uint8] = np.zeros((count, STRIDE), np.uint8)
        self._region = pd.register(self._memory, Access.LOCAL_WRITE | Access.REMOTE_WRITE)
        self._free = deque(range(count))

    @property
    def stag(self) -> int:
        return self._region.stag

    def take(self, count: int) -> NDArray[np.uint64]:
        """Tagged Offsets of `count` slots. Credit has seen to it that there are as many."""
        offsets: NDArray[np.uint64] = np.array([self._free.popleft() * STRIDE for _ in range(count)], np.uint64)
        return offsets

    def arrived(self, immediate: int) -> NDArray[np.uint8] | None:
        """The record that an immediate announces, (1, 24) octets; None if it names no slot in use."""
        slot, rest = divmod(immediate, STRIDE)
        if rest or slot >= len(self._memory) or slot in self._free:
            return None
        self._free.append(slot)
        record: NDArray[np.uint8] = self._memory[slot : slot + 1, :RECORD_BYTES].copy()
        return record
