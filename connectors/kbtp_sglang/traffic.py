"""Batches of values between memory and the stores, within limits of time, and what is counted of them.

Rules:
1. Whatever goes wrong is a miss in its place of the answer, and counted by what it was; nothing is raised.
2. A batch goes in rounds of a few MiB. A round from which nothing comes back opens the breaker and ends the batch: a dead store costs
   `timeout_s`, a slow one no more than `batch_timeout_s`, and the pages that came are there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.client import Client
from kbtp_core.errors import KbtpError
from kbtp_core.store.channel import LinkOptions
from kbtp_core.store.identity import Namespace
from kbtp_core.store.item_status import ItemStatus
from kbtp_core.store.places import Places
from kbtp_sglang.breaker import Breaker
from kbtp_sglang.config import HiCacheConfig

_log = logging.getLogger(__name__)

_NO_ANSWER: Final = (int(ItemStatus.TIMED_OUT), int(ItemStatus.UNAVAILABLE))
_PROBE: Final = [b"kbtp/probe"]
_GET_OK: Final = (int(ItemStatus.OK),)
_PUT_OK: Final = (int(ItemStatus.OK), int(ItemStatus.EXISTS))
_LOG_EVERY_S: Final = 10.0


class Traffic:
    """Any thread. `value_bytes` is the largest value. Connects when it is first needed. Raises ConfigError."""

    def __init__(self, config: HiCacheConfig, namespace: Namespace, value_bytes: int, breaker: Breaker) -> None:
        options = LinkOptions(
            block_bytes=value_bytes,
            secret=config.secret_bytes(),
            trust_domain=config.trust_domain,
            client_name="sglang",
            stripes=config.stripes,
        )
        self._config = config
        self._client = Client(config.members, namespace, timeout_s=config.timeout_s, ttl_s=config.ttl_s, options=options)
        self._breaker = breaker
        self._lock = threading.Lock()  # guards the counts
        self._counts: Counter[str] = Counter()
        self._logged_at = -_LOG_EVERY_S

    def lengths(self, keys: list[bytes]) -> NDArray[np.int64]:
        """Octets of each value, 0 for none; those that there are count as used."""
        nothing: NDArray[np.int64] = np.zeros(len(keys), np.int64)
        if not keys or self._breaker.is_open:
            return nothing
        begun = time.monotonic()
        try:
            found = self._client.lengths(keys, touch=True, promote=True)
        except KbtpError as error:
            self._failed("exists", error)
            return nothing
        if not found.any() and time.monotonic() - begun >= 0.9 * self._config.timeout_s:
            self._count("exists", "timed_out", len(keys))
            self._breaker.trip(f"no answer in {self._config.timeout_s:g} s")
        return found

    def get(self, keys: list[bytes], where: Places) -> NDArray[np.bool_]:
        """Which values are in their places now, each whole."""
        totals = where.totals

        def load(at: slice, timeout_s: float) -> NDArray[np.uint8]:
            status, lengths = self._client.get_into(keys[at], where.part(at), timeout_s=timeout_s)
            status[(status == ItemStatus.OK) & (lengths != totals[at])] = ItemStatus.TOO_LARGE
            return status

        return self._in_rounds("get", totals, load, _GET_OK)

    def put(self, keys: list[bytes], where: Places) -> NDArray[np.bool_]:
        """Which values the store has now; those that it had are not sent."""
        totals = where.totals
        is_there: NDArray[np.bool_] = np.asarray(self.lengths(keys) == totals)
        self._count("put", "deduplicated", int(is_there.sum()))
        if is_there.all():
            return is_there
        left = np.flatnonzero(~is_there)
        wanted, part = [keys[at] for at in left.tolist()], where.part(left)

        def store(at: slice, timeout_s: float) -> NDArray[np.uint8]:
            return self._client.put_from(wanted[at], part.part(at), timeout_s=timeout_s)

        is_there[left] = self._in_rounds("put", totals[left], store, _PUT_OK)
        return is_there

    def remove_all(self) -> int:
        """Forget the namespace's values; how many there were. Raises KbtpError if a store can't be asked."""
        return self._client.remove_all(timeout_s=self._config.batch_timeout_s)

    def counts(self) -> Counter[str]:
        """Values by "operation/what became of them"."""
        with self._lock:
            return Counter(self._counts)

    def answers(self) -> bool:
        """Whether a store says anything at all."""
        status, _ = self._client.get(_PROBE, [np.empty(1, np.uint8)], timeout_s=self._config.timeout_s)
        return int(status[0]) not in _NO_ANSWER

    def close(self) -> None:
        self._client.close()

    def _in_rounds(
        self, operation: str, totals: NDArray[np.uint32], work: Callable[[slice, float], NDArray[np.uint8]], good: tuple[int, ...]
    ) -> NDArray[np.bool_]:
        status: NDArray[np.uint8] = np.full(len(totals), ItemStatus.UNAVAILABLE, np.uint8)
        deadline = time.monotonic() + self._config.batch_timeout_s
        for at in _rounds(totals, self._config.round_mib << 20):
            left_s = deadline - time.monotonic()
            if self._breaker.is_open or left_s <= 0:
                break
            try:
                status[at] = work(at, min(left_s, self._config.timeout_s))
            except (KbtpError, ValueError) as error:
                self._failed(operation, error)
                break
            if np.isin(status[at], _NO_ANSWER).all():
                self._breaker.trip("it can't be reached" if status[at][0] == ItemStatus.UNAVAILABLE else "nothing came back in time")
        for value, count in zip(*np.unique(status, return_counts=True), strict=True):
            self._count(operation, ItemStatus(int(value)).name.lower(), int(count))
        if operation == "put" and np.isin(status, (ItemStatus.TOO_LARGE, ItemStatus.REFUSED)).any():
            self._say(f"the store refuses pages of {int(totals.max())} octets: see its log; its blocks may be smaller than that")
        return np.isin(status, good)

    def _failed(self, operation: str, error: Exception) -> None:
        self._count(operation, "failed", 1)
        self._say(f"{operation}: {error}")

    def _say(self, text: str) -> None:
        """At most so often."""
        now = time.monotonic()
        if now - self._logged_at >= _LOG_EVERY_S:
            self._logged_at = now
            _log.warning("%s", text)

    def _count(self, operation: str, what: str, count: int) -> None:
        with self._lock:
            self._counts[f"{operation}/{what}"] += count


def _rounds(totals: NDArray[np.uint32], most_bytes: int) -> Iterator[slice]:
    """Runs of values of about `most_bytes` together, one or more each."""
    begin, octets = 0, 0
    for at, size in enumerate(totals.tolist()):
        if octets and octets + size > most_bytes:
            yield slice(begin, at)
            begin, octets = at, 0
        octets += size
    if begin < len(totals):
        yield slice(begin, len(totals))


def buffers_of(tensors: Any) -> list[Any]:
    """Octets of contiguous tensors, as arrays over their memory."""
    import torch

    return [tensor.contiguous().view(torch.uint8).reshape(-1).numpy() for tensor in tensors]
