"""Several connections behind one session: what is spread over them, what is not, and what happens when one of them is lost."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.errors import DeadlineExceeded, SessionClosed
from kbtp_core.fabric.api import FabricError
from kbtp_core.protocol import HelloParameters, Status, TargetLimits
from kbtp_core.protocol.constants import NO_STATUS, Flag
from kbtp_core.session import InitiatorSession, StripedSession, TargetServer
from tests.session.conftest import BLOCK, World, buffer, soon, wait_until

LARGE = 256  # blocks that are split over four stripes: 1 MiB


def striped(world: World, server: TargetServer, *, stripes: int = 4, **wishes: Any) -> StripedSession:
    wishes = {"quota": 64, "handle_count": 64, "outstanding": 32, "inline_bytes": 256, **wishes}
    session = StripedSession.connect(world.fabric, *server.address, HelloParameters(**wishes), stripes=stripes)
    world.sessions.append(session)  # type: ignore[arg-type]  # it is closed with the others
    return session


def own(session: StripedSession, each: int) -> NDArray[np.uint64]:
    """`each` handles of every stripe, mixed."""
    return np.stack([np.arange(base, base + each, dtype=np.uint64) for base, _ in session.ranges], 1).reshape(-1)


def lent(world: World, blocks: int = LARGE) -> TargetServer:
    server = world.lent(blocks=blocks, handles=blocks)
    server.bind(1000 + np.arange(blocks), np.arange(blocks) * BLOCK, BLOCK)
    return server


def lose(session: StripedSession, number: int) -> InitiatorSession:
    """Break one connection, as a network would."""
    lost = session._stripes[number].session
    assert lost is not None
    lost._core.qp.abort()
    wait_until(lambda: lost.poll() or not lost.is_open)  # type: ignore[func-returns-value]
    return lost


def test_blocks_are_stored_through_the_stripe_of_their_handle_and_come_back(world: World) -> None:
    session = striped(world, world.ring(blocks=64))
    assert len(session.ranges) == 4
    assert session.quota == 64
    handles = own(session, 4)
    memory = buffer(32)
    memory[: 16 * BLOCK] = np.repeat(np.arange(16) + 1, BLOCK)
    region = session.register(memory)
    places = np.arange(16) * BLOCK
    stored = session.alloc_store(handles, 0, region, places, BLOCK, deadline=soon()).wait()
    assert stored.ok
    assert min(session.posted_bytes) == 4 * BLOCK
    loaded = session.load(handles, stored.generation, region, places + 16 * BLOCK, BLOCK, deadline=soon()).wait()
    assert loaded.ok
    assert loaded.data_length.tolist() == [BLOCK] * 16
    assert np.array_equal(memory[: 16 * BLOCK], memory[16 * BLOCK :])
    assert session.free(handles, stored.generation, deadline=soon()).wait().ok
    again = session.load(handles, stored.generation, region, 0, BLOCK, deadline=soon()).wait()
    assert set(again.status.tolist()) == {Status.NOT_BOUND}


def test_a_large_batch_is_spread_over_all_stripes_by_octets(world: World) -> None:
    session = striped(world, lent(world))
    memory = buffer(LARGE)
    region = session.register(memory)
    batch = session.load(1000 + np.arange(LARGE), 2, region, np.arange(LARGE) * BLOCK, BLOCK, deadline=soon(20)).wait()
    assert batch.ok
    assert batch.done
    assert session.posted_bytes == [LARGE * BLOCK // 4] * 4
    assert np.array_equal(memory, world.memory)
    assert batch.block_offset.tolist() == (np.arange(LARGE) * BLOCK).tolist()


def test_unequal_requests_are_split_into_equal_octets(world: World) -> None:
    session = striped(world, lent(world), stripes=2)
    lengths = np.full(LARGE, BLOCK)
    region = session.register(buffer(2 * LARGE))
    offsets = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    assert session.load(1000 + np.arange(LARGE), 0, region, offsets, lengths, deadline=soon(20)).wait().ok
    lengths[0] = LARGE * BLOCK  # room for far more than the block has
    offsets = np.concatenate([[0], LARGE * BLOCK + np.cumsum(lengths[1:]) - BLOCK])
    before = session.posted_bytes
    assert session.load(1000 + np.arange(LARGE), 0, region, offsets, lengths, deadline=soon(20)).wait().ok
    assert sorted(np.subtract(session.posted_bytes, before).tolist()) == [(LARGE - 1) * BLOCK, LARGE * BLOCK]


def test_a_small_batch_takes_the_stripe_with_the_least_under_way(world: World) -> None:
    session = striped(world, lent(world))
    region = session.register(buffer(8))
    with world.servers[0]._lock:  # nothing that needs the target's own thread is answered
        batches = [session.load([1999], 0, region, 0, BLOCK, deadline=soon()) for _ in range(8)]
        assert session.posted_bytes == [2 * BLOCK] * 4
    assert [batch.wait().status.tolist() for batch in batches] == [[Status.NOT_PERMITTED]] * 8


def test_each_request_finds_its_own_result_and_failures_stay_where_they_are(world: World) -> None:
    session = striped(world, lent(world))
    generations = np.full(LARGE, 2, np.uint16)
    generations[[3, 100, 255]] = 9
    region = session.register(buffer(LARGE))
    batch = session.load(1000 + np.arange(LARGE), generations, region, np.arange(LARGE) * BLOCK, BLOCK, deadline=soon(20)).wait()
    assert not batch.ok
    assert batch.error is None
    assert np.flatnonzero(batch.status != Status.OK).tolist() == [3, 100, 255]


def test_a_handle_of_nobodys_range_is_for_the_target_to_judge(world: World) -> None:
    session = striped(world, world.ring(blocks=64), handle_count=16)
    mine = session.ranges[0][0]
    strange = max(base + count for base, count in session.ranges)
    batch = session.alloc_store_inline([mine, strange], 0, [b"mine", b"not mine"], deadline=soon()).wait()
    assert batch.status.tolist() == [Status.OK, Status.NOT_PERMITTED]


def test_inline_data_goes_with_its_handle(world: World) -> None:
    session = striped(world, world.ring(blocks=64))
    handles = own(session, 2)
    data = [f"block {handle}".encode() for handle in handles]
    stored = session.alloc_store_inline(handles, 0, data, deadline=soon(), flags=Flag.NONE).wait()
    assert stored.ok
    assert session.store_inline(handles, stored.generation, [item[::-1] for item in data], deadline=soon(), flags=Flag.SEAL).wait().ok
    memory = buffer(len(handles))
    loaded = session.load(
        handles, 0, session.register(memory), np.arange(len(handles)) * BLOCK, BLOCK, deadline=soon(), flags=Flag.ALLOW_UNSEALED
    ).wait()
    found = [bytes(memory[at * BLOCK : at * BLOCK + length]) for at, length in enumerate(loaded.data_length.tolist())]
    assert found == [item[::-1] for item in data]


def test_a_load_follows_the_writes_of_its_handle_that_are_under_way(world: World) -> None:
    session = striped(world, world.ring(blocks=64, limits=TargetLimits()))
    handles = own(session, 8)
    region = session.register(buffer(64))
    for round_number in range(20):
        stored = session.alloc_store_inline(handles, 0, [bytes([round_number])] * len(handles), deadline=soon())
        loaded = session.load(handles, 0, region, np.arange(len(handles)) * BLOCK, BLOCK, deadline=soon())
        freed = session.free(handles, 0, deadline=soon())
        assert stored.wait().ok
        assert loaded.wait().ok
        assert freed.wait().ok


def test_losing_a_stripe_fails_its_part_alone_and_it_comes_back(world: World) -> None:
    server = lent(world)
    session = striped(world, server)
    memory = buffer(LARGE)
    region = session.register(memory)
    everything = (1000 + np.arange(LARGE), 2, region, np.arange(LARGE) * BLOCK, BLOCK)
    with server._lock:
        held = session.load(np.full(LARGE, 1999), 0, region, 0, BLOCK, deadline=soon(20))
        lose(session, 2)
    with pytest.raises(SessionClosed):
        held.wait()
    is_lost = held.status == NO_STATUS
    assert np.count_nonzero(is_lost) == LARGE // 4
    assert set(held.status[~is_lost].tolist()) == {Status.NOT_PERMITTED}
    assert session.is_open
    assert session.error is None
    assert session.load(*everything, deadline=soon(20)).wait().ok  # by the other three
    assert np.array_equal(memory, world.memory)
    wait_until(lambda: session.open_count == 4)
    before = session.posted_bytes
    memory[:] = 0
    assert session.load(*everything, deadline=soon(20)).wait().ok
    assert np.subtract(session.posted_bytes, before).tolist() == [LARGE * BLOCK // 4] * 4
    assert np.array_equal(memory, world.memory)


def test_writes_to_the_handles_of_a_lost_stripe_fail_and_others_do_not(world: World) -> None:
    session = striped(world, world.ring(blocks=64))
    handles = own(session, 2)
    session._stripes[1]._next_try = float("inf")  # stays lost
    lose(session, 1)
    batch = session.alloc_store_inline(handles, 0, [b"x"] * 8, deadline=soon())
    with pytest.raises(SessionClosed, match="the stripe that has these handles is lost"):
        batch.wait()
    assert [status == NO_STATUS for status in batch.status.tolist()] == [False, True, False, False] * 2
    assert (batch.status[batch.status != NO_STATUS] == Status.OK).all()


def test_a_session_whose_last_stripe_is_lost_is_over(world: World) -> None:
    session = striped(world, lent(world), stripes=2)
    region = session.register(buffer(1))
    for number in (0, 1):
        lose(session, number)
    assert not session.is_open
    assert isinstance(session.error, SessionClosed)
    with pytest.raises(SessionClosed, match="all of its stripes are lost"):
        session.load([1000], 0, region, 0, BLOCK, deadline=soon())
    time.sleep(0.2)
    assert session.open_count == 0  # another target could have the address by now


def test_a_stripe_is_not_connected_to_another_target_at_the_same_address(world: World) -> None:
    first = lent(world)
    session = striped(world, first, stripes=2)
    stripe = session._stripes[1]
    other = World(world.fabric, world.use_executor)
    elsewhere = other.ring()
    elsewhere.target.__dict__["incarnation"] = 78
    stripe._make = lambda: InitiatorSession.connect(world.fabric, *elsewhere.address, HelloParameters(outstanding=4))
    lose(session, 1)
    assert not stripe.connect(session.target)
    assert session.open_count == 1
    other.close()


def test_a_deadline_fences_the_memory_on_every_stripe_and_keeps_the_session(world: World) -> None:
    server = lent(world)
    session = striped(world, server)
    memory = buffer(LARGE)
    region = session.register(memory)
    with server._lock:  # no block has this handle, so the late answers bring no data
        batch = session.load(np.full(LARGE, 1999), 0, region, np.arange(LARGE) * BLOCK, BLOCK, deadline=soon(0.3))
        with pytest.raises(DeadlineExceeded):
            batch.wait()
        assert not region.is_valid
        memory[:] = 77
    with pytest.raises(FabricError, match="fenced by a deadline"):
        session.load([1000], 0, region, 0, BLOCK, deadline=soon())
    again = session.load([1000], 0, session.register(buffer(1)), 0, BLOCK, deadline=soon()).wait()
    assert again.ok
    assert (memory == 77).all()


def test_a_cancelled_batch_changes_no_memory_any_more(world: World) -> None:
    server = lent(world)
    session = striped(world, server)
    memory = buffer(LARGE)
    region = session.register(memory)
    with server._lock:
        batch = session.load(np.full(LARGE, 1999), 0, region, 0, BLOCK, deadline=soon())
        batch.cancel()
        assert batch.done
        assert not region.is_valid
    assert set(batch.status.tolist()) == {NO_STATUS}


def test_pages_that_are_scattered_are_a_sink_on_every_stripe(world: World) -> None:
    session = striped(world, lent(world))
    arena = buffer(2 * LARGE)
    pages = np.random.default_rng(3).permutation(2 * LARGE)[:LARGE]
    region = session.register_pages((arena.ctypes.data + pages * BLOCK).astype(np.uint64), BLOCK, arena)
    assert session.load(1000 + np.arange(LARGE), 2, region, np.arange(LARGE) * BLOCK, BLOCK, deadline=soon(20)).wait().ok
    assert np.array_equal(arena.reshape(-1, BLOCK)[pages].reshape(-1), world.memory)


def test_several_threads_wait_for_large_and_small_batches(world: World) -> None:
    session = striped(world, lent(world))
    failures: list[str] = []

    def work(who: int) -> None:
        memory = buffer(LARGE)
        region = session.register(memory)
        count = LARGE if who % 2 else 2
        for _ in range(10):
            memory[:] = 0
            batch = session.load(1000 + np.arange(count), 2, region, np.arange(count) * BLOCK, BLOCK, deadline=soon(60)).wait()
            if not batch.ok or not np.array_equal(memory[: count * BLOCK], world.memory[: count * BLOCK]):
                failures.append(f"thread {who}: {batch.status}")

    threads = [threading.Thread(target=work, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_a_caller_that_must_not_wait_polls(world: World) -> None:
    session = striped(world, lent(world))
    region = session.register(buffer(LARGE))
    batch = session.load(1000 + np.arange(LARGE), 2, region, np.arange(LARGE) * BLOCK, BLOCK, deadline=soon(20))
    assert session.fileno() >= 0
    wait_until(lambda: session.poll() or batch.done)  # type: ignore[func-returns-value]
    assert batch.ok


def test_a_closed_session_takes_no_requests(world: World) -> None:
    session = striped(world, lent(world))
    region = session.register(buffer(1))
    session.close()
    session.close()
    assert not session.is_open
    with pytest.raises((SessionClosed, FabricError)):
        session.load([1000], 0, region, 0, BLOCK, deadline=soon())


@pytest.mark.parametrize("stripes", [0, 65])
def test_a_count_of_stripes_that_makes_no_sense_is_refused(world: World, stripes: int) -> None:
    with pytest.raises(ValueError, match=f"{stripes} stripes: there must be between 1 and 64"):
        StripedSession.connect(world.fabric, "127.0.0.1", 1, stripes=stripes)
