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
   completion, or with `disconnected`, which the driver calls only when none of the connection can touch memory any more. One-sided
   writes of DIRECT_ALLOC end with `partition_revoked`, or with `disconnected`.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol.constants import VERSION, Capability, Flag, Status
from kbtp_core.protocol.effects import Close, Effect, LoadMany, Read, Record, RevokePartition, Send, SendMany, Write
from kbtp_core.protocol.hello import Hello, HelloAck
from kbtp_core.protocol.partition import Partition, PartitionState
from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.table import Entry
from kbtp_core.protocol.target_batch import free_lent, judge_loads, plain_frees, plain_loads
from kbtp_core.protocol.target_grant import Expose
from kbtp_core.protocol.target_greeting import Greeting
from kbtp_core.protocol.target_operations import Loading, LoadingMany, Operation, Storing, invalidated_stag
from kbtp_core.protocol.target_operations import check_bound as _check_bound
from kbtp_core.protocol.wire import (
    AllocStore,
    Bind,
    Completion,
    Free,
    Goodbye,
    Header,
    Load,
    Request,
    Store,
    Unknown,
    encode_record,
    parse,
)

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target

# Plain names: looking a member up in its enumeration costs more than all else that is done with it.
_INLINE, _SEAL, _RECORD = int(Flag.INLINE), int(Flag.SEAL), int(Flag.RECORD)
_INVALIDATE, _ALLOW_UNSEALED = int(Flag.INVALIDATE), int(Flag.ALLOW_UNSEALED)
_CHECKSUM = int(Capability.CHECKSUM)
_OK = Status.OK


class TargetState(Enum):
    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"


class TargetSession:
    """Made by `Target.open_session`."""

    def __init__(self, target: Target, number: int, peer: str, offers: Capability, expose: Expose | None) -> None:
        self.number = number
        self.peer = peer
        self.state = TargetState.GREETING
        self.hello: Hello | None = None
        """What the initiator asked for, from READY on."""
        self.ack: HelloAck | None = None
        """What it was granted, from READY on."""
        self.handle_base = 0
        self.handle_count = 0
        self.partition: Partition | None = None
        """Its own part of the pool, if DIRECT_ALLOC was granted."""
        self._target = target
        self._greeting = Greeting(target, number, offers, expose)
        self._now = 0.0
        self._effects: list[Effect] = []
        self._outstanding: set[int] = set()
        self._lines: dict[int, deque[Request]] = {}  # entry index -> requests behind the one in progress
        self._operations: dict[int, Operation] = {}
        self._next_token = 1
        self._frees: dict[int, Free] = {}  # entry index -> the FREE that is answered once it has drained
        self._undrained: set[int] = set()  # entries of a session that is gone, not yet drained
        self._is_connected = True

    # Events ----------------------------------------------------------------------------------------------------------

    def receive(self, message: bytes, now: float) -> list[Effect]:
        """Take one message of the initiator."""
        self._now = now
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

    def receive_loads(self, raw: NDArray[np.uint8], now: float) -> list[Effect]:
        """Take n messages of a LOAD's length, (n, 40) octets, in the order received; as `receive` for each, but quicker where it can be."""
        requests = plain_loads(raw) if self._takes_plain_loads else None
        if requests is not None and self._outstanding.isdisjoint(requests["request_id"].tolist()):
            messages, at, entries = judge_loads(self._target, requests)
            lengths = entries["data_length"].astype(np.uint32)
            loaded = at[lengths != 0]
            if self._lines.keys().isdisjoint(at.tolist()) and self._target.begin_reading(loaded, entries[lengths != 0]):
                token = self._token(LoadingMany(loaded)) if loaded.size else 0
                self._emit(LoadMany(messages, requests, entries["block_offset"].astype(np.uint64), lengths, token))
                return self.take_effects()
        return [effect for row in raw for effect in self.receive(row.tobytes(), now)]

    @property
    def _takes_plain_loads(self) -> bool:
        """Whether nothing about this session needs a look at each LOAD by itself."""
        ack, target = self.ack, self._target
        if self.state is not TargetState.READY or ack is None or target.is_shutting_down or target.confined:
            return False
        return not ack.capabilities & _CHECKSUM and len(self._outstanding) < ack.outstanding

    def write_done(self, token: int, ok: bool, now: float) -> list[Effect]:
        """The RDMA Write of `token` has completed. One that failed is the end of its connection."""
        self._now = now
        operation = self._operations.pop(token)
        assert isinstance(operation, (Loading, LoadingMany))
        self._unread(operation)
        if not ok:
            self._close("an RDMA Write failed")
        elif isinstance(operation, Loading) and operation.holds_line:
            self._advance_line(operation.index)
        return self.take_effects()

    def read_done(self, token: int, ok: bool, now: float) -> list[Effect]:
        """The RDMA Read of `token` has completed: its data is in the block, or (not ok) anything may be."""
        self._now = now
        operation = self._operations.pop(token)
        assert isinstance(operation, Storing)
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

    def poll_tickets(self, now: float) -> None:
        """Notice tickets that the initiator took, and see to those whose time is over."""
        partition = self.partition
        if partition is None or not self._is_connected:
            return
        self._observe_tickets(partition, now)
        if partition.fault is not None:
            self._close(partition.fault)
        elif partition.is_overdue(now):
            if partition.state is PartitionState.OPEN:
                partition.state = PartitionState.REVOKING
                self._emit(RevokePartition())
            elif partition.state is PartitionState.REVOKED:
                for offset in partition.abandon_overdue(now):
                    self._pool().unticketed(self.number, offset)

    def partition_revoked(self, now: float) -> list[Effect]:
        """The Partition and Head STags are invalid: no RDMA Write of this session reaches the partition any more, nor any FetchAdd."""
        assert self.partition is not None
        self.partition.state = PartitionState.REVOKED
        self.poll_tickets(now)
        return self.take_effects()

    def disconnected(self, now: float) -> None:
        """The connection is gone and can touch no memory any more: undo what was in progress, free what this session bound."""
        if not self._is_connected:
            return
        self._is_connected = False
        self.state = TargetState.CLOSED
        self._effects.clear()
        self._lines.clear()
        for operation in self._operations.values():
            if not isinstance(operation, Storing):
                self._unread(operation)
            elif isinstance(operation.request, AllocStore):
                self._give_up(operation)
        self._operations.clear()
        self._undrained = set(self._frees)
        self._frees.clear()
        pool = self._target.pool
        if self.partition is not None:
            self._observe_tickets(self.partition, now)
            self._pool().dissolve(self.number, clear=self._target.clears_blocks)
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
    def is_idle(self) -> bool:
        """Whether its end would hurt nobody: it is ready, nothing of it is under way, and it owns no block of a ring's pool.

        An executor has things under way that are not seen here; what it stores is, for it owns the block first.
        """
        if self.state is not TargetState.READY or self._outstanding or self._operations or self._lines or self._effects or self._frees:
            return False
        pool = self._target.pool
        return not isinstance(pool, BlockPool) or pool.usage(self.number) == 0

    def is_reading(self, indexes: NDArray[np.intp]) -> bool:
        """Whether an RDMA Write of the block of one of these entries has not completed."""
        loading = (operation for operation in self._operations.values() if not isinstance(operation, Storing))
        read = (operation.index if isinstance(operation, Loading) else operation.indexes for operation in loading)
        return any(bool(np.isin(at, indexes).any()) for at in read)

    @property
    def target(self) -> Target:
        """Whose pool it uses; final once a HELLO was answered OK."""
        return self._target

    @property
    def is_granted(self) -> bool:
        """Whether a HELLO was answered OK, so that a quota and a handle range are held."""
        return self.ack is not None

    @property
    def has_tickets(self) -> bool:
        """Whether it takes tickets by itself, or has some whose time is not over."""
        partition = self.partition
        return partition is not None and self._is_connected and (partition.state is PartitionState.OPEN or bool(partition.taken_offsets))

    @property
    def allows_executor(self) -> bool:
        """Whether its plain requests may be run without this object: an executor knows no checksums and no trust domains."""
        return self.ack is not None and not self.ack.capabilities & Capability.CHECKSUM and self._target.allows_executor

    @property
    def unanswered_count(self) -> int:
        return len(self._outstanding)

    def take_effects(self) -> list[Effect]:
        """What is to be done now, in order; each effect is given out once."""
        effects, self._effects = self._effects, []
        return effects

    # HELLO -----------------------------------------------------------------------------------------------------------

    def _receive_hello(self, message: bytes) -> None:
        reply = self._greeting.receive(message)
        granted = reply.granted
        if reply.answer is not None:
            self._emit(Send(reply.answer))
        if granted is not None:
            self._target = self._target.hand_over(self, granted.target)
            self.hello, self.ack = reply.hello, granted.ack
            self.handle_base, self.handle_count, self.partition = granted.handle_base, granted.handle_count, granted.partition
            self.state = TargetState.READY
        elif reply.close_reason is not None:
            self._close(reply.close_reason)
        else:
            self.state = TargetState.PROVING

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
            self._answer(Header.of_prefix(message), status, None if status is Status.MALFORMED else invalidated_stag(request))
        else:
            assert isinstance(request, (Load, Store, Free, Bind))
            self._start(request)

    def _admission(self, request: Request) -> Status:
        """Whether a well-formed request may run at all: form and capability, before anything looks at its handle."""
        assert self.ack is not None
        if request.request_id in self._outstanding:
            return Status.MALFORMED
        if isinstance(request, Store) and len(request.inline) > self.ack.inline_bytes:
            return Status.MALFORMED
        needed = Capability.DIRECT_ALLOC if isinstance(request, Bind) else Capability.RECORD_COMPLETION if request.flags & _RECORD else 0
        if needed & ~self.ack.capabilities:
            return Status.UNSUPPORTED
        if request.flags & _RECORD and request.flags & _INVALIDATE:
            return Status.MALFORMED  # only a Send can invalidate
        if self._target.is_shutting_down:
            return Status.SHUTTING_DOWN
        if len(self._outstanding) >= self.ack.outstanding:
            return Status.BUSY
        return _OK

    def _start(self, request: Request) -> None:
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
            case Bind():
                self._bind(request, index)

    def _advance_line(self, index: int) -> None:
        """The request in progress for this entry is finished: run those behind it until one is in progress again."""
        line = self._lines.pop(index, None)
        while line and self.state is not TargetState.CLOSED:
            self._run(line.popleft(), index)
            if index in self._lines:
                self._lines[index] = line
                return

    def _load(self, request: Load, index: int | None) -> None:
        at = np.arange(0) if index is None else np.array([index])
        self._target.hold(at)
        entry = None if index is None else self._target.table.entry(index)
        status = _check_bound(request, entry)
        if index is not None and self._is_forbidden(index):
            status = Status.NOT_PERMITTED
        if status is _OK:
            assert entry is not None
            if not entry.is_sealed and not request.flags & _ALLOW_UNSEALED:
                status = Status.NOT_SEALED
            elif entry.data_length > request.data.length:
                status = Status.LENGTH
        if status is not _OK or index is None or entry is None:
            self._target.end_reading(at)
            self._fail(request, status)
            return
        # A later STORE would change an unsealed block under the Write, so it waits; a sealed block doesn't change.
        holds_line = not entry.is_sealed
        if holds_line:
            self._lines[index] = deque()
        token = self._token(Loading(index, holds_line))
        data = request.data
        may_change = holds_line or index in self._target.confined
        self._emit(Write(entry.block_offset, entry.data_length, data.stag, data.offset, token, snapshot=may_change))
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
            self._fetch(Storing(request, index, entry.block_offset))

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
        operation = Storing(request, index, offset)
        if request.flags & _INLINE:
            pool.write(offset, request.inline)
            self._finish_alloc_store(operation, True)
        else:
            self._fetch(operation)

    def _finish_alloc_store(self, operation: Storing, ok: bool) -> None:
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

    def _bind(self, request: Bind, index: int | None) -> None:
        target, partition = self._target, self.partition
        assert partition is not None
        entry = None if index is None else target.table.entry(index)
        self._observe_tickets(partition, self._now)
        if entry is None or not self._is_in_range(request.handle):
            status = Status.NOT_PERMITTED
        elif entry.is_valid:
            status = Status.ALREADY_BOUND
        elif request.generation not in (0, entry.generation):
            status = Status.STALE_GENERATION
        elif not 0 < request.data_length <= target.pool.block_bytes:
            status = Status.LENGTH
        else:
            status = partition.check(request.ticket, request.block_offset)
        if status is _OK and index is not None:
            partition.consume(request.ticket)
            target.reserve(index)
            sealed = bool(request.flags & _SEAL)
            target.bind_taken(index, self.number, request.block_offset, request.data_length, sealed)
            if self.hello is not None:
                target.confined[index] = self.hello.trust_domain
            self._succeed(request, target.table.entry(index))
        else:
            self._fail(request, status)
        if partition.fault is not None:
            self._close(partition.fault)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _unread(self, operation: Loading | LoadingMany) -> None:
        """Its RDMA Writes touch their blocks no more."""
        self._target.end_reading(np.array([operation.index]) if isinstance(operation, Loading) else operation.indexes)

    def _observe_tickets(self, partition: Partition, now: float) -> None:
        for offset in partition.observe(now):
            self._pool().ticketed(self.number, offset)

    def _pool(self) -> BlockPool:
        assert isinstance(self._target.pool, BlockPool)
        return self._target.pool

    def _is_forbidden(self, index: int) -> bool:
        """Whether the block of an entry, which was held before it was looked at, must not be served to this session."""
        domain = self._target.confined.get(index)
        return domain is not None and (self.hello is None or domain != self.hello.trust_domain)

    def _is_in_range(self, handle: int) -> bool:
        return self.handle_base <= handle < self.handle_base + self.handle_count

    def _check_size(self, request: Store) -> Status:
        return _OK if 0 < request.data.length <= self._target.pool.block_bytes else Status.LENGTH

    def _fetch(self, operation: Storing) -> None:
        """Read the data of a store; its handle's line waits until `read_done`."""
        self._lines[operation.index] = deque()
        data = operation.request.data
        self._emit(Read(operation.block_offset, data.length, data.stag, data.offset, self._token(operation)))

    def _give_up(self, operation: Storing) -> None:
        self._target.unreserve(operation.index)
        self._pool().give_back(self.number, operation.block_offset, clear=self._target.clears_blocks)

    def _token(self, operation: Operation) -> int:
        token = self._next_token
        self._next_token += 1
        self._operations[token] = operation
        return token

    def _succeed(self, request: Request, entry: Entry, *, with_block: bool = True) -> None:
        offset, length = (entry.block_offset, entry.data_length) if with_block else (0, 0)
        checksum = 0
        if with_block and self.ack is not None and self.ack.capabilities & _CHECKSUM:
            checksum = self._target.checksum(request.handle - self._target.table.base_handle)
        self._complete(request, Completion(request.request_id, request.handle, entry.generation, _OK, length, offset, checksum))

    def _fail(self, request: Request, status: Status) -> None:
        assert status is not _OK
        self._complete(request, Completion(request.request_id, request.handle, self._generation(request.handle), status))

    def _complete(self, request: Request, completion: Completion) -> None:
        self._outstanding.remove(request.request_id)
        if not isinstance(request, Bind) and request.record is not None:
            slot = request.record
            self._emit(Record(encode_record(completion), slot.stag, slot.offset, slot.offset & 0xFFFF_FFFF))
        else:
            self._emit(Send(completion.encode(), invalidated_stag(request)))
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

    def _close(self, reason: str, error: Exception | None = None) -> None:
        self._emit(Close(reason, error))
        self.state = TargetState.CLOSED

    def _close_if_answered(self) -> None:
        if self.state is TargetState.CLOSING and not self._outstanding:
            self._close("goodbye")

    def _release_if_drained(self) -> None:
        if not self._is_connected and not self._undrained and self.number in self._target.sessions:
            self._target.release(self)
