"""A store as a node of a cluster: pools by block size in one budget of RAM, disks, quotas, and what shows them to others.

    with StoreNode(settings) as node:
        print(node.address)

Starting opens disks first, then the address for KBTP, then the one for metrics; an error leaves nothing behind. Closing goes the other
way round: new clients are turned away, those that are there get `drain_s` to finish, what is dirty is written, the disks are synced.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Final

from prometheus_client import CollectorRegistry

from kbtp_core.errors import ConfigError
from kbtp_core.fabric.api import FabricError
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.metrics import Metrics
from kbtp_core.protocol import Target, TargetLimits
from kbtp_core.session import TargetServer
from kbtp_core.session.target_core import PoolRegion
from kbtp_core.store.budget import RamBudget
from kbtp_core.store.disk import DiskEngine
from kbtp_core.store.disk_group import DiskGroup
from kbtp_core.store.disk_watch import DiskWatch
from kbtp_core.store.file_engine import FileEngine
from kbtp_core.store.node_metrics import METRICS, samples
from kbtp_core.store.observe import Observatory
from kbtp_core.store.quota import UNLIMITED, QuotaTable
from kbtp_core.store.ram import RamOptions, RamStore
from kbtp_core.store.settings import StoreSettings
from kbtp_core.store.slab import SlabEngine

_log = logging.getLogger(__name__)

DEFAULT_BLOCK_BYTES: Final = 4 << 20
"""Of the pool for clients that name no size."""
_LARGEST_BLOCK: Final = 1 << 30
_COST_BYTES: Final = 256
"""What is kept of each block beside its octets."""
_COST_SHARE: Final = 4
"""Pools that clients ask for may take this part of the RAM beside it, together."""
_IDLE_S: Final = 0.5
_RETRY_S: Final = 10.0
_INLINE_BYTES: Final = 1 << 16
_OUTSTANDING: Final = 1024


class StoreNode:
    """A running store. Raises ConfigError, DiskError or FabricError from its constructor, naming the setting that is wrong."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings: Final = settings
        self.started_at: Final = time.time()
        self._is_draining = False
        self._pools: dict[int, RamStore] = {}
        self._budget = RamBudget(settings.ram)
        self._limited: set[int] = set()  # tenants that have or had a quota of their own
        self._domains = settings.domains()  # the same for all pools, whatever becomes of the file
        with contextlib.ExitStack() as opened:
            self.quotas: Final = QuotaTable(settings.quota_file, int(settings.quota_default) or UNLIMITED)
            self.disk: Final = self._open_disks(opened)
            self._disk_watch = None if self.disk is None else DiskWatch(self.disk)
            self.fabric: Final = SoftRnic(progress_threads=settings.progress_threads)
            opened.callback(self.fabric.close)
            opened.callback(lambda: [store.close(0.0) for store in self.pools()])
            first = self._make_store(int(settings.block[0]) if settings.block else _default_block(settings))
            for block_bytes in settings.block[1:]:
                self._make_store(int(block_bytes))
            self._budget.share_evenly()
            host, port = settings.address
            try:
                self.server: Final = TargetServer(
                    self.fabric,
                    first.target,
                    first.pool_region,
                    host,
                    port,
                    session_limit=settings.sessions,
                    make_pool=self._make_pool,
                )
            except FabricError as error:
                raise FabricError(f"listen is {settings.listen}: {error}") from None
            opened.callback(self.server.close, 0.5)
            self.observatory: Final = self._observe()
            if self.observatory is not None:
                opened.callback(self.observatory.close)
            self._stopping = threading.Event()
            if settings.commit_ram == "start":
                threading.Thread(target=self._commit_ram, name="kbtp-commit", daemon=True).start()
            opened.pop_all()
        self.address: Final = self.server.address

    # What is served --------------------------------------------------------------------------------------------------

    def pools(self) -> list[RamStore]:
        """One for each block size."""
        return list(self._pools.values())

    def disk_stats(self) -> dict[str, dict[str, int]]:
        """Counters and levels of each disk, by its folder."""
        if self.disk is None:
            return {}
        return {name: engine.stats() for name, engine in zip(self.disk.names, self.disk.engines, strict=True)}

    def tenant_usage(self) -> dict[int, int]:
        """Octets that each tenant keeps on disk, or in RAM where there is no disk."""
        if self.disk is not None:
            return self.disk.usage()
        usage: dict[int, int] = {}
        for store in self.pools():
            for tenant, used in store.tenant_usage().items():
                usage[tenant] = usage.get(tenant, 0) + used
        return usage

    def unready(self) -> str | None:
        """Why it can't serve, or nothing."""
        if self._is_draining:
            return "it is draining: it was asked to stop"
        if self.disk is not None and self.settings.data_dir and len(self.disk.degraded_names) == len(self.settings.data_dir):
            return f"no disk is in service: {self.disk.error}"
        try:
            self.server.check()
        except Exception as error:  # noqa: BLE001 - whatever it is, it is the answer
            return str(error)
        return None

    def check(self) -> None:
        """Call about once a second: tells the log what has become of the disks, and raises what has ended the server."""
        if self._disk_watch is not None:
            self._disk_watch.look()
        self.server.check()

    def reload(self) -> None:
        """Read the quota file again. Raises ConfigError, with the old quotas in force."""
        self.quotas.reload()
        self._apply_quotas()

    def close(self) -> bool:
        """Stop in order; whether everything was written. Idempotent."""
        if self._is_draining:
            return True
        self._is_draining = True
        self._stopping.set()
        self.server.close(self.settings.drain_s)
        deadline = time.monotonic() + self.settings.drain_s
        closed = [store.close(max(deadline - time.monotonic(), 0.5)) for store in self.pools()]
        is_written = all(closed)  # each of them gets its chance
        if self.disk is not None:
            if not is_written:
                _log.error("what was in RAM alone could not be written within %g s and is lost: %s", self.settings.drain_s, self.disk.error)
            self.disk.close()
        if self.observatory is not None:
            self.observatory.close()
        self.fabric.close()
        return is_written

    def check_integrity(self) -> None:
        """Assert the invariants of every pool, and that the budget holds."""
        self.server.check_integrity()
        for store in self.pools():
            store.check_integrity()
        self._budget.check_integrity()

    def __enter__(self) -> StoreNode:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _open_disks(self, opened: contextlib.ExitStack) -> DiskGroup | None:
        settings = self.settings
        if not settings.data_dir:
            return None
        engines: dict[str, DiskEngine] = {}
        for folder in settings.data_dir:
            engine = self._open_disk(folder)
            opened.callback(engine.close)
            engines[str(folder)] = engine
        return DiskGroup(engines)

    def _open_disk(self, folder: Path) -> DiskEngine:
        if self.settings.engine == "file":
            return FileEngine(folder, self.settings.disk, quotas=self.quotas)
        return SlabEngine(folder, self.settings.disk, quotas=self.quotas, io_timeout_s=self.settings.disk_timeout_s)

    def _observe(self) -> Observatory | None:
        address = self.settings.metrics_address
        if address is None:
            return None
        registry = CollectorRegistry()
        registry.register(Metrics(METRICS, lambda: samples(self)))
        try:
            return Observatory(*address, registry, self.unready)
        except OSError as error:
            raise ConfigError(
                f"metrics_listen is {self.settings.metrics_listen}: {error.strerror}. Give another address, or off."
            ) from None

    def _make_pool(self, block_bytes: int) -> tuple[Target, PoolRegion] | None:
        """By the server, for the first client that wants blocks of this size."""
        known = self._pools.get(block_bytes)  # one that was made at start
        if known is not None:
            return known.target, known.pool_region
        if not 64 <= block_bytes <= _LARGEST_BLOCK or not self._budget.fits(block_bytes) or not self._can_afford(block_bytes):
            _log.warning("no pool for blocks of %d octets: RAM of %d octets has no room for it", block_bytes, self.settings.ram)
            return None
        try:
            store = self._make_store(block_bytes)
        except (OSError, MemoryError) as error:
            _log.error("no pool for blocks of %d octets: %s", block_bytes, error or "the system has no memory for it")
            return None
        _log.info("a pool for blocks of %d octets, %d of them to begin with", block_bytes, store.pool.live_count)
        return store.target, store.pool_region

    def _can_afford(self, block_bytes: int) -> bool:
        """Whether what is kept of so many blocks is little beside them: the smaller the blocks, the more of them there are."""
        cost_bytes = sum(self.settings.ram // size * _COST_BYTES for size in (*self._pools, block_bytes))
        return cost_bytes * _COST_SHARE <= self.settings.ram

    def _make_store(self, block_bytes: int) -> RamStore:
        settings = self.settings
        if not self._budget.fits(block_bytes):
            raise ConfigError(f"ram is {settings.ram} octets, too few for a pool of blocks of {block_bytes}; give more, or smaller blocks")
        options = RamOptions(
            limits=TargetLimits(
                outstanding=_OUTSTANDING,
                inline_bytes=_INLINE_BYTES,
                handle_count=1 << 14,
                quota=max(2, min(int(settings.session_quota) // block_bytes, 1 << 14)),
                shares_fairly=True,
            ),
            session_handles=max(1 << 12, min(settings.ram // block_bytes, 1 << 20)),
            dirty_share=settings.dirty_limit,
            writes_around=settings.write_mode == "around",
            acks_on_disk=settings.acknowledge == "disk",
            default_ttl_s=settings.ttl_s,
            flush_threads=settings.flush_threads,
            on_tick=lambda: self._budget.rebalance(time.monotonic()),
        )
        store = RamStore(
            block_bytes,
            settings.ram,
            options=options,
            name=settings.name or settings.listen,
            secrets={name: domain.secret for name, domain in self._domains.items()} or None,
            tenants={name: domain.tenants for name, domain in self._domains.items()} or None,
            disk=self.disk,
        )
        self._budget.add(store)
        self._pools[block_bytes] = store
        for one in self.pools():
            one.set_siblings([other for other in self.pools() if other is not one])
        self._apply_quotas()
        return store

    def _commit_ram(self) -> None:
        """Have the system give the pools' memory, piece by piece, and later what moves between them."""
        pause_s, is_told = 0.0, False
        while not self._stopping.wait(pause_s):
            try:
                pause_s = 0.0 if any(store.commit() for store in self.pools()) else _IDLE_S
            except MemoryError as error:
                _log.warning("the system has no memory for all of ram (%d octets): %s; give less, or free some", self.settings.ram, error)
                pause_s = _RETRY_S
            if pause_s == _IDLE_S and not is_told:
                _log.info("all of the RAM is there")
                is_told = True

    def _apply_quotas(self) -> None:
        """To the pools, for what is in RAM alone; the disks have the table itself."""
        for store in self.pools():
            store.set_default_quota(None if self.quotas.default_limit == UNLIMITED else self.quotas.default_limit)
            for tenant in self._limited | self.quotas.limits.keys():
                store.set_quota(tenant, self.quotas.limits.get(tenant))
        self._limited |= self.quotas.limits.keys()


def _default_block(settings: StoreSettings) -> int:
    """As large as the usual, or what a small RAM has room for."""
    block_bytes = DEFAULT_BLOCK_BYTES
    while block_bytes * 16 > settings.ram:
        block_bytes //= 2
    return block_bytes
