"""The RAM tier against a model, in any order of events; and the executor against the software target, answer by answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kbtp_core.protocol import Flag, Status, keyed
from kbtp_core.protocol.wire import AllocStore, DataDescriptor, Free, Load
from tests.store.keyed_world import BLOCK, TENANT, Peer, World, data_of, ids_of

NAMES = st.integers(0, 9)
PEERS = st.integers(0, 3)


class KeyedStore(RuleBasedStateMachine):
    """What a name's value is, if it is there at all: that of the last writer who was told OK, and nothing after a removal."""

    @initialize(blocks=st.integers(4, 8))
    def start(self, blocks: int) -> None:
        self.world = World(blocks=blocks)
        self.world.set_time(1000)
        self.time = 1000.0
        self.peers: list[Peer] = [self.world.peer(native=at % 2 == 1, quota=1) for at in range(4)]
        self.current: dict[int, bytes] = {}
        self.versions = 0

    @rule(name=NAMES, at=PEERS, flags=st.sampled_from([0, keyed.PublishFlag.PIN]))
    def put(self, name: int, at: int, flags: int) -> None:
        self.versions += 1
        data = b"%d is %d" % (name, self.versions)
        got = self.peers[at].put(name, data, flags=flags)
        if got.status == Status.OK:
            self.current[name] = data
            assert self.peers[at - 1].get(name) == data
        elif got.status == Status.ALREADY_BOUND:
            assert self.peers[at].load(got.handle, got.generation) == (Status.OK, self.current[name])
        else:  # over the quota, which its readers' blocks use up, or everything is held
            assert got.status in (Status.NOT_BOUND, Status.NO_SPACE)

    @rule(name=NAMES, at=PEERS)
    def get(self, name: int, at: int) -> None:
        found = self.peers[at].get(name)
        assert found is None or found == self.current[name]

    @rule(name=NAMES, at=PEERS)
    def begin_to_load(self, name: int, at: int) -> None:
        peer = self.peers[at]
        (item,) = peer.lookup(name)
        if item["tier"] and not peer.held:
            peer.hold = True
            peer.send(peer.load_message(int(item["handle"]), int(item["generation"])).encode())
            peer.hold = False
            expected = self.current[name]
            held, peer.held = list(peer.held), type(peer.held)()
            for one in held:  # it is read as late as can be
                self.late.append((peer, one, expected))

    @initialize()
    def no_late_loads(self) -> None:
        self.late: list[tuple[Peer, Any, bytes]] = []

    @rule()
    def finish_loads(self) -> None:
        for peer, one, expected in self.late:
            peer.held.append(one)
            peer.finish()
            assert peer.memory[: len(expected)].tobytes() == expected
        self.late.clear()

    @rule(name=NAMES, at=PEERS)
    def remove(self, name: int, at: int) -> None:
        self.peers[at].remove(name)
        self.current.pop(name, None)
        assert self.peers[at].get(name) is None

    @rule(name=NAMES, at=PEERS, is_pinned=st.booleans())
    def pin(self, name: int, at: int, is_pinned: bool) -> None:
        from tests.store.keyed_world import Got

        (item,) = self.peers[at].lookup(name)
        if item["tier"]:
            status = self.peers[at].pin(Got(0, int(item["handle"]), int(item["generation"])), 10_000, int(is_pinned))
            assert status in (Status.OK, Status.NO_SPACE)

    @rule(seconds=st.floats(0.1, 20))
    def time_passes(self, seconds: float) -> None:
        self.time += seconds
        self.world.set_time(self.time)
        self.world.tick()

    @rule(at=PEERS, native=st.booleans(), with_block=st.booleans())
    def crash(self, at: int, native: bool, with_block: bool) -> None:
        peer = self.peers[at]
        if with_block and self.world.store.pool.usage(peer.session.number) == 0:
            peer.alloc(0, b"never published")
        for late in [late for late in self.late if late[0] is peer]:
            self.late.remove(late)
            peer.held.append(late[1])
        peer.disconnect()
        self.world.peers.remove(peer)
        self.peers[at] = self.world.peer(native=native, quota=1)

    @invariant()
    def is_sound(self) -> None:
        self.world.check()
        self.world.tick()


KeyedStore.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestKeyedStore = KeyedStore.TestCase


# The executor and the software target give the same answers -----------------------------------------------------------------

HANDLES = st.integers(0, 3)
OPERATIONS = st.one_of(
    st.tuples(st.just("alloc"), HANDLES, st.integers(0, 300), st.booleans()),
    st.tuples(st.just("publish"), st.lists(st.tuples(NAMES, HANDLES, st.integers(0, 5)), max_size=4), st.sampled_from([0, 2, 4])),
    st.tuples(st.just("lookup"), st.lists(NAMES, max_size=6), st.integers(0, 8)),
    st.tuples(st.just("remove"), st.lists(NAMES, max_size=3)),
    st.tuples(st.just("load"), st.integers(0, 40), st.integers(0, 6)),
    st.tuples(st.just("free"), HANDLES),
    st.tuples(st.just("namespace"), st.integers(0, 2), st.integers(0, 20)),
    st.tuples(st.just("spoil"), st.binary(min_size=24, max_size=90)),
)


def encode(operation: Any, request_id: int, peer: Peer) -> bytes:
    match operation:
        case ("alloc", at, length, seals):
            flags = Flag.INLINE | (Flag.SEAL if seals else Flag.NONE)
            data = DataDescriptor(0, 0, length)
            return AllocStore(request_id, int(peer.handles[at]), 0, data, flags, inline=(data_of(at) * 5)[:length]).encode()
        case ("publish", rows, flags):
            items = np.zeros(len(rows), keyed.PUBLISH_ITEM)
            for item, (name, at, generation) in zip(items, rows, strict=True):
                item["id"], item["handle"], item["generation"] = ids_of(name)[0], peer.handles[at], generation
            return keyed.Publish(request_id, TENANT, flags, items).encode()
        case ("lookup", names, flags):
            return keyed.Lookup(request_id, TENANT, flags, ids_of(*names)).encode()
        case ("remove", names):
            return keyed.Remove(request_id, TENANT, ids_of(*names)).encode()
        case ("load", handle, generation):
            return Load(request_id, handle, generation, DataDescriptor(1, 0, BLOCK)).encode()
        case ("free", at):
            return Free(request_id, int(peer.handles[at]), 0).encode()
        case ("namespace", namespace, ttl_s):
            return keyed.SetNamespace(request_id, TENANT, namespace, ttl_s).encode()
        case ("spoil", octets):
            return bytes([1, 0x80 | octets[1] & 15, 0, 0]) + request_id.to_bytes(8, "big") + octets
    raise AssertionError(operation)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), OPERATIONS), max_size=40))
def test_the_executor_answers_as_the_software_target_does(script: list[tuple[int, Any]]) -> None:
    worlds = [World(blocks=6), World(blocks=6)]
    peers = [[world.peer(native, quota=2, handles=4) for _ in range(2)] for world, native in zip(worlds, (False, True), strict=True)]
    for world in worlds:
        world.set_time(1000)
    for at, (who, operation) in enumerate(script):
        answers = []
        for world, mine in zip(worlds, peers, strict=True):
            world.set_time(1000 + at)
            mine[who].send(encode(operation, 100 + at, mine[who]))
            answers.append(mine[who].answer_to(100 + at))
            world.check()
        assert answers[0] == answers[1], operation
        assert (peers[0][who].memory[:BLOCK] == peers[1][who].memory[:BLOCK]).all()
    stats = [world.store.stats() for world in worlds]
    assert stats[0] == stats[1]
