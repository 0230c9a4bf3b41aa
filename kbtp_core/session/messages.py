"""Messages and puts that the provider sends and matches by itself (`fabric.api.RunsMessages`), seen as batches of a session.

The promises are those of `session.loads`. Answers are kept as octets, and read by who asked.
"""

from __future__ import annotations

import numpy as np

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Array, LookupRequests, MessageRequests, PutRequests, Region
from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.keyed_batch import adopted_count


class PendingMessages:
    """n messages at the requester."""

    def __init__(self, sequence: int, requests: MessageRequests, region: Region | None, deadline: float) -> None:
        self.sequence = sequence
        self.count = requests.count
        self.region = region
        self.deadline = deadline
        self.error: KbtpError | None = None
        self.done = False
        self._requests = requests

    @property
    def answers(self) -> list[bytes]:
        """The answer to each, empty where none came."""
        return self._requests.answers()

    @property
    def unanswered_count(self) -> int:
        return sum(not answer for answer in self.answers)

    def bound_step(self) -> int:
        """How many more blocks the session owns for it."""
        return -sum(map(adopted_count, self.answers))

    def finish(self, error: KbtpError | None) -> None:
        """Done: results stay as they are now, whatever still arrives."""
        self.error = error
        self.done = True

    def abandon(self) -> None:
        """Send no more of it."""
        self._requests.abandon()


class PendingPuts(PendingMessages):
    """Values at the requester."""

    def __init__(self, sequence: int, requests: PutRequests, region: Region | None, deadline: float) -> None:
        super().__init__(sequence, requests, region, deadline)
        self._puts = requests

    def bound_step(self) -> int:
        return int(np.count_nonzero(self.results()["stored"] == Status.OK)) + super().bound_step()

    def results(self) -> Array:
        """What they were answered so far (dtype PUT_RESULT)."""
        return self._puts.results()


class PendingLookups(PendingMessages):
    """LOOKUPs at the requester."""

    def __init__(self, sequence: int, requests: LookupRequests, deadline: float) -> None:
        super().__init__(sequence, requests, None, deadline)
        self._lookups = requests

    def results(self) -> Array:
        """What was found so far (dtype LOOKUP_RESULT)."""
        return self._lookups.results()
