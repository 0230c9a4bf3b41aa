"""Asks the store, beside the scheduler, which of a request's blocks it has.

A lookup starts when its request arrives, so the answer is there, as a rule, before the request is scheduled. The scheduler waits for
none: it looks again in its next step. A lookup ends by its deadline; after one that took all of its time the store counts as slow and is
not asked for a while, which doubles (`Breaker`). One that can't be reached costs nothing: the client knows and answers at once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from kbtp_core.client import Client
from kbtp_vllm.store_client import Breaker
from kbtp_vllm.store_keys import ids_of

logger = init_logger("vllm.kbtp.store")


class Lookup:
    """One request's. `present` has a row of booleans for each group, once `done` is set."""

    def __init__(self, keys: Sequence[Sequence[bytes]]) -> None:
        self.keys = keys
        self.done = threading.Event()
        self.asked_at = time.monotonic()
        self.seconds = 0.0
        self.is_answered = False
        self.present: list[NDArray[np.bool_]] = [np.zeros(len(some), np.bool_) for some in keys]


class LookupThread:
    """`namespaces`: those of each worker, all of which have to have a block."""

    def __init__(self, client: Client, namespaces: Sequence[Sequence[bytes]], block_bytes: int, timeout_s: float) -> None:
        self._client = client
        self._namespaces = list(dict.fromkeys(map(tuple, namespaces)))
        self._block_bytes = block_bytes
        self._timeout_s = timeout_s
        self._breaker = Breaker()
        self._queue: queue.SimpleQueue[Lookup | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kbtp-lookup", daemon=True)
        self._thread.start()

    def start(self, keys: Sequence[Sequence[bytes]]) -> Lookup:
        """Look these keys up, some for each group; ended at once if nobody is to be asked."""
        lookup = Lookup(keys)
        if self._breaker.is_open or not any(keys):
            lookup.done.set()
        else:
            self._queue.put(lookup)
        return lookup

    def _run(self) -> None:
        while (lookup := self._queue.get()) is not None:
            try:
                self._look(lookup)
            except Exception:
                logger.exception("A lookup in the store failed; its request is computed.")
            finally:
                lookup.done.set()

    def _look(self, lookup: Lookup) -> None:
        begun = time.monotonic()
        left_s = lookup.asked_at + self._timeout_s - begun
        if self._breaker.is_open or left_s <= 0:
            return
        counts = [len(some) for some in lookup.keys]
        ids = [ids_of(namespaces, lookup.keys) for namespaces in self._namespaces]
        found = self._client.lengths(np.concatenate(ids), touch=True, promote=True, timeout_s=left_s)
        now = time.monotonic()
        lookup.seconds = now - lookup.asked_at
        # One that began late, behind others, and had little time left says nothing of the store.
        self._breaker.report("lookup", now - begun, max(left_s, self._timeout_s / 2))
        if now - begun >= left_s:
            return
        lookup.is_answered = True
        everywhere = (found == self._block_bytes).reshape(len(ids), -1).all(axis=0)
        lookup.present = np.split(everywhere, np.cumsum(counts)[:-1])

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(5.0)
