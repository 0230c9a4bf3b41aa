"""A RAM tier and its peers, linked without a network: messages are octets that are handed over, RDMA operations are copies.

A peer is served by the software target alone, or with the native executor before it, as a queue pair does it. With `hold` its RDMA
operations stay in flight until `finish`.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.protocol import BlockState, Capability, Flag, HelloParameters, Initiator, Status, keyed
from kbtp_core.protocol.effects import Effect, LoadMany, Read, Send, SendMany, Write
from kbtp_core.protocol.wire import AllocStore, Completion, DataDescriptor, Free, Goodbye, Load, parse
from kbtp_core.session.native import store_grant
from kbtp_core.store.ram import RamOptions, RamStore

BLOCK = 256
TENANT = 0x7E
_LOAD, _READ, _PARKED = 0, 1, 3  # kinds of native work
_numbers = itertools.count(1)


def ids_of(*names: int) -> NDArray[np.uint8]:
    """(n, 16) an id for each number."""
    return np.array([list(name.to_bytes(16, "big")) for name in names], np.uint8).reshape(-1, 16)


@dataclass(frozen=True)
class Got:
    """What became of one value."""

    status: int
    handle: int
    generation: int


class World:
    def __init__(self, blocks: int = 8, **options: Any) -> None:
        store = {name: options.pop(name) for name in ("trust_domains", "tenants", "direct", "disk") if name in options}
        options.setdefault("session_handles", 64)
        self.store = RamStore(BLOCK, blocks * BLOCK, options=RamOptions(**options), incarnation=5, **store)
        self.peers: list[Peer] = []
        self.now = 0.0

    def peer(self, native: bool = False, *, quota: int = 2, handles: int = 8, inline_bytes: int = 1024, **wishes: Any) -> Peer:
        wishes = {"capabilities": int(Capability.STORE), "outstanding": 64, **wishes}
        self.peers.append(Peer(self, native, HelloParameters(quota=quota, handle_count=handles, inline_bytes=inline_bytes, **wishes)))
        return self.peers[-1]

    def set_time(self, seconds: float) -> None:
        """The time of day of lifetimes and leases."""
        self.store.native.set_now(int(seconds * 1000))

    def tick(self) -> None:
        for session in self.store.target.tick(self.now):
            for peer in self.peers:
                if peer.session is session:
                    peer.apply(session.take_effects())

    def check(self) -> None:
        self.store.check_integrity()
        self.store.target.check_integrity()

    @property
    def free_count(self) -> int:
        return self.store.pool.count(BlockState.FREE)


class Peer:
    """One session, and what its initiator has in memory."""

    def __init__(self, world: World, native: bool, wishes: HelloParameters) -> None:
        self.world = world
        self.memory = np.zeros(1 << 14, np.uint8)
        self.session = world.store.target.open_session("a peer")
        self.answers: deque[bytes] = deque()
        self.held: deque[tuple[str, Any]] = deque()
        self.hold = False
        self.native: _native.ExecutorSession | None = None
        self.native_count = 0
        self._withheld: list[bytes] = []
        self._taken: dict[int, bytes] = {}
        initiator = Initiator(wishes, peer="the store", incarnation=9)
        self.send(initiator.hello())
        initiator.receive(self.answers.popleft())
        assert initiator.ack is not None, initiator.error
        self.ack = initiator.ack
        self.handles = self.ack.handle_base + np.arange(self.ack.handle_count, dtype=np.uint64)
        if native:
            grant = store_grant(world.store.executor, world.store.target, self.session)
            executor: Any = world.store.executor
            self._keep = grant
            self.native = _native.create_executor_session(executor.native, grant, world.store.memory.size)

    # Messages --------------------------------------------------------------------------------------------------------

    def send(self, message: bytes) -> None:
        if self.native is not None:
            work = self.native.take(message, self.session.unanswered_count > 0 or bool(self._withheld), True)
            if work is not None:
                self.native_count += 1
                self._do(work)
                return
            if self.native.has_unsettled:
                self._withheld.append(message)
                return
        self.apply(self.session.receive(message, self.world.now))

    def ask(self, message: Any) -> bytes:
        """Send a message, and wait for the answer to it."""
        self.send(message.encode())
        answer = self.answer_to(message.request_id)
        assert answer is not None, "no answer came"
        return answer

    def answer_to(self, request_id: int) -> bytes | None:
        while self.answers:
            octets = self.answers.popleft()
            self._taken[int.from_bytes(octets[4:12], "big")] = octets
        return self._taken.pop(request_id, None)

    def goodbye(self) -> None:
        self.send(Goodbye().encode())

    def disconnect(self) -> None:
        """The connection breaks, with whatever is in flight."""
        for kind, work in self.held:
            if kind == "native load":
                assert self.native is not None
                self.native.load_sent(work.entry, work.snapshot)
        if self.native is not None:
            self.native.give_up()
        self.held.clear()
        self._withheld.clear()
        self.session.disconnected(self.world.now)
        self.world.tick()

    # Values ----------------------------------------------------------------------------------------------------------

    def alloc(self, at: int, data: bytes, *, seal: bool = True, inline: bool = True) -> int:
        """ALLOC_STORE into the peer's handle number `at`; the Request ID."""
        request_id = next(_numbers)
        flags = (Flag.SEAL if seal else 0) | (Flag.INLINE if inline else 0)
        handle = int(self.handles[at])
        if inline:
            message = AllocStore(request_id, handle, 0, DataDescriptor(0, 0, len(data)), flags, inline=data)
        else:
            start = 4096 + at * BLOCK
            self.memory[start : start + len(data)] = np.frombuffer(data, np.uint8)
            message = AllocStore(request_id, handle, 0, DataDescriptor(1, start, len(data)), flags)
        self.send(message.encode())
        return request_id

    def publish_message(
        self, names: list[int], ats: list[int], flags: int = 0, generations: Any = 0, tenant: int = TENANT
    ) -> keyed.Publish:
        items = np.zeros(len(names), keyed.PUBLISH_ITEM)
        items["id"], items["handle"], items["generation"] = ids_of(*names), self.handles[ats], generations
        items["crc"] = names
        return keyed.Publish(next(_numbers), tenant, flags, items)

    def publish(self, names: list[int], ats: list[int], flags: int = 0, generations: Any = 0, tenant: int = TENANT) -> list[Got]:
        answer = self.ask(self.publish_message(names, ats, flags, generations, tenant))
        return published(answer)

    def put(self, name: int, data: bytes, at: int = 0, flags: int = 0, tenant: int = TENANT) -> Got:
        """One round trip: ALLOC_STORE and PUBLISH."""
        request_id = self.alloc(at, data)
        (got,) = self.publish([name], [at], flags, tenant=tenant)
        answer = self.answer_to(request_id)
        assert answer is not None
        stored = parse(answer)
        assert isinstance(stored, Completion)
        if got.status in (Status.OK, Status.ALREADY_BOUND) or stored.status != Status.OK:
            return got
        self.free(at)
        return got

    def free(self, at: int) -> int:
        return completion(self.ask(Free(next(_numbers), int(self.handles[at]), 0))).status

    def lookup(self, *names: int, flags: int = 0, tenant: int = TENANT) -> NDArray[Any]:
        answer = keyed.parse_keyed_answer(self.ask(keyed.Lookup(next(_numbers), tenant, flags, ids_of(*names))))
        assert isinstance(answer, keyed.LookupResult)
        return answer.items

    def load_message(self, handle: int, generation: int) -> Load:
        return Load(next(_numbers), handle, generation, DataDescriptor(1, 0, BLOCK))

    def load(self, handle: int, generation: int) -> tuple[int, bytes]:
        """(status, octets)"""
        self.memory[:BLOCK] = 0xEE
        answer = completion(self.ask(self.load_message(handle, generation)))
        return answer.status, self.memory[: answer.data_length].tobytes()

    def get(self, name: int, tenant: int = TENANT) -> bytes | None:
        """LOOKUP, then LOAD."""
        (item,) = self.lookup(name, tenant=tenant)
        if item["tier"] != keyed.Tier.RAM:
            return None
        status, octets = self.load(int(item["handle"]), int(item["generation"]))
        return octets if status == Status.OK else None

    def remove(self, *names: int, tenant: int = TENANT) -> int:
        return completion(self.ask(keyed.Remove(next(_numbers), tenant, ids_of(*names)))).data_length

    def pin(self, got: Got, lease_ms: int = 0, flags: int = keyed.PinFlag.PIN) -> int:
        items = np.zeros(1, keyed.PIN_ITEM)
        items["handle"], items["generation"] = got.handle, got.generation
        answer = keyed.parse_keyed_answer(self.ask(keyed.Pin(next(_numbers), flags, lease_ms, items)))
        assert isinstance(answer, keyed.PinResult)
        return int(answer.statuses[0])

    def count(self, message: Any) -> int:
        """Data Length of the COMPLETION that answers `message`."""
        answer = completion(self.ask(message))
        assert answer.status == Status.OK
        return answer.data_length

    # Inside ----------------------------------------------------------------------------------------------------------

    def apply(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send():
                    self.answers.append(effect.data)
                case SendMany():
                    self.answers.extend(row.tobytes() for row in effect.messages)
                case Write():
                    self.held.append(("write", effect))
                case Read():
                    self.held.append(("read", effect))
                case LoadMany():
                    raise AssertionError("messages come one by one here")
        self._go_on()

    def _do(self, work: _native.Work) -> None:
        if work.kind == _READ:
            self.held.append(("native read", work))
        elif work.kind != _PARKED:
            if work.kind == _LOAD:
                self.held.append(("native load", work))
            self.answers.append(work.answer)
        self._go_on()

    def _go_on(self) -> None:
        while self.held and not self.hold:
            self.finish_one()

    def finish(self) -> None:
        """Carry everything that is in flight to its end."""
        while self.held:
            self.finish_one()
        self.world.tick()

    def finish_one(self) -> None:
        kind, work = self.held.popleft()
        pool = self.world.store.memory
        here, there = slice(work.offset, work.offset + work.length), slice(work.block_offset, work.block_offset + work.length)
        if kind in ("write", "native load"):
            self.memory[here] = pool[there]
        else:
            pool[there] = self.memory[here]
        if kind == "write":
            self.apply(self.session.write_done(work.token, True, self.world.now))
        elif kind == "read":
            self.apply(self.session.read_done(work.token, True, self.world.now))
        else:
            assert self.native is not None
            if kind == "native load":
                self.native.load_sent(work.entry, work.snapshot)
            else:
                self._do(self.native.store_arrived(work.entry))
            while (parked := self.native.unpark()) is not None:
                self._do(parked)
            if not self.native.has_unsettled:
                waiting, self._withheld = self._withheld, []
                for message in waiting:
                    self.apply(self.session.receive(message, self.world.now))


def completion(octets: bytes) -> Completion:
    message = parse(octets)
    assert isinstance(message, Completion), message
    return message


def published(octets: bytes) -> list[Got]:
    answer = keyed.parse_keyed_answer(octets)
    assert isinstance(answer, keyed.PublishResult)
    return [Got(int(item["status"]), int(item["handle"]), int(item["generation"])) for item in answer.items]


def data_of(name: int) -> bytes:
    """The octets that every writer of `name` writes."""
    return (b"value %d " % name * BLOCK)[: 64 + name % 128]
