"""The memory of a pool: pages of this process that are zero at first, that the system can have back, and that can be had before their use.

The first touch of a page costs more than writing to it: the system finds a page and clears it. `commit` has that done ahead of time, a
piece at a time, from a thread that nobody waits for.

Rule: a piece is committed only while all of its blocks are in use by the pool. `give_back` comes after its blocks have left, under the
same lock, so nothing that was given back is taken again by a `commit` that had begun before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES: Final = 2 << 20
_POPULATE_WRITE: Final = 23  # MADV_POPULATE_WRITE, Linux 5.14
_libc: Final = ctypes.CDLL(None, use_errno=True)


class PoolMemory:
    """`size` octets; `array` is over all of them."""

    def __init__(self, size: int) -> None:
        self._area: Final = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._has_huge_pages = True
        self._advise("MADV_HUGEPAGE")
        self.array: Final[NDArray[np.uint8]] = np.frombuffer(self._area, np.uint8)
        self._lock = threading.Lock()
        self._is_committed = np.zeros(-(-size // PIECE_BYTES), np.bool_)
        self._can_commit = True

    def give_back(self, begin: int, end: int) -> None:
        """Let the system have the whole pages within [begin, end); they are zero afterwards."""
        begin, end = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
        if begin < end and hasattr(mmap, "MADV_DONTNEED"):
            with self._lock:
                if self._has_huge_pages:  # they would fill the holes again
                    self._has_huge_pages = False
                    self._advise("MADV_NOHUGEPAGE")
                self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)
                self._is_committed[begin // PIECE_BYTES : -(-end // PIECE_BYTES)] = False

    def commit(self, is_in_use: Callable[[int, int], bool]) -> bool:
        """Have the next piece of which `is_in_use(begin, end)`; False if there is none left.

        Raises MemoryError if the system has no memory for it.
        """
        for piece in np.flatnonzero(~self._is_committed).tolist() if self._can_commit else ():
            begin, end = piece * PIECE_BYTES, min((piece + 1) * PIECE_BYTES, self.array.size)
            with self._lock:
                if is_in_use(begin, end):
                    self._populate(begin, end)
                    self._is_committed[piece] = True
                    return True
        return False

    def _advise(self, name: str) -> None:
        if hasattr(mmap, name):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._area.madvise(getattr(mmap, name))

    def _populate(self, begin: int, end: int) -> None:
        address = ctypes.c_void_p(self.array.ctypes.data + begin)
        if _libc.madvise(address, ctypes.c_size_t(end - begin), _POPULATE_WRITE) == 0:
            return
        code = ctypes.get_errno()
        if code == errno.ENOMEM:
            raise MemoryError(os.strerror(code))
        self._can_commit = False  # an older kernel: pages come as they are used
