"""A target on a fabric, without threads and without waiting: completions and `now` go in, batches of work requests come out.

Each connection has a protection domain of its own, so that what one peer learns of STags is worth nothing on another. The rules
that keep a connection sound:
1. As many receives are posted as a peer may have requests outstanding, and a few more; the receive of a message is posted again only
   when that message is answered, right before the answer. So an executor runs nothing while a message waits for its answer.
2. Until HELLO is answered a peer has one receive, and a deadline.
3. What does not fit into the send queue waits here, in order; it is posted when earlier requests have completed.
4. The session hears `disconnected` only when the queue pair's DISCONNECTED was polled: nothing of it touches memory any more.
5. Nobody waits for a greedy neighbour: completions are taken in turns of bounded cost, one session after the other. And within a
   session loads and small messages don't wait for stores: RDMA Reads are posted behind everything else, a few at a time, so that
   the send queue never stands still because the peer's read credit is used up.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import (
    Array,
    CompletionQueue,
    CompletionStatus,
    ConnectionRequest,
    Executor,
    Fabric,
    FabricError,
    Op,
    ProtectionDomain,
    QueueFull,
    QueueLimits,
    QueuePair,
    QueuePairClosed,
    Region,
    ReportsReaders,
    WrFlag,
)
from kbtp_core.protocol.constants import (
    DESCRIPTOR_BYTES,
    HEADER_BYTES,
    HELLO_ACK_LIMIT_BYTES,
    HELLO_LIMIT_BYTES,
    REQUEST_BYTES,
    Capability,
    Opcode,
)
from kbtp_core.protocol.effects import Close, Effect, LoadMany, Read, Record, RevokePartition, Send, SendMany, Write
from kbtp_core.protocol.keyed import message_limit
from kbtp_core.protocol.target import Target
from kbtp_core.protocol.target_session import TargetSession, TargetState
from kbtp_core.session.exposure import ExposedMemory
from kbtp_core.session.fence import DrainFence, StoreFence, is_reading
from kbtp_core.session.native import create_executor, store_grant
from kbtp_core.session.posting import PostBatch
from kbtp_core.session.runs import GREETING_ID, first_run, split_loads
from kbtp_core.session.slots import ReceiveRows, SendRows

_log = logging.getLogger(__name__)

SPARE_RECEIVES: Final = 8
SMALLEST_RECEIVE_BYTES: Final = 640
READS_IN_FLIGHT: Final = 16
TURN_COST: Final = 128  # of one session; a completion costs 1, one of many that are taken together a part of that
_RUN_COST: Final = 1 / 16
_IDLE_LEAST_S: Final = 1.0  # a session that was used less long ago does not make room
_SILENT_LEAST_S: Final = 0.1  # nor does a connection so young that has not said HELLO
_IDLE_WAIT_S: Final = 0.25  # how late an overdue HELLO may be noticed
_DRAIN_WAIT_S: Final = 0.001  # how often readers of cleared blocks are asked for
_ANSWER_BYTES: Final = 64
_LONG_ANSWERS: Final = 32  # longer ones that are on their way at once
_SENDS: Final = frozenset({Op.SEND, Op.SEND_INVALIDATE, Op.SEND_SE, Op.SEND_SE_INVALIDATE})

PoolRegion = Callable[[ProtectionDomain], Region]
"""Registers the pool's memory in a connection's protection domain, with LOCAL_WRITE if stores are served."""


class _Connection:
    """One queue pair and its session."""

    def __init__(self, core: TargetCore, request: ConnectionRequest, now: float) -> None:
        limits = core.target.limits
        self.core = core
        self.peer = request.peer
        self.hello_deadline = now + core.hello_timeout_s
        self.send_depth = 2 * limits.outstanding + SPARE_RECEIVES
        self.pd = core.fabric.alloc_pd()
        queue = QueueLimits(
            send_depth=self.send_depth, receive_depth=limits.outstanding + SPARE_RECEIVES + 2, startup_timeout_s=core.hello_timeout_s
        )
        try:
            self.greetings = ReceiveRows(self.pd, 1, HELLO_LIMIT_BYTES, GREETING_ID)
            self.greeting_answers = SendRows(self.pd, 2, HELLO_ACK_LIMIT_BYTES)
            self.answers = SendRows(self.pd, self.send_depth, _ANSWER_BYTES)
            self.qp: QueuePair = request.create_qp(self.pd, core.cq, queue)
        except FabricError:
            self.pd.close()
            raise
        self.pool: Region | None = None  # once HELLO is granted, as are the next two
        self.pool_stag = 0
        self.receives: ReceiveRows | None = None
        self.long_answers: SendRows | None = None  # of keyed messages, if STORE is granted
        self.long_marks: deque[tuple[int, int]] = deque()  # (posted_count behind it, mark in `long_answers`) of each
        self.held: deque[int] = deque()  # receive rows whose messages are not answered
        self.inbox: deque[Array] = deque()  # completions that no turn has taken yet
        self.backlog: deque[Send | SendMany | LoadMany | Write | Record | Close] = deque()
        self.reads: deque[Read] = deque()
        self.reads_in_flight = 0
        self.finished_read_count = 0
        self.posted_count = 0  # work requests ever posted
        self.retired_count = 0  # of those, known to have completed
        self.signaled: deque[tuple[int, int]] = deque()  # (posted_count behind it, mark in `answers`) of each signaled request
        self.is_closing = False
        self.has_executor = False
        self.last_used = now
        self.executed_count = 0
        self.memory = ExposedMemory(self.pd, self._report)
        self.session: TargetSession = core.target.open_session(self.peer, offers=core.offers, expose=self.memory.expose)

    @property
    def is_greeted(self) -> bool:
        return self.receives is not None

    @property
    def is_idle(self) -> bool:
        """Whether it may make room for another: greeted, and neither the session nor the connection has anything to do."""
        has_work = self.is_closing or self.inbox or self.backlog or self.reads or self.held
        return self.is_greeted and not has_work and self.session.is_idle

    def stores(self) -> tuple[int, int]:
        """How many stores wait for data of the peer, and how many have had it: the session's and the executor's."""
        stats = self.qp.stats()
        under_way = self.reads_in_flight + stats.get("stores_under_way", 0)
        return under_way, self.finished_read_count + stats.get("executed_stores", 0)

    def notice_native_use(self, now: float) -> bool:
        """Whether the executor has answered or still answers requests of it since the last call, which no completion tells."""
        executed_count = sum(count for name, count in self.qp.stats().items() if name.startswith("executed_"))
        is_reading = isinstance(self.qp, ReportsReaders) and len(self.qp.reading()) > 0
        if executed_count == self.executed_count and not is_reading:
            return False
        self.executed_count, self.last_used = executed_count, now
        return True

    def start(self) -> None:
        self.qp.post_receive(self.greetings.requests(np.zeros(1, np.int64)))
        self.qp.accept()

    def on_receive(self, wr_id: int, length: int, now: float) -> None:
        if wr_id == GREETING_ID:
            message = self.greetings.message(0, length)
        else:
            assert self.receives is not None
            message = self.receives.message(wr_id, length)
            self.held.append(wr_id)
        self.add(self.session.receive(message, now), now)

    def on_loads(self, wr_ids: NDArray[np.int64], now: float) -> bool:
        """A run of messages that have the length of a LOAD; whether they could be taken together."""
        assert self.receives is not None
        self.held.extend(wr_ids.tolist())
        effects = self.session.receive_loads(self.receives.memory[wr_ids, :REQUEST_BYTES], now)
        self.add(effects, now)
        return len(effects) == 1 and isinstance(effects[0], LoadMany)

    def on_frees(self, wr_ids: NDArray[np.int64], now: float) -> None:
        """A run of messages that have the length of a FREE."""
        assert self.receives is not None
        self.held.extend(wr_ids.tolist())
        self.add(self.session.receive_frees(self.receives.memory[wr_ids, :HEADER_BYTES], now), now)

    def on_sent(self, op: int, wr_id: int, ok: bool, now: float) -> None:
        """A work request has completed; all before it have too."""
        if ok:
            self.retired_count, mark = self.signaled.popleft()
            self.answers.release(mark)
            while self.long_answers is not None and self.long_marks and self.long_marks[0][0] <= self.retired_count:
                self.long_answers.release(self.long_marks.popleft()[1])
        if op == Op.WRITE and wr_id:
            self.add(self.session.write_done(wr_id, ok, now), now)
        elif op == Op.READ:
            self.reads_in_flight -= 1
            self.finished_read_count += 1
            self.add(self.session.read_done(wr_id, ok, now), now)

    def add(self, effects: Iterable[Effect], now: float) -> None:
        for effect in effects:
            if isinstance(effect, Read):
                self.reads.append(effect)
            elif isinstance(effect, RevokePartition):
                self.memory.revoke()
                self.add(self.session.partition_revoked(now), now)
            else:
                self.backlog.append(effect)
        if self.backlog or self.reads:
            self.core.dirty.add(self)

    def _report(self, error: FabricError) -> None:
        _log.warning("%s gets no direct modes: %s", self.peer, error)

    def flush(self) -> None:
        """Post what fits of the backlog, as one batch; with a Close at its end."""
        if not self.is_greeted and self.session.state is TargetState.READY:
            self._grant()
        batch = PostBatch(self.posted_count)
        room = self.send_depth - (self.posted_count - self.retired_count)
        while self.backlog and len(batch) < room:
            effect = self.backlog[0]
            if isinstance(effect, Close) or not self._translate(effect, batch, room - len(batch)):
                break
        try:
            self._post(batch)
            self._post_reads(room - len(batch))
            if self.backlog and isinstance(self.backlog[0], Close):
                self._close(self.backlog[0])
        except QueuePairClosed:
            self.backlog.clear()  # DISCONNECTED is on its way, and with it the session's end
            self.reads.clear()

    def _post_reads(self, room: int) -> None:
        """Post what fits of the Reads, behind all else. A peer that serves none (its IRD is 0) is told that they failed."""
        reads = [self.reads.popleft() for _ in range(min(len(self.reads), room, READS_IN_FLIGHT - self.reads_in_flight))]
        batch = PostBatch(self.posted_count)
        for read in reads:
            batch.add_signaled(Op.READ, WrFlag.NONE, read, self.pool_stag, self.answers.mark)
        try:
            self._post(batch)
            self.reads_in_flight += len(reads)
        except (QueuePairClosed, QueueFull):
            raise
        except FabricError as error:
            _log.info("%s can store inline only: %s", self.peer, error)
            for read in reads:
                self.add(self.session.read_done(read.token, False, self.last_used), self.last_used)

    def _translate(self, effect: Send | SendMany | LoadMany | Write | Record, batch: PostBatch, room: int) -> bool:
        """Move the first effect of the backlog into `batch`; False if a send row has to be waited for."""
        match effect:
            case Write():
                flags = WrFlag.SNAPSHOT if effect.snapshot else WrFlag.NONE
                batch.add_signaled(Op.WRITE, flags, effect, self.pool_stag, self.answers.mark)
            case LoadMany():
                count = min(room // 2, self.answers.free_count, len(effect.messages))
                if not count:
                    return False
                first, rest = split_loads(effect, count)
                batch.add_loads(self.answers, first, self.pool_stag)
                if rest is not None:
                    self.backlog[0] = rest
                    return False
            case Record():
                if not self.answers.free_count:
                    return False
                assert self.core.record_op is not None, "RECORD_COMPLETION was granted without a binding that has it"
                batch.add_record(self.answers, effect, self.core.record_op)
            case Send():
                rows = self._rows_for(effect)
                if not rows.free_count:
                    return False
                batch.add_send(rows, effect)
                if rows is self.long_answers:
                    self.long_marks.append((self.posted_count + len(batch), rows.mark))
            case SendMany():
                count = min(room, self.answers.free_count, len(effect.messages))
                batch.add_sends(self.answers, effect.messages[:count])
                if count < len(effect.messages):
                    self.backlog[0] = SendMany(effect.messages[count:])
                    return False
        self.backlog.popleft()
        return True

    def _rows_for(self, effect: Send) -> SendRows:
        if len(effect.data) <= _ANSWER_BYTES:
            return self.answers
        is_greeting = effect.data[1] == Opcode.HELLO_ACK
        return self.greeting_answers if is_greeting or self.long_answers is None else self.long_answers

    def _post(self, batch: PostBatch) -> None:
        if not len(batch):
            return
        if batch.answer_count and self.receives is not None:
            rows = [self.held.popleft() for _ in range(min(batch.answer_count, len(self.held)))]
            if rows:
                self.qp.post_receive(self.receives.requests(np.array(rows, np.int64)))
        elif batch.answer_count and self.session.state is TargetState.PROVING:
            self.qp.post_receive(self.greetings.requests(np.zeros(1, np.int64)))
        requests = batch.finish(self.answers.mark)
        self.qp.post_send(requests)
        self.posted_count += len(requests)
        self.signaled.extend(batch.signaled)

    def _grant(self) -> None:
        """HELLO was granted: the executor, then receives for what was granted, and only then the answer.

        A peer that doesn't wait for the answer finds no receive until the executor is there to count its messages.
        """
        ack = self.session.ack
        assert ack is not None
        size = max(SMALLEST_RECEIVE_BYTES, REQUEST_BYTES + DESCRIPTOR_BYTES + ack.inline_bytes)
        if ack.capabilities & Capability.STORE:
            size = max(size, message_limit(ack.inline_bytes))
            self.long_answers = SendRows(self.pd, _LONG_ANSWERS, message_limit(ack.inline_bytes))
        count = ack.outstanding + SPARE_RECEIVES
        self.receives = ReceiveRows(self.pd, count, size)
        served = self.core.served(self.session.target)
        try:
            self.pool = served.pool_region(self.pd)
            self.pool_stag = self.pool.stag
            if served.executor is not None and self.session.allows_executor:
                self.qp.attach_executor(served.executor, self.pool, store_grant(served.executor, served.target, self.session))
                self.has_executor = True
            self.qp.post_receive(self.receives.requests(np.arange(count, dtype=np.int64)))
        except QueuePairClosed:
            return  # DISCONNECTED is on its way
        except FabricError as error:
            _log.warning("session of %s ends: the pool can't be registered for it: %s", self.peer, error)
            self.qp.abort()

    def _close(self, effect: Close) -> None:
        self.backlog.clear()
        self.reads.clear()
        if not self.is_closing:
            self.is_closing = True
            level = logging.INFO if effect.error is None else logging.ERROR
            _log.log(level, "session of %s ends: %s", self.peer, effect.reason, exc_info=effect.error)
            self.qp.close()

    def end(self, now: float) -> None:
        """DISCONNECTED was polled."""
        self.backlog.clear()
        self.reads.clear()
        self.inbox.clear()
        self.session.disconnected(now)
        self.pd.close()
        # Connection, session and exposed memory name each other: what is large must not wait for the cycle collector.
        self.receives = self.long_answers = self.pool = None


class ServedPool:
    """A target, what registers its pool, and what runs beside it."""

    def __init__(self, fabric: Fabric, target: Target, pool_region: PoolRegion, use_executor: bool, drain_limit_s: float) -> None:
        self.target = target
        self.pool_region = pool_region
        self.executor: Executor | None = create_executor(fabric, target) if use_executor and target.allows_executor else None
        self.fence = DrainFence(target, drain_limit_s)


class TargetCore:
    """See the module. `target` is driven by this object alone; `pool_region` registers its pool.

    Connections begin at `target`. Others, with pools of other block sizes, come by `add_pool`, and sessions move to them by `Target.pick`.
    """

    def __init__(
        self,
        fabric: Fabric,
        cq: CompletionQueue,
        target: Target,
        pool_region: PoolRegion,
        *,
        use_executor: bool = True,
        session_limit: int = 256,
        hello_timeout_s: float = 5.0,
        drain_limit_s: float = 10.0,
        store_limit_s: float = 30.0,
    ) -> None:
        self.fabric = fabric
        self.cq = cq
        self.target = target
        self.session_limit = session_limit
        self.hello_timeout_s = hello_timeout_s
        self._use_executor = use_executor
        self._drain_limit_s = drain_limit_s
        self._pools: dict[Target, ServedPool] = {}
        self.add_pool(target, pool_region)
        self._store_fence = StoreFence(store_limit_s)
        self.record_op: int | None = getattr(fabric, "write_with_immediate", None)
        """The work request that writes a completion record, of fabrics that keep its order (draft section 6.5); no RDMAP fabric has it."""
        self.offers = Capability.NONE if self.record_op is None else Capability.RECORD_COMPLETION
        self.dirty: set[_Connection] = set()
        self._connections: dict[int, _Connection] = {}
        self._by_session: dict[TargetSession, _Connection] = {}

    @property
    def executor(self) -> Executor | None:
        """That of the target where connections begin."""
        return self._pools[self.target].executor

    def add_pool(self, target: Target, pool_region: PoolRegion) -> ServedPool:
        """Serve one more pool."""
        if target.keyed is not None:
            target.keyed.wake = self.cq.wake
        self._pools[target] = ServedPool(self.fabric, target, pool_region, self._use_executor, self._drain_limit_s)
        return self._pools[target]

    def served(self, target: Target) -> ServedPool:
        return self._pools[target]

    @property
    def connection_count(self) -> int:
        return len(self._connections)

    @property
    def has_pending_work(self) -> bool:
        """Something waits that no completion may announce: call `process` soon."""
        return self.wait_limit_s < _IDLE_WAIT_S

    @property
    def wait_limit_s(self) -> float:
        """How long to wait for completions at most, for what none may announce."""
        if any(connection.inbox for connection in self._connections.values()):
            return 0.0
        return min(map(_wait_limit_s, self._pools))

    def admit(self, request: ConnectionRequest, now: float) -> None:
        """Take a connection. If there are as many as may be, one that says nothing makes room, or the one that has been idle longest."""
        if self.target.is_shutting_down or not self._has_room(now):
            _log.warning("rejected %s: %d sessions of %d", request.peer, len(self._connections), self.session_limit)
            request.reject()
            return
        try:
            connection = _Connection(self, request, now)
        except FabricError as error:
            _log.warning("rejected %s: %s", request.peer, error)
            request.reject()
            return
        self._connections[connection.qp.number] = connection
        self._by_session[connection.session] = connection
        try:
            connection.start()
        except QueuePairClosed:
            _log.info("lost %s while it was accepted", request.peer)

    def _has_room(self, now: float) -> bool:
        """Whether one more connection may be taken, after the longest idle one was told to go if need be.

        One that goes is not counted any more, though its memory is held until it has gone: at most a quarter more than the limit.
        """
        leaving_count = sum(connection.is_closing for connection in self._connections.values())
        if len(self._connections) - leaving_count < self.session_limit:
            return len(self._connections) < self.session_limit + max(1, self.session_limit // 4)
        if leaving_count >= max(1, self.session_limit // 4):
            return False
        # Who has said nothing yet goes first: connections cost nothing to whoever makes many, sessions do.
        silent = [one for one in self._connections.values() if not one.is_greeted and not one.is_closing]
        oldest = min(silent, key=lambda connection: connection.hello_deadline, default=None)
        if oldest is not None and oldest.hello_deadline - self.hello_timeout_s + _SILENT_LEAST_S <= now:
            oldest.is_closing = True
            _log.info("session of %s ends: it has said no HELLO yet, and another peer wants its place", oldest.peer)
            oldest.qp.abort()
            return True
        idle = [connection for connection in self._connections.values() if connection.is_idle and not connection.notice_native_use(now)]
        idle = [connection for connection in idle if now - connection.last_used >= _IDLE_LEAST_S]
        if not idle:
            return False
        connection = min(idle, key=lambda connection: connection.last_used)
        connection.is_closing = True
        _log.info("session of %s ends: it was idle, and another peer wants its place", connection.peer)
        connection.qp.close()
        return True

    def process(self, completions: Array, now: float) -> None:
        """Take completions (dtype COMPLETION) of this target's queue pairs, give each session a turn, and post what follows."""
        numbers = completions["qp"]
        for number in np.unique(numbers).tolist():
            connection = self._connections.get(number)
            if connection is not None:
                connection.inbox.append(completions[numbers == number])
                connection.last_used = now
        for connection in [connection for connection in self._connections.values() if connection.inbox]:
            self._take_turn(connection, now)
        self.tick(now)

    def _take_turn(self, connection: _Connection, now: float) -> None:
        budget = float(TURN_COST)
        while connection.inbox and budget > 0:
            run, length, rest = first_run(connection.inbox.popleft(), int(budget) + 1)
            if len(rest):
                connection.inbox.appendleft(rest)
            if length == HEADER_BYTES:
                connection.on_frees(run["wr_id"].astype(np.int64), now)
                budget -= _RUN_COST * len(run)
            elif length == REQUEST_BYTES:
                is_quick = connection.on_loads(run["wr_id"].astype(np.int64), now)
                budget -= len(run) * (_RUN_COST if is_quick else 1)
            else:
                for completion in run.tolist():
                    self._on_completion(connection, completion, now)
                budget -= len(run)
        if connection in self.dirty:
            self.dirty.remove(connection)
            connection.flush()

    def tick(self, now: float) -> None:
        """Move drained blocks on, end connections whose HELLO is overdue, post what waits."""
        for session in [session for target in self._pools for session in target.tick(now)]:
            connection = self._by_session.get(session)
            effects = session.take_effects()
            if connection is not None:
                connection.add(effects, now)
        for connection in self._connections.values():
            if not connection.is_greeted and now >= connection.hello_deadline and not connection.is_closing:
                connection.is_closing = True
                _log.info("session of %s ends: no HELLO within %g s", connection.peer, self.hello_timeout_s)
                connection.qp.abort()
        self._fence_readers(now)
        self._fence_stores(now)
        self.flush()

    def _fence_readers(self, now: float) -> None:
        overdue = {target: entries for target, pool in self._pools.items() if (entries := pool.fence.overdue_entries(now)).size}
        for connection in self._connections.values() if overdue else ():
            target = connection.session.target
            if not connection.is_closing and target in overdue and is_reading(connection, target, overdue[target]):
                connection.is_closing = True
                _log.warning("session of %s ends: it reads blocks too slowly that are wanted back", connection.peer)
                connection.qp.abort()

    def _fence_stores(self, now: float) -> None:
        connections = self._connections
        for number in self._store_fence.overdue(lambda: [(one.qp.number, *one.stores()) for one in connections.values()], now):
            connection = connections[number]
            if not connection.is_closing:
                connection.is_closing = True
                _log.warning("session of %s ends: it does not answer the RDMA Reads of its stores", connection.peer)
                connection.qp.abort()

    def shut_down(self, now: float) -> None:
        """Say goodbye on every session; new requests are answered SHUTTING_DOWN from now on."""
        for pool in self._pools.values():
            if pool.executor is not None:
                pool.executor.stop()
            for session in pool.target.shut_down():
                self._by_session[session].add(session.take_effects(), now)
        self.flush()

    def close_all(self) -> None:
        """End every connection in order; DISCONNECTED follows for each."""
        for connection in self._connections.values():
            connection.is_closing = True
            connection.qp.close()

    def abort_all(self) -> None:
        """End every connection at once; DISCONNECTED follows for each."""
        for connection in self._connections.values():
            connection.is_closing = True
            connection.qp.abort()

    def flush(self) -> None:
        while self.dirty:
            self.dirty.pop().flush()

    def _on_completion(self, connection: _Connection, completion: tuple[Any, ...], now: float) -> None:
        wr_id, number, op, status, _, length = completion[:6]
        if op == Op.DISCONNECTED:
            del self._connections[number]
            del self._by_session[connection.session]
            self.dirty.discard(connection)
            connection.end(now)
        elif op == Op.RECEIVE:
            if status == CompletionStatus.OK:
                connection.on_receive(wr_id, length, now)
        elif op in _SENDS or op in (Op.WRITE, Op.READ):
            if status != CompletionStatus.FLUSHED:  # the flushed are settled by `end`
                connection.on_sent(op, wr_id, status == CompletionStatus.OK, now)
            self.dirty.add(connection)


def _wait_limit_s(target: Target) -> float:
    if target.leaving_count > 0 or any(session.is_retrying for session in target.keyed_waiting):
        return _DRAIN_WAIT_S
    if target.direct is not None and target.has_open_partitions:
        return min(max(target.direct.ticket_timeout_s / 8, _DRAIN_WAIT_S), _IDLE_WAIT_S)
    return _IDLE_WAIT_S
