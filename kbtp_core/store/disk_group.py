"""Several disks as one engine: a weighted ring gives each key its disk, and the disks work side by side.

Rules: a key lives on one disk alone, so a disk that is lost or degraded is a miss for its own keys and nobody else's. A batch is cut by
disk, each disk gets its part at once, and the answer has the order of the batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cluster.placement import Placement
from kbtp_core.store.disk import KEY_BYTES, U8, U32, U64, DiskEngine, DiskError, Flags, GetResult, Keys, Listing

DISK_WEIGHT: Final = 10
_CALLS_AT_ONCE: Final = 16  # to each disk, from all threads
_CURSOR_BITS: Final = 48

T = TypeVar("T")
Rows = NDArray[np.intp]


class DiskGroup:
    """A `DiskEngine` over others, which it closes. Names are what the ring knows a disk by: they stay with their disk."""

    def __init__(self, engines: Mapping[str, DiskEngine]) -> None:
        self.placement: Final = Placement(dict.fromkeys(engines, DISK_WEIGHT))
        self.names = self.placement.names
        self.engines = tuple(engines[name] for name in self.names)
        self._pool = ThreadPoolExecutor(len(engines) * _CALLS_AT_ONCE, "kbtp-disk")

    @property
    def error(self) -> str:
        return "; ".join(engine.error for engine in self.engines if engine.error)

    @property
    def degraded_names(self) -> tuple[str, ...]:
        """The disks that are out of service."""
        return tuple(name for name, engine in zip(self.names, self.engines, strict=True) if engine.error)

    def put(self, keys: Keys, addresses: U64, lengths: U32, crcs: U32, namespaces: U64, expiries: U32) -> U8:
        status = np.empty(len(keys), np.uint8)

        def work(engine: DiskEngine, rows: Rows) -> U8:
            return engine.put(keys[rows], addresses[rows], lengths[rows], crcs[rows], namespaces[rows], expiries[rows])

        for rows, part in self._cut(keys, work):
            status[rows] = part
        return status

    def get(self, keys: Keys, addresses: U64, capacities: U32, offsets: U32) -> GetResult:
        result = GetResult(np.empty(len(keys), np.uint8), *(np.empty(len(keys), np.uint32) for _ in range(3)))

        def work(engine: DiskEngine, rows: Rows) -> GetResult:
            return engine.get(keys[rows], addresses[rows], capacities[rows], offsets[rows])

        for rows, part in self._cut(keys, work):
            result.status[rows], result.stored_lengths[rows], result.copied[rows], result.crcs[rows] = part
        return result

    def lookup(self, keys: Keys) -> U32:
        lengths = np.empty(len(keys), np.uint32)
        for rows, part in self._cut(keys, lambda engine, rows: engine.lookup(keys[rows])):
            lengths[rows] = part
        return lengths

    def remove(self, keys: Keys) -> Flags:
        were_there = np.empty(len(keys), np.bool_)
        for rows, part in self._cut(keys, lambda engine, rows: engine.remove(keys[rows])):
            were_there[rows] = part
        return were_there

    def remove_namespace(self, tenant: int, namespace: int) -> int:
        return sum(self._each(lambda engine: engine.remove_namespace(tenant, namespace)))

    def expire(self, now: int) -> int:
        return sum(self._each(lambda engine: engine.expire(now)))

    def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> Listing:
        at, cursor = cursor >> _CURSOR_BITS, cursor & ((1 << _CURSOR_BITS) - 1)
        parts = [Listing(np.empty((0, KEY_BYTES), np.uint8), np.empty(0, np.uint32), np.empty(0, np.uint32), 0)]
        missing = most
        while at < len(self.engines) and missing > 0:
            part = self.engines[at].list(tenant, namespace, cursor, missing)
            parts.append(part)
            missing -= len(part.keys)
            cursor = part.cursor
            if cursor:  # a disk looks at so many values at a time
                break
            at += 1
        columns = zip(*(part[:3] for part in parts), strict=True)
        keys, lengths, expiries = (np.concatenate(column) for column in columns)
        return Listing(keys, lengths, expiries, 0 if at >= len(self.engines) else at << _CURSOR_BITS | cursor)

    def usage(self) -> dict[int, int]:
        """The engines of a node share one `QuotaTable`, so each of them knows the sum."""
        return self.engines[0].usage()

    def stats(self) -> dict[str, int]:
        """Sums over the disks; `is_degraded` and `is_direct` count disks."""
        return dict(sum((Counter(engine.stats()) for engine in self.engines), Counter({"disks": len(self.engines)})))

    def sync(self) -> None:
        self._each(lambda engine: engine.sync())

    def close(self) -> None:
        self._each(lambda engine: engine.close())

    def _cut(self, keys: Keys, work: Callable[[DiskEngine, Rows], T]) -> Sequence[tuple[Rows, T]]:
        """`work` on each disk that has keys of this batch, with the rows of its keys."""
        owners = self.placement.owners(keys[:, 8:])
        order = np.argsort(owners, kind="stable")
        disks, starts = np.unique(owners[order], return_index=True)
        rows = np.split(order, starts[1:]) if len(disks) else []
        return list(zip(rows, self._run([self.engines[disk] for disk in disks], work, rows), strict=True))

    def _each(self, work: Callable[[DiskEngine], T]) -> Sequence[T]:
        """`work` on every disk; an error of one is raised once all others are done."""
        empty = np.empty(0, np.intp)
        return self._run(self.engines, lambda engine, _: work(engine), [empty] * len(self.engines))

    def _run(self, engines: Sequence[DiskEngine], work: Callable[[DiskEngine, Rows], T], rows: Sequence[Rows]) -> Sequence[T]:
        if len(engines) == 1:
            return [work(engines[0], rows[0])]
        futures = [self._pool.submit(work, engine, part) for engine, part in zip(engines, rows, strict=True)]
        errors = [error for future in futures if (error := future.exception()) is not None]
        if errors:
            raise errors[0] if len(errors) == 1 else DiskError("; ".join(map(str, errors)))
        return [future.result() for future in futures]
