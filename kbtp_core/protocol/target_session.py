"""The target's side of one session, without sockets and without a clock.

    GREETING --HELLO--> READY                               (no key configured)
    GREETING --HELLO--> PROVING --HELLO with proof--> READY (key configured)
    READY --GOODBYE--> CLOSING --all answered--> CLOSED

1. Every message is answered exactly once, except GOODBYE, unless the session closes first.
2. Requests for one handle take effect in the order sent: while one is in progress (its data is being fetched, or its block
   drains), later ones for that handle wait in line. Requests for other handles pass.
3. A request is checked in the order form, capability, range, binding, generation, seal, size, room; the first check that fails
   answers it, and it changes nothing.
4. Nothing is given to anybody else while an RDMA operation of this session may touch it: that ends with the operation's own
   completion, or with `disconnected`, which the driver calls only when none of the connection can touch memory any more.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol.auth import is_proved, proved
from kbtp_core.protocol.constants import NONCE_BYTES, VERSION, Capability, Flag, Opcode, Status
from kbtp_core.protocol.effects import Close, Effect, Read, Send, SendMany, Write
from kbtp_core.protocol.hello import NO_NONCE, Hello, HelloAck
from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.table import Entry
from kbtp_core.protocol.target_batch import free_lent, plain_frees
from kbtp_core.protocol.wire import AllocStore, Bind, Completion, Free, Goodbye, Header, Load, Message, Request, Store, Unknown, parse

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target

# Plain names: looking a member up in its enumeration costs more than all else that is done with it.
_INLINE, _SEAL, _RECORD = int(Flag.INLINE), int(Flag.SEAL), int(Flag.RECORD)
_INVALIDATE, _ALLOW_UNSEALED = int(Flag.INVALIDATE), int(Flag.ALLOW_UNSEALED)
_OK = Status.OK


class TargetState(Enum):
    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"


@dataclass(frozen=True)
class _Loading:
    """A Write of the block of entry `index`; `holds_line`: later requests for its handle wait for it."""

    index: int
    holds_line: bool


@dataclass(frozen=True)
class _Storing:
    """A Read into the block at `block_offset`, for the entry at `index`."""

    request: Store
    index: int
    block_offset: int


_Operation: TypeAlias = _Loading | _Storing


class TargetSession:
    """Made by `Target.open_session`."""

    def __init__(self, target: Target, number: int, peer: str) -> None:
        self.number = number
        self.peer = peer
        self.state = TargetState.GREETING
        self.hello: Hello | None = None
        """What the initiator asked for, from READY on."""
        self.ack: HelloAck | None = None
        """What it was granted, from READY on."""
        self.handle_base = 0
        self.handle_count = 0
        self._target = target
        self._effects: list[Effect] = []
        self._nonce = NO_NONCE
        self._outstanding: set[int] = set()
        self._lines: dict[int, deque[Request]] = {}  # entry index -> requests behind the one in progress
        self._operations: dict[int, _Operation] = {}
        self._next_token = 1
        self._frees: dict[int, Free] = {}  # entry index -> the FREE that is answered once it has drained
        self._undrained: set[int] = set()  # entries of a session that is gone, not yet drained
        self._is_connected = True

    # Events ----------------------------------------------------------------------------------------------------------

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """Take one message of the initiator."""
        del now  # deadlines are the driver's
        if self.state in (TargetState.GREETING, TargetState.PROVING):
            self._receive_hello(message)
        elif self.state in (TargetState.READY, TargetState.CLOSING):
            self._receive_request(message)
        return self.take_effects()

    def receive_frees(self, raw: NDArray[np.uint8], now: float) -> list[Effect]:
        """Take n messages of a FREE's length, (n, 24) octets, in the order received; as `receive` for each, but quicker where it can be."""
        is_plain = self.state is TargetState.READY and not self._outstanding and not self._lines and not self._target.is_shutting_down
        if is_plain and self.ack is not None and not isinstance(self._target.pool, BlockPool) and len(raw) <= self.ack.outstanding:
            headers = plain_frees(raw)
            if headers is not None:
                self._emit(SendMany(free_lent(self._target, self.handle_base, self.handle_count, headers)))
                return self.take_effects()
        return [effect for row in raw for effect in self.receive(row.tobytes(), now)]

    def write_done(self, token: int, ok: bool, now: float) -> list[Effect]:
        """The RDMA Write of `token` has completed. One that failed is the end of its connection."""
        del now
        operation = self._operations.pop(token)
        assert isinstance(operation, _Loading)
        self._target.reading[operation.index] -= 1
        if not ok:
            self._close("an RDMA Write failed")
        elif operation.holds_line:
            self._advance_line(operation.index)
        return self.take_effects()

    def read_done(self, token: int, ok: bool, now: float) -> list[Effect]:
        """The RDMA Read of `token` has completed: its data is in the block, or (not ok) anything may be."""
        del now
        operation = self._operations.pop(token)
        assert isinstance(operation, _Storing)
        if isinstance(operation.request, AllocStore):
            self._finish_alloc_store(operation, ok)
        elif ok:
            self._finish_store(operation.request, operation.index)
        else:
            # The block may hold half of the new data. It was never sealed; closing frees it, so nobody takes it for whole.
            self._fail(operation.request, Status.ACCESS)
            self._close("an RDMA Read into a bound block failed")
        self._advance_line(operation.index)
        return self.take_effects()

    def disconnected(self, now: float) -> None:
        """The connection is gone and can touch no memory any more: undo what was in progress, free what this session bound."""
        del now
        if not self._is_connected:
            return
        self._is_connected = False
        self.state = TargetState.CLOSED
        self._effects.clear()
        self._lines.clear()
        for operation in self._operations.values():
            if isinstance(operation, _Loading):
                self._target.reading[operation.index] -= 1
            elif isinstance(operation.request, AllocStore):
                self._give_up(operation)
        self._operations.clear()
        self._undrained = set(self._frees)
        self._frees.clear()
        pool = self._target.pool
        if isinstance(pool, BlockPool) and self.handle_count:
            start = self.handle_base - self._target.table.base_handle
            bound = self._target.table.valid_indexes(start, self.handle_count).tolist()
            self._undrained.update(bound)  # all of them first: the last one that drains releases the session
            for index in bound:
                self._target.clear(index)
        self._release_if_drained()

    def drained(self, index: int) -> None:
        """By the target: the block of an entry that this session had bound is back in the ring."""
        free = self._frees.pop(index, None)
        if free is not None:
            self._succeed(free, self._target.table.entry(index), with_block=False)
            self._advance_line(index)
        elif index in self._undrained:
            self._undrained.remove(index)
            self._release_if_drained()

    def say_goodbye(self, status: Status) -> None:
        """Tell the initiator to send no more; it may have requests under way, which are still answered."""
        if self.state is TargetState.READY:
            self._emit(Send(Goodbye(status=status).encode(), answers=0))
        elif self.state in (TargetState.GREETING, TargetState.PROVING):
            self._close("the target shuts down")

    @property
    def has_effects(self) -> bool:
        return bool(self._effects)

    @property
    def is_granted(self) -> bool:
        """Whether a HELLO was answered OK, so that a quota and a handle range are held."""
        return self.ack is not None

    @property
    def unanswered_count(self) -> int:
        return len(self._outstanding)

    def take_effects(self) -> list[Effect]:
        """What is to be done now, in order; each effect is given out once."""
        effects, self._effects = self._effects, []
        return effects

    # HELLO -----------------------------------------------------------------------------------------------------------

    def _receive_hello(self, message: bytes) -> None:
        header = Header.of_prefix(message)
        if len(message) >= 24 and header.opcode == Opcode.HELLO and header.version != VERSION:
            answer = Completion(header.request_id, 0, 0, Status.VERSION, data_length=VERSION)
            self._emit(Send(answer.encode()))
            self._close(f"HELLO of version {header.version}")
            return
        if header.opcode != Opcode.HELLO:
            self._close("the first message is no HELLO")
            return
        try:
            hello = parse(message)
        except Malformed as error:
            self._refuse(header.request_id, Status.MALFORMED, str(error))
            return
        assert isinstance(hello, Hello)
        secret = self._target.secrets.get(hello.trust_domain)
        if not self._target.secrets:
            self._admit(hello, None)
        elif self.state is TargetState.GREETING and not hello.proof:
            self._nonce = self._target.draw(NONCE_BYTES)
            self.state = TargetState.PROVING
            self._emit(Send(HelloAck(hello.request_id, Status.UNAUTHENTICATED, nonce=self._nonce).encode()))
        elif self.state is TargetState.PROVING and secret is not None and is_proved(message, self._nonce, secret):
            self._admit(hello, secret)
        else:
            self._refuse(hello.request_id, Status.UNAUTHENTICATED, f"a wrong proof for trust domain {hello.trust_domain!r}")

    def _admit(self, hello: Hello, secret: bytes | None) -> None:
        target = self._target
        if target.is_shutting_down:
            self._refuse(hello.request_id, Status.SHUTTING_DOWN, "the target shuts down")
        elif target.trust_domains is not None and hello.trust_domain not in target.trust_domains:
            self._refuse(hello.request_id, Status.NOT_PERMITTED, f"trust domain {hello.trust_domain!r} is not served")
        elif hello.block_bytes not in (0, target.pool.block_bytes):
            self._refuse(hello.request_id, Status.UNSUPPORTED, f"no pool of blocks of {hello.block_bytes} octets")
        else:
            self.hello = hello
            ack = self.ack = self._grant(hello)
            self.state = TargetState.READY
            self._emit(Send((ack if secret is None else proved(ack, hello.nonce, secret)).encode()))

    def _grant(self, hello: Hello) -> HelloAck:
        target, limits = self._target, self._target.limits
        if isinstance(target.pool, BlockPool):
            quota = target.pool.grant(self.number, min(hello.quota, limits.quota))
            self.handle_base, self.handle_count = target.ranges.take(min(hello.handle_count, limits.handle_count))
        else:
            quota = 0
            self.handle_base = target.table.base_handle + target.reserved_handles
            self.handle_count = target.table.entry_count - target.reserved_handles
        return HelloAck(
            request_id=hello.request_id,
            block_bytes=target.pool.block_bytes,
            block_count=target.pool.block_count,
            quota=quota,
            handle_base=self.handle_base,
            handle_count=self.handle_count,
            table_base=target.table.base_handle,
            table_count=target.table.entry_count,
            outstanding=min(max(hello.outstanding, 1), limits.outstanding),
            inline_bytes=min(hello.inline_bytes, limits.inline_bytes),
            incarnation=target.incarnation,
            nonce=self._nonce,
            target_name=target.name,
        )

    def _refuse(self, request_id: int, status: Status, reason: str) -> None:
        nonce = self._nonce if status is Status.UNAUTHENTICATED else NO_NONCE
        self._emit(Send(HelloAck(request_id, status, nonce=nonce).encode()))
        self._close(reason)

    # Requests --------------------------------------------------------------------------------------------------------

    def _receive_request(self, message: bytes) -> None:
        try:
            request = parse(message)
        except Malformed:
            self._answer(Header.of_prefix(message), Status.MALFORMED)
            return
        match request:
            case Goodbye():
                self.state = TargetState.CLOSING
                self._close_if_answered()
                return
            case Hello():
                self._answer(Header.of_prefix(message), Status.MALFORMED)
                self._close("a second HELLO")
                return
            case Load() | Store() | Free() | Bind():
                status = self._admission(request)
            case Unknown() if request.header.version != VERSION:
                status = Status.MALFORMED
            case _:
                status = Status.UNSUPPORTED
        if self.state is TargetState.CLOSING:
            self._close("a request after GOODBYE")
        elif status is not _OK:
            self._answer(Header.of_prefix(message), status, None if status is Status.MALFORMED else _invalidated_stag(request))
        else:
            assert isinstance(request, (Load, Store, Free))
            self._start(request)

    def _admission(self, request: Request) -> Status:
        """Whether a well-formed request may run at all: form and capability, before anything looks at its handle."""
        assert self.ack is not None
        if request.request_id in self._outstanding:
            return Status.MALFORMED
        if isinstance(request, Store) and len(request.inline) > self.ack.inline_bytes:
            return Status.MALFORMED
        if isinstance(request, Bind) or request.flags & _RECORD and not self.ack.capabilities & Capability.RECORD_COMPLETION:
            return Status.UNSUPPORTED
        if self._target.is_shutting_down:
            return Status.SHUTTING_DOWN
        if len(self._outstanding) >= self.ack.outstanding:
            return Status.BUSY
        return _OK

    def _start(self, request: Load | Store | Free) -> None:
        self._outstanding.add(request.request_id)
        index = self._target.table.index_of(request.handle)
        if index is not None and index in self._lines:
            self._lines[index].append(request)
        else:
            self._run(request, index)

    def _run(self, request: Request, index: int | None) -> None:
        match request:
            case Load():
                self._load(request, index)
            case AllocStore():
                self._alloc_store(request, index)
            case Store():
                self._store(request, index)
            case Free():
                self._free(request, index)

    def _advance_line(self, index: int) -> None:
        """The request in progress for this entry is finished: run those behind it until one is in progress again."""
        line = self._lines.pop(index, None)
        while line and self.state is not TargetState.CLOSED:
            self._run(line.popleft(), index)
            if index in self._lines:
                self._lines[index] = line
                return

    def _load(self, request: Load, index: int | None) -> None:
        entry = None if index is None else self._target.table.entry(index)
        status = _check_bound(request, entry)
        if status is _OK:
            assert entry is not None
            if not entry.is_sealed and not request.flags & _ALLOW_UNSEALED:
                status = Status.NOT_SEALED
            elif entry.data_length > request.data.length:
                status = Status.LENGTH
        if status is not _OK or index is None or entry is None:
            self._fail(request, status)
            return
        # A later STORE would change an unsealed block under the Write, so it waits; a sealed block doesn't change.
        holds_line = not entry.is_sealed
        self._target.reading[index] += 1
        if holds_line:
            self._lines[index] = deque()
        token = self._token(_Loading(index, holds_line))
        data = request.data
        self._emit(Write(entry.block_offset, entry.data_length, data.stag, data.offset, token, snapshot=holds_line))
        self._succeed(request, entry)

    def _store(self, request: Store, index: int | None) -> None:
        pool = self._target.pool
        entry = None if index is None else self._target.table.entry(index)
        if not self._is_in_range(request.handle) or not isinstance(pool, BlockPool):
            status = Status.NOT_PERMITTED
        elif (status := _check_bound(request, entry)) is _OK:
            assert entry is not None
            status = Status.SEALED if entry.is_sealed else self._check_size(request)
        if status is not _OK or index is None or entry is None or not isinstance(pool, BlockPool):
            self._fail(request, status)
        elif request.flags & _INLINE:
            pool.write(entry.block_offset, request.inline)
            self._finish_store(request, index)
        else:
            self._fetch(_Storing(request, index, entry.block_offset))

    def _finish_store(self, request: Store, index: int) -> None:
        self._target.table.update_one(index, request.data.length, bool(request.flags & _SEAL))
        self._succeed(request, self._target.table.entry(index))

    def _alloc_store(self, request: AllocStore, index: int | None) -> None:
        target, pool = self._target, self._target.pool
        entry = None if index is None else target.table.entry(index)
        offset = None
        if entry is None or not self._is_in_range(request.handle):
            status = Status.NOT_PERMITTED
        elif entry.is_valid:
            status = Status.ALREADY_BOUND
        elif request.generation not in (0, entry.generation):
            status = Status.STALE_GENERATION
        elif (status := self._check_size(request)) is _OK:
            offset = pool.take(self.number) if isinstance(pool, BlockPool) else None
            status = Status.NO_SPACE if offset is None else _OK
        if index is None or offset is None or not isinstance(pool, BlockPool):
            self._fail(request, status)
            return
        target.reserve(index)
        operation = _Storing(request, index, offset)
        if request.flags & _INLINE:
            pool.write(offset, request.inline)
            self._finish_alloc_store(operation, True)
        else:
            self._fetch(operation)

    def _finish_alloc_store(self, operation: _Storing, ok: bool) -> None:
        request = operation.request
        if ok:
            sealed = bool(request.flags & _SEAL)
            self._target.bind_taken(operation.index, self.number, operation.block_offset, request.data.length, sealed)
            self._succeed(request, self._target.table.entry(operation.index))
        else:
            self._give_up(operation)
            self._fail(request, Status.ACCESS)

    def _free(self, request: Free, index: int | None) -> None:
        is_lent = not isinstance(self._target.pool, BlockPool)
        entry = None if index is None else self._target.table.entry(index)
        if not self._is_in_range(request.handle) or is_lent and request.generation == 0:
            status = Status.NOT_PERMITTED
        else:
            status = _check_bound(request, entry)
        if status is not _OK or index is None:
            self._fail(request, status)
        elif is_lent:
            self._target.clear(index)
            self._succeed(request, self._target.table.entry(index), with_block=False)
        else:
            # Answered by `drained`: the block is in the ring, and the unit of quota free, when the initiator hears of it.
            self._frees[index] = request
            self._lines[index] = deque()
            self._target.clear(index)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _is_in_range(self, handle: int) -> bool:
        return self.handle_base <= handle < self.handle_base + self.handle_count

    def _check_size(self, request: Store) -> Status:
        return _OK if 0 < request.data.length <= self._target.pool.block_bytes else Status.LENGTH

    def _fetch(self, operation: _Storing) -> None:
        """Read the data of a store; its handle's line waits until `read_done`."""
        self._lines[operation.index] = deque()
        data = operation.request.data
        self._emit(Read(operation.block_offset, data.length, data.stag, data.offset, self._token(operation)))

    def _give_up(self, operation: _Storing) -> None:
        pool = self._target.pool
        assert isinstance(pool, BlockPool)
        self._target.unreserve(operation.index)
        pool.give_back(self.number, operation.block_offset, clear=self._target.clears_blocks)

    def _token(self, operation: _Operation) -> int:
        token = self._next_token
        self._next_token += 1
        self._operations[token] = operation
        return token

    def _succeed(self, request: Request, entry: Entry, *, with_block: bool = True) -> None:
        offset, length = (entry.block_offset, entry.data_length) if with_block else (0, 0)
        self._complete(request, Completion(request.request_id, request.handle, entry.generation, _OK, length, offset))

    def _fail(self, request: Request, status: Status) -> None:
        assert status is not _OK
        self._complete(request, Completion(request.request_id, request.handle, self._generation(request.handle), status))

    def _complete(self, request: Request, completion: Completion) -> None:
        self._outstanding.remove(request.request_id)
        self._emit(Send(completion.encode(), _invalidated_stag(request)))
        self._close_if_answered()

    def _answer(self, header: Header, status: Status, invalidate_stag: int | None = None) -> None:
        """Answer a message that never became a request that runs."""
        answer = Completion(header.request_id, header.handle, self._generation(header.handle), status)
        self._emit(Send(answer.encode(), invalidate_stag))

    def _generation(self, handle: int) -> int:
        index = self._target.table.index_of(handle)
        return 0 if index is None else self._target.table.entry(index).generation

    def _emit(self, effect: Effect) -> None:
        """Queue an effect; behind a Close there is nothing more to do."""
        if self.state is not TargetState.CLOSED:
            self._effects.append(effect)

    def _close(self, reason: str) -> None:
        self._emit(Close(reason))
        self.state = TargetState.CLOSED

    def _close_if_answered(self) -> None:
        if self.state is TargetState.CLOSING and not self._outstanding:
            self._close("goodbye")

    def _release_if_drained(self) -> None:
        if not self._is_connected and not self._undrained and self.number in self._target.sessions:
            self._target.release(self)


def _check_bound(request: Request, entry: Entry | None) -> Status:
    """Range, binding and generation of a request for a bound handle."""
    if entry is None:
        return Status.NOT_PERMITTED
    if not entry.is_valid:
        return Status.NOT_BOUND
    if request.generation not in (0, entry.generation):
        return Status.STALE_GENERATION
    return _OK


def _invalidated_stag(request: Message) -> int | None:
    """What the completion of this request invalidates, whatever its status."""
    is_asked = isinstance(request, (Load, Store)) and request.flags & _INVALIDATE
    return request.data.stag if is_asked and isinstance(request, (Load, Store)) else None
