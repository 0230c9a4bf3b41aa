"""Two equal targets that are given the same messages: one in software alone, one with an executor before it.

Nothing here is concurrent: RDMA operations are copies that happen when the test says so, the oldest of a session first, as a connection
does them. So both sides must give the same answers, in the same order for each handle, and end with the same memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.fabric.api import Fabric
from kbtp_core.fabric.executor import NativeExecutor, create_executor
from kbtp_core.protocol import BlockPool, BlockTable, HelloParameters, Initiator, Target, TargetLimits
from kbtp_core.protocol.effects import Close, Effect, LoadMany, Read, Send, SendMany, Write
from kbtp_core.protocol.target_session import TargetSession
from kbtp_core.session.native import create_executor as share
from kbtp_core.session.native import store_grant

BLOCK = 64
BASE = 100
LOAD, READ, ANSWER = 0, 1, 2  # kinds of native work


def draw(count: int) -> bytes:
    return bytes(range(1, count + 1))


class _Executors:
    """As much of a fabric as makes executors."""

    def create_executor(self, *arguments: Any) -> NativeExecutor:
        return create_executor(*arguments)


@dataclass(eq=False)
class Connection:
    """One session of one side: what was sent to its initiator, and the operations in flight."""

    side: Side
    session: TargetSession
    memory: NDArray[np.uint8]
    answers: list[tuple[bytes, int | None]] = field(default_factory=list)
    operations: deque[tuple[str, Any]] = field(default_factory=deque)
    native: _native.ExecutorSession | None = None
    withheld: list[bytes] = field(default_factory=list)
    is_open: bool = True
    native_count: int = 0

    def send(self, message: bytes) -> None:
        """A message of the initiator."""
        if not self.is_open:
            return
        if self.native is not None:
            work = self.native.take(message, self.session.unanswered_count > 0 or bool(self.withheld), True)
            if work is not None:
                self.native_count += 1
                self._do(work)
                return
            if self.native.has_unsettled:
                self.withheld.append(message)
                return
        self._apply(self.session.receive(message, 0.0))

    def finish_one(self) -> None:
        """Complete the oldest operation in flight."""
        kind, operation = self.operations.popleft()
        memory, pool = self.memory, self.side.memory
        start = operation.offset % (memory.size - BLOCK)  # a message that was spoiled may name any place
        here = slice(start, start + operation.length)
        there = slice(operation.block_offset, operation.block_offset + operation.length)
        if kind in ("write", "native write"):
            memory[here] = pool[there]
        else:
            pool[there] = memory[here]
        if kind == "write":
            self._apply(self.session.write_done(operation.token, True, 0.0))
        elif kind == "read":
            self._apply(self.session.read_done(operation.token, True, 0.0))
        else:
            assert self.native is not None
            if kind == "native write":
                self.native.load_sent(operation.entry, operation.snapshot)
            else:
                self._do(self.native.store_arrived(operation.entry))
            if not self.native.has_unsettled:
                waiting, self.withheld = self.withheld, []
                for message in waiting:
                    self._apply(self.session.receive(message, 0.0))
        self.side.tick()

    def disconnect(self) -> None:
        self.is_open = False
        if self.native is not None:
            for kind, operation in self.operations:
                if kind == "native write":
                    self.native.load_sent(operation.entry, operation.snapshot)
            self.native.give_up()
            self.withheld.clear()
        self.operations.clear()
        self.session.disconnected(0.0)
        self.side.tick()

    def _do(self, work: _native.Work) -> None:
        if work.kind == LOAD:
            self.operations.append(("native write", work))
        elif work.kind == READ:
            assert self.native is not None
            self.native.store_asked(work.entry)
            self.operations.append(("native read", work))
            return
        self.answers.append((work.answer, work.stag if work.invalidate else None))

    def _apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.answers.append((effect.data, effect.invalidate_stag))
                case Write():
                    self.operations.append(("write", effect))
                case Read():
                    self.operations.append(("read", effect))
                case Close():
                    self.disconnect()
                    return
                case SendMany() | LoadMany():
                    raise AssertionError("messages were given one by one")


@dataclass(eq=False)
class Side:
    """A target and its connections."""

    target: Target
    memory: NDArray[np.uint8]
    executor: NativeExecutor | None
    connections: list[Connection] = field(default_factory=list)

    def connect(self, quota: int, handles: int, memory: NDArray[np.uint8], **wishes: Any) -> Connection:
        session = self.target.open_session("10.0.0.2:1")
        parameters = HelloParameters(quota=quota, handle_count=handles, outstanding=64, inline_bytes=2 * BLOCK, **wishes)
        hello = Initiator(parameters, peer="10.0.0.1:7400", incarnation=7, draw=draw).hello()
        assert any(isinstance(effect, Send) for effect in session.receive(hello, 0.0))
        connection = Connection(self, session, memory.copy())
        if self.executor is not None and session.allows_executor:
            grant = store_grant(self.executor, self.target, session)
            connection.native = _native.create_executor_session(self.executor.native, grant, self.memory.size)
        self.connections.append(connection)
        return connection

    def tick(self) -> None:
        for session in self.target.tick(0.0):
            effects = session.take_effects()
            for connection in self.connections:
                if connection.session is session and connection.is_open:
                    connection._apply(effects)


def make_side(blocks: int, handles: int, *, has_executor: bool, trust_domains: frozenset[str] | None = None) -> Side:
    memory = np.zeros(blocks * BLOCK, np.uint8)
    pool = BlockPool(BLOCK, memory)
    target = Target(
        pool,
        BlockTable(handles, BASE),
        name="twin",
        incarnation=5,
        limits=TargetLimits(inline_bytes=2 * BLOCK),
        trust_domains=trust_domains,
        draw=draw,
    )
    executor = share(_fabric(), target) if has_executor else None
    assert executor is None or isinstance(executor, NativeExecutor)
    return Side(target, memory, executor)


def _fabric() -> Fabric:
    fabric: Any = _Executors()
    return fabric  # type: ignore[no-any-return]
