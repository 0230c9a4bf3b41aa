"""Memory that is registered on several connections: one region in each stripe's protection domain, made when it is first needed there.

An STag is never valid on two sessions, so a striped region has a part for each. The parts are fenced together: once `close` was called,
or a part was closed by a deadline or invalidated by the target, there will be no new part, and the other parts are closed too when
somebody looks. A part of a connection that is gone went with it, and its successor gets a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.api import FabricError, Region
from kbtp_core.session.initiator import InitiatorSession


class StripedRegion:
    """See the module. `length` is in octets; tagged offsets are the same in every part."""

    def __init__(self, register: Callable[[InitiatorSession], Region], first: InitiatorSession) -> None:
        self._register = register
        self._lock = threading.Lock()
        self._parts: dict[InitiatorSession, Region] = {first: register(first)}
        self._is_closed = False
        self.length = self._parts[first].length

    @property
    def is_valid(self) -> bool:
        with self._lock:
            return self._is_whole()

    def expect_valid(self) -> None:
        """Raises FabricError if it was closed, or fenced on some stripe."""
        if not self.is_valid:
            raise FabricError("this memory was closed, or fenced by a deadline: register it again")

    def on(self, session: InitiatorSession) -> Region:
        """The part on `session`. Raises SessionClosed if it was fenced a moment ago."""
        with self._lock:
            if not self._is_whole():
                raise SessionClosed("the memory was fenced while the batch was sent")
            part = self._parts.get(session)
            if part is None:
                part = self._parts[session] = self._register(session)
            return part

    def close(self) -> None:
        """Fence the memory on all stripes: nothing lands there any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            for part in self._parts.values():
                part.close()

    def _is_whole(self) -> bool:
        """With the lock."""
        for session in [session for session in self._parts if session.is_over]:
            self._parts.pop(session).close()
        if not self._is_closed and any(not part.is_valid for part in self._parts.values()):
            self._is_closed = True
            for part in self._parts.values():
                part.close()
        return not self._is_closed
