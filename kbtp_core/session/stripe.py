"""One connection of a striped session: what is under way on it, and how it is connected again after it was lost."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from kbtp_core.errors import KbtpError, SessionClosed, SessionRefused
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.session.initiator import InitiatorSession, LoadBatch

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0

_log = logging.getLogger(__name__)
At = TypeVar("At")


class HasEnd(Protocol):
    """A batch, of whatever kind."""

    @property
    def done(self) -> bool: ...


class Stripe:
    """A session, or none at the moment. The striped session's lock guards all but `connect` and `close`, which take none."""

    def __init__(self, make: Callable[[], InitiatorSession], session: InitiatorSession | None = None) -> None:
        self._make = make
        self._session = session
        self._swap = threading.Lock()  # of the session and of what follows
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._next_try, self._pause_s = 0.0, FIRST_PAUSE_S
        self._under_way: deque[tuple[HasEnd, int]] = deque()
        self.posted_bytes = 0

    @property
    def session(self) -> InitiatorSession | None:
        """The one that is there, or was there last; None if it was never connected."""
        return self._session

    @property
    def is_open(self) -> bool:
        session = self._session
        return session is not None and session.is_open

    @property
    def handles(self) -> tuple[int, int]:
        """Base and count of the range; of the last session, if it is lost."""
        session = self._session
        return (0, 0) if session is None else (session.target.handle_base, session.target.handle_count)

    @property
    def outstanding_bytes(self) -> int:
        """Octets of the batches that are not done."""
        while self._under_way and self._under_way[0][0].done:
            self._under_way.popleft()
        return sum(octets for batch, octets in self._under_way if not batch.done)

    def post(self, post: Callable[[InitiatorSession, At], LoadBatch], at: At, octets: int) -> LoadBatch:
        """Post requests of `octets`. Raises SessionClosed."""
        session = self._session
        if session is None or not session.is_open:
            raise SessionClosed("the stripe that has these handles is lost, and their blocks are freed")
        batch = post(session, at)
        self.note(batch, octets)
        return batch

    def note(self, batch: HasEnd, octets: int) -> None:
        """A batch of so many octets was posted."""
        self._under_way.append((batch, octets))
        self.posted_bytes += octets

    def connect(self, like: HelloAck) -> bool:
        """Connect now, to the same life of the same target as `like` tells of; whether that was possible."""
        try:
            session = self._make()
            if _life(session.target) != _life(like):
                session.close(0.5)
                raise SessionRefused(f"{session.peer} is another target now, or has been started again")
        except KbtpError as error:
            with self._swap:
                self._next_try, self._pause_s = time.monotonic() + self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
            _log.info("a stripe is not connected: %s", error)
            return False
        with self._swap:
            lost, self._pause_s = self._session, FIRST_PAUSE_S
            if not self._is_closed:
                self._session = session
                self._under_way.clear()
            is_late = self._is_closed
        if is_late:
            session.close(0.5)
        if lost is not None:
            lost.close(0.5)
        return not is_late

    def reconnect(self, beside: InitiatorSession) -> None:
        """Connect in the background, unless that is under way or failed a moment ago; `beside` is an open stripe of the same target."""
        with self._swap:
            is_busy = self._thread is not None and self._thread.is_alive()
            if self._is_closed or is_busy or time.monotonic() < self._next_try:
                return
            self._next_try = time.monotonic() + self._pause_s
            self._thread = threading.Thread(target=self.connect, args=(beside.target,), name="kbtp-stripe", daemon=True)
            self._thread.start()

    def close(self, timeout_s: float) -> None:
        with self._swap:
            self._is_closed = True
            session = self._session
        if session is not None:
            session.close(timeout_s)


def _life(ack: HelloAck) -> tuple[Any, ...]:
    return (ack.incarnation, ack.block_bytes, ack.block_count, ack.table_base, ack.table_count)
