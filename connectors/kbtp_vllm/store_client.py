"""The client of a store, as an engine's halves and its offloading tier use it."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from kbtp_core.client import Client, ItemStatus
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.places import Places

logger = init_logger("vllm.kbtp.store")

QUOTA_BYTES = 256 << 20  # of values on their way to a store
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 2.0  # the longest: how late a store is used again that was slow for long


def options(block_bytes: int, name: str, *, secret: bytes | None, trust_domain: str, stripes: int) -> LinkOptions:
    """For blocks of that size."""
    return LinkOptions(
        block_bytes=block_bytes,
        secret=secret,
        trust_domain=trust_domain,
        client_name=f"vllm {name}",
        quota=max(8, min(1024, QUOTA_BYTES // block_bytes)),
        stripes=stripes,
    )


class Breaker:
    """Whether a store that was slow is left alone for now. One thread reports, any thread asks.

    One that can't be reached is none of its business: the client knows, and answers at once.
    """

    def __init__(self) -> None:
        self._pause_s = 0.0
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        return time.monotonic() < self._until

    def report(self, what: str, seconds: float, limit_s: float) -> None:
        """A call took so long; `what` it was, for the log."""
        if seconds < limit_s:
            self._pause_s = self._until = 0.0
            return
        if self._pause_s == 0.0:
            logger.warning("The store took more than %g s for a %s; it is left alone for a while.", limit_s, what)
        self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
        self._until = time.monotonic() + self._pause_s


class Saving:
    """A batch that is saved by a deadline: `new` are those that the store does not have yet, `put` sends them."""

    def __init__(self, client: Client, ids: NDArray[np.uint8], limit_s: float) -> None:
        self._client = client
        self._ids = ids
        self._deadline = time.monotonic() + limit_s
        self.status: NDArray[np.uint8] = np.full(len(ids), ItemStatus.UNAVAILABLE, np.uint8)
        """An ItemStatus each; EXISTS for those that were there."""
        is_there = client.lengths(ids, timeout_s=limit_s) > 0
        self.status[is_there] = ItemStatus.EXISTS
        self.new = np.flatnonzero(~is_there)

    def put(self, where: Places) -> NDArray[np.bool_]:
        """Send the new ones, which are there; which of them the store has taken."""
        left_s = max(0.0, self._deadline - time.monotonic())
        self.status[self.new] = self._client.put_from(np.ascontiguousarray(self._ids[self.new]), where, timeout_s=left_s)
        return np.asarray(self.status[self.new] == ItemStatus.OK)
