"""Registered memory for messages: rows of equal size that queue pairs send from and receive into.

A send row is in use from the moment it is posted until its work request has completed; requests complete in the order posted, so
send rows are a ring. A receive row is in use while it is posted; which of the free rows is posted next doesn't matter.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import RECEIVE_REQUEST, Access, Array, ProtectionDomain

ROW_ALIGNMENT: Final = 64


def row_stride(message_bytes: int) -> int:
    """Octets of a row that holds messages of up to `message_bytes`."""
    return -(-message_bytes // ROW_ALIGNMENT) * ROW_ALIGNMENT


class Rows:
    """`count` rows of `stride` octets in one region of `pd`."""

    def __init__(self, pd: ProtectionDomain, count: int, message_bytes: int, access: Access) -> None:
        self.count = count
        self.stride = row_stride(message_bytes)
        # Of many rows for long messages most hold short ones only.
        self.memory: NDArray[np.uint8] = _sparse(count * self.stride).reshape(count, self.stride)
        self.region = pd.register(self.memory, access)

    def offset(self, row: int) -> int:
        return row * self.stride


class SendRows(Rows):
    """Rows to send from, as a ring."""

    def __init__(self, pd: ProtectionDomain, count: int, message_bytes: int) -> None:
        super().__init__(pd, count, message_bytes, Access.NONE)
        self._taken = 0  # rows ever taken
        self._released = 0  # rows ever released

    @property
    def mark(self) -> int:
        """What to release all rows with that are taken now."""
        return self._taken

    @property
    def free_count(self) -> int:
        return self.count - (self._taken - self._released)

    def take(self, count: int) -> tuple[NDArray[np.int64], int]:
        """The next `count` rows, and the mark to release them, and all before them, with. The caller has looked at `free_count`."""
        assert count <= self.free_count, f"{count} send rows wanted, {self.free_count} free"
        rows = np.arange(self._taken, self._taken + count, dtype=np.int64) % self.count
        self._taken += count
        return rows, self._taken

    def release(self, mark: int) -> None:
        """The request that sent the row before `mark` has completed, and so have all before it."""
        self._released = max(self._released, mark)


class ReceiveRows(Rows):
    """Rows to receive into; a row's number plus `first_id` is the wr_id of its receive."""

    def __init__(self, pd: ProtectionDomain, count: int, message_bytes: int, first_id: int = 0) -> None:
        super().__init__(pd, count, message_bytes, Access.LOCAL_WRITE)
        self.first_id = first_id

    def requests(self, rows: NDArray[np.int64]) -> Array:
        """What to post for `rows` (dtype RECEIVE_REQUEST)."""
        requests = np.zeros(len(rows), RECEIVE_REQUEST)
        requests["wr_id"] = rows + self.first_id
        requests["offset"] = rows * self.stride
        requests["stag"] = self.region.stag
        requests["length"] = self.stride
        return requests

    def message(self, row: int, length: int) -> bytes:
        return self.memory[row, :length].tobytes()


def _sparse(size: int) -> NDArray[np.uint8]:
    """Zeros in ordinary pages: NumPy asks for huge ones for a large array, and then each part that is touched costs 2 MiB."""
    area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(area, np.uint8)[:size]
