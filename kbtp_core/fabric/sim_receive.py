"""The receiving half of a simulated queue pair: messages are placed, and delivered in order (RFC 5040, section 5.5).

Sends are delivered in order; when one is, all that was sent before it is placed. Writes may be placed before what was sent ahead of
them is delivered. A Read sees what was sent before it, and may see what was sent later. Whatever breaks a rule ends the connection with
the Terminate code that the software RNIC gives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import numpy as np

from kbtp_core.fabric.api import Access, CompletionFlag, CompletionStatus, Op, terminate_code
from kbtp_core.fabric.sim_memory import Fault, SimRegion
from kbtp_core.fabric.sim_message import ATOMIC_RESPONSE, ATOMICS, FIN, IMMEDIATES, READ_RESPONSE, SENDS, Message, Work

if TYPE_CHECKING:
    from kbtp_core.fabric.sim_pair import SimQp

_OK = int(CompletionStatus.OK)
_LOCAL_WRITE, _REMOTE_READ = int(Access.LOCAL_WRITE), int(Access.REMOTE_READ)
_REMOTE_WRITE, _REMOTE_ATOMIC = int(Access.REMOTE_WRITE), int(Access.REMOTE_ATOMIC)
_INVALIDATES: Final = frozenset(map(int, (Op.SEND_INVALIDATE, Op.SEND_SE_INVALIDATE)))
_SOLICITED: Final = frozenset(map(int, (Op.SEND_SE, Op.SEND_SE_INVALIDATE, Op.IMMEDIATE_SE)))
_WRITE, _READ, _RECEIVE = int(Op.WRITE), int(Op.READ), int(Op.RECEIVE)
_RESPONSES: Final = frozenset((READ_RESPONSE, ATOMIC_RESPONSE))
LOST: Final = terminate_code(2, 0, 1)
_NO_BUFFER, _TOO_LONG = terminate_code(1, 2, 2), terminate_code(1, 2, 5)
_CANNOT_INVALIDATE, _UNALIGNED, _CATASTROPHE = terminate_code(0, 1, 9), terminate_code(0, 2, 7), terminate_code(0, 0, 0)
_ALL: Final = (1 << 64) - 1


class Receiver:
    """What a pair has posted to receive, and what is under way to it."""

    def __init__(self, pair: SimQp) -> None:
        self.pair = pair
        self.posted: deque[tuple[int, int, int, int]] = deque()  # wr_id, offset, STag, length
        self.is_deaf = False
        """The connection is lost: what is under way never arrives."""
        self._in_flight: deque[list[Message]] = deque()
        self._delivered_count = 0  # messages of the oldest burst, up to the last Send that was delivered
        self._held_count = 0  # receives that went up and were not posted again

    def post(self, receives: list[tuple[int, int, int, int]]) -> None:
        self.posted.extend(receives)
        self._held_count = max(0, self._held_count - len(receives))

    def expect(self, burst: list[Message]) -> None:
        """A burst starts now; its Writes may scribble on their sinks from now on."""
        self._in_flight.append(burst)
        sim = self.pair.sim
        if sim.chance(sim.conditions.garbage):
            for message in burst:
                if message.kind == _WRITE and message.length and not self.is_deaf:
                    region = self.pair.domain.look_up(message.stag, message.to, message.length, _REMOTE_WRITE)
                    if isinstance(region, SimRegion):
                        region.fill_with_garbage(message.to, message.length)

    def messages_in_flight(self) -> Iterator[Message]:
        """What is not delivered; only that may still change memory."""
        skipped = self._delivered_count
        for burst in self._in_flight:
            yield from burst[skipped:]
            skipped = 0

    def arrive(self) -> None:
        """The oldest burst under way is here."""
        pair = self.pair
        sender = pair.other
        if self.is_deaf or not pair.is_open or sender is None:
            return
        burst = self._in_flight[0]
        pair.first_message()
        if len(burst) > 1 and pair.sim.chance(pair.sim.conditions.reorder):
            self._place_early(burst, sender)
        for at, message in enumerate(burst, 1):
            if not self._is_read(message, sender):
                self._cut()
                break
            if not self._take(message):
                break
            if message.kind in SENDS:
                self._delivered_count = at
        self._in_flight.popleft()
        self._delivered_count = 0
        sender.retire()

    def _cut(self) -> None:
        """The sender died before it had sent this: nothing comes behind it but the end."""
        self.is_deaf = True
        sim = self.pair.sim
        sim.after(sim.between(sim.conditions.end_s), self.pair.end, LOST)

    def _is_read(self, message: Message, sender: SimQp) -> bool:
        """Whether the message has left its sender: its source was read, or can be read now."""
        if message.data is not None or message.region is None or message.kind == _READ:
            return True
        if sender.is_dead or not sender.gather(message):
            return False
        if message.work is not None and message.kind != READ_RESPONSE:
            message.work.is_done = True
        return True

    def _place_early(self, burst: list[Message], sender: SimQp) -> None:
        """Place the Writes of a burst, last first, before anything of it is delivered."""
        writes: list[Message] = []
        for message in burst:
            if message.kind in _INVALIDATES or message.kind in _RESPONSES:
                break
            if message.kind == _WRITE and message.length:
                writes.append(message)
        for message in reversed(writes):
            region = self.pair.domain.look_up(message.stag, message.to, message.length, _REMOTE_WRITE)
            if isinstance(region, Fault) or message.data is None and not (message.region is not None and message.region.is_valid):
                continue
            if not self._is_read(message, sender):
                return
            assert message.data is not None
            region.write(message.to, message.data)
            message.is_placed = True

    # By kind; each returns False if the connection has ended -----------------------------------------------------------

    def _take(self, message: Message) -> bool:
        kind = message.kind
        if kind == _WRITE:
            return self._on_write(message)
        if kind in SENDS or kind in IMMEDIATES:
            return self._on_send(message)
        if kind == _READ:
            return self._on_read(message)
        if kind == READ_RESPONSE:
            return self._on_read_response(message)
        if kind in ATOMICS:
            return self._on_atomic(message)
        if kind == ATOMIC_RESPONSE:
            assert message.work is not None
            self._answered(message.work, message.operands[0])
            return True
        assert kind == FIN
        self.pair.peer_closed()
        return True

    def _on_write(self, message: Message) -> bool:
        if not message.length:
            return True
        region = self.pair.domain.look_up(message.stag, message.to, message.length, _REMOTE_WRITE)
        if isinstance(region, Fault):
            self.pair.fail(region.tagged)
            return False
        if not message.is_placed:
            assert message.data is not None
            region.write(message.to, message.data)
        return True

    def _on_send(self, message: Message) -> bool:
        pair = self.pair
        if not self.posted:
            pair.fail(_NO_BUFFER)
            return False
        kind = message.kind
        data = message.data or b""
        is_immediate = kind in IMMEDIATES
        if pair.run is not None and kind == Op.SEND and pair.run.take(data, self._held_count > 0, len(self.posted)):
            return True
        wr_id, offset, stag, room = self.posted[0]
        if len(data) > room:
            pair.fail(_TOO_LONG)
            return False
        if room and not is_immediate and not self._place_send(data, stag, offset, room):
            self.posted.popleft()
            pair.cq.push((wr_id, pair.number, _RECEIVE, CompletionStatus.LOCAL_PROTECTION, 0, 0, 0, 0))
            pair.fail(_CATASTROPHE)
            return False
        flags = int(CompletionFlag.SOLICITED) if kind in _SOLICITED else 0
        invalidated = 0
        if kind in _INVALIDATES:
            region = pair.domain.look_up(message.stag, 0, 0, Access.REMOTE_INVALIDATE)
            if isinstance(region, Fault):
                pair.fail(_CANNOT_INVALIDATE)
                return False
            region.close()
            flags, invalidated = flags | int(CompletionFlag.INVALIDATED), message.stag
        self.posted.popleft()
        self._held_count += 1
        op, length, value = (Op.RECEIVE_IMMEDIATE, 8, message.operands[0]) if is_immediate else (_RECEIVE, len(data), 0)
        item = (wr_id, pair.number, int(op), _OK, flags, length, invalidated, value)
        if pair.run is None or not pair.run.withhold(item):
            pair.cq.push(item)
        return True

    def _place_send(self, data: bytes, stag: int, offset: int, room: int) -> bool:
        region = self.pair.domain.look_up(stag, offset, room, _LOCAL_WRITE)
        if isinstance(region, Fault):
            return False
        if self.pair.sim.conditions.garbage and len(data) < room:
            region.fill_with_garbage(offset, room)
        region.write(offset, data)
        return True

    def _on_read(self, message: Message) -> bool:
        """A Read Request: its answer starts now, and reads memory now or as late as when it arrives."""
        pair = self.pair
        answer = Message(READ_RESPONSE, message.work, None, message.to, message.length)
        if message.length:
            region = pair.domain.look_up(message.stag, message.to, message.length, _REMOTE_READ)
            if isinstance(region, Fault):
                self._refuse(message, region.request)
                return False
            answer.region = region
        if not message.length or not pair.sim.chance(pair.sim.conditions.late_read):
            pair.gather(answer)
        pair.launch([answer])
        return True

    def _on_read_response(self, message: Message) -> bool:
        work = message.work
        assert work is not None
        assert message.data is not None
        if work.length:
            sink = self.pair.domain.look_up(work.sink_stag, work.sink_offset, work.length, _LOCAL_WRITE)
            if isinstance(sink, Fault):
                self.pair.fail(sink.tagged)
                return False
            sink.write(work.sink_offset, message.data)
        self._answered(work, 0)
        return True

    def _on_atomic(self, message: Message) -> bool:
        region = self.pair.domain.look_up(message.stag, message.to, 8, _REMOTE_ATOMIC)
        if isinstance(region, Fault) or message.to % 8:
            self._refuse(message, region.request if isinstance(region, Fault) else _UNALIGNED)
            return False
        old = int(np.frombuffer(region.read(message.to, 8), np.uint64)[0])
        region.write(message.to, np.uint64(_atomic(message, old)).tobytes())
        self.pair.launch([Message(ATOMIC_RESPONSE, message.work, operands=(old, 0, 0, 0))])
        return True

    def _refuse(self, message: Message, code: int) -> None:
        """A Read or atomic that the peer may not do: its Terminate names that request."""
        assert message.work is not None
        if code >> 12 & 15 == 0 and code >> 8 & 15 == 1:
            message.work.status = CompletionStatus.REMOTE_ACCESS
        self.pair.fail(code)

    def _answered(self, work: Work, value: int) -> None:
        pair = self.pair
        work.is_done, work.value = True, value
        pair.reads_outstanding -= 1
        if pair.run is not None:
            pair.run.arrived(work)
        pair.retire()
        pair.ring()

    def on_terminate(self, code: int) -> None:
        if not self.is_deaf:
            self.pair.end(code, CompletionFlag.REMOTE)


def _atomic(message: Message, old: int) -> int:
    """The new value of the word (RFC 7306, section 5)."""
    operand, mask, compare, compare_mask = message.operands
    if message.kind == Op.FETCH_ADD:
        return (((old & ~mask & _ALL) + (operand & ~mask & _ALL)) & _ALL) ^ ((old ^ operand) & mask)
    return old & ~mask & _ALL | operand & mask if (compare ^ old) & compare_mask == 0 else old
