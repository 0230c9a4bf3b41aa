"""The session that a client has with a store, made when it is first needed and made anew when it has ended.

Rules:
1. An attempt runs in a thread of its own. A caller waits for it until the caller's deadline and no longer, so whoever has little time costs
   the others nothing, and a session that comes too late for one caller is there for the next.
2. An attempt that has failed is remembered for a while, which doubles up to two seconds: calls fail at once meanwhile, and a store
   that is back is used within a few seconds, however long it was away.
3. What is known through a session belongs to it (`T`, made by `connect`), and goes when it goes: handles and generations of one mean
   nothing in the next.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

from kbtp_core.errors import DeadlineExceeded, KbtpError
from kbtp_core.fabric.api import FabricError
from kbtp_core.session import InitiatorSession
from kbtp_core.store.link_errors import Refused, TenantRefused, Unavailable

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_END_S: Final = 0.1  # for a session that nobody uses any more


class HasSession(Protocol):
    """What an attempt makes."""

    @property
    def session(self) -> InitiatorSession: ...


T = TypeVar("T", bound=HasSession)


class Dialer(Generic[T]):
    """`connect(is_wanted)` makes a session, and gives up soon when `is_wanted` says no. Any thread."""

    def __init__(self, name: str, connect: Callable[[Callable[[], bool]], T]) -> None:
        self.name: Final = name
        self.current: T | None = None
        """The last one; its session may have ended."""
        self._connect = connect
        self._changed = threading.Condition()  # guards all below, and changes of `current`
        self._dropped: T | None = None
        self._is_connecting = False
        self._is_closed = False
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._failure: Exception | None = None

    @property
    def open(self) -> T | None:
        """One whose session is open, if there is one now."""
        current = self.current
        return current if current is not None and current is not self._dropped and current.session.is_open else None

    def get(self, deadline: float) -> T:
        """One whose session is open. Raises Unavailable, DeadlineExceeded."""
        if (current := self.open) is not None:
            return current
        with self._changed:
            while True:
                if self._is_closed:
                    raise Unavailable(f"the client of {self.name} is closed")
                if (current := self.open) is not None:
                    return current
                now = time.monotonic()
                if not self._is_connecting:
                    if now < self._retry_at:
                        self._fail(now)
                    self._is_connecting = True
                    threading.Thread(target=self._try, args=(self.current,), name="kbtp-connect").start()
                if now >= deadline:
                    raise DeadlineExceeded(f"{self.name} was not connected to in time")
                self._changed.wait(deadline - now)

    def drop(self, one: T) -> None:
        """The next `get` makes another one: it was found to have ended, or is of no use."""
        self._dropped = one

    def close(self, timeout_s: float) -> None:
        """End the session, and the attempt that is under way."""
        with self._changed:
            self._is_closed = True
            current, self.current = self.current, None
            self._changed.notify_all()
        if current is not None:
            current.session.close(timeout_s)
        with self._changed:
            self._changed.wait_for(lambda: not self._is_connecting, timeout_s + 1.0)

    def _fail(self, now: float) -> None:
        assert self._failure is not None
        if not isinstance(self._failure, (KbtpError, FabricError)):
            raise self._failure.with_traceback(None)
        left_s = self._retry_at - now
        kind, what = (Refused, "refuses this client") if isinstance(self._failure, TenantRefused) else (Unavailable, "can't be reached")
        raise kind(f"{self.name} {what}, and is tried again in {left_s:.1f} s: {self._failure}") from self._failure

    def _try(self, last: T | None) -> None:
        made: T | None = None
        failure: Exception | None = None
        try:
            if last is not None:
                _log.info("the session with %s has ended: %s", self.name, last.session.error)
                last.session.close(_END_S)
            made = self._connect(lambda: not self._is_closed)
        except Exception as error:  # noqa: BLE001 - told to those who wait for it
            failure = error
        with self._changed:
            self._is_connecting = False
            is_wanted = not self._is_closed
            if is_wanted:
                self.current = made
            if failure is None:
                self._pause_s = 0.0
            else:
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._failure, self._retry_at = failure, time.monotonic() + self._pause_s
            self._changed.notify_all()
        if made is not None and not is_wanted:
            made.session.close(_END_S)
