"""The slab engine: one disk's values in preallocated extents, through native code (kbtp_core/native/store).

What is on the disk, in `folder`: `extents.dat`, `slots.tbl` with one record of 64 octets for each value, `superblock`, `lock`. A store
that was made with one capacity and extent size is refused with another, untouched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np

from kbtp_core import _native
from kbtp_core.store.disk import KEY_BYTES, U8, U32, U64, UNIT_BYTES, DiskError, Fault, Flags, GetResult, Keys, Listing
from kbtp_core.store.quota import QuotaTable

EXTENT_BYTES: Final = 64 << 20
"""The usual extent, and so the largest value; smaller stores have smaller ones."""

FAULT_POINTS: Final = (
    "extents_allocate",
    "superblock_write",
    "superblock_sync",
    "superblock_rename",
    "folder_sync",
    "payload_write",
    "payload_sync",
    "record_write",
    "record_sync",
    "clear_write",
    "clear_punch",
    "clear_sync",
    "payload_read",
    "table_read",
)
"""Every place that writes, syncs or reads, for `faults`."""


def extent_bytes_for(capacity_bytes: int) -> int:
    """The extent size of a store that does not name one: 64 MiB, or less where that would be too few extents for many slot sizes."""
    least = min(EXTENT_BYTES // 16, capacity_bytes // 8)
    share = min(EXTENT_BYTES, max(UNIT_BYTES, capacity_bytes // 64, least))
    return 1 << (share.bit_length() - 1)


class SlabEngine:
    """A `DiskEngine` over one folder, of which it is the only user."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        extent_bytes: int | None = None,
        quotas: QuotaTable | None = None,
        direct: bool = True,
        io_uring: bool = True,
        io_threads: int = 8,
        io_timeout_s: float = 20.0,
        faults: Sequence[Fault] = (),
    ) -> None:
        """Open the store in `folder`, or make it. Raises DiskError.

        `direct` asks for O_DIRECT and `io_uring` for that; where the filesystem or the kernel has none, `stats()["is_direct"]` or
        `stats()["has_io_uring"]` is 0. `faults` are for tests.
        """
        self.folder = folder
        self.quotas = quotas or QuotaTable()
        try:
            self._slab = _native.open_slab(
                str(folder),
                capacity_bytes,
                extent_bytes or extent_bytes_for(capacity_bytes),
                direct,
                io_uring,
                io_threads,
                io_timeout_s,
                self.quotas.ledger,
                [astuple(fault) for fault in faults],
            )
        except _native.StoreError as error:
            raise DiskError(str(error)) from None

    def __enter__(self) -> SlabEngine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    @property
    def native(self) -> _native.Slab:
        """For native code that asks it by itself."""
        return self._slab

    @property
    def error(self) -> str:
        return self._slab.why_degraded()

    def put(self, keys: Keys, addresses: U64, lengths: U32, crcs: U32, namespaces: U64, expiries: U32) -> U8:
        status = np.empty(len(keys), np.uint8)
        self._slab.put(keys, addresses, lengths, crcs, namespaces, expiries, status)
        return status

    def get(self, keys: Keys, addresses: U64, capacities: U32, offsets: U32) -> GetResult:
        result = GetResult(np.empty(len(keys), np.uint8), *(np.empty(len(keys), np.uint32) for _ in range(3)))
        self._slab.get(keys, addresses, capacities, offsets, *result)
        return result

    def lookup(self, keys: Keys) -> U32:
        lengths = np.empty(len(keys), np.uint32)
        self._slab.lookup(keys, lengths)
        return lengths

    def remove(self, keys: Keys) -> Flags:
        were_there = np.empty(len(keys), np.uint8)
        self._slab.remove(keys, were_there)
        return were_there.view(np.bool_)

    def remove_namespace(self, tenant: int, namespace: int) -> int:
        return self._slab.remove_namespace(tenant, namespace)

    def expire(self, now: int) -> int:
        return self._slab.expire(now)

    def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> Listing:
        keys, lengths, expiries, cursor = self._slab.list(tenant, namespace, cursor, most)
        return Listing(
            np.frombuffer(keys, np.uint8).reshape(-1, KEY_BYTES),
            np.frombuffer(lengths, np.uint32),
            np.frombuffer(expiries, np.uint32),
            cursor,
        )

    def usage(self) -> dict[int, int]:
        return self.quotas.usage()

    def stats(self) -> dict[str, int]:
        return self._slab.stats()

    def fault_visits(self) -> dict[str, int]:
        """How often each of FAULT_POINTS was passed, for tests."""
        return self._slab.fault_visits()

    def sync(self) -> None:
        if self._slab.sync() != 0:
            raise DiskError(self.error or f"{self.folder} is closed")

    def close(self) -> None:
        self._slab.close()

    def check_integrity(self) -> None:
        """End the process if an invariant of the index or of the extents does not hold."""
        self._slab.check_integrity()
