"""The native executor (`kbtp_core/native/executor.hpp`), as `fabric.api` has it; for the software RNIC, and for the simulator.

Rule: what an executor works on (the table, the pool's arrays, a grant's usage cell) is kept alive by it or by the queue pair it serves,
whose use of it ends with the queue pair's object.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.fabric.api import Array, FabricError, PoolState


class NativeExecutor:
    """See `fabric.api.Executor`."""

    def __init__(self, table: Array, base_handle: int, block_bytes: int, pool: PoolState | None = None) -> None:
        if not table.flags.c_contiguous or table.dtype.itemsize * table.size % 16:
            raise FabricError("a block table is a C-contiguous array of 16-octet entries")
        self._keep = (table, pool)
        self.native = _native.create_executor(table, base_handle, block_bytes, pool)

    def readers(self, entries: NDArray[np.uint64]) -> NDArray[np.uint32]:
        wanted = np.ascontiguousarray(entries, dtype=np.uint64)
        counts = np.zeros(wanted.size, np.uint32)
        self.native.readers_into(wanted, counts)
        return counts

    def stop(self) -> None:
        self.native.stop()


class PoolExecutor(NativeExecutor):
    """See `fabric.api.SharesPool`."""

    def hold(self, entries: NDArray[np.uint64]) -> None:
        self.native.hold(np.ascontiguousarray(entries, dtype=np.uint64))

    def let_go(self, entries: NDArray[np.uint64]) -> None:
        self.native.let_go(np.ascontiguousarray(entries, dtype=np.uint64))

    def allocate(self) -> int | None:
        return self.native.allocate()

    def give_back(self, block_offset: int) -> None:
        self.native.give_back(block_offset)

    def allocate_many(self, count: int) -> NDArray[np.uint64]:
        offsets = np.empty(count, np.uint64)
        return offsets[: self.native.allocate_into(offsets)]

    def give_back_many(self, block_offsets: NDArray[np.uint64]) -> None:
        self.native.give_back_all(np.ascontiguousarray(block_offsets, np.uint64))


def create_executor(table: Array, base_handle: int, block_bytes: int, pool: PoolState | None) -> NativeExecutor:
    """One that runs LOADs, or with `pool` stores and frees as well."""
    kind = NativeExecutor if pool is None else PoolExecutor
    return kind(table, base_handle, block_bytes, pool)
