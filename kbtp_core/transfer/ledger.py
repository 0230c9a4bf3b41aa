"""The scheduler's book of handles (DESIGN, "Engines": pull).

The scheduler answers a finished request before any worker has bound its blocks, so it must know the generation that each
handle will have. It can: every handle starts at generation 1, and each use of it is one bind and one clear, each of which advances
the generation by one and skips zero (draft sections 6.3 and 6.4). `take` is the bind, `give_back` follows the clear.

A handle is used again as late as possible: the longest-free one goes first.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import GENERATION_LIMIT, next_generation


def generations_before(generations: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """The generation that comes right before each: one less, skipping zero."""
    return ((generations.astype(np.int32) - 2) % GENERATION_LIMIT + 1).astype(np.uint16)


class HandleLedger:
    """Handles [first_handle, entry_count) of a table; the ones before are reserved for the descriptor."""

    def __init__(self, entry_count: int, first_handle: int) -> None:
        if not 0 <= first_handle < entry_count:
            raise ValueError(f"a table of {entry_count} entries has no handle from {first_handle} on")
        self._free: deque[int] = deque(range(first_handle, entry_count))
        self._generation = np.ones(entry_count, np.uint16)
        self._is_taken = np.zeros(entry_count, np.bool_)

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint16]]:
        """`count` handles and the generations that they will have once bound. Raises ValueError if fewer are free."""
        if count > len(self._free):
            raise ValueError(f"{count} handles wanted, {len(self._free)} free")
        handles = np.array([self._free.popleft() for _ in range(count)], np.uint64)
        for handle in handles.tolist():
            self._generation[handle] = next_generation(int(self._generation[handle]))
        self._is_taken[handles] = True
        return handles, self._generation[handles]

    def give_back(self, handles: NDArray[np.uint64]) -> None:
        """The entries were cleared and nothing reads their blocks. Raises ValueError for a handle that is not taken."""
        if not self._is_taken[handles].all() or np.unique(handles).size != handles.size:
            raise ValueError("a handle is given back that is not taken")
        self._is_taken[handles] = False
        for handle in handles.tolist():
            self._generation[handle] = next_generation(int(self._generation[handle]))
            self._free.append(handle)
