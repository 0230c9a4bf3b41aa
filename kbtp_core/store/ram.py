"""The RAM tier: one pool of blocks, whose blocks are the values of a keyed store (docs/store-protocol.md).

The native store (`native/keyed_store.hpp`) has the index, eviction, pins and lifetimes; a target serves the pool. This module makes
the two from a block size and a budget, and stands between them as `protocol.keyed_backend.KeyedBackend`. With a disk tier
(`store.tier`) values go on to disk and come back from there.

    store = RamStore(block_bytes=1 << 20, ram_bytes=4 << 30)
    server = TargetServer(fabric, store.target, store.pool_region)
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.fabric.api import Access, ProtectionDomain, Region, SharesPool, StoreGrant
from kbtp_core.fabric.executor import PoolExecutor
from kbtp_core.protocol import BlockPool, BlockTable, Target, TargetLimits
from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.keyed import LIST_ITEM, Ids, LookupFlag, Tier
from kbtp_core.protocol.keyed_backend import FOUND, IS_ON_DISK, SETTLED, Deferred, total_of
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.target_session import TargetSession
from kbtp_core.session.incarnation import process_incarnation
from kbtp_core.session.native import shared_pool
from kbtp_core.store.pool_memory import PoolMemory
from kbtp_core.store.tier import DISK_ITEM, DiskTier

if TYPE_CHECKING:
    from kbtp_core.protocol.partition import DirectPolicy
    from kbtp_core.store.disk import DiskEngine

_log = logging.getLogger(__name__)

NO_LIMIT: Final = 0xFFFF_FFFF_FFFF_FFFF
"""As a tenant's octets: as many as there is room for."""
STORE_OWNER: Final = 1 << 63
"""Owns the store's entries, where sessions have their numbers."""
_REFUSALS_EVERY_S: Final = 10.0
_ON_DISK: Final = 1 << 63
"""Added to cursors of lists that have reached the disk."""
_DIRTY: Final = 1
"""Flag of a value that waits for the disk (native/keyed_store.hpp)."""
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
    dirty_share: float = 0.8
    """Of the blocks: how many may wait for the disk before new keys are refused."""
    writes_around: bool = False
    """Values go to disk and are not kept in RAM until they are asked for."""
    acks_on_disk: bool = False
    """Every PUBLISH is answered only after the disk commit."""
    default_ttl_s: int = 0
    """How long values of clients live that name no time; 0: until they are evicted."""
    flush_threads: int = 2
    """How many write to disk."""
    on_tick: Callable[[], None] | None = None
    """Called now and then by whoever drives the target."""


class RamPeer:
    """One session of the store; see `protocol.keyed_backend.KeyedPeer`."""

    def __init__(self, store: RamStore, session: TargetSession) -> None:
        self._store = store
        assert session.hello is not None
        self._domain = session.hello.trust_domain
        self._tenants = None if store.tenants is None else store.tenants.get(self._domain, frozenset())
        self.is_limited: Final = self._tenants is not None
        self.native = _native.KeyedSession(store.native, None if self._tenants is None else list(self._tenants))
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

    def may_use(self, tenant: int) -> bool:
        is_allowed = self._tenants is None or tenant in self._tenants
        if not is_allowed:
            self._store.note_refusal(self._domain, tenant)
        return is_allowed

    def pin(self, handles: NDArray[np.uint64], generations: NDArray[np.uint16], wanted: bool, lease_ms: int) -> NDArray[np.uint16]:
        statuses = np.zeros(len(handles), np.uint16)
        self.native.pin(handles, generations, wanted, lease_ms, statuses)
        return statuses

    def set_namespace(self, tenant: int, namespace: int, ttl_s: int) -> None:
        self.native.set_space(tenant, namespace, ttl_s or self._store.options.default_ttl_s)

    def publish(self, tenant: int, flags: int, items: NDArray[Any], results: NDArray[Any]) -> int:
        tier = self._store.tier
        if tier is not None and not tier.is_asked_natively:
            is_on_disk = tier.lookup(tenant, items["id"]) != 0
            items["flags"] = items["flags"] & ~np.uint16(IS_ON_DISK) | np.where(is_on_disk, np.uint16(IS_ON_DISK), np.uint16(0))
        return self._store.native.publish(self._grant, tenant, flags, items, results)


class RamStore:
    """At most `ram_bytes // block_bytes` values of at most `block_bytes` octets each. See the module; any thread.

    With `disk`, which stays the caller's, values go on to that engine until `close`. `tenants` says whose values each trust domain may
    use: ids, or None for everybody's; a domain that is not there may use nobody's. Other arguments are those of `protocol.Target`.
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
        tenants: Mapping[str, frozenset[int] | None] | None = None,
        trust_domains: frozenset[str] | None = None,
        direct: DirectPolicy | None = None,
        crc32c: Callable[[bytes], int] | None = None,
        disk: DiskEngine | None = None,
    ) -> None:
        if not 0 < block_bytes <= ram_bytes // 2:
            raise ValueError(f"blocks of {block_bytes} octets in {ram_bytes} octets of RAM: a store needs room for two at least")
        self.block_bytes: Final = block_bytes
        self.block_count: Final = ram_bytes // block_bytes
        self.options: Final = options
        self.tenants: Final = None if tenants is None else dict(tenants)
        self.wake: Callable[[], None] | None = None
        self._refused_at: dict[str, float] = {}
        self._siblings: tuple[RamStore, ...] = ()
        self._pages: Final = PoolMemory(self.block_count * block_bytes)
        self.memory: Final = self._pages.array
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
            dirty_limit=0 if disk is None else max(1, int(self.block_count * options.dirty_share)),
            writes_around=options.writes_around,
            acks_on_disk=options.acks_on_disk,
            default_lease_ms=int(options.default_lease_s * 1000),
            longest_lease_ms=int(options.longest_lease_s * 1000),
        )
        self.pool.cache = self
        self.native.set_limit(self.block_count)
        self.target.keyed = self
        self.tier: Final = None if disk is None else DiskTier(self.native, disk, self._on_settled, flusher_count=options.flush_threads)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what is dirty; whether all of it was written in time. Without a disk there is nothing to do."""
        return self.tier is None or self.tier.close(timeout_s)

    def pool_region(self, pd: ProtectionDomain) -> Region:
        """For `TargetServer`: the pool's memory in a connection's protection domain."""
        return pd.register(self.memory, Access.LOCAL_WRITE)

    # store.budget.Pool -------------------------------------------------------------------------------------------------------

    @property
    def live_bytes(self) -> int:
        """Octets of the blocks that are in use or may be."""
        return self.pool.live_count * self.block_bytes

    @property
    def idle_bytes(self) -> int:
        """Octets of live blocks that hold nothing and are promised to nobody."""
        stats = self.native.stats()
        return (stats["limit"] - stats["used"]) * self.block_bytes

    @property
    def missed_count(self) -> int:
        """Values that were evicted or refused for want of memory, ever."""
        stats = self.native.stats()
        return stats["evicted"] + stats["refused_full"]

    def park(self, count: int) -> int:
        """Take up to `count` blocks out of use and give their memory back to the system; returns how many."""
        offsets = self.pool.park(count)
        starts = np.sort(offsets).tolist()
        while starts:
            first = last = starts.pop()
            while starts and starts[-1] == first - self.block_bytes:
                first = starts.pop()
            self._pages.give_back(first, last + self.block_bytes)
        return len(offsets)

    def commit(self) -> bool:
        """Have the system give a piece of the pool's memory now that is not there yet; False if all of it is.

        Raises MemoryError. Any thread.
        """
        states, size = self.pool.states, self.block_bytes
        return self._pages.commit(lambda begin, end: bool((states[begin // size : -(-end // size)] != BlockState.PARKED).all()))

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
        found = self._find(tenant, ids, flags)
        self.native.note_lookup(found)
        return found

    def _find(self, tenant: int, ids: Ids, flags: int) -> NDArray[Any]:
        found = np.zeros(len(ids), FOUND)
        if self.tier is None:
            return found[: self.native.lookup(tenant, np.ascontiguousarray(ids), flags, found)]
        self.native.lookup(tenant, np.ascontiguousarray(ids), flags & ~LookupFlag.PREFIX, found)
        absent = np.flatnonzero(found["tier"] == Tier.ABSENT)
        unknown = absent[found["flags"][absent] == 0]
        found["flags"][absent] = 0
        if len(unknown) and not self.tier.is_asked_natively:
            found["data_length"][unknown] = self.tier.lookup(tenant, ids[unknown])
            found["tier"][unknown[found["data_length"][unknown] != 0]] = Tier.DISK
        on_disk = np.flatnonzero(found["tier"] == Tier.DISK)
        if flags & LookupFlag.PREFIX:
            missing = np.flatnonzero(found["tier"] == Tier.ABSENT)[:1]
            found = found[: int(missing[0]) + 1] if len(missing) else found
        if flags & LookupFlag.PROMOTE:
            self._promote(tenant, ids, found, on_disk[on_disk < len(found)])
        return found

    def _promote(self, tenant: int, ids: Ids, found: NDArray[Any], at: NDArray[np.intp]) -> None:
        """Have these values read into blocks, as far as there is room; `found` gets their handles."""
        assert self.tier is not None
        items = np.zeros(len(at), DISK_ITEM)
        items["tenant"], items["id"], items["length"] = tenant, ids[at], found["data_length"][at]
        self.native.reserve(items)
        is_read = items["status"] == Status.OK
        has_handle = is_read | (items["status"] == Status.ALREADY_BOUND)
        at = at[has_handle]
        found["tier"][at] = Tier.PROMOTING
        found["handle"][at], found["generation"][at] = items["handle"][has_handle], items["generation"][has_handle]
        self.tier.promote(items[is_read])

    def remove(self, tenant: int, ids: Ids) -> int | Deferred[int]:
        return self._with_siblings(lambda store: store._remove(tenant, ids), len(ids))

    def remove_namespace(self, tenant: int, namespace: int) -> int | Deferred[int]:
        return self._with_siblings(lambda store: store._remove_namespace(tenant, namespace))

    def _with_siblings(self, work: Callable[[RamStore], int | Deferred[int]], most: int = 0xFFFF_FFFF) -> int | Deferred[int]:
        """The sum of what `work` does in every store that may hold the ids."""
        if not self._siblings:
            return work(self)
        return total_of([work(store) for store in (self, *self._siblings)], most)

    def _remove(self, tenant: int, ids: Ids) -> int | Deferred[int]:
        octets = np.ascontiguousarray(ids)
        if self.tier is not None:
            return self.tier.remove(tenant, octets)
        return self.native.remove(tenant, octets, False, np.zeros(len(ids), np.uint8))

    def _remove_namespace(self, tenant: int, namespace: int) -> int | Deferred[int]:
        if self.tier is None:
            return self._forget(tenant, namespace, None)
        return self.tier.remove_namespace(tenant, namespace, partial(self._forget, tenant, namespace))

    def _forget(self, tenant: int, namespace: int, lane: int | None) -> int:
        total = cursor = 0
        while True:
            cursor, removed = self.native.remove_space(tenant, namespace, cursor, lane)
            total += removed
            if not cursor:
                return total

    def tenant_of(self, index: int) -> int | None:
        return self.native.tenant_of(index)

    def note_refusal(self, domain: str, tenant: int) -> None:
        """Log that a client wanted what it may not have, once in a while for each trust domain."""
        now = time.monotonic()
        if now - self._refused_at.get(domain, -_REFUSALS_EVERY_S) >= _REFUSALS_EVERY_S:
            self._refused_at[domain] = now
            _log.warning("trust domain %r may not use tenant %016x: its line in the secret file says which it may", domain, tenant)

    def list(self, tenant: int, namespace: int, cursor: int, limit: int) -> tuple[int, NDArray[Any]]:
        if cursor >= _ON_DISK:
            return self._list_disk(tenant, namespace, cursor - _ON_DISK, limit)
        raw = np.zeros(limit, _NATIVE_LIST)
        cursor, count = self.native.list(tenant, namespace, cursor, raw)
        items = np.zeros(count, _NATIVE_LIST_ITEM)
        for name in _NATIVE_LIST.names or ():
            items[name] = raw[name][:count]
        if self.tier is None:
            return cursor, items
        # What is on disk is told by the disk, which knows its namespace.
        return cursor or _ON_DISK, items[items["flags"] & _DIRTY != 0]

    def _list_disk(self, tenant: int, namespace: int, cursor: int, limit: int) -> tuple[int, NDArray[Any]]:
        """What is on disk, wherever else it is."""
        assert self.tier is not None
        page = self.tier.engine.list(tenant, namespace or None, cursor, limit)
        ids = np.ascontiguousarray(page.keys[:, 8:])
        in_ram = np.zeros(len(ids), FOUND)
        self.native.lookup(tenant, ids, 0, in_ram)
        told = in_ram["flags"] & _DIRTY == 0
        now_s = self.native.now_ms() // 1000
        items = np.zeros(int(np.count_nonzero(told)), _NATIVE_LIST_ITEM)
        items["id"], items["data_length"] = ids[told], page.lengths[told]
        items["tier"] = np.where(in_ram["tier"][told] == Tier.RAM, Tier.RAM, Tier.DISK)
        expiries = page.expiries[told].astype(np.int64)
        items["ttl_s"] = np.where(expiries == 0, 0, np.maximum(expiries - now_s, 1))
        return page.cursor and page.cursor + _ON_DISK, items

    def will_have(self, index: int, generation: int) -> bool:
        return self.native.will_have(index, generation)

    @property
    def promoting_count(self) -> int:
        return self.native.promoting_count

    def kept_counts(self) -> tuple[int, int]:
        return self.native.kept_counts()

    def tick(self) -> NDArray[Any]:
        self.native.tick()
        if self.options.on_tick is not None:
            self.options.on_tick()
        return np.frombuffer(self.native.take_settled(), SETTLED)

    def _on_settled(self) -> None:
        if self.wake is not None:
            self.wake()

    # For operators and tests ---------------------------------------------------------------------------------------------

    def set_siblings(self, stores: Iterable[RamStore]) -> None:
        """Other stores of the node, which may hold the same ids in blocks of another size: what is removed here is removed there."""
        self._siblings = tuple(stores)
        self.native.set_siblings(bool(self._siblings))

    def tenant_usage(self) -> dict[int, int]:
        """Octets of each tenant's values in RAM."""
        return dict(self.native.bytes_of_tenants())

    def set_default_quota(self, limit_bytes: int | None) -> None:
        """At most so many octets of each tenant that has no quota of its own; None: as many as there is room for."""
        self.native.set_default_limit(NO_LIMIT if limit_bytes is None else limit_bytes)

    def set_quota(self, tenant: int, limit_bytes: int | None) -> None:
        """At most so many octets of this tenant; None: as many as there is room for."""
        self.native.set_limit_of_tenant(tenant, NO_LIMIT if limit_bytes is None else limit_bytes)

    def stats(self) -> dict[str, int]:
        """Counters and levels; `native/keyed_store.hpp` names them. And the pool's blocks: `live` = `free` + `used` + `owned`."""
        pool = self.pool
        return self.native.stats() | {"live": pool.live_count, "free": pool.free_count, "owned": pool.owned_count}

    def check_integrity(self) -> None:
        """Assert the store's invariants."""
        self.native.check_integrity()
