"""What was moved since SGLang asked last: it asks once a step where metrics are on, and never where they are off."""

from __future__ import annotations

import threading
from collections import Counter, deque
from typing import Any, Final

_MOST: Final = 4096


class Stats:
    """Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moved: tuple[deque[tuple[int, float]], deque[tuple[int, float]]] = (deque(maxlen=_MOST), deque(maxlen=_MOST))
        self._failures: Counter[str] = Counter()

    def add(self, *, is_get: bool, page_count: int, octets: int, seconds: float) -> None:
        """One batch."""
        with self._lock:
            self._moved[is_get].append((page_count, octets / 1e9 / max(seconds, 1e-9)))

    def failed(self, operation: str, count: int) -> None:
        """Pages of a batch that could not even be tried."""
        with self._lock:
            self._failures[f"{operation}/refused_here"] += count

    def failures(self) -> dict[str, int]:
        with self._lock:
            return dict(self._failures)

    def take(self) -> Any:
        """SGLang's StorageMetrics: pages and GB/s of each batch since the last call."""
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            backups, prefetches = (list(each) for each in self._moved)
            for each in self._moved:
                each.clear()
        metrics = StorageMetrics()
        metrics.backup_pgs, metrics.backup_bandwidth = [count for count, _ in backups], [rate for _, rate in backups]
        metrics.prefetch_pgs, metrics.prefetch_bandwidth = [count for count, _ in prefetches], [rate for _, rate in prefetches]
        return metrics
