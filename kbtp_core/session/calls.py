"""Whole calls of a store's client in their usual case, by the provider (`fabric.client_calls`), seen from a session.

Such a call drives the session like any thread that waits, so there is one at a time; another one meanwhile goes the general way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import PUT_RESULT, Array
from kbtp_core.fabric.client_calls import CallResult, ClientCalls, RunsClientCalls
from kbtp_core.protocol.constants import Capability
from kbtp_core.protocol.keyed import KeyedOpcode, items_limit
from kbtp_core.session.initiator import InitiatorSession

_DONE, _REFUSED, _PARTLY = int(CallResult.DONE), int(CallResult.REFUSED), int(CallResult.PARTLY)


class StoreCalls:
    """Of one session. `cache` is the client's HandleCache, `prefix` what ids begin their hash with, `handles` are for puts here alone."""

    def __init__(self, session: InitiatorSession, native: ClientCalls) -> None:
        self.session = session
        self._native = native

    @classmethod
    def create(cls, session: InitiatorSession, cache: Any, prefix: bytes, tenant: int, handles: NDArray[np.uint64]) -> StoreCalls | None:
        """None where the provider has no such calls, or the target granted no STORE."""
        ack, qp = session.target, session.qp
        if not ack.capabilities & Capability.STORE or not isinstance(qp, RunsClientCalls):
            return None
        opcodes = (KeyedOpcode.PUBLISH, KeyedOpcode.GET, KeyedOpcode.LOOKUP)
        publish_items, get_items, lookup_items = (items_limit(opcode, ack.inline_bytes) for opcode in opcodes)
        native = qp.create_client_calls(
            cache, prefix, tenant, ack.inline_bytes, ack.block_bytes, publish_items, get_items, lookup_items, handles
        )
        return cls(session, native)

    def get(self, keys: Any, where: Any, deadline: float) -> tuple[NDArray[np.uint16] | None, NDArray[np.int64], KbtpError | None] | None:
        """Read values: (status each, or None if all are OK; octets each; why the rest has no status).

        None: one of them is not in the store's memory, or not where it was. Go the general way.
        """
        native = self._native
        result, error = self.session.call(native, lambda left: native.get(keys, where, left), deadline)
        if result == _DONE:
            return None, np.frombuffer(native.lengths(), np.int64), None
        if error is None and result != _PARTLY:
            return None
        return np.frombuffer(native.statuses(), np.uint16), np.frombuffer(native.lengths(), np.int64), error

    def look_up(self, keys: Any, flags: int, deadline: float) -> NDArray[np.int64] | None:
        """Octets of each value, 0 for what is not there. None: go the general way. Raises DeadlineExceeded, SessionClosed."""
        native = self._native
        result, error = self.session.call(native, lambda left: native.look_up(keys, flags, left), deadline)
        if error is not None:
            raise error
        return np.frombuffer(native.lengths(), np.int64) if result == _DONE else None

    def put(
        self, keys: Any, where: Any, flags: int, deadline: float
    ) -> tuple[Array | None, NDArray[np.uint8], NDArray[np.uint64], KbtpError | None] | None:
        """Store values: (dtype PUT_RESULT each, or None if all are stored; their ids; the handles used; why the rest has no status).

        The handles are the caller's from now on. None: nothing has happened. Go the general way.
        """
        native = self._native
        result, error = self.session.call(native, lambda left: native.put(keys, where, flags, left), deadline)
        if result == _DONE:
            return None, _NO_IDS, _NO_HANDLES, None
        if error is None and result == _REFUSED:
            return None
        ids = np.frombuffer(native.ids(), np.uint8).reshape(-1, 16)
        return np.frombuffer(native.results(), PUT_RESULT), ids, np.frombuffer(native.used(), np.uint64), error


_NO_IDS: NDArray[np.uint8] = np.empty((0, 16), np.uint8)
_NO_HANDLES: NDArray[np.uint64] = np.empty(0, np.uint64)
