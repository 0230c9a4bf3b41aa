"""Sessions end to end, on every fabric."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.errors import DeadlineExceeded, SessionClosed, SessionRefused
from kbtp_core.fabric.api import Access, FabricError, QueueLimits
from kbtp_core.protocol import NO_STATUS, BlockState, Flag, Status, TargetLimits
from kbtp_core.session import BUFFER_ACCESS, InitiatorCore
from kbtp_core.session.slots import ReceiveRows
from tests.session.conftest import BLOCK, World, buffer, soon, wait_until


def test_blocks_go_there_and_come_back(world: World) -> None:
    session = world.connect(world.ring())
    assert (session.target.quota, session.target.handle_base, session.target.incarnation) == (8, 1000, 77)
    memory = buffer()
    memory[:] = np.random.default_rng(1).integers(0, 256, memory.size)
    original = memory[: 4 * BLOCK].copy()
    region = session.register(memory)
    handles = session.target.handle_base + np.arange(4)
    offsets = np.arange(4) * BLOCK
    stored = session.alloc_store(handles, 0, region, offsets, [BLOCK, BLOCK, 100, 1], deadline=soon()).wait()
    assert stored.ok
    assert stored.data_length.tolist() == [BLOCK, BLOCK, 100, 1]
    loaded = session.load(handles, stored.generation, region, offsets + 8 * BLOCK, BLOCK, deadline=soon()).wait()
    assert loaded.ok
    assert loaded.data_length.tolist() == [BLOCK, BLOCK, 100, 1]
    assert (memory[8 * BLOCK : 10 * BLOCK] == original[: 2 * BLOCK]).all()
    assert (memory[10 * BLOCK : 10 * BLOCK + 100] == original[2 * BLOCK : 2 * BLOCK + 100]).all()
    freed = session.free(handles, stored.generation, deadline=soon()).wait()
    assert freed.ok
    assert freed.generation.tolist() == [3] * 4


def test_inline_stores_need_no_registered_memory(world: World) -> None:
    session = world.connect(world.ring())
    memory = buffer(2)
    region = session.register(memory)
    data = [b"a" * 256, b"b"]
    stored = session.alloc_store_inline([1000, 1001], 0, data, deadline=soon(), flags=Flag.NONE).wait()
    assert stored.data_length.tolist() == [256, 1]
    assert session.store_inline([1001], stored.generation[1:], [b"better"], deadline=soon(), flags=Flag.SEAL).wait().ok
    loaded = session.load([1000, 1001], 0, region, [0, BLOCK], BLOCK, deadline=soon(), flags=Flag.ALLOW_UNSEALED).wait()
    assert loaded.data_length.tolist() == [256, 6]
    assert memory[BLOCK : BLOCK + 6].tobytes() == b"better"


def test_a_failed_request_is_a_status_and_not_an_exception(world: World) -> None:
    session = world.connect(world.ring())
    region = session.register(buffer(4))
    session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait()
    batch = session.load([1000, 1001, 9999, 1000], [2, 0, 0, 7], region, np.arange(4) * BLOCK, BLOCK, deadline=soon()).wait()
    assert batch.status.tolist() == [Status.OK, Status.NOT_BOUND, Status.NOT_PERMITTED, Status.STALE_GENERATION]
    assert batch.generation.tolist() == [2, 1, 0, 2]
    assert not batch.ok


def test_load_now_has_the_results_of_load_and_wait(world: World) -> None:
    session = world.connect(world.ring())
    memory = np.zeros(4 * BLOCK, np.uint8)
    region = session.register(memory)
    session.alloc_store_inline([1000, 1001], 0, [b"first", b"second"], deadline=soon()).wait()
    handles, offsets = np.array([1001, 1000, 1002, 1000], np.uint64), np.arange(4, dtype=np.uint64) * BLOCK
    for places in (offsets, offsets.tolist()):  # arrays of their own types, and what is made into them
        memory[:] = 0
        batch = session.load_now(handles, np.array([0, 2, 0, 9], np.uint16), region, places, BLOCK, deadline=soon())
        assert batch.done
        assert not batch.ok
        assert batch.status.tolist() == [Status.OK, Status.OK, Status.NOT_BOUND, Status.STALE_GENERATION]
        assert batch.data_length[:2].tolist() == [6, 5]
        assert memory[:6].tobytes() + memory[BLOCK : BLOCK + 5].tobytes() == b"secondfirst"
    assert session.load_now(handles[:2], 0, region, offsets[:2], BLOCK, deadline=soon()).ok
    session.alloc_store_inline([1003], 0, [b"open"], deadline=soon(), flags=Flag.NONE).wait()
    assert session.load_now(np.array([1003], np.uint64), 0, region, 0, BLOCK, deadline=soon(), flags=Flag.ALLOW_UNSEALED).ok
    with pytest.raises(DeadlineExceeded):
        session.load_now(handles, 0, region, offsets, BLOCK, deadline=soon(-1))


def test_a_big_batch_is_windowed_by_credit(world: World) -> None:
    server = world.lent(blocks=50, handles=3000)
    handles = 1000 + np.arange(3000)
    blocks = np.arange(3000) % 50
    generations = server.bind(handles, blocks * BLOCK, 16)
    session = world.connect(server, outstanding=100)
    memory = np.zeros(3000 * 16, np.uint8)
    batch = session.load(handles, generations, session.register(memory), np.arange(3000) * 16, 16, deadline=soon(20)).wait()
    assert batch.ok
    assert (memory.reshape(3000, 16) == (blocks + 1).astype(np.uint8)[:, None]).all()


def test_many_batches_at_once_find_their_own_results(world: World) -> None:
    server = world.lent(blocks=16, handles=64)
    server.bind(1000 + np.arange(64), np.arange(64) % 16 * BLOCK, 1 + np.arange(64))
    session = world.connect(server, outstanding=8)
    region = session.register(buffer(1))
    batches = [session.load([1000 + i, 1063 - i], 0, region, 0, BLOCK, deadline=soon()) for i in range(64)]
    for i, batch in enumerate(batches):
        assert batch.wait().data_length.tolist() == [i + 1, 64 - i]


def test_several_threads_wait_on_one_session(world: World) -> None:
    server = world.lent(blocks=16)
    server.bind(1000 + np.arange(16), np.arange(16) * BLOCK, BLOCK)
    session = world.connect(server)
    failures: list[str] = []

    def work(who: int) -> None:
        memory = buffer(1)
        region = session.register(memory)
        for _ in range(50):
            memory[:] = 0
            if not session.load([1000 + who], 2, region, 0, BLOCK, deadline=soon(20)).wait().ok or not (memory == who + 1).all():
                failures.append(f"thread {who}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def test_a_caller_that_must_not_wait_polls(world: World) -> None:
    session = world.connect(world.ring())
    batch = session.alloc_store_inline([1000], 0, [b"x"], deadline=soon())
    deadline = soon()
    while not batch.done:
        assert time.monotonic() < deadline
        session.poll()
    assert batch.ok


def test_initiators_share_blocks_but_not_handles(world: World) -> None:
    server = world.ring()
    writer, reader = world.connect(server), world.connect(server)
    assert writer.target.handle_base != reader.target.handle_base
    stored = writer.alloc_store_inline([1000], 0, [b"shared"], deadline=soon()).wait()
    memory = buffer(1)
    assert reader.load([1000], stored.generation, reader.register(memory), 0, BLOCK, deadline=soon()).wait().ok
    assert memory[:6].tobytes() == b"shared"
    assert reader.free([1000], 0, deadline=soon()).wait().status.tolist() == [Status.NOT_PERMITTED]


def test_a_session_that_leaves_gives_its_blocks_back(world: World) -> None:
    server = world.ring(blocks=4)
    for _ in range(3):
        session = world.connect(server, quota=4)
        assert session.target.quota == 4
        stored = session.alloc_store_inline(1000 + np.arange(4), 0, [b"x"] * 4, deadline=soon()).wait()
        assert stored.ok
        session.close()
        wait_until(lambda: server.session_count == 0)
        server.check_integrity()
        assert server.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]


def test_a_lent_handle_is_bound_loaded_freed_and_given_back(world: World) -> None:
    server = world.lent()
    session = world.connect(server)
    memory = buffer(2)
    region = session.register(memory)
    early = session.load([1005], [2], region, 0, BLOCK, deadline=soon()).wait()
    assert (early.status[0], early.generation[0]) == (Status.NOT_BOUND, 1)
    generations = server.bind([1005, 1006], [BLOCK, 2 * BLOCK], BLOCK)
    assert session.load([1005, 1006], generations, region, [0, BLOCK], BLOCK, deadline=soon()).wait().ok
    assert memory[[0, BLOCK]].tolist() == [2, 3]
    assert session.free([1005], generations[:1], deadline=soon()).wait().ok
    wait_until(lambda: server.take_drained().tolist() == [1005])
    assert server.reclaim([1006]).tolist() == [True]
    late = session.load([1006], generations[1:], region, 0, BLOCK, deadline=soon()).wait()
    assert late.status.tolist() == [Status.NOT_BOUND]
    wait_until(lambda: server.take_drained().tolist() == [1006])


def test_scattered_pages_are_a_source_and_a_sink(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    arena = np.zeros(64 * 1024, np.uint8)
    base = arena.ctypes.data
    sources = np.array([base + 5 * 1024, base + 1024, base + 9 * 1024, base + 3 * 1024], np.uint64)
    sinks = sources + np.uint64(32 * 1024)
    arena[: 32 * 1024] = np.arange(32 * 1024) // 1024
    stored = session.alloc_store([1000], 0, session.register_pages(sources, 1024, arena), 0, BLOCK, deadline=soon()).wait()
    assert stored.ok
    assert session.load([1000], stored.generation, session.register_pages(sinks, 1024, arena), 0, BLOCK, deadline=soon()).wait().ok
    assert [int(arena[32 * 1024 + 1024 * page]) for page in (5, 1, 9, 3)] == [5, 1, 9, 3]
    assert world.memory[[0, 1024, 2048, 3072]].tolist() == [5, 1, 9, 3]


def test_invalidate_ends_the_region_with_the_answer(world: World) -> None:
    session = world.connect(world.ring())
    session.alloc_store_inline([1000], 0, [b"once"], deadline=soon()).wait()
    memory = buffer(1)
    region = session.register(memory, BUFFER_ACCESS | Access.REMOTE_INVALIDATE)
    assert session.load([1000], 0, region, 0, BLOCK, deadline=soon(), flags=Flag.INVALIDATE).wait().ok
    assert not region.is_valid
    assert session.is_open


def test_with_a_key_both_sides_prove_themselves(world: World) -> None:
    server = world.ring(secrets={"team": b"key"})
    session = world.connect(server, secret=b"key", trust_domain="team")
    assert session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait().ok
    with pytest.raises(SessionRefused, match=f"{server.address[0]}:{server.address[1]} answered HELLO with UNAUTHENTICATED"):
        world.connect(server, secret=b"wrong", trust_domain="team")
    with pytest.raises(SessionRefused, match="Configure the secret of trust domain 'team'"):
        world.connect(server, trust_domain="team")
    wait_until(lambda: server.session_count == 1)


def test_a_refused_hello_names_target_and_status(world: World) -> None:
    server = world.ring()
    with pytest.raises(SessionRefused, match=f":{server.address[1]} answered HELLO with UNSUPPORTED"):
        world.connect(server, block_bytes=123)


def test_a_target_that_is_not_there_is_named(world: World) -> None:
    server = world.ring()
    server.close()
    with pytest.raises(SessionClosed, match=f":{server.address[1]} ended: it could not be connected to"):
        world.connect(server)


def test_a_listener_that_never_answers_hello_is_a_deadline(world: World) -> None:
    fabric = world.fabric
    cq = fabric.create_cq()
    listener = fabric.listen("127.0.0.1", 0, cq)
    stop = threading.Event()

    def accept_and_say_nothing() -> None:
        while not stop.is_set():
            cq.wait(0.05)
            cq.poll()
            for request in listener.poll():
                qp = request.create_qp(fabric.alloc_pd(), cq, QueueLimits())
                pairs.append(qp)
                qp.accept()

    pairs: list[object] = []
    thread = threading.Thread(target=accept_and_say_nothing)
    thread.start()
    server = world.ring()
    object.__setattr__(server, "address", listener.address)
    start = time.monotonic()
    with pytest.raises((DeadlineExceeded, SessionClosed)):
        world.connect(server, deadline_s=0.3)
    assert time.monotonic() - start < 3
    stop.set()
    thread.join(5)
    listener.close()


def test_a_session_that_fails_while_it_begins_leaves_nothing_behind(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    server = world.ring()

    def fail(core: InitiatorCore) -> None:
        raise MemoryError

    monkeypatch.setattr(InitiatorCore, "_on_ready", fail)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(MemoryError):
            world.connect(server)
    wait_until(lambda: server.session_count == 0)
    wait_until(lambda: len(list(Path("/proc/self/fd").iterdir())) <= before)


def test_a_connection_without_hello_is_ended_in_time(world: World) -> None:
    server = world.ring(hello_timeout_s=0.2)
    cq = world.fabric.create_cq()
    qp = world.fabric.create_qp(world.fabric.alloc_pd(), cq)
    qp.connect(*server.address)
    wait_until(lambda: server.session_count == 1)
    wait_until(lambda: server.session_count == 0)
    server.check()


def test_as_many_sessions_are_served_as_may_be(world: World) -> None:
    server = world.ring(session_limit=1)
    first = world.connect(server)
    with pytest.raises(SessionClosed):
        world.connect(server)
    first.close()
    wait_until(lambda: server.session_count == 0)
    world.connect(server)


def test_the_session_that_was_idle_longest_makes_room_for_another(world: World) -> None:
    server = world.lent(session_limit=2)
    server.bind([1000], [0], BLOCK)
    busy, idle = world.connect(server), world.connect(server)
    time.sleep(1.1)
    region = busy.register(buffer(1))
    assert busy.load([1000], 2, region, 0, BLOCK, deadline=soon()).wait().ok
    third = world.connect(server)
    assert third.load([1000], 2, third.register(buffer(1)), 0, BLOCK, deadline=soon()).wait().ok
    assert busy.load([1000], 2, region, 0, BLOCK, deadline=soon()).wait().ok
    with pytest.raises(SessionClosed):
        idle.load([1000], 2, idle.register(buffer(1)), 0, BLOCK, deadline=soon()).wait()


def test_a_session_that_has_bound_blocks_makes_no_room(world: World) -> None:
    server = world.ring(session_limit=1)
    session = world.connect(server)
    assert session.alloc_store_inline([1000], 0, [b"kept"], deadline=soon()).wait().ok
    time.sleep(1.1)
    with pytest.raises(SessionClosed):
        world.connect(server)
    assert session.free([1000], 0, deadline=soon()).wait().ok


def test_outstanding_requests_fail_when_the_target_dies(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    with server._lock:  # the target is stuck: what an executor doesn't run is not answered
        batch = session.alloc_store_inline([1000, 1001], 9, [b"x", b"y"], deadline=soon())
        for connection in server._core._connections.values():
            connection.qp.abort()
        with pytest.raises(SessionClosed, match="ended"):
            batch.wait()
    assert batch.status.tolist() == [NO_STATUS, NO_STATUS]
    assert not session.is_open
    with pytest.raises(SessionClosed):
        session.alloc_store_inline([1000], 0, [b"x"], deadline=soon())


def test_a_deadline_fences_the_memory_and_keeps_the_session(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    region = session.register(buffer(1))
    with server._lock:  # the target is slow
        batch = session.load([1000, 1001], 0, region, 0, BLOCK, deadline=soon(0.05))
        with pytest.raises(DeadlineExceeded, match=r"2 of 2 requests to 127\.0\.0\.1:.* were not answered in time"):
            batch.wait()
        assert not region.is_valid
    again = session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait()
    assert again.ok  # the late answers were matched, and cost no credit
    assert batch.status.tolist() == [NO_STATUS, NO_STATUS]


def test_a_deadline_passes_also_for_those_who_only_poll(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    with server._lock:
        batch = session.load([1000], 0, session.register(buffer(1)), 0, BLOCK, deadline=soon(0.02))
        time.sleep(0.05)
        session.poll()
        assert batch.done
    assert isinstance(batch.error, DeadlineExceeded)


def test_a_deadline_holds_after_thousands_of_batches_that_were_done_before_theirs(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    region = session.register(buffer(1))
    stored = session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait()
    for _ in range(30):
        batches = [session.load([1000], stored.generation, region, 0, BLOCK, deadline=soon(600)) for _ in range(60)]
        assert all(batch.wait().ok for batch in batches)
    assert len(session._core._deadlines) < 1500, "deadlines of batches that are done pile up"
    with server._lock:
        batch = session.load([1001], 0, region, 0, BLOCK, deadline=soon(0.05))
        with pytest.raises(DeadlineExceeded):
            batch.wait()


def test_a_closing_target_says_goodbye_and_sessions_end(world: World) -> None:
    server = world.ring()
    session = world.connect(server)
    assert session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait().ok
    server.close()
    session.poll()
    wait_until(lambda: not session.is_open)
    with pytest.raises(SessionClosed, match="SHUTTING_DOWN"):
        session.load([1000], 0, session.register(buffer(1)), 0, BLOCK, deadline=soon())


def test_quota_and_room_are_kept_over_the_wire(world: World) -> None:
    session = world.connect(world.ring(blocks=4), quota=2)
    batch = session.alloc_store_inline([1000, 1001, 1002], 0, [b"x"] * 3, deadline=soon()).wait()
    assert sorted(batch.status.tolist()) == [Status.OK, Status.OK, Status.NO_SPACE]
    assert session.free([1000], 0, deadline=soon()).wait().ok
    assert session.alloc_store_inline([1002], 0, [b"x"], deadline=soon()).wait().ok


def test_requests_sent_back_to_back_take_effect_in_order(world: World) -> None:
    session = world.connect(world.ring())
    memory = buffer(4)
    memory[:BLOCK] = 9
    region = session.register(memory)
    for round_number in range(20):
        stored = session.alloc_store([1000], 0, region, 0, BLOCK, deadline=soon())
        loaded = session.load([1000], 0, region, BLOCK, BLOCK, deadline=soon())
        freed = session.free([1000], 0, deadline=soon())
        assert stored.wait().ok
        assert loaded.wait().ok
        assert freed.wait().ok
        assert int(freed.generation[0]) == 3 + 2 * round_number
    assert (memory[BLOCK : 2 * BLOCK] == 9).all()


def test_more_inline_data_than_granted_is_refused_here(world: World) -> None:
    session = world.connect(world.ring(limits=TargetLimits(inline_bytes=10)))
    with pytest.raises(ValueError, match="takes at most 10"):
        session.store_inline([1000], 0, [b"x" * 11], deadline=soon())


def test_two_servers_cannot_have_one_address(world: World) -> None:
    server = world.ring()
    with pytest.raises(FabricError, match=str(server.address[1])):
        world.ring(port=server.address[1])


def test_thousands_of_lent_handles_are_freed_in_one_batch(world: World) -> None:
    server = world.lent(blocks=16, handles=2000)
    handles = 1000 + np.arange(2000)
    generations = server.bind(handles, np.arange(2000) % 16 * BLOCK, BLOCK)
    session = world.connect(server, outstanding=256)
    stale = session.free(handles[::2], generations[::2] + 5, deadline=soon(20)).wait()
    assert (stale.status == Status.STALE_GENERATION).all()
    freed = session.free(handles, generations, deadline=soon(20)).wait()
    assert freed.ok
    assert (freed.generation == 3).all()
    back: list[int] = []

    def all_are_back() -> bool:
        back.extend(server.take_drained().tolist())
        return len(back) == 2000

    wait_until(all_are_back)
    assert sorted(back) == handles.tolist()


def test_a_load_that_succeeds_never_holds_bytes_of_the_next_owner(world: World) -> None:
    """The owner binds, reclaims, waits until the handle has drained, and only then writes other bytes into the block."""
    server = world.lent(blocks=4, handles=8)
    session = world.connect(server)
    count = 4
    handles, offsets = 1000 + np.arange(count), np.arange(count) * BLOCK
    memory = buffer(count)
    region = session.register(memory)
    stop = threading.Event()
    life = np.zeros(count, np.uint64)  # how often each block was given away

    def own() -> None:
        while not stop.is_set():
            server.bind(handles, offsets, BLOCK)
            time.sleep(0.001)
            server.reclaim(handles)
            drained: list[int] = []
            while len(drained) < count:
                drained += server.take_drained().tolist()
            life[:] += 1
            world.memory.reshape(count, BLOCK)[:] = (life % 251).astype(np.uint8)[:, None]

    owner = threading.Thread(target=own)
    owner.start()
    try:
        loaded = 0
        deadline = soon(10)
        while loaded < 200 and time.monotonic() < deadline:
            batch = session.load(handles, 0, region, offsets, BLOCK, deadline=soon()).wait()
            for i in np.flatnonzero(batch.status == Status.OK):
                block = memory[i * BLOCK : (i + 1) * BLOCK]
                uses = (int(batch.generation[i]) - 2) // 2  # each life of a handle is one bind and one reclaim
                assert (block == (uses % 251 if uses else i + 1)).all(), f"block {i} in life {uses} holds {np.unique(block)}"
                loaded += 1
    finally:
        stop.set()
        owner.join(10)
    assert loaded >= 200
    assert not owner.is_alive()


def test_an_ended_session_takes_its_rows_with_it_at_once(world: World) -> None:
    server = world.ring()
    before = live_rows()
    gc.disable()  # what only the cycle collector frees stays for minutes in a quiet server
    try:
        world.connect(server)
        assert len(live_rows() - before) == 2
        world.sessions.pop().close(1.0)
        wait_until(lambda: live_rows() - before == set())
    finally:
        gc.enable()


def live_rows() -> set[int]:
    """Those for many messages, of both ends; rows to send from are small."""
    return {id(rows) for rows in gc.get_objects() if isinstance(rows, ReceiveRows) and rows.count > 2}
