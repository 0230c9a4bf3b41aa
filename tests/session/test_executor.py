"""Plain requests are run natively where the provider can, and everything else still reaches the target."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import BlockPool, BlockTable, Capability, Flag, Status, Target
from kbtp_core.protocol.hello import Hello
from kbtp_core.protocol.wire import AllocStore, DataDescriptor
from kbtp_core.session import InitiatorSession, TargetServer
from tests.fabric.peer import dial
from tests.fabric.wire import Opcode, StartUp, send
from tests.session.conftest import BLOCK, World, buffer, soon, wait_until


@pytest.fixture
def native() -> Iterator[tuple[World, TargetServer, InitiatorSession]]:
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    server = world.lent(blocks=8, handles=32)
    server.bind(1000 + np.arange(8), np.arange(8) * BLOCK, BLOCK)
    yield world, server, world.connect(server)
    world.close()
    fabric.close()


def executed(server: TargetServer) -> int:
    return sum(connection.qp.stats()["executed_loads"] for connection in server._core._connections.values())


def test_plain_loads_do_not_reach_the_interpreter(native: tuple[World, TargetServer, InitiatorSession]) -> None:
    _, server, session = native
    memory = buffer(8)
    with server._lock:  # the target could answer nothing
        batch = session.load(1000 + np.arange(8), 2, session.register(memory), np.arange(8) * BLOCK, BLOCK, deadline=soon()).wait()
    assert batch.ok
    assert memory[::BLOCK].tolist() == list(range(1, 9))
    assert executed(server) == 8


def test_what_is_not_plain_is_answered_by_the_target_and_then_loads_are_native_again(
    native: tuple[World, TargetServer, InitiatorSession],
) -> None:
    _, server, session = native
    region = session.register(buffer(8))
    failed = session.load([1000, 1020, 1001], [9, 0, 2], region, 0, BLOCK, deadline=soon()).wait()
    assert failed.status.tolist() == [Status.STALE_GENERATION, Status.NOT_BOUND, Status.OK]
    before = executed(server)
    assert session.load([1000, 1001], 2, region, [0, BLOCK], BLOCK, deadline=soon()).wait().ok
    wait_until(lambda: executed(server) == before + 2)


@pytest.fixture
def ring() -> Iterator[tuple[World, TargetServer, InitiatorSession]]:
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    server = world.ring(blocks=16)
    yield world, server, world.connect(server)
    world.close()
    fabric.close()


def counts(server: TargetServer) -> dict[str, int]:
    (connection,) = server._core._connections.values()
    return {name: count for name, count in connection.qp.stats().items() if name.startswith("executed_")}


def test_stores_and_frees_do_not_reach_the_interpreter(ring: tuple[World, TargetServer, InitiatorSession]) -> None:
    _, server, session = ring
    memory, handles = buffer(8), 1000 + np.arange(4)
    memory[: 4 * BLOCK] = np.repeat([11, 22, 33, 44], BLOCK)
    region = session.register(memory)
    with server._lock:  # the target could answer nothing
        stored = session.alloc_store(handles, 0, region, np.arange(4) * BLOCK, BLOCK, deadline=soon()).wait()
        inline = session.alloc_store_inline([1010, 1011], 0, [b"a", b"bc"], deadline=soon(), flags=0).wait()
        again = session.store_inline([1010], inline.generation[:1], [b"xyz"], deadline=soon(), flags=Flag.SEAL).wait()
        loaded = session.load(handles, stored.generation, region, (4 + np.arange(4)) * BLOCK, BLOCK, deadline=soon()).wait()
        freed = session.free(handles, stored.generation, deadline=soon()).wait()
    assert stored.ok
    assert inline.ok
    assert again.data_length.tolist() == [3]
    assert loaded.ok
    assert memory[4 * BLOCK :: BLOCK].tolist() == [11, 22, 33, 44]
    assert freed.generation.tolist() == [3] * 4
    assert counts(server) == {"executed_loads": 4, "executed_stores": 7, "executed_frees": 4, "executed_keyed": 0}
    assert server.target.table.entry(10).is_sealed


def test_the_target_goes_on_where_the_executor_left_off(ring: tuple[World, TargetServer, InitiatorSession]) -> None:
    _, server, session = ring
    stored = session.alloc_store_inline(1000 + np.arange(8), 0, [b"x"] * 8, deadline=soon()).wait()
    assert stored.ok
    full = session.alloc_store_inline([1008, 1000], 0, [b"x"] * 2, deadline=soon()).wait()
    assert full.status.tolist() == [Status.NO_SPACE, Status.ALREADY_BOUND]
    assert session.free([1000, 1001], [2, 9], deadline=soon()).wait().status.tolist() == [Status.OK, Status.STALE_GENERATION]
    assert session.alloc_store_inline([1000], 3, [b"y"], deadline=soon()).wait().ok
    with server._lock:
        server.target.check_integrity()


def test_a_session_that_leaves_gives_back_what_the_executor_took(ring: tuple[World, TargetServer, InitiatorSession]) -> None:
    world, server, session = ring
    assert session.alloc_store_inline(1000 + np.arange(8), 0, [b"x"] * 8, deadline=soon()).wait().ok
    session.close()
    wait_until(lambda: server._core.connection_count == 0 and not server.target.sessions)
    other = world.connect(server, quota=16)
    assert other.target.quota == 16
    assert other.alloc_store_inline(other.target.handle_base + np.arange(16), 0, [b"z"] * 16, deadline=soon()).wait().ok


def test_a_peer_that_dies_in_the_middle_of_a_store_costs_no_block(ring: tuple[World, TargetServer, InitiatorSession]) -> None:
    _, server, session = ring
    region = session.register(buffer(1))
    region.close()  # the Read of the store ends the connection
    batch = session.alloc_store([1000, 1001], 0, region, 0, BLOCK, deadline=soon())
    with pytest.raises(SessionClosed):
        batch.wait()
    wait_until(lambda: not server.target.sessions)
    pool = server.target.pool
    assert isinstance(pool, BlockPool)
    assert not pool.states.any()


def test_sessions_on_both_sides_of_the_executor_share_one_ring() -> None:
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    server = world.ring(blocks=32, handles=64, crc32c=lambda data: 7)
    native = world.connect(server, quota=16, handle_count=32)
    software = world.connect(server, quota=16, handle_count=32, capabilities=int(Capability.CHECKSUM))
    assert software.target.handle_base != native.target.handle_base

    def churn(session: InitiatorSession) -> None:
        handles = session.target.handle_base + np.arange(16)
        for _ in range(40):
            stored = session.alloc_store_inline(handles, 0, [b"%d" % i for i in range(16)], deadline=soon()).wait()
            assert stored.ok
            assert session.free(handles, stored.generation, deadline=soon()).wait().ok

    threads = [threading.Thread(target=churn, args=(session,)) for session in (native, software)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    with server._lock:
        server.target.check_integrity()
    executed = sorted(connection.qp.stats()["executed_stores"] for connection in server._core._connections.values())
    assert executed == [0, 640]
    world.close()
    fabric.close()


def test_a_server_that_is_closed_has_no_connection_left_though_a_peer_holds_on_to_one() -> None:
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    server = world.ring()
    peer = dial(server.address[1])
    peer.request(StartUp())
    peer.send(send(Hello(0, incarnation=5, quota=4, handle_count=4, outstanding=4).encode(), 1))
    peer.receive()
    peer.send(send(AllocStore(1, 1000, 0, DataDescriptor(9, 0, BLOCK)).encode(), 2))
    assert peer.receive_untagged().opcode == Opcode.READ_REQUEST, "and it is never answered"
    server.close(0.0)
    assert server.session_count == 0
    pool = server.target.pool
    assert isinstance(pool, BlockPool)
    assert not pool.states.any()
    peer.close()
    world.close()
    fabric.close()


@pytest.mark.parametrize(("domains", "native_count"), [(frozenset({"a", "b"}), 0), (frozenset({"a"}), 1)])
def test_nobody_waits_while_a_large_block_is_cleared(domains: frozenset[str], native_count: int) -> None:
    """A progress thread serves many sessions; the target, whose work it is then, takes sessions in turns."""
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    block = 512 * 1024
    world.memory = np.zeros(2 * block, np.uint8)
    target = Target(BlockPool(block, world.memory), BlockTable(4, 1000), name="large", incarnation=7, trust_domains=domains)
    server = world._serve(target)
    session = world.connect(server, quota=2, trust_domain="a")
    stored = session.alloc_store_inline([1000], 0, [b"secret"], deadline=soon()).wait()
    assert world.memory[stored.block_offset[0]] == ord("s")
    assert session.free([1000], stored.generation, deadline=soon()).wait().ok
    assert counts(server)["executed_frees"] == native_count
    assert world.memory.any() == (len(domains) == 1)
    world.close()
    fabric.close()


def test_sessions_on_several_progress_threads_share_one_executor() -> None:
    fabric = SoftRnic(progress_threads=3)
    world = World(fabric, use_executor=True)
    sessions, each, rounds = 6, 8, 40
    server = world.ring(blocks=sessions * each, handles=sessions * 16)
    shared = world.connect(server)
    common = shared.alloc_store_inline(shared.target.handle_base + np.arange(2), 0, [b"common", b"unsealed"], deadline=soon()).wait()
    assert common.ok

    def churn(session: InitiatorSession, seed: int) -> None:
        handles, memory = session.target.handle_base + np.arange(each), buffer(each)
        region = session.register(memory)
        for turn in range(rounds):
            stored = session.alloc_store_inline(handles, 0, [b"%d/%d/%d" % (seed, turn, i) for i in range(each)], deadline=soon()).wait()
            loaded = session.load(handles, stored.generation, region, BLOCK * np.arange(each), BLOCK, deadline=soon()).wait()
            texts = [memory[BLOCK * i : BLOCK * i + int(n)].tobytes() for i, n in enumerate(loaded.data_length)]
            other = session.load([shared.target.handle_base], common.generation[0], region, 0, BLOCK, deadline=soon()).wait()
            freed = session.free(handles, stored.generation, deadline=soon()).wait()
            if not (stored.ok and loaded.ok and other.ok and freed.ok) or texts != [b"%d/%d/%d" % (seed, turn, i) for i in range(each)]:
                failures.append((seed, turn, texts))
            if memory[:6].tobytes() != b"common":
                failures.append((seed, turn, "common"))
        finished.append(seed)

    failures: list[tuple[int, int, object]] = []
    finished: list[int] = []
    threads = [threading.Thread(target=churn, args=(world.connect(server), seed)) for seed in range(sessions - 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    assert sorted(finished) == list(range(sessions - 1))
    with server._lock:
        server.target.check_integrity()
    executed = sorted(connection.qp.stats()["executed_frees"] for connection in server._core._connections.values())
    assert executed == [0, *[rounds * each] * (sessions - 1)]
    world.close()
    fabric.close()


def test_connections_end_while_somebody_reads_their_counters(ring: tuple[World, TargetServer, InitiatorSession]) -> None:
    """What ends on the progress thread needs nothing of the interpreter while it holds a lock that `stats` waits for."""
    world, server, _ = ring
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            for connection in list(server._core._connections.values()):
                connection.qp.stats()

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(40):
        session = world.connect(server, quota=0, handle_count=0)
        session._core.qp.abort()
        wait_until(lambda: server.session_count == 1)
    is_over.set()
    reader.join()
