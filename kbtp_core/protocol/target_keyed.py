"""The target's side of a session that was granted STORE: values by key (docs/store-protocol.md).

What `target_session` says holds here too, and:
1. A PUBLISH takes effect as a whole, at its place among the session's messages: while a handle that it names has a request in
   progress, or a block that it names is read, it waits, and what came behind it waits with it.
2. A PUBLISH that waits for the disk, and whatever the disk tier answers later, holds nothing up.
3. A LOAD of a value that is being read from disk waits for that read alone.
   Where the trust domain limits whose values a session may use, other tenants' are refused, by name and by handle.
4. Where the store fails at a message, its session ends, and nobody else's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol import keyed
from kbtp_core.protocol.constants import HEADER_BYTES, VERSION, Capability, Status
from kbtp_core.protocol.effects import Effect, Send, Write
from kbtp_core.protocol.keyed_backend import (
    ADOPTED,
    ADOPTION,
    BEING_READ,
    COMMITTING,
    IS_COPIED,
    UNDECIDED,
    Deferred,
    KeyedBackend,
    KeyedPeer,
)
from kbtp_core.protocol.target_operations import Loading
from kbtp_core.protocol.target_operations import check_bound as _check_bound
from kbtp_core.protocol.target_session import TargetSession, TargetState
from kbtp_core.protocol.wire import Completion, Header, Load

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target
    from kbtp_core.protocol.target_grant import Expose

_READ_LIMIT_S: Final = 10.0  # how long a PUBLISH waits for those who read its blocks
_OK = Status.OK


@dataclass(eq=False)
class _Publishing:
    """A PUBLISH in progress: `results` fill up, then `commits` are waited for."""

    request: keyed.Publish
    items: NDArray[Any]
    indexes: list[int]  # of the table, as far as the handles have entries
    results: NDArray[Any]
    since: float
    commits: dict[tuple[int, int], list[int]] = field(default_factory=dict)  # (entry, generation) -> items


class KeyedTargetSession(TargetSession):
    """Made by `Target.open_session` where there is a store."""

    def __init__(self, target: Target, number: int, peer: str, offers: Capability, expose: Expose | None) -> None:
        super().__init__(target, number, peer, offers, expose)
        self.keyed_peer: KeyedPeer | None = None
        """Its side of the store, if it was granted STORE."""
        self._peer: KeyedPeer | None = None  # that, whatever it was granted
        self._publishing: _Publishing | None = None
        self._behind: deque[bytes] = deque()  # messages behind it
        self._is_stepping = False
        self._committing: list[_Publishing] = []
        self._deferred: list[tuple[int, Deferred[int]]] = []  # Request IDs of what is answered with a count
        self._promised: dict[int, Load] = {}  # entry -> the LOAD that waits until its value is read from disk

    # Events ----------------------------------------------------------------------------------------------------------

    def poll_keyed(self, settled: NDArray[Any], now: float) -> None:
        """By the target's `tick`: these commits and promotions have ended."""
        self._now = now
        for index, generation, status, is_promotion in settled.tolist():
            if not is_promotion:
                self._on_commit(index, generation, status)
            else:
                self._on_promotion(index)
        for waiting in [waiting for waiting in self._deferred if waiting[1].is_done]:
            self._deferred.remove(waiting)
            self._answer_count(waiting[0], waiting[1].value)
        self._step()
        self._note_waiting()

    def disconnected(self, now: float) -> None:
        self._publishing = None
        self._behind.clear()
        self._committing.clear()
        self._deferred.clear()
        self._promised.clear()
        self._target.keyed_waiting.discard(self)
        super().disconnected(now)

    def receive(self, message: bytes, now: float) -> list[Effect]:
        effects = super().receive(message, now)
        self._note_waiting()
        return effects

    @property
    def is_retrying(self) -> bool:
        """Whether it waits for something that nobody announces: call `Target.tick` soon."""
        return self._publishing is not None

    # Inside: messages ------------------------------------------------------------------------------------------------

    def _receive_hello(self, message: bytes) -> None:
        super()._receive_hello(message)
        if self.state is TargetState.READY and self.ack is not None:
            self._peer = self._backend.open_peer(self)
            self.keyed_peer = self._peer if self.ack.capabilities & Capability.STORE else None

    def _receive_request(self, message: bytes) -> None:
        if self._publishing is not None:
            self._behind.append(message)
        elif self.keyed_peer is not None and len(message) >= HEADER_BYTES and message[0] == VERSION and keyed.is_keyed(message[1]):
            self._receive_keyed(message)
        else:
            super()._receive_request(message)

    @property
    def allows_executor(self) -> bool:
        """As its base; one that is limited is known to the executor by what it needs for keyed messages."""
        return super().allows_executor and (self.keyed_peer is not None or not self._is_limited)

    @property
    def _takes_plain_loads(self) -> bool:
        is_plain = self._publishing is None and self._backend.promoting_count == 0 and not self._is_limited
        return is_plain and super()._takes_plain_loads

    @property
    def _is_limited(self) -> bool:
        return self._peer is not None and self._peer.is_limited

    def _is_forbidden(self, index: int) -> bool:
        return super()._is_forbidden(index) or (self._is_limited and self._is_foreign(index))

    def _is_foreign(self, index: int) -> bool:
        """Whether the entry has a value of a tenant that is not this session's, or a block of a session of another trust domain."""
        assert self._peer is not None
        tenant = self._backend.tenant_of(index)
        if tenant is not None:
            return not self._peer.may_use(tenant)
        owner = self._target.sessions.get(int(self._target.owners[index]))
        is_same = owner is None or owner.hello is None or self.hello is None or owner.hello.trust_domain == self.hello.trust_domain
        return not is_same

    @property
    def _backend(self) -> KeyedBackend:
        assert self._target.keyed is not None
        return self._target.keyed

    def _receive_keyed(self, message: bytes) -> None:
        header = Header.of_prefix(message)
        if self.state is TargetState.CLOSING:
            self._close("a request after GOODBYE")
            return
        assert self.ack is not None
        try:
            if len(message) > keyed.message_limit(self.ack.inline_bytes):
                raise Malformed(f"a keyed message of {len(message)} octets is longer than was granted")
            request = keyed.parse_keyed(message)
            status = self._keyed_admission(request)
        except Malformed:
            status = Status.MALFORMED
        if status is not _OK:
            self._answer(header, status)
            return
        if isinstance(request, keyed.LoadRange):
            self._start(request)
            return
        self._outstanding.add(request.request_id)
        try:
            self._run_keyed(request)
        except Exception as error:  # noqa: BLE001 - the close has it
            self._fail_store(error)

    def _keyed_admission(self, request: keyed.KeyedRequest) -> Status:
        assert self.ack is not None
        assert self._peer is not None
        if request.request_id in self._outstanding:
            return Status.MALFORMED
        if not isinstance(request, (keyed.Pin, keyed.LoadRange)) and not self._peer.may_use(request.tenant):
            return Status.NOT_PERMITTED
        if self._target.is_shutting_down:
            return Status.SHUTTING_DOWN
        return _OK if len(self._outstanding) < self.ack.outstanding else Status.BUSY

    def _run_keyed(self, request: keyed.KeyedRequest) -> None:
        assert self.ack is not None
        assert self.keyed_peer is not None
        store = self._backend
        match request:
            case keyed.Lookup():
                self._finish(request.request_id, keyed.LookupResult(request.request_id, _found(request, store)).encode())
            case keyed.Get():  # it writes nothing by itself: an executor does that
                self._finish(request.request_id, keyed.GetResult(request.request_id, _found(request, store)).encode())
            case keyed.Publish():
                self._publish(request)
            case keyed.Remove():
                self._count(request.request_id, store.remove(request.tenant, request.ids))
            case keyed.Pin():
                handles, generations = request.items["handle"].astype(np.uint64), request.items["generation"].astype(np.uint16)
                statuses = self.keyed_peer.pin(handles, generations, bool(request.flags & keyed.PinFlag.PIN), request.lease_ms)
                self._finish(request.request_id, keyed.PinResult(request.request_id, statuses).encode())
            case keyed.SetNamespace():
                self.keyed_peer.set_namespace(request.tenant, request.namespace, request.ttl_s)
                self._answer_count(request.request_id, 0)
            case keyed.RemoveNamespace():
                self._count(request.request_id, store.remove_namespace(request.tenant, request.namespace))
            case keyed.List():
                limit = min(request.limit, keyed.items_limit(keyed.KeyedOpcode.LIST, self.ack.inline_bytes))
                cursor, items = store.list(request.tenant, request.namespace, request.cursor, limit)
                self._finish(request.request_id, keyed.ListResult(request.request_id, cursor, items).encode())

    def _fail_store(self, error: Exception) -> None:
        """The store could not do what this session wants. Others may fare better, so it costs this session alone."""
        self._close(f"the store failed: {error!r}", error)

    # Inside: PUBLISH -------------------------------------------------------------------------------------------------

    def _publish(self, request: keyed.Publish) -> None:
        table = self._target.table
        items = np.zeros(len(request.items), ADOPTION)
        for name in ("id", "handle", "generation", "crc"):
            items[name] = request.items[name]
        found = [table.index_of(handle) for handle in request.items["handle"].tolist()]
        items["flags"] = [IS_COPIED if index in self._target.confined else 0 for index in found]
        results = np.zeros(len(items), ADOPTED)
        results["status"] = UNDECIDED
        indexes = [index for index in found if index is not None]
        self._publishing = _Publishing(request, items, indexes, results, self._now)
        self._step()

    def _step(self) -> None:
        """Go on with the PUBLISH that waits, and then with what came behind it."""
        if self._is_stepping:
            return
        self._is_stepping = True
        while self.state is not TargetState.CLOSED:
            if self._publishing is not None:
                try:
                    if not self._adopt(self._publishing):
                        break
                except Exception as error:  # noqa: BLE001 - the close has it
                    self._fail_store(error)
                self._publishing = None
            elif self._behind:
                self._receive_request(self._behind.popleft())
            else:
                break
        self._is_stepping = False

    def _adopt(self, publishing: _Publishing) -> bool:
        """Whether all of its items are decided now."""
        assert self.keyed_peer is not None
        if any(index in self._lines for index in publishing.indexes):
            return False
        request, results = publishing.request, publishing.results
        was_undecided = results["status"] >= COMMITTING
        undecided = self.keyed_peer.publish(request.tenant, request.flags, publishing.items, results)
        self._free_copied(publishing, was_undecided)
        if undecided and self._now - publishing.since >= _READ_LIMIT_S:
            results["status"][results["status"] == BEING_READ] = Status.BUSY
            undecided = int(np.count_nonzero(results["status"] >= COMMITTING))
        if undecided:
            return False
        for at in np.flatnonzero(results["is_committing"]).tolist():
            index = int(results["handle"][at]) - self._target.table.base_handle
            publishing.commits.setdefault((index, int(results["generation"][at])), []).append(at)
        if publishing.commits:
            self._committing.append(publishing)
        else:
            self._answer_publish(publishing)
        return True

    def _free_copied(self, publishing: _Publishing, was_undecided: NDArray[np.bool_]) -> None:
        """The store has copies of these, or doesn't want them: their blocks go back to the partition."""
        taken = was_undecided & (publishing.items["flags"] & IS_COPIED != 0)
        taken &= np.isin(publishing.results["status"], (Status.OK, Status.ALREADY_BOUND))
        for handle in publishing.items["handle"][taken].tolist():
            index = self._target.table.index_of(handle)
            assert index is not None
            self._target.clear(index)

    def _on_commit(self, index: int, generation: int, status: int) -> None:
        for publishing in self._committing:
            at = publishing.commits.pop((index, generation), None)
            if at is None:
                continue
            publishing.results["status"][at] = status
            if not publishing.commits:
                self._committing.remove(publishing)
                self._answer_publish(publishing)
            return

    def _answer_publish(self, publishing: _Publishing) -> None:
        results = np.zeros(len(publishing.results), keyed.PUBLISH_RESULT)
        for name in ("status", "generation", "handle"):
            results[name] = publishing.results[name]
        request_id = publishing.request.request_id
        self._finish(request_id, keyed.PublishResult(request_id, results).encode())

    # Inside: loads ---------------------------------------------------------------------------------------------------

    def _load(self, request: Load, index: int | None) -> None:
        if index is not None and self._backend.will_have(index, request.generation) and not self._is_forbidden(index):
            self._lines[index] = deque()
            self._promised[index] = request
        elif isinstance(request, keyed.LoadRange):
            self._load_range(request, index)
        else:
            super()._load(request, index)

    def _on_promotion(self, index: int) -> None:
        """Go on with the LOAD that waits for it, and with those behind."""
        request = self._promised.pop(index, None)
        if request is None:
            return
        line = self._lines.pop(index)
        self._run(request, index)
        if index not in self._lines:
            self._lines[index] = line
            self._advance_line(index)
        else:
            self._lines[index] = line

    def _advance_line(self, index: int) -> None:
        super()._advance_line(index)
        self._step()
        self._note_waiting()

    def _load_range(self, request: keyed.LoadRange, index: int | None) -> None:
        target = self._target
        at = np.arange(0) if index is None else np.array([index])
        target.hold(at)
        entry = None if index is None else target.table.entry(index)
        status = _check_range(request, entry, index is not None and self._is_forbidden(index))
        if status is not _OK or index is None or entry is None:
            target.end_reading(at)
            self._fail(request, status)
            return
        length = _clamped(request, entry.data_length)
        if length:
            data, token = request.data, self._token(Loading(index, False))
            may_change = index in target.confined
            self._emit(Write(entry.block_offset + request.offset, length, data.stag, data.offset, token, snapshot=may_change))
        self._succeed(request, entry)
        if not length:
            target.end_reading(at)

    # Inside: answers -------------------------------------------------------------------------------------------------

    def _finish(self, request_id: int, answer: bytes) -> None:
        self._outstanding.remove(request_id)
        self._emit(Send(answer))
        self._close_if_answered()

    def _count(self, request_id: int, count: int | Deferred[int]) -> None:
        if isinstance(count, Deferred):
            self._deferred.append((request_id, count))
        else:
            self._answer_count(request_id, count)

    def _answer_count(self, request_id: int, count: int) -> None:
        self._finish(request_id, Completion(request_id, 0, 0, _OK, count).encode())

    def _note_waiting(self) -> None:
        is_waiting = self._publishing is not None or self._committing or self._deferred or self._promised
        (self._target.keyed_waiting.add if is_waiting else self._target.keyed_waiting.discard)(self)


def _found(request: keyed.Lookup | keyed.Get, store: KeyedBackend) -> NDArray[Any]:
    found = store.lookup(request.tenant, request.ids, request.flags)
    items = np.zeros(len(found), keyed.LOOKUP_ITEM)
    for name in keyed.LOOKUP_ITEM.names or ():
        items[name] = found[name]
    return items


def _clamped(request: keyed.LoadRange, stored: int) -> int:
    rest = stored - request.offset
    return rest if request.length == 0 else min(request.length, rest)


def _check_range(request: keyed.LoadRange, entry: Any, is_foreign: bool) -> Status:
    status = _check_bound(request, entry)
    if is_foreign:
        return Status.NOT_PERMITTED
    if status is not _OK:
        return status
    if not entry.is_sealed:
        return Status.NOT_SEALED
    if request.offset > entry.data_length or _clamped(request, entry.data_length) > request.data.length:
        return Status.LENGTH
    return _OK
