"""Whatever a peer sends, the other side answers or closes: no exception, no lost block, no more than was granted."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.effects import Close
from kbtp_core.protocol.hello import Hello, HelloAck
from kbtp_core.protocol.initiator import InitiatorState
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.wire import AllocStore, Bind, Completion, DataDescriptor, Free, Goodbye
from tests.protocol.test_draft_6_6 import direct_link, direct_world
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.test_wire import messages
from tests.protocol.world import STAG, lent_world, ring_world


def mutate(octets: bytes, at: int, bits: int, cut: int) -> bytes:
    """`octets` with one octet changed and the last `cut` gone."""
    changed = bytearray(octets)
    if changed:
        changed[at % len(changed)] ^= bits
    return bytes(changed[: max(0, len(changed) - cut)])


valid = messages.map(lambda message: message.encode())
mutated = st.builds(mutate, valid, st.integers(0, 700), st.integers(0, 255), st.integers(0, 3))
octets = st.one_of(st.binary(max_size=80), valid, mutated)


@settings(max_examples=150)
@given(st.lists(octets, max_size=12), st.booleans(), st.booleans())
def test_a_target_survives_any_octets(stream: list[bytes], is_ring: bool, is_greeted: bool) -> None:
    world = ring_world(blocks=4) if is_ring else lent_world()
    link = world.link(quota=2, handles=8)
    if is_greeted:
        link.greet()
        if is_ring:
            put(link, 100, b"data")
        else:
            world.target.bind([101], [0], [64])
    world.hold_operations = True
    for message in stream:
        answers = link.session.receive(message, 0.0)
        assert len(answers) <= 3
        world.target.check_integrity()
    link.disconnect()
    world.tick()
    world.target.check_integrity()
    assert not world.target.sessions
    if is_ring:
        assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]


@given(st.lists(st.binary(min_size=24, max_size=24), min_size=1, max_size=8))
def test_a_target_survives_any_run_of_short_messages(rows: list[bytes]) -> None:
    world = lent_world()
    world.target.bind([101], [0], [64])
    link = world.link().greet()
    link.session.receive_frees(np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 24), 0.0)
    world.target.check_integrity()


answers = st.one_of(
    octets,
    st.builds(lambda i, s: Completion(1 << 32 | i, 100, 1, s).encode(), st.integers(0, 5), st.integers(0, 20)),
    st.builds(lambda s: Goodbye(0, s).encode(), st.integers(0, 20)),
    st.builds(lambda s, o: HelloAck(0, s, block_bytes=64, incarnation=1, outstanding=o).encode(), st.integers(0, 20), st.integers(0, 4)),
)


@settings(max_examples=150)
@given(st.lists(answers, max_size=12), st.booleans(), st.sampled_from([None, b"key"]))
def test_an_initiator_survives_any_octets(stream: list[bytes], is_greeted: bool, secret: bytes | None) -> None:
    world = ring_world()
    initiator = ready(world).initiator if is_greeted else world.link(secret=secret).initiator
    if is_greeted:
        initiator.load([100, 101, 102], 0, STAG, 0, 64)
        initiator.take_window(2)
    else:
        assert initiator.hello() == Hello(0, 7, 0, 0, 0, 0, 16, 256, bytes(range(1, 17)), "test").encode()
    for message in stream:
        initiator.receive(message)
        assert 0 <= initiator.outstanding_count <= 16
        if initiator.state is InitiatorState.CLOSED:
            assert initiator.error is not None


moves = st.lists(
    st.one_of(
        st.tuples(st.just("head"), st.integers(0, (1 << 64) - 1), st.just(0), st.just(0)),
        st.tuples(st.just("take"), st.integers(1, 3), st.just(0), st.just(0)),
        st.tuples(st.just("bind"), st.integers(0, 5), st.sampled_from([0, 64, 128, 1, 1 << 63]), st.integers(0, 3)),
        st.tuples(st.just("free"), st.integers(0, 3), st.just(0), st.just(0)),
        st.tuples(st.just("store"), st.integers(0, 3), st.just(0), st.just(0)),
        st.tuples(st.just("time"), st.integers(0, 3), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@settings(max_examples=150)
@given(moves)
def test_a_target_survives_whatever_a_direct_initiator_does_to_head_and_tickets(steps: list[tuple[str, int, int, int]]) -> None:
    world = direct_world(blocks=4)
    link = direct_link(world, quota=2)
    other = ready(world, quota=2)
    partition = link.session.partition
    assert partition is not None
    for serial, (what, first, second, third) in enumerate(steps):
        if link.closed_because is not None:
            break
        match what:
            case "head" if not link.is_revoked:
                partition.ring.counters[0] = first
            case "take" if not link.is_revoked:
                for _ in range(first):
                    link.fetch_add_head()
            case "bind":
                closing = link.session.receive(Bind(serial, 100 + third, 0, first, 1, second).encode(), world.now)
                link.apply([effect for effect in closing if isinstance(effect, Close)])
            case "free":
                link.session.receive(Free(serial, 100 + first, 0).encode(), world.now)
            case "store":
                request = AllocStore(serial, 100 + first, 0, DataDescriptor(0, 0, 1), Flag.INLINE, None, b"x")
                link.session.receive(request.encode(), world.now)
            case "time":
                world.now += first
        world.tick()
        world.target.check_integrity()
    put(other, 108, b"still served")
    link.disconnect()
    other.disconnect()
    world.tick()
    world.target.check_integrity()
    assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
