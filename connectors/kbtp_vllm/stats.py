"""Counters of the connector, shown in vLLM's log and under /metrics.

Declared once in COUNTERS; a step's statistics are plain sums, so that adding the workers' up is adding numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

COUNTERS = {
    "requests_pulled": "Requests whose KV blocks were all loaded from a prefill engine.",
    "requests_failed": "Requests whose load failed; they are computed again.",
    "blocks_pulled": "KV blocks loaded from prefill engines.",
    "bytes_pulled": "Octets of KV loaded from prefill engines.",
    "pull_seconds": "Seconds between asking for a request's blocks and having them, summed over requests.",
    "requests_offered": "Finished prefills whose blocks were offered.",
    "requests_released": "Offered prefills whose blocks were given back to the engine.",
    "leases_expired": "Offered prefills that no decode engine finished loading within the lease.",
    "store_lookups": "Requests that were looked up in the store.",
    "store_lookups_failed": "Lookups without an answer: the store was slow or could not be reached.",
    "store_lookup_seconds": "Seconds from starting a lookup to its answer, summed over lookups.",
    "store_loads": "Requests that got blocks from the store.",
    "store_loads_failed": "Requests whose load from the store failed in part or whole; what is missing is computed.",
    "store_blocks_loaded": "KV blocks loaded from the store.",
    "store_bytes_loaded": "Octets of KV loaded from the store.",
    "store_load_seconds": "Seconds between asking for a request's blocks and having them, summed over requests.",
    "store_blocks_saved": "KV blocks saved to the store.",
    "store_bytes_saved": "Octets of KV saved to the store.",
    "store_blocks_known": "KV blocks that the store had already when they were to be saved.",
    "store_blocks_unsaved": "KV blocks that were not saved: too many waited, or the store was full, slow or not there.",
}


@dataclass
class KbtpStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last step; `data` maps names of COUNTERS to numbers."""

    data: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, value: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + value

    def take(self) -> KbtpStats | None:
        """What was added since the last call, if anything."""
        if self.is_empty():
            return None
        taken, self.data = KbtpStats(data=self.data), {}
        return taken

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KbtpStats:
        for name, value in other.data.items():
            self.add(name, value)
        return self

    def reduce(self) -> dict[str, int | float]:
        summary = {name: self.data[name] for name in COUNTERS if name in self.data and not name.endswith("_seconds")}
        for rate, octets, seconds in (("pull", "bytes_pulled", "pull_seconds"), ("load", "store_bytes_loaded", "store_load_seconds")):
            if self.data.get(seconds, 0) > 0:
                summary[f"{rate}_gib_per_s"] = round(self.data.get(octets, 0) / self.data[seconds] / 2**30, 3)
        return summary

    def is_empty(self) -> bool:
        return not self.data


class KbtpPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:kbtp_<counter>_total` for each of COUNTERS."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kbtp_{name}", documentation=text, labelnames=labelnames) for name, text in COUNTERS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, value in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(value)


def merged(*parts: KbtpStats | None) -> KbtpStats | None:
    """The sum of what there is; None if there is nothing."""
    total = KbtpStats()
    for part in parts:
        if part is not None:
            total.aggregate(part)
    return total.take()
