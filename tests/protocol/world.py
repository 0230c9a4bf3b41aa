"""A target and initiators, linked without a network: messages are handed over, RDMA operations are copies between arrays.

`World.run` carries everything that is under way to its end. `hold_operations` leaves Writes and Reads in flight until
`finish_operations`, to look at what must wait for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import Capability, Flag
from kbtp_core.protocol.direct import DirectAllocator, DirectBatch, DirectKind, DirectLoad, DirectStore
from kbtp_core.protocol.effects import Close, Effect, LoadMany, Read, Record, RevokePartition, Send, SendMany, Write
from kbtp_core.protocol.hello import DirectAccess
from kbtp_core.protocol.initiator import HelloParameters, Initiator
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.pool import BlockPool, LentPool
from kbtp_core.protocol.ring import fetch_add
from kbtp_core.protocol.table import BlockTable
from kbtp_core.protocol.target import Target, TargetLimits
from kbtp_core.protocol.target_grant import Exposure
from kbtp_core.protocol.target_session import TargetSession

STAG = 0x51A6
TABLE, POOL, PARTITION, SLOTS, HEAD = 0x7A, 0x70, 0x9A, 0x51, 0x4E  # STags of what direct modes reach


def draw(count: int) -> bytes:
    """Random octets that are the same in every run."""
    return bytes(range(1, count + 1))


@dataclass(eq=False)
class Link:
    """One connection: an initiator, its memory, and the session at the target."""

    world: World
    initiator: Initiator
    session: TargetSession
    memory: NDArray[np.uint8]
    held: list[Write | Read | LoadMany] = field(default_factory=list)
    closed_because: str | None = None
    invalidated: list[int] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    immediates: list[int] = field(default_factory=list)
    is_connected: bool = True
    is_revoked: bool = False
    allocator: DirectAllocator | None = None
    exposure: Exposure = field(init=False)
    machine: DirectBatch = field(init=False)

    def greet(self) -> Link:
        self.deliver(self.initiator.hello())
        return self

    def deliver(self, message: bytes) -> None:
        """One message to the target, with everything that follows from it."""
        self.apply(self.session.receive(message, self.world.now))

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self._to_initiator(effect)
                case SendMany():
                    for row in effect.messages:
                        self._to_initiator(Send(row.tobytes()))
                case LoadMany():
                    self.held.append(effect)
                    if not self.world.hold_operations:
                        self.finish_operations()
                case Write() | Read():
                    self.held.append(effect)
                    if not self.world.hold_operations:
                        self.finish_operations()
                case Record():
                    self.memory[effect.offset : effect.offset + 24] = np.frombuffer(effect.data, np.uint8)
                    self.immediates.append(effect.immediate)
                    self.initiator.receive_records(np.frombuffer(effect.data, np.uint8).reshape(1, 24))
                case RevokePartition():
                    self.is_revoked = True
                    self.apply(self.session.partition_revoked(self.world.now))
                case Close():
                    self.closed_because = effect.reason

    def finish_operations(self, ok: bool = True) -> None:
        """Complete the RDMA operations in flight, oldest first."""
        while self.held:
            operation = self.held.pop(0)
            if isinstance(operation, LoadMany):
                self._finish_loads(operation, ok)
                continue
            here = slice(operation.offset, operation.offset + operation.length)
            there = slice(operation.block_offset, operation.block_offset + operation.length)
            if isinstance(operation, Write):
                self.memory[here] = self.world.pool_memory[there]
                self.apply(self.session.write_done(operation.token, ok, self.world.now))
            else:
                if ok:
                    self.world.pool_memory[there] = self.memory[here]
                self.apply(self.session.read_done(operation.token, ok, self.world.now))

    def _finish_loads(self, loads: LoadMany, ok: bool) -> None:
        for i, length in enumerate(loads.lengths.tolist()):
            here, there = int(loads.requests["offset"][i]), int(loads.block_offsets[i])
            self.memory[here : here + length] = self.world.pool_memory[there : there + length]
        for message, request in zip(loads.messages, loads.requests, strict=True):
            self._to_initiator(Send(message.tobytes(), int(request["stag"]) if request["flags"] & Flag.INVALIDATE else None))
        if loads.token:
            self.apply(self.session.write_done(loads.token, ok, self.world.now))

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
        self.session.disconnected(self.world.now)
        self.initiator.disconnected("the test says so")

    # Direct modes ----------------------------------------------------------------------------------------------------

    def carry_out(self, operations: NDArray[Any]) -> NDArray[np.uint64]:
        """What an RNIC does for one-sided operations; an invalid STag is an assertion. Atomics return their values."""
        values = []
        for operation in operations:
            values.append(self._one_sided(**{name: int(operation[name]) for name in operations.dtype.names or ()}))
        return np.array(values, np.uint64)

    def direct(self, machine: DirectBatch) -> DirectBatch:
        """Run a machine to its end, but for the BIND."""
        self.machine = machine
        operations = machine.start(self.world.now)
        for _ in range(100):
            if not len(operations):
                return machine
            operations = machine.advance(self.carry_out(operations), self.world.now)
        raise AssertionError("the machine reads again and again")

    def load_direct(self, handles: list[int], generations: list[int], at: int = 0, length: int = 64) -> DirectLoad:
        assert self.initiator.ack is not None
        count = len(handles)
        places = np.arange(count, dtype=np.uint64) * np.uint64(length) + np.uint64(at)
        machine = DirectLoad(
            self.initiator.ack, np.array(handles, np.uint64), np.array(generations, np.uint16), places, np.full(count, length, np.uint32)
        )
        self.direct(machine)
        return machine

    def take_direct(self, data: list[bytes], at: int = 1024) -> DirectStore:
        """Take tickets and write blocks, without BIND."""
        for i, octets in enumerate(data):
            self.memory[at + 64 * i : at + 64 * i + len(octets)] = np.frombuffer(octets, np.uint8)
        assert self.initiator.ack is not None
        self.allocator = self.allocator or DirectAllocator(self.initiator.ack)
        offsets = np.arange(len(data), dtype=np.uint64) * np.uint64(64) + np.uint64(at)
        machine = DirectStore(self.allocator, self.initiator.bound_count, offsets, np.array([len(octets) for octets in data], np.uint32))
        self.direct(machine)
        return machine

    def bind_taken(self, machine: DirectStore, handles: list[int], flags: int = Flag.SEAL) -> Batch:
        at = machine.bindable
        bound = self.initiator.bind(np.array(handles)[at], 0, machine.tickets[at], machine._lengths[at], machine.block_offset[at], flags)
        self.run(bound)
        machine.settle(bound.status, bound.generation)
        return bound

    def fetch_add_head(self) -> int:
        """One ticket, as the initiator's RNIC takes it."""
        assert self.initiator.ack is not None
        self.allocator = self.allocator or DirectAllocator(self.initiator.ack)
        return self._one_sided(DirectKind.FETCH_ADD, False, 0, HEAD, 0, 0, 0)

    def expose(self, exposure: Exposure) -> DirectAccess:
        self.exposure = exposure
        readable, partition = exposure.is_readable, exposure.partition is not None
        return DirectAccess(
            table_stag=TABLE if readable else 0,
            pool_stag=POOL if readable or partition else 0,
            partition_stag=PARTITION if partition else 0,
            ring_stag=SLOTS if partition else 0,
            head_stag=HEAD if partition else 0,
        )

    def _one_sided(self, kind: int, in_data: bool, index: int, stag: int, length: int, offset: int, local_offset: int) -> int:
        partition = self.exposure.partition
        local = self.memory if in_data else self.machine.scratch if hasattr(self, "machine") else self.memory
        assert not (self.is_revoked and stag in (PARTITION, HEAD)), "an invalid STag ends the connection"
        if kind == DirectKind.FETCH_ADD:
            assert partition is not None
            assert self.allocator is not None
            assert stag == HEAD
            old = int(partition.ring.counters[0])
            partition.ring.counters[0] = fetch_add(old, self.allocator.add, self.allocator.add_mask)
            return old
        if kind == DirectKind.WRITE:
            assert partition is not None
            assert stag == PARTITION
            assert offset // self.world.target.pool.block_bytes * self.world.target.pool.block_bytes in partition.block_offsets
            self.world.pool_memory[offset : offset + length] = local[local_offset : local_offset + length]
            return 0
        memory = {
            TABLE: self.world.target.table.entries,
            POOL: self.world.pool_memory,
            SLOTS: None if partition is None else partition.ring.slots,
        }[stag]
        assert memory is not None
        octets = memory.view(np.uint8).reshape(-1)
        assert offset + length <= octets.size
        local[local_offset : local_offset + length] = octets[offset : offset + length]
        return 0

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
    now: float = 0.0

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
        capabilities: Capability = Capability.NONE,
        offers: Capability = Capability.NONE,
    ) -> Link:
        wishes = HelloParameters(
            quota=quota,
            handle_count=handles,
            outstanding=outstanding,
            inline_bytes=inline_bytes,
            trust_domain=trust_domain,
            block_bytes=block_bytes,
            client_name="test",
            capabilities=int(capabilities),
        )
        initiator = Initiator(wishes, peer="10.0.0.1:7400", incarnation=7, secret=secret, draw=draw)
        exposed: list[Link] = []
        session = self.target.open_session("10.0.0.2:1", offers=offers, expose=lambda exposure: exposed[0].expose(exposure))
        link = Link(self, initiator, session, np.zeros(memory_bytes, np.uint8))
        exposed.append(link)
        self.links.append(link)
        return link

    def tick(self) -> None:
        for session in self.target.tick(self.now):
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
    direct: DirectPolicy | None = None,
    crc32c: Callable[[bytes], int] | None = None,
) -> World:
    """A target whose pool belongs to its ring."""
    memory = np.zeros(blocks * block_bytes, np.uint8)
    return _world(BlockPool(block_bytes, memory), memory, handles, limits, secrets, trust_domains, 0, direct, crc32c)


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
    direct: DirectPolicy | None = None,
    crc32c: Callable[[bytes], int] | None = None,
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
        direct=direct,
        crc32c=crc32c,
        draw=draw,
    )
    world = World(target, memory)
    reader: Callable[[NDArray[np.uint64]], NDArray[np.uint32]] = world._readers
    target.readers = reader
    return world
