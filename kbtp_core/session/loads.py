"""LOADs that the provider sends and matches by itself (`fabric.api.Requester`), seen as batches of a session.

A batch costs one call and one completion here, whatever its length. What keeps the session's promises:

1. Of the outstanding requests that the target granted, the requester has its own share; the protocol machine has the rest.
2. Order: LOADs go to the requester only while the machine has nothing unsent, and the machine sends nothing while the requester has
   unsent LOADs. So requests that name one handle leave in the order asked for.
3. An answer that matches no LOAD goes up to the protocol machine, which ends the session.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Array, LoadRequests, Region
from kbtp_core.protocol.constants import NO_STATUS


class PendingLoads:
    """n LOADs at the requester, and their results as arrays of shape (n,); NO_STATUS where there is no answer."""

    __slots__ = ("_requests", "_results", "count", "deadline", "done", "error", "region", "sequence")

    def __init__(self, sequence: int, requests: LoadRequests, region: Region, deadline: float) -> None:
        self.sequence = sequence
        self.count = requests.count
        self.region: Region | None = region
        self.deadline = deadline
        self.error: KbtpError | None = None
        self.done = False
        self._requests = requests
        self._results: Array | None = None

    def _now(self) -> Array:
        if self._results is not None:
            return self._results
        results = self._requests.results()
        if self.done:  # they do not change any more
            self._results = results
        return results

    @property
    def status(self) -> NDArray[np.uint16]:
        return np.asarray(self._now()["status"])

    @property
    def generation(self) -> NDArray[np.uint16]:
        return np.asarray(self._now()["generation"])

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return np.asarray(self._now()["data_length"])

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return np.asarray(self._now()["block_offset"])

    @property
    def checksum(self) -> NDArray[np.uint32]:
        return np.asarray(self._now()["checksum"])

    @property
    def ok(self) -> bool:
        """Done, and every request was answered OK."""
        return self.done and self.error is None and self._requests.failed_count == 0

    @property
    def unanswered_count(self) -> int:
        return int(np.count_nonzero(self.status == NO_STATUS))

    def bound_step(self) -> int:
        """How many more blocks the session owns for it."""
        return 0

    def finish(self, error: KbtpError | None) -> None:
        """Done: results stay as they are now, whatever still arrives."""
        self.error = error
        self.done = True

    def abandon(self) -> None:
        """Send no more of it."""
        self._requests.abandon()
