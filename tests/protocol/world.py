"""A target and initiators, linked without a network: messages are handed over, RDMA operations are copies between arrays.

`World.run` carries everything that is under way to its end. `hold_operations` leaves Writes and Reads in flight until
`finish_operations`, to look at what must wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.effects import Close, Effect, Read, Send, SendMany, Write
from kbtp_core.protocol.initiator import Batch, HelloParameters, Initiator
from kbtp_core.protocol.pool import BlockPool, LentPool
from kbtp_core.protocol.table import BlockTable
from kbtp_core.protocol.target import Target, TargetLimits
from kbtp_core.protocol.target_session import TargetSession

STAG = 0x51A6


def draw(count: int) -> bytes:
    """Random octets that are the same in every run."""
    return bytes(range(1, count + 1))


@dataclass
class Link:
    """One connection: an initiator, its memory, and the session at the target."""

    world: World
    initiator: Initiator
    session: TargetSession
    memory: NDArray[np.uint8]
    held: list[Write | Read] = field(default_factory=list)
    closed_because: str | None = None
    invalidated: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    is_connected: bool = True

    def greet(self) -> Link:
        self.deliver(self.initiator.hello())
        return self

    def deliver(self, message: bytes) -> None:
        """One message to the target, with everything that follows from it."""
        self.apply(self.session.receive(message, 0.0))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._to_initiator(effect)
                case SendMany():
                    for row in effect.messages:
                        self._to_initiator(Send(row.tobytes()))
                case Write() | Read():
                    self.held.append(effect)
                    if not self.world.hold_operations:
                        self.finish_operations()
                case Close():
                    self.closed_because = effect.reason

    def finish_operations(self, ok: bool = True) -> None:
        """Complete the RDMA operations in flight, oldest first."""
        while self.held:
            operation = self.held.pop(0)
            here = slice(operation.offset, operation.offset + operation.length)
            there = slice(operation.block_offset, operation.block_offset + operation.length)
            if isinstance(operation, Write):
                self.memory[here] = self.world.pool_memory[there]
                self.apply(self.session.write_done(operation.token, ok, 0.0))
            else:
                if ok:
                    self.world.pool_memory[there] = self.memory[here]
                self.apply(self.session.read_done(operation.token, ok, 0.0))

    def run(self, *batches: Batch) -> Link:
        """Send whatever credit allows until nothing is left to send."""
        while (window := self.initiator.take_window(1 << 30)) is not None:
            lengths = window.batch.message_lengths
            for i in range(window.start, window.stop):
                row = window.batch.messages[i]
                self.deliver(bytes(row if lengths is None else row[: lengths[i]]))
        for batch in batches:
            assert batch.is_done, f"{batch.outstanding_count} requests are unanswered"
        return self

    def disconnect(self) -> None:
        """The connection ends; its operations are fenced."""
        self.is_connected = False
        self.held.clear()
        self.session.disconnected(0.0)
        self.initiator.disconnected("the test says so")

    def _to_initiator(self, effect: Send) -> None:
        if effect.invalidate_stag is not None:
            self.invalidated.append(effect.invalidate_stag)
        self.statuses.append(int.from_bytes(effect.data[22:24], "big"))
        for answer in self.initiator.receive(effect.data):
            self.deliver(answer)


@dataclass
class World:
    target: Target
    pool_memory: NDArray[np.uint8]
    links: list[Link] = field(default_factory=list)
    hold_operations: bool = False
    native_readers: dict[int, int] = field(default_factory=dict)

    def link(
        self,
        *,
        quota: int = 0,
        handles: int = 0,
        outstanding: int = 16,
        inline_bytes: int = 256,
        trust_domain: str = "",
        secret: bytes | None = None,
        block_bytes: int = 0,
        memory_bytes: int = 4096,
    ) -> Link:
        wishes = HelloParameters(
            quota=quota,
            handle_count=handles,
            outstanding=outstanding,
            inline_bytes=inline_bytes,
            trust_domain=trust_domain,
            block_bytes=block_bytes,
            client_name="test",
        )
        initiator = Initiator(wishes, peer="10.0.0.1:7400", incarnation=7, secret=secret, draw=draw)
        session = self.target.open_session("10.0.0.2:1")
        link = Link(self, initiator, session, np.zeros(memory_bytes, np.uint8))
        self.links.append(link)
        return link

    def tick(self) -> None:
        for session in self.target.tick(0.0):
            link = next(link for link in self.links if link.session is session)
            link.apply(session.take_effects())

    def block(self, offset: int, length: int) -> bytes:
        return self.pool_memory[offset : offset + length].tobytes()

    def _readers(self, indexes: NDArray[np.uint64]) -> NDArray[np.uint32]:
        return np.array([self.native_readers.get(int(i), 0) for i in indexes], np.uint32)


def ring_world(
    *,
    blocks: int = 4,
    block_bytes: int = 64,
    handles: int = 16,
    limits: TargetLimits | None = None,
    secrets: dict[str, bytes] | None = None,
    trust_domains: frozenset[str] | None = None,
) -> World:
    """A target whose pool belongs to its ring."""
    memory = np.zeros(blocks * block_bytes, np.uint8)
    return _world(BlockPool(block_bytes, memory), memory, handles, limits, secrets, trust_domains, 0)


def lent_world(*, blocks: int = 4, block_bytes: int = 64, handles: int = 16, reserved: int = 1) -> World:
    """A target whose pool belongs to somebody else; block i is filled with i + 1."""
    memory = np.repeat(np.arange(1, blocks + 1, dtype=np.uint8), block_bytes)
    return _world(LentPool(block_bytes, memory.size), memory, handles, None, None, None, reserved)


def _world(
    pool: BlockPool | LentPool,
    memory: NDArray[np.uint8],
    handles: int,
    limits: TargetLimits | None,
    secrets: dict[str, bytes] | None,
    trust_domains: frozenset[str] | None,
    reserved: int,
) -> World:
    target = Target(
        pool,
        BlockTable(handles, 100),
        name="target",
        incarnation=0xABCDEF,
        limits=limits or TargetLimits(),
        secrets=secrets,
        trust_domains=trust_domains,
        reserved_handles=reserved,
        draw=draw,
    )
    world = World(target, memory)
    reader: Callable[[NDArray[np.uint64]], NDArray[np.uint32]] = world._readers
    target.readers = reader
    return world
