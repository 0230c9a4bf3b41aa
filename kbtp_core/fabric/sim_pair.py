"""A queue pair of the simulated fabric: how it lives, what it starts, and how it ends.

    IDLE --connect--> CONNECTING --accepted--> UP --close, or FIN of the peer--> CLOSING --all sent--> DEAD
                                               UP, CLOSING --error, abort, loss, crash--> DEAD

A pair's messages go out in bursts. A burst arrives whole, later than the burst before it; what happens then is in `sim_receive`.
What RFC 5040 section 5.5 leaves open is left to chance, as far out as it allows:
1. The source of a Send, a Write or a Read Response is read when its burst starts, or as late as at its arrival (then its request
   completes late as well). A source may be reused at its request's completion, not earlier.
2. A sink may hold 0xDD from the start of its operation on. When a pair has died, whatever was still under way to it turns into 0xDD at
   the last moment allowed: when its DISCONNECTED is polled, unless the region was closed before.
3. DISCONNECTED comes some time after the end, behind a completion FLUSHED for everything that had none yet.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Final

from kbtp_core.fabric.api import (
    Access,
    Array,
    CompletionFlag,
    CompletionStatus,
    Executor,
    FabricError,
    Op,
    QueueFull,
    QueueLimits,
    QueuePairClosed,
    Region,
    StoreGrant,
    WrFlag,
)
from kbtp_core.fabric.executor import NativeExecutor
from kbtp_core.fabric.sim_executor import SimRun
from kbtp_core.fabric.sim_memory import Fault, SimDomain, SimRegion
from kbtp_core.fabric.sim_message import ATOMICS, FIN, POSTABLE, SOURCED, Message, Row, Work
from kbtp_core.fabric.sim_queues import Item, SimCq
from kbtp_core.fabric.sim_receive import LOST, Receiver

if TYPE_CHECKING:
    from kbtp_core.fabric.sim import SimFabric

_OK, _FLUSHED = int(CompletionStatus.OK), int(CompletionStatus.FLUSHED)
_SIGNALED, _FENCE, _SNAPSHOT = int(WrFlag.SIGNALED), int(WrFlag.FENCE), int(WrFlag.SNAPSHOT)
_LOCAL_WRITE, _REMOTE_WRITE = int(Access.LOCAL_WRITE), int(Access.REMOTE_WRITE)
_READ, _WRITE = int(Op.READ), int(Op.WRITE)
_BURST: Final = 64


class PairState(Enum):
    IDLE = "idle"
    CONNECTING = "connecting"
    UP = "up"
    CLOSING = "closing"
    DEAD = "dead"


class SimQp:
    """See `fabric.api.QueuePair`."""

    def __init__(self, device: SimFabric, domain: SimDomain, cq: SimCq, limits: QueueLimits) -> None:
        self.device = device
        self.sim = device.sim
        self.domain = domain
        self.cq = cq
        self.limits = limits
        self.number = self.sim.next_number()
        self.peer = ""
        self.peer_private_data = b""
        self.state = PairState.IDLE
        self.other: SimQp | None = None
        self.receiver = Receiver(self)
        self.reads_outstanding = 0
        self.run: SimRun | None = None
        """What an executor does for it."""
        self._queue: deque[Row] = deque()  # posted, not started
        self._works: deque[Work] = deque()  # started, not completed
        self._arrives = 0.0  # when the last message sent so far arrives
        self._may_send = False  # the passive side waits for the first message of the active side
        self._peer_closed = False
        self._has_finished = False  # FIN was sent
        self._sinks: list[tuple[int, int, int, int]] = []  # (STag, offset, length, right) that were in use when the pair died

    @property
    def is_dead(self) -> bool:
        return self.state is PairState.DEAD

    @property
    def is_open(self) -> bool:
        return self.state is PairState.UP or self.state is PairState.CLOSING

    # Life ------------------------------------------------------------------------------------------------------------

    def connect(self, host: str, port: int, private_data: bytes = b"") -> None:
        self.peer = f"{host}:{port}"
        self.state = PairState.CONNECTING
        sim = self.sim
        sim.after(sim.between(sim.conditions.delay_s), self._arrive_at, (host, port), bytes(private_data))
        sim.after(self.limits.startup_timeout_s, self._give_up_starting)

    def _arrive_at(self, address: tuple[str, int], private_data: bytes) -> None:
        listener = self.sim.listeners.get(address)
        if self.state is not PairState.CONNECTING:
            return
        if listener is None:
            self.end(0, status=CompletionStatus.CONNECT_FAILED)
        else:
            listener.add(self, private_data)

    def adopt(self, active: SimQp, peer: str, private_data: bytes) -> None:
        """Passive side: the pair that will answer `active`."""
        self.other, active.other = active, self
        self.peer, self.peer_private_data = peer, private_data
        self.state = PairState.CONNECTING

    def rejected(self, private_data: bytes) -> None:
        self.peer_private_data = private_data
        if self.state is PairState.CONNECTING:
            self.end(0, status=CompletionStatus.CONNECT_FAILED)

    def accept(self, private_data: bytes = b"") -> None:
        other = self.other
        if other is None or other.state is not PairState.CONNECTING:
            self.end(0, status=CompletionStatus.CONNECT_FAILED)
            return
        self.state = PairState.UP
        sim = self.sim
        sim.after(sim.between(sim.conditions.delay_s), other._accepted, bytes(private_data))
        sim.after(self.limits.startup_timeout_s, self._give_up_starting)

    def _accepted(self, private_data: bytes) -> None:
        if self.state is PairState.CONNECTING:
            self.state = PairState.UP
            self._may_send = True
            self.peer_private_data = private_data
            self.cq.push((0, self.number, Op.CONNECTED, _OK, 0, len(private_data), 0, 0))
            self.ring()

    def first_message(self) -> None:
        """Passive side: the active side has spoken, so this one may."""
        if not self._may_send:
            self._may_send = True
            self.cq.push((0, self.number, Op.CONNECTED, _OK, 0, len(self.peer_private_data), 0, 0))
            self.ring()

    def _give_up_starting(self) -> None:
        if self.state is PairState.CONNECTING or self.is_open and not self._may_send:
            self.end(0, status=CompletionStatus.CONNECT_FAILED)
            self._tell_peer(LOST, 0)

    def close(self, timeout_s: float = 2.0) -> None:
        if self.state is PairState.UP:
            self.state = PairState.CLOSING
            self.sim.after(timeout_s, self.abort)
            self.ring()
        elif not self.is_dead:
            self.abort()

    def peer_closed(self) -> None:
        """FIN: what was posted here is still sent, and then this is the end."""
        self._peer_closed = True
        self.state = PairState.CLOSING
        self.ring()

    def abort(self) -> None:
        if not self.is_dead:
            self.end(0)
            self._tell_peer(LOST, 0)

    def lose(self) -> None:
        """The connection breaks here: nothing arrives any more, and both sides hear of it, each in its time."""
        if self.other is None:
            if not self.is_dead:
                self.end(0, status=CompletionStatus.CONNECT_FAILED)
            return
        for side in (self, self.other):
            if side is not None and not side.is_dead:
                side.receiver.is_deaf = True
                self.sim.after(self.sim.between(self.sim.conditions.end_s), side.end, LOST)

    def hold(self, until: float) -> None:
        """Nothing that is sent from now on, either way, arrives before `until`."""
        for side in (self, self.other):
            if side is not None:
                side._arrives = max(side._arrives, until)

    def fail(self, code: int) -> None:
        """The peer broke a rule: end, and tell it why by a Terminate."""
        if self.is_open:
            self.sim.terminated[code] = self.sim.terminated.get(code, 0) + 1
            self.end(code)
            self._tell_peer(code, CompletionFlag.REMOTE)

    def _tell_peer(self, code: int, flags: int) -> None:
        other = self.other
        if other is not None and not other.is_dead:
            sim = self.sim
            when = max(self._arrives, sim.now) + sim.between(sim.conditions.delay_s)
            if flags:
                sim.at(when, other.receiver.on_terminate, code)
            else:
                sim.at(when, other.end, code)

    def crash(self) -> None:
        """The process is gone: no completion, no memory; the peer hears of it."""
        if not self.is_dead:
            self.state = PairState.DEAD
            self._forget()
            self._tell_peer(LOST, 0)

    def end(self, value: int, flags: int = 0, status: int = CompletionStatus.OK) -> None:
        """Die: flush everything, and DISCONNECTED some time later as the last word."""
        if self.is_dead:
            return
        self.state = PairState.DEAD
        sim = self.sim
        sim.log(f"qp {self.number} ends: {value:#x} {flags} {status}")
        items = []
        for work in self._works:
            if not work.is_done:
                work.status = _FLUSHED if work.status == _OK else work.status
            if work.flags & _SIGNALED or work.status != _OK:
                items.append((work.wr_id, self.number, work.op, work.status, 0, 0, 0, work.value))
            if work.op == _READ and not work.is_done:
                self._sinks.append((work.sink_stag, work.sink_offset, work.length, _LOCAL_WRITE))
        if self.run is not None:
            withheld, sinks = self.run.end()
            items += withheld
            self._sinks += sinks
        items += [(row[0], self.number, row[1], _FLUSHED, 0, 0, 0, 0) for row in self._queue]
        for wr_id, offset, stag, length in self.receiver.posted:
            items.append((wr_id, self.number, Op.RECEIVE, _FLUSHED, 0, 0, 0, 0))
            self._sinks.append((stag, offset, length, _LOCAL_WRITE))
        for message in self.receiver.messages_in_flight():
            if message.kind == _WRITE:
                self._sinks.append((message.stag, message.to, message.length, _REMOTE_WRITE))
        self._forget()
        last = (0, self.number, int(Op.DISCONNECTED), int(status), int(flags), 0, 0, value)
        sim.after(sim.between(sim.conditions.end_s), self._finish, items, last)

    def _finish(self, items: list[Item], last: Item) -> None:
        for item in items:
            self.cq.push(item)
        self.cq.push_end(self, last)
        self.device.pairs.pop(self.number, None)

    def last_gasp(self) -> None:
        """DISCONNECTED is being polled: only now nothing of this pair touches memory any more."""
        if self.sim.conditions.garbage:
            for stag, offset, length, right in self._sinks:
                region = self.domain.look_up(stag, offset, length, right)
                if isinstance(region, SimRegion):
                    region.fill_with_garbage(offset, length)
        self._sinks.clear()
        if self.run is not None:
            self.run.give_up()

    def _forget(self) -> None:
        self._queue.clear()
        self._works.clear()
        self.receiver.posted.clear()

    # Posting ---------------------------------------------------------------------------------------------------------

    def post_send(self, requests: Array) -> None:
        if self.state is not PairState.UP:
            raise QueuePairClosed(f"the queue pair to {self.peer} is {self.state.value}")
        if len(self._queue) + len(self._works) + len(requests) > self.limits.send_depth:
            raise QueueFull(f"{len(requests)} more requests pass the send_depth of {self.limits.send_depth}")
        rows: list[Row] = requests.tolist()
        if not POSTABLE.issuperset([row[1] for row in rows]):
            raise FabricError("a work request has an op that can't be posted")
        self._queue.extend(rows)
        self.ring()

    def post_receive(self, requests: Array) -> None:
        if self.is_dead:
            raise QueuePairClosed(f"the queue pair to {self.peer} is dead")
        if len(self.receiver.posted) + len(requests) > self.limits.receive_depth:
            raise QueueFull(f"{len(requests)} more receives pass the receive_depth of {self.limits.receive_depth}")
        self.receiver.post(requests.tolist())

    def attach_executor(self, executor: Executor, pool: Region, grant: StoreGrant | None = None) -> None:
        if not isinstance(executor, NativeExecutor) or not isinstance(pool, SimRegion):
            raise FabricError("a simulated queue pair takes an executor and a pool of its own device")
        self.run = SimRun(self, executor, pool, grant)

    def stats(self) -> dict[str, int]:
        counts = {} if self.run is None else {**self.run.counts, "stores_under_way": self.run.store_count}
        return {"queued": len(self._queue), "started": len(self._works), "receives": len(self.receiver.posted), **counts}

    # Sending ---------------------------------------------------------------------------------------------------------

    def ring(self) -> None:
        """Start what is posted, after the present event."""
        self.sim.rung[self.number] = self

    def transmit(self) -> None:
        """Start posted requests as one burst."""
        if not self.is_open or not self._may_send:
            return
        sim, queue = self.sim, self._queue
        conditions = sim.conditions
        is_late = sim.chance(conditions.late_read)
        room = 1 + int(sim.random.random() * 4) if sim.chance(conditions.small_burst) else _BURST
        burst: list[Message] = [] if self.run is None else self.run.start_reads()
        while queue and len(burst) < room and not self._must_wait(queue[0]):
            message = self._begin(queue.popleft(), is_late)
            if message is None:
                self.launch(burst)
                self.abort()
                return
            burst.append(message)
        if burst:
            self.retire()
            self.launch(burst)
        if queue:
            if not self._must_wait(queue[0]):
                self.ring()
        elif self.state is PairState.CLOSING and not (self.run is not None and self.run.is_busy) and not self._has_unsent():
            self._finish_closing()

    def _has_unsent(self) -> bool:
        """Whether an octet of something posted, or an answer that is waited for, is still to come."""
        return any(not work.is_done and (work.op in SOURCED or not self._peer_closed) for work in self._works)

    def _finish_closing(self) -> None:
        """All is sent. The side that closes second is done; the first waits for the other's FIN."""
        if not self._has_finished:
            self._has_finished = True
            self.launch([Message(FIN)])
        if self._peer_closed:
            self.end(0)

    @property
    def read_limit(self) -> int:
        """How many Reads and atomics may be outstanding."""
        return 0 if self.other is None else min(self.limits.ord, self.other.limits.ird)

    def _must_wait(self, row: Row) -> bool:
        op, flags = row[1], row[2]
        if (op == _READ or op in ATOMICS) and self.reads_outstanding >= self.read_limit:
            return True
        return bool(flags & _FENCE) and self.reads_outstanding > 0

    def _begin(self, row: Row, is_late: bool) -> Message | None:
        """The message of a work request, which counts as started; None if its local memory can't be used."""
        wr_id, op, flags, _, length, local_stag, stag, local_offset, to, operand, mask, compare, compare_mask = row
        work = Work(wr_id, op, flags, length)
        self._works.append(work)
        message = Message(op, work, None, local_offset, length, None, stag, to)
        if op in SOURCED or op == _READ:
            if length:
                region = self.domain.look_up(local_stag, local_offset, length, _LOCAL_WRITE if op == _READ else 0)
                if isinstance(region, Fault):
                    work.status = CompletionStatus.LOCAL_PROTECTION
                    return None
                message.region = region
            if op == _READ:
                self.reads_outstanding += 1
                work.sink_stag, work.sink_offset = local_stag, local_offset
                if message.region is not None and self.sim.chance(self.sim.conditions.garbage):
                    message.region.fill_with_garbage(local_offset, length)
            elif not is_late or flags & _SNAPSHOT or not length:
                self.gather(message)
                work.is_done = True
            return message
        if op in ATOMICS:
            self.reads_outstanding += 1
        else:
            work.is_done = True
        message.operands = (operand, mask, compare, compare_mask)
        return message

    def gather(self, message: Message) -> bool:
        """Read the source of a message, which may be reused from now on; False, and dead, if it was closed meanwhile."""
        region = message.region
        if region is None:
            message.data = b""
        elif region.is_valid:
            message.data = region.read(message.offset, message.length)
        else:
            if message.work is not None and message.work.op != _READ:
                message.work.status = CompletionStatus.LOCAL_PROTECTION
                self.abort()
            else:
                self.fail(Fault.UNKNOWN.request)
            return False
        if self.run is not None:
            self.run.left(message)
        return True

    def launch(self, burst: list[Message]) -> None:
        """Put messages on their way, behind everything that went before."""
        other = self.other
        if not burst or other is None or other.is_dead:
            return
        sim = self.sim
        sim.message_count += len(burst)
        conditions = sim.conditions
        delay = sim.between(conditions.delay_s)
        if sim.chance(conditions.stall):
            delay += sim.between(conditions.stall_s)
        self._arrives = max(self._arrives, sim.now + delay)
        if sim.trace is not None:
            sim.log(f"qp {self.number} -> {other.number} at {self._arrives * 1e6:.3f}: " + " ".join(map(str, burst)))
        other.receiver.expect(burst)
        sim.at(self._arrives, other.receiver.arrive)

    def retire(self) -> None:
        """Complete what is done, in the order posted."""
        works = self._works
        while works and works[0].is_done:
            work = works.popleft()
            if work.flags & _SIGNALED or work.status != _OK:
                self.cq.push((work.wr_id, self.number, work.op, work.status, 0, work.length, 0, work.value))
        if self.state is PairState.CLOSING:
            self.ring()
