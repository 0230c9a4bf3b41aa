"""The RAM tier: one pool of blocks, whose blocks are the values of a keyed store (docs/store-protocol.md).

The native store (`native/keyed_store.hpp`) has the index, eviction, pins and lifetimes; a target serves the pool. This module makes
the two from a block size and a budget, and stands between them as `protocol.keyed_backend.KeyedBackend`.

    store = RamStore(block_bytes=1 << 20, ram_bytes=4 << 30)
    server = TargetServer(fabric, store.target, store.pool_region)
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.fabric.api import Access, ProtectionDomain, Region, SharesPool, StoreGrant
from kbtp_core.fabric.executor import PoolExecutor
from kbtp_core.protocol import BlockPool, BlockTable, Target, TargetLimits
from kbtp_core.protocol.keyed import LIST_ITEM, Ids
from kbtp_core.protocol.keyed_backend import FOUND, SETTLED, Deferred
from kbtp_core.protocol.target_session import TargetSession
from kbtp_core.session.incarnation import process_incarnation
from kbtp_core.session.native import shared_pool

if TYPE_CHECKING:
    from kbtp_core.protocol.partition import DirectPolicy

NO_LIMIT: Final = 0xFFFF_FFFF_FFFF_FFFF
"""As a tenant's octets: as many as there is room for."""
STORE_OWNER: Final = 1 << 63
"""Owns the store's entries, where sessions have their numbers."""
_NATIVE_LIST_ITEM: Final = LIST_ITEM.newbyteorder("=")
_NATIVE_LIST: Final = np.dtype(
    [("id", "u1", 16), ("data_length", "u4"), ("ttl_s", "u4"), ("tier", "u1"), ("flags", "u1"), ("reserved", "u2")]
)


@dataclass(frozen=True)
class RamOptions:
    """How a RAM tier works. Times are in seconds."""

    session_handles: int = 1 << 16
    """Handles for sessions, beside those of the store's own."""
    limits: TargetLimits = field(default_factory=lambda: TargetLimits(outstanding=1024, inline_bytes=8192, handle_count=4096, quota=256))
    default_lease_s: float = 60.0
    longest_lease_s: float = 3600.0


class RamPeer:
    """One session of the store; see `protocol.keyed_backend.KeyedPeer`."""

    def __init__(self, store: RamStore, session: TargetSession) -> None:
        self._store = store
        self.native = _native.KeyedSession(store.native)
        ack = session.ack
        assert ack is not None
        self._grant = StoreGrant(
            owner=session.number,
            handle_base=session.handle_base,
            handle_count=session.handle_count,
            inline_bytes=ack.inline_bytes,
            quota=ack.quota,
            usage=store.pool.usage_cell(session.number),
            keyed=self.native,
        )

    def set_namespace(self, tenant: int, namespace: int, ttl_s: int) -> None:
        self.native.set_space(tenant, namespace, ttl_s)

    def publish(self, tenant: int, flags: int, items: NDArray[Any], results: NDArray[Any]) -> int:
        return self._store.native.publish(self._grant, tenant, flags, items, results)


class RamStore:
    """At most `ram_bytes // block_bytes` values of at most `block_bytes` octets each. See the module; any thread.

    Other arguments are those of `protocol.Target`.
    """

    def __init__(
        self,
        block_bytes: int,
        ram_bytes: int,
        *,
        options: RamOptions = RamOptions(),
        name: str = "kbtp-store",
        incarnation: int | None = None,
        secrets: Mapping[str, bytes] | None = None,
        trust_domains: frozenset[str] | None = None,
        direct: DirectPolicy | None = None,
        crc32c: Callable[[bytes], int] | None = None,
    ) -> None:
        if not 0 < block_bytes <= ram_bytes // 2:
            raise ValueError(f"blocks of {block_bytes} octets in {ram_bytes} octets of RAM: a store needs room for two at least")
        self.block_bytes: Final = block_bytes
        self.block_count: Final = ram_bytes // block_bytes
        self.options: Final = options
        self.wake: Callable[[], None] | None = None
        self._area: Final = _pages(self.block_count * block_bytes)
        self.memory: Final[NDArray[np.uint8]] = np.frombuffer(self._area, np.uint8)
        self.pool: Final = BlockPool(block_bytes, self.memory)
        table = BlockTable(self.block_count + options.session_handles)
        self.target: Final = Target(
            self.pool,
            table,
            name=name,
            incarnation=process_incarnation() if incarnation is None else incarnation,
            limits=options.limits,
            secrets=secrets,
            trust_domains=trust_domains,
            direct=direct,
            crc32c=crc32c,
        )
        own = PoolExecutor(table.entries, table.base_handle, block_bytes, shared_pool(self.target, self.pool))
        self.executor: SharesPool = own
        self.target.share(own)
        self.target.readers = own.readers
        base, count = self.target.ranges.take(self.block_count)
        assert count == self.block_count
        self.native: Final = _native.create_keyed_store(
            own.native,
            base_entry=base - table.base_handle,
            capacity=self.block_count,
            owner=STORE_OWNER,
            dirty_limit=0,
            writes_around=False,
            acks_on_disk=False,
            default_lease_ms=int(options.default_lease_s * 1000),
            longest_lease_ms=int(options.longest_lease_s * 1000),
        )
        self.pool.cache = self
        self.native.set_limit(self.block_count)
        self.target.keyed = self

    def pool_region(self, pd: ProtectionDomain) -> Region:
        """For `TargetServer`: the pool's memory in a connection's protection domain."""
        return pd.register(self.memory, Access.LOCAL_WRITE)

    # store.budget.Pool -------------------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Octets of the blocks that are in use or may be."""
        return self.pool.live_count * self.block_bytes

    @property
    def missed_count(self) -> int:
        """Values that were evicted or refused for want of memory, ever."""
        stats = self.native.stats()
        return stats["evicted"] + stats["refused_full"]

    def park(self, count: int) -> int:
        """Take up to `count` blocks out of use and give their memory back to the system; returns how many."""
        offsets = self.pool.park(count)
        starts = sorted(offsets)
        while starts and hasattr(mmap, "MADV_DONTNEED"):
            first = last = starts.pop()
            while starts and starts[-1] == first - self.block_bytes:
                first = starts.pop()
            begin, end = -(-first // mmap.PAGESIZE) * mmap.PAGESIZE, (last + self.block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if begin < end:
                self._area.madvise(mmap.MADV_DONTNEED, begin, end - begin)
        return len(offsets)

    def unpark(self, count: int) -> int:
        """Put up to `count` parked blocks to use again; returns how many."""
        return self.pool.unpark(count)

    # protocol.pool.BlockCache --------------------------------------------------------------------------------------------

    @property
    def used_count(self) -> int:
        """Blocks that the store holds."""
        return self.native.stats()["used"]

    def set_limit(self, blocks: int) -> int:
        return self.native.set_limit(blocks)

    # protocol.keyed_backend.KeyedBackend -----------------------------------------------------------------------------------

    def open_peer(self, session: TargetSession) -> RamPeer:
        return RamPeer(self, session)

    def lookup(self, tenant: int, ids: Ids, flags: int) -> NDArray[Any]:
        found = np.zeros(len(ids), FOUND)
        return found[: self.native.lookup(tenant, np.ascontiguousarray(ids), flags, found)]

    def remove(self, tenant: int, ids: Ids) -> int | Deferred[int]:
        return self.native.remove(tenant, np.ascontiguousarray(ids), False, np.zeros(len(ids), np.uint8))

    def remove_namespace(self, tenant: int, namespace: int) -> int | Deferred[int]:
        total = cursor = 0
        while True:
            cursor, removed = self.native.remove_space(tenant, namespace, cursor)
            total += removed
            if not cursor:
                return total

    def pin(self, handles: NDArray[np.uint64], generations: NDArray[np.uint16], wanted: bool, lease_ms: int) -> NDArray[np.uint16]:
        statuses = np.zeros(len(handles), np.uint16)
        self.native.pin(handles, generations, wanted, lease_ms, statuses)
        return statuses

    def list(self, tenant: int, namespace: int, cursor: int, limit: int) -> tuple[int, NDArray[Any]]:
        raw = np.zeros(limit, _NATIVE_LIST)
        cursor, count = self.native.list(tenant, namespace, cursor, raw)
        items = np.zeros(count, _NATIVE_LIST_ITEM)
        for name in _NATIVE_LIST.names or ():
            items[name] = raw[name][:count]
        return cursor, items

    def will_have(self, index: int, generation: int) -> bool:
        return self.native.will_have(index, generation)

    @property
    def promoting_count(self) -> int:
        return self.native.promoting_count

    def kept_counts(self) -> tuple[int, int]:
        stats = self.native.stats()
        return stats["leaving"], stats["promoting"]

    def tick(self) -> NDArray[Any]:
        self.native.tick()
        return np.frombuffer(self.native.take_settled(), SETTLED)

    # For operators and tests ---------------------------------------------------------------------------------------------

    def set_quota(self, tenant: int, limit_bytes: int | None) -> None:
        """At most so many octets of this tenant; None: as many as there is room for."""
        self.native.set_limit_of_tenant(tenant, NO_LIMIT if limit_bytes is None else limit_bytes)

    def stats(self) -> dict[str, int]:
        """Counters and levels; `native/keyed_store.hpp` names them."""
        return self.native.stats()

    def check_integrity(self) -> None:
        """Assert the store's invariants."""
        self.native.check_integrity()


def _pages(size: int) -> mmap.mmap:
    """Zeroed memory that starts at a page, so that a disk can read into it directly."""
    area = mmap.mmap(-1, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            area.madvise(mmap.MADV_HUGEPAGE)
    return area
