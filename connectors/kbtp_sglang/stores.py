"""The stores, as one client for each size of value.

A session has blocks of one size, and sees the values in blocks of that size. So the size is the page's own, or `block_bytes` for pages
that are smaller: it does not depend on which other pools an engine has, and engines of one model find each other's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from typing import Final

from kbtp_core.errors import KbtpError
from kbtp_core.store.identity import Namespace
from kbtp_sglang.breaker import Breaker
from kbtp_sglang.config import HiCacheConfig
from kbtp_sglang.traffic import Traffic


class Stores:
    """Any thread. Whether the stores are worth asking is known once for all sizes."""

    def __init__(self, config: HiCacheConfig, namespace: Namespace) -> None:
        self._config = config
        self._namespace = namespace
        self._lock = threading.Lock()  # guards what follows
        self._by_size: dict[int, Traffic] = {}
        self._is_closed = False
        self.breaker: Final = Breaker(f"the store at {config.stores}", self._answers, config.probe_s)

    def of(self, value_bytes: int) -> Traffic:
        """For values of this size. Raises KbtpError after `close`, ConfigError."""
        size = max(self._config.block_bytes, value_bytes)
        with self._lock:
            if self._is_closed:
                raise KbtpError("the backend is closed")
            if size not in self._by_size:
                self._by_size[size] = Traffic(self._config, self._namespace, size, self.breaker)
            return self._by_size[size]

    def remove_all(self, sizes: Iterable[int]) -> int:
        """Forget the namespace's values of these sizes; how many there were. Raises KbtpError if a store can't be asked."""
        if self.breaker.is_open:
            raise KbtpError(f"the store at {self._config.stores} does not answer")
        return sum(traffic.remove_all() for traffic in {id(one): one for one in map(self.of, sizes)}.values())

    def counts(self) -> dict[str, int]:
        """Values by "operation/what became of them"."""
        found: Counter[str] = Counter()
        for traffic in self._all():
            found.update(traffic.counts())
        return {**found, "breaker/trips": self.breaker.trip_count}

    def close(self) -> None:
        """End the connections and the thread that looks. Idempotent."""
        with self._lock:
            self._is_closed = True
        self.breaker.close()
        for traffic in self._all():
            traffic.close()

    def _all(self) -> list[Traffic]:
        with self._lock:
            return list(self._by_size.values())

    def _answers(self) -> bool:
        known = self._all()
        return bool(known) and known[0].answers()
