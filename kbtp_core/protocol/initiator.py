"""The initiator's side of a session, without sockets and without a clock.

    START --hello--> GREETING --HELLO_ACK OK--> READY --goodbye, either side--> CLOSING --all answered--> CLOSED
                     GREETING --UNAUTHENTICATED, once--> PROVING --HELLO_ACK OK--> READY

Any state ends in CLOSED with `error` set if the peer refuses, breaks the protocol, or goes away.

Requests live in batches. Request ID = batch sequence << 32 | index in the batch, so that an array of completions finds its places
without a Python object per request. Three rules:
1. Never more requests outstanding than were granted: `take_window` hands out what credit allows, in order.
2. A completion must match a request that is outstanding; anything else, or a second answer, ends the session.
3. Results are final once written; a request that was never answered keeps status NO_STATUS.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import KbtpError, Malformed, SessionClosed, SessionRefused
from kbtp_core.protocol.auth import is_proved, proved
from kbtp_core.protocol.constants import (
    NONCE_BYTES,
    REQUEST_BYTES,
    Capability,
    Flag,
    Opcode,
    Status,
    status_name,
)
from kbtp_core.protocol.hello import Hello, HelloAck
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.keyed import FIRST_KEYED, LoadRange
from kbtp_core.protocol.keyed_batch import Encode, KeyedBatch, adopted_count
from kbtp_core.protocol.wire import (
    Completion,
    DataDescriptor,
    Goodbye,
    Header,
    decode_completions,
    decode_records,
    encode_binds,
    encode_frees,
    encode_requests,
    parse,
)

_SEQUENCES: Final = 1 << 31  # those above are the provider's, for calls that it makes by itself
_INDEXES: Final = 1 << 32
_MAX_LOG2_SLOTS: Final = 32
_STORE: Final = int(Capability.STORE)
_BOUND_STEP: Final = {int(Opcode.ALLOC_STORE): 1, int(Opcode.BIND): 1, int(Opcode.FREE): -1}


class InitiatorState(Enum):
    START = "start"
    GREETING = "greeting"
    PROVING = "proving"
    READY = "ready"
    CLOSING = "closing"
    CLOSED = "closed"


# Looked up once: an Enum's attributes are slow, and these are asked for with every completion.
_START, _GREETING, _PROVING = InitiatorState.START, InitiatorState.GREETING, InitiatorState.PROVING
_READY, _CLOSING, _CLOSED = InitiatorState.READY, InitiatorState.CLOSING, InitiatorState.CLOSED


@dataclass(frozen=True)
class HelloParameters:
    """What an initiator wishes for; see `Hello` for units."""

    capabilities: int = 0
    block_bytes: int = 0
    quota: int = 0
    handle_count: int = 0
    outstanding: int = 256
    inline_bytes: int = 0
    client_name: str = ""
    trust_domain: str = ""


class Window(NamedTuple):
    """Requests [start, stop) of `batch`, which are to be sent now."""

    batch: Batch
    start: int
    stop: int


class Initiator:
    """One session with a target. `peer` names it in errors; `incarnation` is this process's; `draw` gives random octets."""

    def __init__(
        self,
        parameters: HelloParameters,
        *,
        peer: str,
        incarnation: int,
        secret: bytes | None = None,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self.parameters = parameters
        self.peer = peer
        self.state = _START
        self.error: KbtpError | None = None
        self.ack: HelloAck | None = None
        """What the target granted, from READY on."""
        self.outstanding_count = 0
        self.bound_count = 0
        """Handles that this session has bound and not freed, as far as answers have come."""
        self.elsewhere_count = 0
        """LOADs under way at a requester of the provider; the session is not over before they are."""
        self.reserved_count = 0
        """Of the outstanding requests that were granted, how many this machine leaves to a requester of the provider."""
        self._incarnation = incarnation
        self._secret = secret
        self._nonce = draw(NONCE_BYTES)
        self._batches: dict[int, Batch] = {}
        self._unsent: deque[Batch] = deque()
        self._next_sequence = 1  # sequence 0 is HELLO's
        self._hello().encode()  # a wish that doesn't fit the message is a mistake here, not later

    # Session ---------------------------------------------------------------------------------------------------------

    def hello(self) -> bytes:
        """The first message of the session."""
        self._expect(_START)
        self.state = _GREETING
        return self._hello().encode()

    def receive(self, message: bytes) -> list[bytes]:
        """Take one message of the target; returns messages to send. An error moves the session to CLOSED and sets `error`."""
        if self.state is _CLOSED:
            return []
        try:
            parsed = parse(message)
        except Malformed as error:
            return self._break(f"malformed message: {error}")
        match parsed:
            case HelloAck() if self.state in (_GREETING, _PROVING):
                return self._receive_ack(parsed, message)
            case Completion() if self.state in (_GREETING, _PROVING) and parsed.status == Status.VERSION:
                return self._refuse(f"VERSION; the highest that it speaks is {parsed.data_length}")
            case Completion():
                self.receive_completions(np.frombuffer(message, np.uint8).reshape(1, -1))
                return []
            case Goodbye() if self.state in (_READY, _CLOSING):
                return self._receive_goodbye(parsed)
            case _:
                return self._break(f"unexpected {type(parsed).__name__} while {self.state.value}")

    def goodbye(self, status: int = Status.OK) -> bytes:
        """Announce the end: what is outstanding will still be answered, unsent requests are given up."""
        self._expect(_READY)
        self._start_closing(f"the session with {self.peer} is closing")
        return Goodbye(status=status).encode()

    def break_off(self, reason: str) -> None:
        """The target broke the protocol in a way that only the driver can see: the session is over."""
        self._break(reason)

    def disconnected(self, reason: str) -> None:
        """The connection has ended: nothing will be answered any more."""
        self._fail(SessionClosed(f"the session with {self.peer} ended: {reason}"))

    def expect_ready(self) -> None:
        """Raise what ended the session unless it is ready."""
        self._expect(_READY)

    def expect_store(self) -> None:
        """Raise what ended the session unless it is ready, or ValueError if the target did not grant STORE."""
        self._expect(_READY)
        if self.ack is None or not self.ack.capabilities & _STORE:
            raise ValueError(f"{self.peer} did not grant STORE: ask for it in HELLO, of a target that has a keyed store")

    # Requests --------------------------------------------------------------------------------------------------------

    def load(
        self, handles: ArrayLike, generations: ArrayLike, stag: ArrayLike, offsets: ArrayLike, lengths: ArrayLike, flags: int = Flag.NONE
    ) -> Batch:
        """Queue LOADs of n handles into (stag, offset, length); scalars stand for all n."""
        return self._requests(Opcode.LOAD, handles, generations, stag, offsets, lengths, flags)

    def store(
        self, handles: ArrayLike, generations: ArrayLike, stag: ArrayLike, offsets: ArrayLike, lengths: ArrayLike, flags: int = Flag.NONE
    ) -> Batch:
        """Queue STOREs, whose data the target reads from (stag, offset, length)."""
        return self._requests(Opcode.STORE, handles, generations, stag, offsets, lengths, flags)

    def alloc_store(
        self, handles: ArrayLike, generations: ArrayLike, stag: ArrayLike, offsets: ArrayLike, lengths: ArrayLike, flags: int = Flag.NONE
    ) -> Batch:
        """Queue ALLOC_STOREs, whose data the target reads from (stag, offset, length)."""
        return self._requests(Opcode.ALLOC_STORE, handles, generations, stag, offsets, lengths, flags)

    def store_inline(self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], flags: int = Flag.NONE) -> Batch:
        """Queue STOREs that carry their data; each at most the granted inline length."""
        return self._inline(Opcode.STORE, handles, generations, data, flags)

    def alloc_store_inline(self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], flags: int = Flag.NONE) -> Batch:
        """Queue ALLOC_STOREs that carry their data; each at most the granted inline length."""
        return self._inline(Opcode.ALLOC_STORE, handles, generations, data, flags)

    def free(self, handles: ArrayLike, generations: ArrayLike) -> Batch:
        """Queue FREEs."""
        wanted, ids, sequence = self._allot(handles)
        return self._queue(Batch(sequence, encode_frees(ids, wanted, np.asarray(generations, np.uint16))))

    def bind(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        tickets: ArrayLike,
        lengths: ArrayLike,
        block_offsets: ArrayLike,
        flags: int = Flag.NONE,
    ) -> Batch:
        """Queue BINDs of blocks that were taken and written by DIRECT_ALLOC."""
        wanted, ids, sequence = self._allot(handles)
        ticket, length = np.asarray(tickets, np.uint32), np.asarray(lengths, np.uint32)
        offset = np.asarray(block_offsets, np.uint64)
        return self._queue(Batch(sequence, encode_binds(ids, wanted, np.asarray(generations, np.uint16), ticket, length, offset, flags)))

    def load_range(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        stag: int,
        offsets: ArrayLike,
        lengths: ArrayLike,
        starts: ArrayLike,
        counts: ArrayLike,
    ) -> Batch:
        """Queue LOAD_RANGEs: `counts` octets from `starts` on of each value, into (stag, offset, length). Needs STORE."""
        wanted, ids, sequence = self._allot(handles)
        columns = np.broadcast_arrays(wanted, generations, offsets, lengths, starts, counts)
        rows = zip(ids.tolist(), *(column.tolist() for column in columns), strict=True)
        messages = [
            LoadRange(identity, handle, generation, DataDescriptor(stag, offset, length), offset=start, length=count).encode()
            for identity, handle, generation, offset, length, start, count in rows
        ]
        return self._queue(KeyedBatch(sequence, messages))

    def ask(self, encode: Encode) -> KeyedBatch:
        """Queue keyed messages. Raises ValueError if the target did not grant STORE."""
        self.expect_store()
        sequence = self._fresh_sequence()
        batch = KeyedBatch(sequence, encode(sequence << 32))
        self._queue(batch)
        return batch

    def with_records(self, batch: Batch) -> Batch:
        """Ask for completion records instead of COMPLETIONs, before anything of `batch` was sent; see `Batch.set_records`.

        Raises ValueError if the target did not grant RECORD_COMPLETION.
        """
        if self.ack is None or not self.ack.capabilities & Capability.RECORD_COMPLETION:
            raise ValueError(f"{self.peer} did not grant RECORD_COMPLETION")
        assert batch.sent_count == 0
        batch.add_records()
        return batch

    @property
    def has_unsent(self) -> bool:
        """Requests wait for credit."""
        return bool(self._unsent)

    def draw_sequence(self) -> int:
        """A sequence number for a batch of LOADs that the provider's requester sends. Raises SessionClosed if the session is not ready."""
        self._expect(_READY)
        return self._fresh_sequence()

    def answered_elsewhere(self, count: int) -> None:
        """The requester has the answers to `count` LOADs."""
        self.elsewhere_count -= count
        self._close_if_answered()

    def take_window(self, limit: int) -> Window | None:
        """Up to `limit` requests that credit allows to send now, counted as outstanding from now on; None if there are none."""
        if not self._unsent or self.ack is None:
            return None
        batch = self._unsent[0]
        start = batch.sent_count
        count = min(limit, self.ack.outstanding - self.reserved_count - self.outstanding_count, batch.count - start)
        if count <= 0:
            return None
        stop = start + count
        batch.is_outstanding[start:stop] = True
        batch.outstanding_count += count
        batch.sent_count = stop
        self.outstanding_count += count
        if stop == batch.count:
            self._unsent.popleft()
        return Window(batch, start, stop)

    def abandon(self, batch: Batch) -> None:
        """Send no more of `batch`. What is outstanding of it keeps its credit until it is answered."""
        batch.is_abandoned = True
        if batch in self._unsent:
            self._unsent.remove(batch)
        if batch.is_done:
            self._batches.pop(batch.sequence, None)

    def receive_completions(self, raw: NDArray[np.uint8]) -> list[Batch]:
        """Match completions, given as (n, 40) octets; returns the batches that are done with them.

        An octet string that is no COMPLETION, or one that matches no outstanding request, closes the session.
        """
        if self.state not in (_READY, _CLOSING):
            if self.state is not _CLOSED:
                self._break(f"a completion while {self.state.value}")
            return []
        if self.ack is not None and self.ack.capabilities & _STORE:
            is_other = raw[:, 1] >= FIRST_KEYED  # short answers of the keyed extension may be as long
            if np.count_nonzero(is_other):
                done = [batch for row in raw[is_other] for batch in self.receive_keyed(row.tobytes())]
                return done + (self.receive_completions(raw[~is_other]) if not is_other.all() else [])
        try:
            completions = decode_completions(raw)
        except Malformed as error:
            self._break(str(error))
            return []
        return self._settle(completions)

    def receive_keyed(self, message: bytes) -> list[Batch]:
        """As `receive_completions`, for one answer of the keyed extension."""
        if self.state not in (_READY, _CLOSING):
            return []
        header = Header.of_prefix(message)
        batch = self._batches.get(header.request_id >> 32)
        if not isinstance(batch, KeyedBatch) or not batch.settle_answer(header.request_id & (_INDEXES - 1), header, message):
            return self._break_keyed(f"opcode {header.opcode:#04x} answers request {header.request_id:#x}, which is not outstanding")
        try:
            self.bound_count -= adopted_count(message)
        except Malformed as error:
            return self._break_keyed(str(error))
        self.outstanding_count -= 1
        done: list[Batch] = []
        if batch.is_done:
            del self._batches[batch.sequence]
            done.append(batch)
        self._close_if_answered()
        return done

    def _break_keyed(self, text: str) -> list[Batch]:
        self._break(text)
        return []

    def receive_records(self, raw: NDArray[np.uint8]) -> list[Batch]:
        """As `receive_completions` for completion records, (n, 24) octets, whose immediates have come."""
        if self.state not in (_READY, _CLOSING):
            return []
        return self._settle(decode_records(raw))

    def _settle(self, completions: NDArray[Any]) -> list[Batch]:
        done: list[Batch] = []
        ids = completions["request_id"].astype(np.uint64)
        while len(ids):
            # Usually one batch has them all: everything else wraps to a huge index.
            sequence = int(ids[0]) >> 32
            indexes = ids - np.uint64(sequence << 32)
            others = indexes >= np.uint64(_INDEXES)
            rest = others if np.count_nonzero(others) else None
            batch = self._batches.get(sequence)
            mine = completions if rest is None else completions[~rest]
            if batch is None or not batch.settle((indexes if rest is None else indexes[~rest]).astype(np.intp), mine):
                self._break(f"a completion of request {int(ids[0]):#x}, or one with it, that is not outstanding")
                return done
            self.outstanding_count -= len(mine)
            if (step := _BOUND_STEP.get(batch.opcode)) is not None:
                self.bound_count += step * int(np.count_nonzero(mine["status"] == Status.OK))
            if batch.is_done:
                del self._batches[sequence]
                done.append(batch)
            if rest is None:
                break
            ids, completions = ids[rest], completions[rest]
        self._close_if_answered()
        return done

    # Inside ----------------------------------------------------------------------------------------------------------

    def _allot(self, handles: ArrayLike) -> tuple[NDArray[np.uint64], NDArray[np.uint64], int]:
        """The handles as an array, and fresh Request IDs for them."""
        self._expect(_READY)
        wanted = np.atleast_1d(np.asarray(handles, np.uint64))
        if not 0 < len(wanted) < _INDEXES:
            raise ValueError(f"a batch of {len(wanted)} requests")
        sequence = self._fresh_sequence()
        return wanted, np.arange(len(wanted), dtype=np.uint64) | np.uint64(sequence << 32), sequence

    def _fresh_sequence(self) -> int:
        sequence = self._next_sequence
        while sequence in self._batches or sequence == 0:
            sequence = (sequence + 1) % _SEQUENCES
        self._next_sequence = (sequence + 1) % _SEQUENCES
        return sequence

    def _queue(self, batch: Batch) -> Batch:
        self._batches[batch.sequence] = batch
        self._unsent.append(batch)
        return batch

    def _requests(
        self,
        opcode: Opcode,
        handles: ArrayLike,
        generations: ArrayLike,
        stag: ArrayLike,
        offsets: ArrayLike,
        lengths: ArrayLike,
        flags: int,
    ) -> Batch:
        wanted, ids, sequence = self._allot(handles)
        messages = encode_requests(
            opcode,
            ids,
            wanted,
            np.asarray(generations, np.uint16),
            np.asarray(stag, np.uint32),
            np.asarray(offsets, np.uint64),
            np.asarray(lengths, np.uint32),
            flags,
        )
        return self._queue(Batch(sequence, messages))

    def _inline(self, opcode: Opcode, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], flags: int) -> Batch:
        assert self.ack is not None
        longest = max(map(len, data), default=0)
        if longest > self.ack.inline_bytes:
            raise ValueError(f"{longest} octets of inline data, but {self.peer} takes at most {self.ack.inline_bytes}")
        wanted, ids, sequence = self._allot(handles)
        lengths = np.fromiter(map(len, data), np.uint32, len(data))
        messages = np.zeros((len(wanted), REQUEST_BYTES + longest), np.uint8)
        generation = np.asarray(generations, np.uint16)
        messages[:, :REQUEST_BYTES] = encode_requests(opcode, ids, wanted, generation, 0, 0, lengths, flags | Flag.INLINE)
        for row, octets in zip(messages, data, strict=True):
            row[REQUEST_BYTES : REQUEST_BYTES + len(octets)] = np.frombuffer(octets, np.uint8)
        return self._queue(Batch(sequence, messages, lengths + np.uint32(REQUEST_BYTES)))

    def _hello(self) -> Hello:
        wish = self.parameters
        return Hello(
            request_id=0,
            incarnation=self._incarnation,
            capabilities=wish.capabilities,
            block_bytes=wish.block_bytes,
            quota=wish.quota,
            handle_count=wish.handle_count,
            outstanding=wish.outstanding,
            inline_bytes=wish.inline_bytes,
            nonce=self._nonce,
            client_name=wish.client_name,
            trust_domain=wish.trust_domain,
        )

    def _receive_ack(self, ack: HelloAck, octets: bytes) -> list[bytes]:
        if ack.request_id != 0:
            return self._break(f"HELLO_ACK for request {ack.request_id:#x}")
        if ack.status == Status.UNAUTHENTICATED and self.state is _GREETING:
            if self._secret is None:
                return self._refuse(f"UNAUTHENTICATED. Configure the secret of trust domain {self.parameters.trust_domain!r}")
            self.state = _PROVING
            return [proved(replace(self._hello(), request_id=0), ack.nonce, self._secret).encode()]
        if ack.status != Status.OK:
            return self._refuse(_WAY_OUT.get(ack.status, status_name(ack.status)))
        if self._secret is not None and not is_proved(octets, self._nonce, self._secret):
            return self._refuse("OK, but without the proof that our secret asks for. Configure the same secret on both sides")
        if ack.outstanding == 0 or ack.block_bytes == 0 or ack.incarnation == 0 or ack.capabilities & ~int(self.parameters.capabilities):
            return self._break("a HELLO_ACK that grants nothing, or more than was asked for")
        # Receives and send rows are sized by these; whoever asks for none may still send one request at a time.
        if ack.outstanding > max(self.parameters.outstanding, 1) or ack.inline_bytes > self.parameters.inline_bytes:
            return self._break(
                f"a HELLO_ACK that grants more than was asked for: {ack.outstanding} outstanding requests of "
                f"{self.parameters.outstanding}, {ack.inline_bytes} inline octets of {self.parameters.inline_bytes}"
            )
        if ack.direct.ring_log2_slots > _MAX_LOG2_SLOTS:
            return self._break(f"a HELLO_ACK with a ring of 2^{ack.direct.ring_log2_slots} slots, more than there are tickets")
        self.ack = ack
        self.state = _READY
        return []

    def _receive_goodbye(self, goodbye: Goodbye) -> list[bytes]:
        self._start_closing(f"{self.peer} said goodbye ({status_name(goodbye.status)})")
        return []

    def _start_closing(self, reason: str) -> None:
        if self.state is _READY:
            self.state = _CLOSING
            self.error = SessionClosed(reason)
        for batch in list(self._unsent):
            self.abandon(batch)
        self._close_if_answered()

    def _close_if_answered(self) -> None:
        if self.state is _CLOSING and self.outstanding_count == 0 and self.elsewhere_count == 0:
            self.state = _CLOSED

    def _refuse(self, text: str) -> list[bytes]:
        self._fail(SessionRefused(f"target {self.peer} answered HELLO with {text}."))
        return []

    def _break(self, text: str) -> list[bytes]:
        self._fail(SessionClosed(f"target {self.peer} broke the protocol: {text}"))
        return []

    def _fail(self, error: KbtpError) -> None:
        if self.error is None:
            self.error = error
        self.state = _CLOSED
        self._unsent.clear()
        self._batches.clear()
        self.outstanding_count = 0

    def _expect(self, state: InitiatorState) -> None:
        if self.state is not state:
            error = self.error or SessionClosed(f"the session with {self.peer} is {self.state.value}, not {state.value}")
            raise error.with_traceback(None)


_WAY_OUT: Final[dict[int, str]] = {
    Status.UNAUTHENTICATED: "UNAUTHENTICATED: the secrets differ. Configure the same secret for the trust domain on both sides",
    Status.NOT_PERMITTED: "NOT_PERMITTED: it does not serve this trust domain. Configure the same trust domain on both sides",
    Status.UNSUPPORTED: "UNSUPPORTED: it has no pool of the block size asked for. Use the same geometry on both sides, or block size 0",
    Status.SHUTTING_DOWN: "SHUTTING_DOWN. Try another target, or again once it is back",
    Status.BUSY: "BUSY: it serves as many sessions as it may. Raise its session limit, or try again",
}
