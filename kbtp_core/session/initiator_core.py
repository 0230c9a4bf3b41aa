"""An initiator on a fabric, without threads and without waiting: completions and `now` go in, batches of work requests come out.

1. Receives for all that may be outstanding are posted before the first request is sent, and a receive is posted again before its
   credit is used again: a peer never finds none.
2. A batch whose deadline passes is fenced: its region is closed, so that nothing lands there any more, and only then it fails.
   What is outstanding of it keeps its credit until it is answered.
3. After the session's end every batch is done, with the answers that came and an error; one that lacks answers is fenced first, as
   the connection may outlive the session.
"""

from __future__ import annotations

import heapq
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import DeadlineExceeded, KbtpError, SessionClosed
from kbtp_core.fabric.api import (
    COMPLETION,
    FIRST_MESSAGE,
    WORK_REQUEST,
    Array,
    CompletionQueue,
    CompletionStatus,
    Fabric,
    Op,
    Puts,
    QueueLimits,
    QueuePair,
    QueuePairClosed,
    Region,
    Requester,
    RunsLoads,
    RunsMessages,
    WrFlag,
)
from kbtp_core.fabric.client_calls import RunsLoadCalls
from kbtp_core.protocol.constants import (
    COMPLETION_BYTES,
    DESCRIPTOR_BYTES,
    HEADER_BYTES,
    HELLO_ACK_LIMIT_BYTES,
    HELLO_LIMIT_BYTES,
    NO_STATUS,
    REQUEST_BYTES,
    Capability,
    Flag,
    Opcode,
)
from kbtp_core.protocol.direct import DirectAllocator, DirectLoad, DirectStore
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.initiator import HelloParameters, Initiator, InitiatorState
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.keyed import Ids, KeyedOpcode, is_keyed, items_limit, message_limit
from kbtp_core.protocol.keyed_batch import Encode
from kbtp_core.session.direct import DIRECT_DEPTH, DIRECT_ID, DirectOperations, PendingDirect
from kbtp_core.session.loads import PendingLoads
from kbtp_core.session.messages import PendingLookups, PendingMessages, PendingPuts
from kbtp_core.session.pending import PendingBatch
from kbtp_core.session.records import RecordSlots
from kbtp_core.session.slots import ReceiveRows, SendRows

_START, _GREETING, _READY = InitiatorState.START, InitiatorState.GREETING, InitiatorState.READY
_CLOSING, _CLOSED = InitiatorState.CLOSING, InitiatorState.CLOSED
_FEW: Final = 4  # completions that cost less one by one than as arrays
_FEW_DEADLINES: Final = 1024
_LOADS: Final = int(Op.LOADS)
_RECEIVE: Final = int(Op.RECEIVE)
_REQUESTER_FLAGS: Final = int(Flag.ALLOW_UNSEALED)  # the others change how a LOAD is answered
SPARE_RECEIVES: Final = 8
_SPARE_SENDS: Final = 2  # GOODBYE passes outstanding requests
_GREETING_ID: Final = 1 << 32  # wr_id of the first receive for a HELLO_ACK
_DIRECT_MODES: Final = int(Capability.DIRECT_LOAD | Capability.DIRECT_ALLOC)
_RECEIVED_WORD: Final = int(
    np.array([(Op.RECEIVE, CompletionStatus.OK, 0)], [("op", "u1"), ("status", "u1"), ("flags", "u2")]).view(np.uint32)[0]
)
_GREETINGS: Final = 2  # a HELLO_ACK, and a GOODBYE that may follow at once


_Elsewhere = TypeVar("_Elsewhere", PendingLoads, PendingMessages, PendingPuts, PendingLookups)


class InitiatorCore:
    """A session with the target at host:port; `start` begins it, `process` moves it on."""

    def __init__(
        self,
        fabric: Fabric,
        cq: CompletionQueue,
        host: str,
        port: int,
        parameters: HelloParameters,
        *,
        incarnation: int,
        secret: bytes | None = None,
        startup_timeout_s: float = 5.0,
    ) -> None:
        self.peer = f"{host}:{port}"
        self.protocol = Initiator(parameters, peer=self.peer, incarnation=incarnation, secret=secret)
        self.is_disconnected = False
        self.pd = fabric.alloc_pd()
        self._address = (host, port)
        direct_depth = DIRECT_DEPTH if parameters.capabilities & _DIRECT_MODES else 0
        limits = QueueLimits(
            send_depth=max(parameters.outstanding, 1) + _SPARE_SENDS + _GREETINGS + direct_depth,
            receive_depth=max(parameters.outstanding, 1) + SPARE_RECEIVES + _GREETINGS,
            startup_timeout_s=startup_timeout_s,
        )
        self.qp: QueuePair = fabric.create_qp(self.pd, cq, limits)
        self.direct = DirectOperations(self.qp, self.pd, self.peer)
        longest = message_limit(parameters.inline_bytes) if parameters.capabilities & Capability.STORE else 0  # may come into one of them
        self._greetings = ReceiveRows(self.pd, _GREETINGS, max(longest, HELLO_ACK_LIMIT_BYTES), _GREETING_ID)
        self._hellos = SendRows(self.pd, 2, HELLO_LIMIT_BYTES)
        self._sends: SendRows | None = None
        self._receives: ReceiveRows | None = None
        self._records: RecordSlots | None = None
        self._pending: dict[int, PendingBatch] = {}
        self._counts_blocks = False  # whoever takes blocks by himself has to know how many he has
        self._requester: Requester | None = None
        self._messages: RunsMessages | None = None  # the same one, if it sends other messages, too
        self._loads: dict[int, PendingLoads | PendingMessages] = {}
        self._deadlines: list[tuple[float, int]] = []  # heap of (deadline, batch sequence)

    # Session ---------------------------------------------------------------------------------------------------------

    @property
    def is_ready(self) -> bool:
        return self.protocol.state is _READY

    @property
    def error(self) -> KbtpError | None:
        """Why the session has ended or is ending."""
        return self.protocol.error

    @property
    def has_loads(self) -> bool:
        """LOADs are at the provider's requester."""
        return bool(self._loads)

    @property
    def is_over(self) -> bool:
        return self.is_disconnected or self.protocol.state is _CLOSED

    def start(self) -> None:
        self.qp.post_receive(self._greetings.requests(np.arange(_GREETINGS, dtype=np.int64)))
        self.qp.connect(*self._address)

    def process(self, completions: Array, now: float) -> None:
        """Take completions (dtype COMPLETION) of this session's queue pair, fail what is overdue, send what credit allows."""
        if not len(completions):
            pass
        elif len(completions) <= _FEW and self._requester is not None:
            for completion in completions.tolist():
                if completion[2] == _RECEIVE:
                    self._on_received(np.array([completion], COMPLETION))
                else:
                    self._on_other(completion)
        elif not self._take_answers(completions):
            received = completions["op"] == Op.RECEIVE
            if np.count_nonzero(received):
                self._on_received(completions[received])
            for completion in completions[~received].tolist():
                self._on_other(completion)
        if self._deadlines and self._deadlines[0][0] <= now:
            self.expire(now)
        if self.direct.is_busy:
            self.direct.step(now)
        if self.protocol.has_unsent:
            self.flush()

    def loads_done(self, sequences: list[int]) -> None:
        """The requester has all answers to these batches; `process` follows."""
        before = self.protocol.state
        for sequence in sequences:
            pending = self._loads.pop(sequence, None)
            if pending is not None:  # else it was given up
                pending.finish(None)
                if self._counts_blocks:
                    self.protocol.bound_count += pending.bound_step()
                self.protocol.answered_elsewhere(pending.count)
        if self.protocol.state is not before:
            self._settle_after(before)

    def goodbye(self) -> None:
        """Announce the end, if the session is ready; requests that are outstanding are still answered."""
        if self.is_ready:
            self._send_control(self.protocol.goodbye())
            self._settle_after(self.protocol.state)

    def flush(self) -> None:
        """Post the requests that credit and the send queue have room for."""
        sends = self._sends
        if sends is None or not self.protocol.has_unsent:
            return
        if self._requester is not None and self._requester.unsent_count:
            return  # order: those LOADs were asked for first; their LOADS completion comes back here
        while (window := self.protocol.take_window(sends.free_count)) is not None:
            batch, start, stop = window
            if batch.has_records and self._records is not None:
                batch.set_records(start, self._records.stag, self._records.take(stop - start))
            self._post(sends, batch.messages[start:stop], None if batch.message_lengths is None else batch.message_lengths[start:stop])

    def expire(self, now: float) -> None:
        """Fence and fail the batches whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, sequence = heapq.heappop(self._deadlines)
            pending = self._pending.get(sequence) or self._loads.get(sequence)
            if pending is not None and pending.deadline == deadline:
                self.give_up(pending)

    # Requests --------------------------------------------------------------------------------------------------------

    def submit(self, batch: Batch, region: Region | None, deadline: float) -> PendingBatch:
        """Follow a batch that was queued on `protocol`, and send what can be sent of it.

        It is completed by records where they were granted, unless it is a BIND or has something to invalidate.
        """
        if (
            self._records is not None
            and batch.takes_records
            and batch.opcode != Opcode.BIND
            and not batch.messages[0, 3] & int(Flag.INVALIDATE)
        ):
            self.protocol.with_records(batch)
        pending = PendingBatch(batch, region, deadline)
        self._pending[batch.sequence] = pending
        self._watch(deadline, batch.sequence)
        self.flush()
        return pending

    def ask(self, encode: Encode, deadline: float) -> PendingBatch | PendingMessages:
        """Send keyed messages. Raises ValueError if the target did not grant STORE, SessionClosed."""
        if self._messages is None or self.protocol.has_unsent:
            return self.submit(self.protocol.ask(encode), None, deadline)
        self.protocol.expect_store()
        sequence = self._draw_sequence()
        messages = encode(sequence << 32 | FIRST_MESSAGE)
        try:
            return self._follow(PendingMessages(sequence, self._messages.post_messages(sequence, messages), None, deadline))
        except QueuePairClosed:
            raise self._ended() from None

    def put(self, puts: Puts, region: Region | None, deadline: float) -> PendingPuts | None:
        """Send values for a keyed store, in one go; None if this session can't. Raises as `ask` does."""
        if self._messages is None or self.protocol.has_unsent:
            return None
        self.protocol.expect_store()
        sequence = self._draw_sequence()
        try:
            return self._follow(PendingPuts(sequence, self._messages.post_puts(sequence, puts), region, deadline))
        except QueuePairClosed:
            raise self._ended() from None

    def lookup(self, ids: Ids, tenant: int, flags: int, deadline: float) -> PendingLookups | None:
        """Send LOOKUPs; None if there are none, or this session has to send them by `ask`. Raises as `ask` does."""
        if self._messages is None or self.protocol.has_unsent or not len(ids):
            return None
        self.protocol.expect_store()
        assert self.protocol.ack is not None
        values_each = items_limit(KeyedOpcode.LOOKUP, self.protocol.ack.inline_bytes)
        sequence = self._draw_sequence()
        try:
            return self._follow(PendingLookups(sequence, self._messages.post_lookups(sequence, tenant, flags, values_each, ids), deadline))
        except QueuePairClosed:
            raise self._ended() from None

    @property
    def may_call(self) -> bool:
        """The provider may make a whole call now: no order to keep, and no blocks to count."""
        return self._messages is not None and self.is_ready and not self.protocol.has_unsent and not self._counts_blocks

    @property
    def load_caller(self) -> RunsLoadCalls | None:
        """The requester, if it may make whole calls now."""
        requester: object = self._requester
        return requester if isinstance(requester, RunsLoadCalls) and self.may_call else None

    def _ended(self) -> SessionClosed:
        self._lost()
        return SessionClosed(f"the session with {self.peer} has ended")

    def _draw_sequence(self) -> int:
        """For a batch of the requester."""
        sequence = self.protocol.draw_sequence()
        while sequence in self._loads:
            sequence = self.protocol.draw_sequence()
        return sequence

    def _follow(self, pending: _Elsewhere) -> _Elsewhere:
        self._loads[pending.sequence] = pending
        self.protocol.elsewhere_count += pending.count
        self._watch(pending.deadline, pending.sequence)
        return pending

    def load(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        deadline: float,
        flags: int,
    ) -> PendingBatch | PendingLoads:
        """LOAD blocks: by the provider's requester where it can keep the order, else by the protocol machine."""
        if self._requester is None or self.protocol.has_unsent or (flags and int(flags) & ~_REQUESTER_FLAGS):
            return self.submit(self.protocol.load(handles, generations, region.stag, offsets, lengths, flags), region, deadline)
        sequence = self._draw_sequence()
        try:
            requests = self._requester.post(sequence, handles, generations, region.stag, offsets, lengths, flags)
        except QueuePairClosed:
            raise self._ended() from None
        return self._follow(PendingLoads(sequence, requests, region, deadline))

    def load_direct(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        deadline: float,
        now: float,
    ) -> PendingDirect:
        """Read blocks by DIRECT_LOAD. Raises ValueError if the target did not grant it, SessionClosed."""
        ack = self._granted(Capability.DIRECT_LOAD)
        wanted = np.atleast_1d(np.asarray(handles, np.uint64))
        machine = DirectLoad(
            ack,
            wanted,
            _spread(generations, len(wanted), np.uint16),
            _spread(offsets, len(wanted), np.uint64),
            _spread(lengths, len(wanted), np.uint32),
        )
        return self.direct.load(machine, region, deadline, now)

    def store_direct(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        deadline: float,
        now: float,
        flags: int = Flag.SEAL,
    ) -> PendingDirect:
        """Take blocks by DIRECT_ALLOC, write them and BIND them. Raises ValueError if the target did not grant it, SessionClosed."""
        ack = self._granted(Capability.DIRECT_ALLOC)
        if self.direct.allocator is None:
            self.direct.allocator = DirectAllocator(ack)
        wanted = np.atleast_1d(np.asarray(handles, np.uint64))
        count, sizes = len(wanted), _spread(lengths, len(wanted), np.uint32)
        wanted_generations = _spread(generations, count, np.uint16)
        machine = DirectStore(self.direct.allocator, self.protocol.bound_count, _spread(offsets, count, np.uint64), sizes)

        def bind(at: NDArray[np.intp]) -> PendingBatch:
            batch = self.protocol.bind(wanted[at], wanted_generations[at], machine.tickets[at], sizes[at], machine.block_offset[at], flags)
            return self.submit(batch, region, deadline)

        return self.direct.store(machine, region, deadline, now, bind)

    def _granted(self, capability: Capability) -> HelloAck:
        self.protocol.expect_ready()
        ack = self.protocol.ack
        assert ack is not None
        if not ack.capabilities & capability:
            raise ValueError(f"{self.peer} did not grant {capability.name}. Let its operator list our trust domain, or use requests")
        return ack

    def give_up(self, pending: PendingBatch | PendingLoads | PendingMessages | PendingDirect) -> None:
        """Fence a batch now, as if its deadline had passed."""
        if isinstance(pending, PendingDirect):
            if pending.binding is not None:
                self.give_up(pending.binding)
            self.direct.give_up(pending)
        elif isinstance(pending, (PendingLoads, PendingMessages)):
            if not pending.done:
                self._end_loads(pending.sequence, self._overdue(pending.unanswered_count, pending.count))
        elif not pending.done:
            self._expire(pending)

    def _watch(self, deadline: float, sequence: int) -> None:
        """Remember a deadline. Those of batches that are done stay in the heap until they pass, or until they are too many."""
        heapq.heappush(self._deadlines, (deadline, sequence))
        if len(self._deadlines) > _FEW_DEADLINES + 4 * (len(self._pending) + len(self._loads)):
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._pending or entry[1] in self._loads]
            heapq.heapify(self._deadlines)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _end_loads(self, sequence: int, error: KbtpError) -> None:
        """Fence LOADs that the requester has, and fail them."""
        pending = self._loads.pop(sequence)
        if pending.region is not None:
            pending.region.close()
        pending.abandon()
        pending.finish(error)
        self.protocol.elsewhere_count -= pending.count

    def _overdue(self, unanswered_count: int, count: int) -> DeadlineExceeded:
        return DeadlineExceeded(
            f"{unanswered_count} of {count} requests to {self.peer} were not answered in time; their memory is fenced. "
            f"Allow more time, or look at what the target does"
        )

    def _expire(self, pending: PendingBatch) -> None:
        if pending.region is not None:
            pending.region.close()
        self.protocol.abandon(pending.batch)
        del self._pending[pending.batch.sequence]
        unanswered = int(np.count_nonzero(pending.batch.status == NO_STATUS))
        pending.finish(self._overdue(unanswered, pending.count))

    def _take_answers(self, completions: Array) -> bool:
        """The usual case in as few array operations as can be: nothing but COMPLETIONs came. False, and nothing done, if not."""
        receives = self._receives
        words = np.ascontiguousarray(completions).view(np.uint64).reshape(-1, 4)  # wr_id; qp, op, status, flags; length, STag; value
        if receives is None or not self.is_ready:
            return False
        if np.count_nonzero(words[:, 1] >> 32 == _RECEIVED_WORD) + np.count_nonzero(words[:, 2] == COMPLETION_BYTES) != 2 * len(words):
            return False
        rows = words[:, 0].astype(np.int64)
        if int(rows.max()) >= _GREETING_ID:
            return False
        before = self.protocol.state
        self._on_done(self.protocol.receive_completions(receives.memory[rows, :COMPLETION_BYTES]))
        self._post_receives(receives, rows)
        if self.protocol.state is not before:
            self._settle_after(before)
        return True

    def _on_received(self, completions: Array) -> None:
        """Messages, in the order that they came. A run of COMPLETIONs is one array."""
        completions = completions[completions["status"] == CompletionStatus.OK]
        if not len(completions):
            return
        before = self.protocol.state
        receives = self._receives
        wr_ids = completions["wr_id"]
        is_plain = (wr_ids < _GREETING_ID) & (completions["length"] == COMPLETION_BYTES)
        if receives is not None and np.count_nonzero(is_plain) == len(completions):
            rows = wr_ids.astype(np.int64)
            self._on_done(self.protocol.receive_completions(receives.memory[rows, :COMPLETION_BYTES]))
        else:
            for wr_id, length in zip(wr_ids.tolist(), completions["length"].tolist(), strict=True):
                self._on_message(wr_id, length)
            rows = wr_ids[wr_ids < _GREETING_ID].astype(np.int64)
        if receives is not None and len(rows):
            self._post_receives(receives, rows)
        if self.protocol.state is not before:
            self._settle_after(before)

    def _on_message(self, wr_id: int, length: int) -> None:
        if wr_id >= _GREETING_ID:
            message = self._greetings.message(wr_id - _GREETING_ID, length)
        else:
            assert self._receives is not None
            message = self._receives.message(wr_id, length)
        if length == COMPLETION_BYTES and self._receives is not None:
            self._on_done(self.protocol.receive_completions(np.frombuffer(message, np.uint8).reshape(1, -1)))
            return
        if length > HEADER_BYTES and is_keyed(message[1]):
            if self._messages is not None and self._messages.settle(message):
                return
            self._on_done(self.protocol.receive_keyed(message))
            return
        was_ready = self.is_ready
        for answer in self.protocol.receive(message):
            self._post_receives(self._greetings, np.array([wr_id - _GREETING_ID], np.int64))
            self._send_control(answer)
        if self.is_ready and not was_ready:
            self._on_ready()

    def _on_ready(self) -> None:
        ack = self.protocol.ack
        assert ack is not None
        outstanding = ack.outstanding  # never more than was asked for, but for one where none was
        longest = message_limit(ack.inline_bytes) if ack.capabilities & Capability.STORE else 0
        self._sends = SendRows(self.pd, outstanding + _SPARE_SENDS, max(longest, REQUEST_BYTES + DESCRIPTOR_BYTES + ack.inline_bytes))
        if ack.capabilities & Capability.RECORD_COMPLETION:
            self._records = RecordSlots(self.pd, outstanding)
        self._receives = ReceiveRows(self.pd, outstanding + SPARE_RECEIVES, max(longest, COMPLETION_BYTES))
        self._counts_blocks = bool(ack.capabilities & Capability.DIRECT_ALLOC)
        share = outstanding * 3 // 4
        if share and isinstance(self.qp, RunsLoads):
            self._requester = self.qp.create_requester(share)
            self._messages = self._requester if isinstance(self._requester, RunsMessages) else None
            self.protocol.reserved_count = share
        self._post_receives(self._receives, np.arange(self._receives.count, dtype=np.int64))

    def _on_done(self, batches: list[Batch]) -> None:
        for batch in batches:
            pending = self._pending.pop(batch.sequence, None)
            if pending is not None:
                pending.finish(self.error if np.count_nonzero(batch.status == NO_STATUS) else None)

    def _settle_after(self, before: InitiatorState) -> None:
        """The protocol has left the state `before`: fail what will get no answer, and close what is over."""
        state = self.protocol.state
        if state in (_CLOSING, _CLOSED):
            over = state is _CLOSED
            for sequence in list(self._loads) if over else ():
                self._end_loads(sequence, self.error or SessionClosed(f"the session with {self.peer} has ended"))
            if over:
                self.direct.fail_all(self.error or SessionClosed(f"the session with {self.peer} has ended"))
            for pending in list(self._pending.values()):
                if over or pending.batch.is_done:
                    del self._pending[pending.batch.sequence]
                    is_whole = not np.count_nonzero(pending.batch.status == NO_STATUS)
                    if over and not is_whole and pending.region is not None:
                        pending.region.close()
                    pending.finish(None if is_whole else self.error or SessionClosed(f"the session with {self.peer} has ended"))
        if state is _CLOSED and before is not _CLOSED and not self.is_disconnected:
            self.qp.close()

    def _on_other(self, completion: tuple[Any, ...]) -> None:
        wr_id, _, op, status, _, _, _, value = completion
        before = self.protocol.state
        if op == _LOADS:
            if status == 0:  # flushed ones end with DISCONNECTED, which knows why
                self.loads_done([wr_id])
        elif op == Op.CONNECTED:
            if before is _START:
                self._send_control(self.protocol.hello())
        elif op == Op.DISCONNECTED:
            self.is_disconnected = True
            self.protocol.disconnected(_why(status, value))
            self._settle_after(before)
        elif op == Op.RECEIVE_IMMEDIATE:
            if status == CompletionStatus.OK:
                self._on_record(wr_id, value)
        elif wr_id == DIRECT_ID:
            self.direct.on_completion(status, value)
        elif status == CompletionStatus.OK and self._sends is not None and wr_id:
            self._sends.release(wr_id)

    def _on_record(self, wr_id: int, immediate: int) -> None:
        before = self.protocol.state
        record = None if self._records is None else self._records.arrived(immediate)
        if record is None:
            self.protocol.break_off(f"the immediate {immediate:#x} announces no record")
        else:
            self._on_done(self.protocol.receive_records(record))
        if self._receives is not None and wr_id < _GREETING_ID:
            self._post_receives(self._receives, np.array([wr_id], np.int64))
        if self.protocol.state is not before:
            self._settle_after(before)

    def _send_control(self, message: bytes) -> None:
        """HELLO, HELLO with proof, or GOODBYE."""
        rows = self._hellos if self._sends is None else self._sends
        if rows.free_count:
            self._post(rows, np.frombuffer(message, np.uint8).reshape(1, -1), None)

    def _post(self, sends: SendRows, messages: NDArray[np.uint8], lengths: ArrayLike | None) -> None:
        rows, mark = sends.take(len(messages))
        sends.memory[rows, : messages.shape[1]] = messages
        requests = np.zeros(len(messages), WORK_REQUEST)
        requests["op"] = Op.SEND
        requests["length"] = messages.shape[1] if lengths is None else lengths
        requests["local_stag"] = sends.region.stag
        requests["local_offset"] = rows * sends.stride
        if sends is self._sends and 2 * sends.free_count < sends.count:  # one completion releases many rows
            requests["wr_id"][-1] = mark
            requests["flags"][-1] = WrFlag.SIGNALED
        try:
            self.qp.post_send(requests)
        except QueuePairClosed:
            self._lost()

    def _post_receives(self, receives: ReceiveRows, rows: NDArray[np.int64]) -> None:
        try:
            self.qp.post_receive(receives.requests(rows))
        except QueuePairClosed:
            self._lost()

    def _lost(self) -> None:
        """The queue pair has ended, and DISCONNECTED, which says why, is on its way: send nothing more until then."""
        self._sends = None
        self._requester = None
        self._messages = None


def _spread(values: ArrayLike, count: int, kind: type[Any]) -> NDArray[Any]:
    """`values` as n of a kind; a scalar stands for all."""
    return np.broadcast_to(np.asarray(values, kind), (count,))


def _why(status: int, value: int) -> str:
    if status == CompletionStatus.CONNECT_FAILED:
        return "it could not be connected to. Is a target listening there?"
    if value:
        return f"the connection broke (Terminate layer {value >> 12 & 15}, type {value >> 8 & 15}, code {value & 255:#04x})"
    return "the peer closed the connection"
