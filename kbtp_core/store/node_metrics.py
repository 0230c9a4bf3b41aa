"""The metrics of a store, declared once: docs/metrics.md, dashboards and /metrics are made from these tables.

Each part counts for itself; a scrape asks it (`samples`). The tables say which of its counters becomes which metric.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kbtp_core.fabric.counters import COUNTERS
from kbtp_core.metrics import Metric, Samples

if TYPE_CHECKING:
    from kbtp_core.store.node import StoreNode

_POOL: Final = {
    "hits": ("hits_total", "Ids looked up whose value was in RAM."),
    "misses": ("misses_total", "Ids looked up whose value was not in RAM: it was on disk or nowhere."),
    "published": ("puts_total", "Values that were taken in."),
    "lost_races": ("puts_lost_total", "Values that were refused because their id had one already: the first writer wins."),
    "refused_full": ("puts_refused_full_total", "Values that were refused because nothing could be evicted for them."),
    "refused_dirty": ("puts_refused_dirty_total", "Values that were refused because too much of the RAM waited for the disk."),
    "refused_quota": ("puts_refused_quota_total", "Values that were refused because their tenant had as much as it may have."),
    "evicted": ("evictions_total", "Values that left RAM to make room."),
    "removed": ("removed_total", "Values that clients removed."),
    "expired": ("expired_total", "Values whose time was over."),
    "flushed": ("flushed_total", "Values that were written to disk."),
    "flush_failed": ("flush_failed_total", "Values that the disk did not take; they stay in RAM, as if clean."),
    "promoted": ("promoted_total", "Values that were read from disk into RAM."),
    "promotion_failed": ("promotion_failed_total", "Values that could not be read from disk: misses."),
    "overruled": ("overruled_total", "Values that left RAM because the disk had another under their id."),
}
_POOL_LEVELS: Final = {
    "live": ("blocks", "Blocks of the pool: those that are free, those of values, and those of clients."),
    "free": ("blocks_free", "Blocks that hold nothing."),
    "owned": ("blocks_of_clients", "Blocks that hold what clients have not published yet."),
    "used": ("blocks_used", "Blocks that hold values, or are on their way."),
    "limit": ("blocks_limit", "Blocks that values may use now."),
    "resident": ("values", "Values in RAM."),
    "promoting": ("promoting", "Values that are being read from disk."),
    "leaving": ("leaving", "Blocks whose value is gone, and that somebody still reads."),
    "dirty": ("dirty", "Values that wait for the disk."),
    "pinned": ("pinned", "Values that clients keep from being evicted."),
}
_DISK: Final = {
    "puts": ("puts_total", "Values written."),
    "put_bytes": ("put_bytes_total", "Octets of values written."),
    "puts_of_known_keys": ("puts_known_total", "Values that were there already."),
    "puts_without_space": ("puts_without_space_total", "Values for which no room could be made."),
    "failed_puts": ("puts_failed_total", "Values that were not written because of an error."),
    "hits": ("hits_total", "Reads that found their value."),
    "misses": ("misses_total", "Reads that did not."),
    "hit_bytes": ("hit_bytes_total", "Octets read."),
    "checksum_errors": ("checksum_errors_total", "Values whose octets did not match their checksum: misses, and gone."),
    "read_errors": ("read_errors_total", "Reads that the disk failed."),
    "evicted_values": ("evictions_total", "Values that made room for others."),
    "drained_extents": ("drained_extents_total", "Extents that were taken from a size that nobody uses any more."),
    "space_retries": ("space_retries_total", "Writes that found the filesystem full, and were tried once more after an eviction."),
    "removed_values": ("removed_total", "Values that clients removed."),
    "expired_values": ("expired_total", "Values whose time was over."),
    "records_dropped": ("records_dropped_total", "Records that did not match their checksum when the store was opened."),
    "recovered_values": ("recovered_total", "Values that were there when the store was opened."),
}
_DISK_LEVELS: Final = {
    "values": ("values", "Values on the disk."),
    "committed_bytes": ("used_bytes", "Octets of values."),
    "slot_bytes": ("slot_bytes", "The same, rounded up to what they take."),
    "capacity_bytes": ("capacity_bytes", "Octets that values may take."),
    "free_extents": ("free_extents", "Extents that belong to no size."),
    "index_bytes": ("index_bytes", "Memory of the index."),
    "is_direct": ("direct", "1 if the page cache is bypassed."),
    "is_degraded": ("degraded", "1 if the disk has failed or hangs, and is out of service."),
}
_DISK_ERRORS: Final = ("io", "no_space", "read_only", "timeout")
_NODE: Final = (
    Metric("kbtp_store_up_seconds", "gauge", "Seconds since the store was started."),
    Metric("kbtp_store_ready", "gauge", "1 if it can serve (/readyz says why not)."),
    Metric("kbtp_store_ram_bytes", "gauge", "RAM that all pools have together.", ()),
    Metric("kbtp_store_pool_bytes", "gauge", "RAM that a pool has now.", ("block_bytes",)),
    Metric("kbtp_store_sessions", "gauge", "Clients."),
    Metric(
        "kbtp_store_tenant_bytes",
        "gauge",
        "Octets that a tenant keeps on disk, or in RAM where there is no disk; of tenants without limits the 100 largest, and `others`.",
        ("tenant",),
    ),
    Metric("kbtp_store_tenant_limit_bytes", "gauge", "Octets that a tenant may keep.", ("tenant",)),
    Metric("kbtp_rnic_queue_pairs", "gauge", "Connections of the software RNIC."),
)

METRICS: Final[tuple[Metric, ...]] = (
    *_NODE,
    *(Metric(f"kbtp_store_{name}", "counter", text, ("block_bytes",)) for name, text in _POOL.values()),
    *(Metric(f"kbtp_store_{name}", "gauge", text, ("block_bytes",)) for name, text in _POOL_LEVELS.values()),
    *(Metric(f"kbtp_disk_{name}", "counter", text, ("disk",)) for name, text in _DISK.values()),
    Metric("kbtp_disk_errors_total", "counter", "What a disk answered instead of doing what it was asked for.", ("disk", "kind")),
    *(Metric(f"kbtp_disk_{name}", "gauge", text, ("disk",)) for name, text in _DISK_LEVELS.values()),
    *(Metric(f"kbtp_rnic_{name}_total", "counter", text) for name, text in COUNTERS.items()),
)


_TENANTS_SHOWN: Final = 100
"""Beside those with limits: whoever may use the store could name millions."""


def _shown(usage: dict[int, int], limits: Mapping[int, int]) -> list[tuple[str, int]]:
    """The tenants with limits, the largest of the others, and the rest as one."""
    others = sorted((tenant for tenant in usage if tenant not in limits), key=lambda tenant: usage[tenant], reverse=True)
    shown = [tenant for tenant in usage if tenant in limits] + others[:_TENANTS_SHOWN]
    rest = sum(usage[tenant] for tenant in others[_TENANTS_SHOWN:])
    return [(f"{tenant:016x}", usage[tenant]) for tenant in shown] + ([("others", rest)] if rest else [])


def samples(node: StoreNode) -> Samples:
    """What the metrics of `node` are now."""
    found: dict[str, dict[tuple[str, ...], float]] = {
        "kbtp_store_up_seconds": {(): time.time() - node.started_at},
        "kbtp_store_ready": {(): float(node.unready() is None)},
        "kbtp_store_ram_bytes": {(): float(node.settings.ram)},
        "kbtp_store_sessions": {(): float(node.server.session_count)},
    }

    def add(name: str, label: str, value: float) -> None:
        found.setdefault(name, {})[(label,)] = float(value)

    for store in node.pools():
        block_bytes, stats = str(store.block_bytes), store.stats()
        add("kbtp_store_pool_bytes", block_bytes, store.live_bytes)
        for key, (name, _) in (_POOL | _POOL_LEVELS).items():
            add(f"kbtp_store_{name}", block_bytes, stats[key])
    for disk, stats in node.disk_stats().items():
        for key, (name, _) in (_DISK | _DISK_LEVELS).items():
            if key in stats:
                add(f"kbtp_disk_{name}", disk, stats[key])
        for kind in _DISK_ERRORS:
            if f"errors_{kind}" in stats:
                found.setdefault("kbtp_disk_errors_total", {})[disk, kind] = float(stats[f"errors_{kind}"])
    for name, used in _shown(node.tenant_usage(), node.quotas.limits):
        add("kbtp_store_tenant_bytes", name, used)
    for tenant, limit in node.quotas.limits.items():
        add("kbtp_store_tenant_limit_bytes", f"{tenant:016x}", limit)
    device = node.fabric.stats()
    found["kbtp_rnic_queue_pairs"] = {(): float(device["queue_pairs"])}
    for key in COUNTERS:
        found[f"kbtp_rnic_{key}_total"] = {(): float(device[key])}
    return found
