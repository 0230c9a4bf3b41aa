"""What a target does for its own side: lent blocks, fences, shutting down, and sessions that come and go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kbtp_core.protocol.constants import EntryFlag, Flag, Status
from kbtp_core.protocol.effects import Close, LoadMany, Send, SendMany, Write
from kbtp_core.protocol.pool import BlockState, LentPool
from kbtp_core.protocol.ring import FreeRing
from kbtp_core.protocol.table import BlockTable
from kbtp_core.protocol.target import EntryState, Target
from kbtp_core.protocol.target_session import TargetState
from kbtp_core.protocol.wire import AllocStore, Bind, Completion, DataDescriptor, Free, Load, parse
from tests.protocol.test_draft_6_6 import direct_link, direct_world
from tests.protocol.test_many_loads import rows
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, Link, World, lent_world, ring_world

DATA = DataDescriptor(STAG, 0, 64)


def frees(*requests: Free) -> np.ndarray:
    return np.frombuffer(b"".join(request.encode() for request in requests), np.uint8).reshape(-1, 24)


# Lent pools ----------------------------------------------------------------------------------------------------------


def test_a_lent_block_may_end_where_its_region_ends() -> None:
    world = lent_world(blocks=4, block_bytes=64)
    assert world.target.bind([101, 102], [192, 255], [64, 1]).tolist() == [2, 2]
    world.target.check_integrity()


@pytest.mark.parametrize(
    ("offset", "length", "why"), [(-1, 1, "outside the region of 256 octets"), (0, -1, "a block holds 1 to 64 octets")]
)
def test_a_negative_place_of_a_lent_block_is_no_place(offset: int, length: int, why: str) -> None:
    world = lent_world(blocks=4, block_bytes=64)
    before = world.target.table.entries.tobytes()
    with pytest.raises(ValueError, match=why):
        world.target.bind([101], np.array([offset]), np.array([length]))
    assert world.target.table.entries.tobytes() == before


def test_a_ring_pool_is_not_bound_by_local_calls() -> None:
    target = ring_world().target
    for call in (lambda: target.bind([100], [0], [1]), lambda: target.reclaim([100]), target.take_drained):
        with pytest.raises(ValueError, match=r"^only a lent pool is bound and reclaimed by local calls; this pool belongs to its ring$"):
            call()


def test_handles_that_are_reclaimed_one_after_the_other_drain_each_by_itself() -> None:
    world = lent_world()
    world.target.bind([101, 102, 103], [0, 64, 128], 64)
    world.native_readers = {1: 1, 2: 1, 3: 2}
    world.target.reclaim([101])
    world.target.reclaim([102, 103])
    assert world.target.draining_count == 3
    assert world.target.draining_indexes.tolist() == [1, 2, 3]
    world.native_readers = {2: 1}
    assert world.target.take_drained().tolist() == [101, 103]
    assert world.target.draining_count == 1
    world.target.check_integrity()


def test_a_handle_that_is_named_twice_is_reclaimed_once() -> None:
    world = lent_world()
    world.target.bind([101, 102], [0, 64], 64)
    assert world.target.reclaim([101, 101, 102]).tolist() == [True, True, True]
    assert world.target.draining_count == 2
    assert world.target.take_drained().tolist() == [101, 102]


def test_readers_are_asked_for_entries_that_no_session_reads() -> None:
    world = lent_world()
    world.target.bind([101, 102, 103], [0, 64, 128], 64, sealed=False)
    link = world.link().greet()
    world.hold_operations = True
    link.run(link.initiator.load([102], 0, STAG, 0, 64, Flag.ALLOW_UNSEALED))
    asked: list[np.ndarray] = []

    def readers(indexes: np.ndarray) -> np.ndarray:
        asked.append(indexes)
        return (indexes == 3).astype(np.uint32)

    world.target.readers = readers
    world.target.reclaim([101, 102, 103])
    assert world.target.take_drained().tolist() == [101]
    assert [(indexes.tolist(), indexes.dtype) for indexes in asked] == [([1, 3], np.uint64)]


def test_without_an_executor_a_target_counts_its_own_readers_only() -> None:
    for world in (ring_world(), lent_world()):
        world.target.readers = None
        link = ready(world)
        if isinstance(world.target.pool, LentPool):
            world.target.bind([101], [0], [64])
            world.target.reclaim([101])
            drained = world.target.take_drained()
            assert (drained.tolist(), drained.dtype) == ([101], np.uint64)
        else:
            put(link, 100, b"data")
            freed = link.initiator.free([100], 0)
            link.run(freed)
            assert freed.status.tolist() == [Status.OK]


def test_a_tick_moves_lent_handles_on_as_well() -> None:
    world = lent_world()
    world.target.bind([101], [0], [64])
    world.native_readers = {1: 1}
    world.target.reclaim([101])
    world.tick()
    assert world.target.entry_state[1] == EntryState.DRAINING
    world.native_readers = {}
    world.tick()
    assert world.target.entry_state[1] == EntryState.DRAINED
    assert world.target.draining_count == 0


def test_a_peer_that_leaves_takes_no_lent_block_with_it() -> None:
    world = lent_world()
    world.target.bind([101, 102], [0, 64], 64)
    link = world.link().greet()
    world.hold_operations = True
    link.run(link.initiator.load([101], 0, STAG, 0, 64))
    link.disconnect()
    assert (link.session.state, world.target.sessions) == (TargetState.CLOSED, {})
    assert world.target.table.valid_indexes(0, 16).tolist() == [1, 2]
    assert not world.target.reading.any()
    world.target.check_integrity()


def test_a_connection_that_ends_before_its_hello_leaves_nothing_behind() -> None:
    for world in (ring_world(), lent_world()):
        link = world.link()
        assert not link.session.is_granted
        link.disconnect()
        link.disconnect()  # twice is as once
        assert world.target.sessions == {}
        assert link.session.receive(link.initiator.parameters.client_name.encode(), 0.0) == []


# Runs of FREEs -------------------------------------------------------------------------------------------------------


def test_as_many_frees_as_were_granted_are_one_run_and_one_more_is_not() -> None:
    for count, kinds in [(4, [SendMany]), (5, [Send] * 5)]:
        world = lent_world()
        handles = range(101, 101 + count)
        world.target.bind(list(handles), 0, 64)
        link = world.link(outstanding=4).greet()
        effects = link.session.receive_frees(frees(*(Free(handle, handle, 2) for handle in handles)), 0.0)
        assert [type(effect) for effect in effects] == kinds
        assert world.target.take_drained().tolist() == list(handles)


def test_frees_behind_a_load_that_holds_its_handle_wait_in_line() -> None:
    world = lent_world()
    world.target.bind([101, 102], [0, 64], 64, sealed=False)
    link = world.link().greet()
    write, _ = link.session.receive(Load(1, 101, 0, DATA, Flag.ALLOW_UNSEALED).encode(), 0.0)
    (other,) = link.session.receive_frees(frees(Free(2, 101, 2), Free(3, 102, 2)), 0.0)
    assert parse(other.data).handle == 102  # type: ignore[union-attr]
    assert link.session.unanswered_count == 1
    (late,) = link.session.write_done(write.token, True, 0.0)  # type: ignore[union-attr]
    assert (parse(late.data).handle, parse(late.data).status) == (101, Status.OK)  # type: ignore[union-attr]


def test_frees_that_come_before_hello_or_while_shutting_down_are_no_run() -> None:
    world = lent_world()
    world.target.bind([101], [0], [64])
    stranger, link = world.link(), world.link().greet()
    assert stranger.session.receive_frees(frees(Free(1, 101, 2)), 0.0) == [Close("the first message is no HELLO")]
    world.target.shut_down()
    link.session.take_effects()
    (answer,) = link.session.receive_frees(frees(Free(1, 101, 2)), 0.0)
    assert parse(answer.data).status == Status.SHUTTING_DOWN  # type: ignore[union-attr]
    assert world.target.table.entry(1).is_valid


def test_frees_of_a_ring_pool_are_no_run() -> None:
    link = ready(ring_world())
    put(link, 100, b"a")
    put(link, 101, b"b")
    effects = link.session.receive_frees(frees(Free(1, 100, 2), Free(2, 101, 0)), 0.0)
    assert [type(effect) for effect in effects] == [Send, Send]
    assert link.world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]


# Runs of LOADs -------------------------------------------------------------------------------------------------------


def test_a_run_of_loads_that_all_fail_writes_nothing() -> None:
    link = ready(ring_world())
    (many,) = link.session.receive_loads(rows([Load(1, 100, 0, DATA), Load(2, 101, 0, DATA)]), 0.0)
    assert isinstance(many, LoadMany)
    assert (many.token, many.lengths.tolist(), many.block_offsets.tolist()) == (0, [0, 0], [0, 0])
    assert (many.lengths.dtype, many.block_offsets.dtype) == (np.uint32, np.uint64)
    assert not link.world.target.reading.any()


def test_is_reading_tells_which_blocks_an_rdma_write_still_reads() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 100, b"a")
    put(link, 101, b"b", Flag.NONE)
    session = link.session
    world.hold_operations = True
    link.run(link.initiator.load([101], 0, STAG, 0, 64, Flag.ALLOW_UNSEALED))
    (many,) = session.receive_loads(rows([Load(70, 100, 0, DATA)]), 0.0)
    session.receive(AllocStore(71, 102, 0, DATA).encode(), 0.0)
    assert [session.is_reading(np.array([index])) for index in range(4)] == [True, True, False, False]
    session.write_done(many.token, True, 0.0)  # type: ignore[union-attr]
    assert [session.is_reading(np.array(indexes)) for indexes in ([0], [1], [0, 1], [2, 3])] == [False, True, True, False]
    link.finish_operations()
    assert not session.is_reading(np.array([0, 1, 2]))


# Beside an executor --------------------------------------------------------------------------------------------------


class Beside:
    """An executor that shares the pool: it allocates by the ring's own rules, counts readers, and does what `meanwhile` says."""

    def __init__(self, world: World) -> None:
        self.ring = FreeRing([64 * i for i in range(4)])
        self.readers = [0] * 16
        self.meanwhile: Callable[[], None] = lambda: None
        world.target.share(self)

    def allocate(self) -> int | None:
        return self.ring.allocate()

    def give_back(self, block_offset: int) -> None:
        self.ring.give_back(block_offset)

    def hold(self, entries: np.ndarray) -> None:
        assert entries.dtype == np.uint64
        for entry in entries.tolist():
            self.readers[entry] += 1
        self.meanwhile()

    def let_go(self, entries: np.ndarray) -> None:
        assert entries.dtype == np.uint64
        for entry in entries.tolist():
            self.readers[entry] -= 1


def shared() -> tuple[World, Link, Beside]:
    world = ring_world()
    executor = Beside(world)
    link = ready(world)
    put(link, 100, b"sealed")
    put(link, 101, b"other")
    world.hold_operations = True
    return world, link, executor


def test_an_executor_counts_the_readers_of_the_target_and_allocates_for_it() -> None:
    world, link, executor = shared()
    assert (executor.ring.free_count, int(world.target.pool.ring.counters[0])) == (2, 0)  # type: ignore[union-attr]
    link.run(link.initiator.load([100], 0, STAG, 0, 64))
    (many,) = link.session.receive_loads(rows([Load(70, 100, 0, DATA), Load(71, 101, 0, DATA), Load(72, 103, 0, DATA)]), 0.0)
    assert isinstance(many, LoadMany)
    assert (executor.readers[:4], world.target.reading[:4].tolist()) == ([2, 1, 0, 0], [2, 1, 0, 0])
    link.session.write_done(many.token, True, 0.0)
    link.finish_operations()
    assert (sum(executor.readers), world.target.reading.any()) == (0, False)


@pytest.mark.parametrize("is_run", [False, True], ids=["one load", "a run"])
@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda table: table.clear_one(1), Status.NOT_BOUND),
        (lambda table: (table.clear_one(1), table.bind_one(1, 64, 5, True)), Status.STALE_GENERATION),
        (lambda table: table.entries["flags"].__setitem__(1, EntryFlag.VALID), Status.NOT_SEALED),
    ],
    ids=["freed", "bound anew", "flags alone"],
)
def test_a_block_that_an_executor_frees_just_before_it_is_read_is_judged_again(
    is_run: bool, change: Callable[[BlockTable], object], status: Status
) -> None:
    world, link, executor = shared()

    def once() -> None:
        executor.meanwhile = lambda: None
        change(world.target.table)

    executor.meanwhile = once
    load = Load(70, 101, 2, DATA)
    if is_run:
        effects = link.session.receive_loads(rows([Load(69, 100, 0, DATA), load]), 0.0)
        assert [type(effect) for effect in effects] == [Write, Send, Send]
    else:
        effects = link.session.receive(load.encode(), 0.0)
    assert isinstance(effects[-1], Send)
    answer = parse(effects[-1].data)
    assert isinstance(answer, Completion)
    assert (answer.request_id, answer.handle, answer.status) == (70, 101, status)
    assert (executor.readers[1], world.target.reading[1]) == (0, 0)
    assert (executor.readers[0], world.target.reading[0]) == (int(is_run), int(is_run))


# The time of tickets -------------------------------------------------------------------------------------------------


def behind_a_load(world: World) -> Callable[[float], object]:
    """A BIND of handle 100 that waits behind an unsealed load of it; what lets it run."""
    link = world.links[0]
    put(world.links[1], 108, b"other")
    link.bind_taken(link.take_direct([b"x"]), [100], 0)
    link.run(link.initiator.load([100], 0, STAG, 0, 64, Flag.ALLOW_UNSEALED))
    write = link.held.pop()
    return lambda now: link.session.write_done(write.token, True, now)


def behind_a_store(world: World) -> Callable[[float], object]:
    """The same behind a store whose data is being fetched."""
    link = world.links[0]
    link.bind_taken(link.take_direct([b"x"]), [100], 0)
    link.initiator.store([100], 0, STAG, 0, 4)
    link.run()
    read = link.held.pop()
    return lambda now: link.session.read_done(read.token, True, now)


def beside_a_load(world: World) -> Callable[[float], object]:
    """A BIND in the middle of a run of LOADs."""
    session = world.links[0].session
    load = Load(80, 101, 0, DATA).encode()
    bind = Bind(81, 101, 7, 0, 1, 0).encode()
    return lambda now: session.receive_loads(np.frombuffer(load + bind, np.uint8).reshape(2, 40), now)


@pytest.mark.parametrize("prepare", [behind_a_load, behind_a_store, beside_a_load])
def test_a_ticket_that_a_bind_shows_has_its_time_from_when_the_bind_runs(prepare: Callable[[World], Callable[[float], object]]) -> None:
    world = direct_world()
    link = direct_link(world, quota=2)
    ready(world, quota=1, handles=4)
    world.hold_operations = True
    let_it_run = prepare(world)
    link.fetch_add_head()
    if prepare is not beside_a_load:
        link.session.receive(Bind(90, 100, 0, 0, 1, 0).encode(), 0.0)
    partition = link.session.partition
    assert partition is not None
    let_it_run(30.0)
    assert len(partition.taken_offsets) == 1
    assert (partition.is_overdue(30.9), partition.is_overdue(31.0)) == (False, True)


def test_a_ticket_that_nobody_has_seen_is_given_back_when_the_connection_ends() -> None:
    link = direct_link(quota=2)
    link.fetch_add_head()
    link.disconnect()
    assert link.world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
    assert link.world.target.sessions == {}
    link.world.target.check_integrity()


def test_the_tickets_of_a_session_that_is_gone_are_looked_at_no_more() -> None:
    world = direct_world()
    link, reader = direct_link(world, quota=2), direct_link(world, quota=1)
    link.bind_taken(link.take_direct([b"x"]), [100])
    world.hold_operations = True
    reader.run(reader.initiator.load([100], 0, STAG, 0, 64))
    partition = link.session.partition
    assert partition is not None
    link.disconnect()
    assert link.session.number in world.target.sessions  # a block of it is still read
    partition.ring.take_ticket()
    world.now = 10.0
    world.tick()
    assert not link.session.has_tickets
    assert not link.session.has_effects
    reader.finish_operations()
    world.tick()
    assert link.session.number not in world.target.sessions
    world.target.check_integrity()


def test_a_session_without_a_partition_has_no_tickets() -> None:
    world = direct_world()
    plain, direct = ready(world, quota=1), direct_link(world, quota=1)
    assert world.target.has_open_partitions
    world.now = 10.0
    world.tick()
    assert (plain.session.has_tickets, direct.session.has_tickets) == (False, True)
    direct.disconnect()
    assert not world.target.has_open_partitions


# Trust domains -------------------------------------------------------------------------------------------------------


def test_a_block_that_its_writer_can_still_change_is_served_in_its_own_trust_domain_only() -> None:
    world = direct_world()
    writer = direct_link(world, quota=2)
    writer.bind_taken(writer.take_direct([b"secret"]), [100])
    friend, stranger = world.link(trust_domain="gpu").greet(), world.link(quota=1, handles=4, trust_domain="else").greet()
    mine = put(stranger, 108, b"mine")
    statuses = []
    for link in (writer, friend, stranger):
        batch = link.initiator.load([100], 0, STAG, 0, 64)
        link.run(batch)
        statuses.append(int(batch.status[0]))
    assert statuses == [Status.OK, Status.OK, Status.NOT_PERMITTED]
    assert not stranger.memory[:64].any()
    batch = stranger.initiator.load([108], [mine], STAG, 0, 64)
    stranger.run(batch)
    assert batch.status.tolist() == [Status.OK]
    assert not stranger.session.allows_executor
    writer.run(writer.initiator.free([100], 0))
    freed = stranger.initiator.load([100], 0, STAG, 0, 64)
    stranger.run(freed)
    assert freed.status.tolist() == [Status.NOT_BOUND]


def test_what_a_failed_store_left_in_a_block_is_cleared() -> None:
    world = ring_world(blocks=1)
    link = ready(world, quota=1)
    world.hold_operations = True
    batch = link.initiator.alloc_store([100], 0, STAG, 0, 64)
    link.run()
    world.pool_memory[:20] = 7  # half of it has come
    link.finish_operations(ok=False)
    assert batch.status.tolist() == [Status.ACCESS]
    assert not world.pool_memory.any()


# Ends ----------------------------------------------------------------------------------------------------------------


def test_a_failed_rdma_write_is_the_end_of_its_connection() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 100, b"data")
    world.hold_operations = True
    link.run(link.initiator.load([100], 0, STAG, 0, 64))
    link.finish_operations(ok=False)
    assert link.closed_because == "an RDMA Write failed"
    assert link.session.state is TargetState.CLOSED
    assert not world.target.reading.any()


def test_a_target_that_shuts_down_says_goodbye_to_sessions_and_closes_connections_without_one() -> None:
    world = ring_world(secrets={"team": b"key"})
    greeting, proving, link = world.link(), world.link(), world.link(trust_domain="team", secret=b"key").greet()
    proving.session.receive(proving.initiator.hello(), 0.0)
    gone = world.link(trust_domain="team", secret=b"key").greet()
    gone.disconnect()
    assert [session.number for session in world.target.shut_down()] == [1, 2, 3]
    for other in (greeting, proving):
        assert other.session.take_effects() == [Close("the target shuts down")]
        assert other.session.state is TargetState.CLOSED
    (goodbye,) = link.session.take_effects()
    assert isinstance(goodbye, Send)
    assert (parse(goodbye.data).status, goodbye.answers) == (Status.SHUTTING_DOWN, 0)  # type: ignore[union-attr]
    assert link.session.state is TargetState.READY


def test_a_bind_that_shows_too_many_tickets_closes_the_session_behind_its_answer() -> None:
    link = direct_link(quota=1)
    link.fetch_add_head()
    over = link.fetch_add_head()
    link.run(link.initiator.bind([100], 0, over >> 32, 1, 0))
    assert link.statuses[-1] == Status.NO_SPACE
    assert link.closed_because == "it took 1 tickets more than its quota of 1 allows"


def test_a_bound_block_may_be_as_long_as_a_block() -> None:
    link = direct_link(quota=1)
    machine = link.take_direct([bytes(range(64))])
    assert link.bind_taken(machine, [100]).status.tolist() == [Status.OK]
    assert link.world.block(int(machine.block_offset[0]), 64) == bytes(range(64))


def test_a_session_before_its_hello_has_nothing() -> None:
    session = ring_world().link().session
    assert (session.peer, session.state, session.hello, session.ack) == ("10.0.0.2:1", TargetState.GREETING, None, None)
    assert (session.handle_base, session.handle_count, session.partition) == (0, 0, None)
    assert (session.has_effects, session.has_tickets, session.unanswered_count, session.is_idle) == (False, False, 0, False)


def test_a_target_has_the_keys_domains_and_handles_that_it_was_given() -> None:
    def target(**options: Any) -> Target:
        return Target(LentPool(64, 64), BlockTable(4), name="target", incarnation=1, **options)

    plain = target()
    assert (plain.reserved_handles, plain.readers, plain.trust_domains, plain.clears_blocks) == (0, None, None, True)
    assert target(readers=len).readers is len
    one, two = target(secrets={"a": b"1"}), target(secrets={"a": b"1", "b": b"2"}, trust_domains=frozenset({"c"}))
    assert (one.trust_domains, one.clears_blocks) == ({"a"}, False)
    assert (two.trust_domains, two.clears_blocks) == ({"a", "b"}, True)


def test_what_native_code_reads_of_a_target_has_the_width_that_it_expects() -> None:
    target = ring_world().target
    assert (target.entry_state.dtype, target.reading.dtype, target.owners.dtype) == (np.uint8, np.int32, np.uint64)
    assert {array.shape for array in (target.entry_state, target.reading, target.owners)} == {(16,)}


def test_an_entry_names_the_session_that_bound_it_until_its_block_is_back() -> None:
    world = ring_world()
    other, link = ready(world), ready(world, quota=1)
    put(link, 108, b"data")
    assert (other.session.number, world.target.owners.tolist()) == (1, [0] * 8 + [2] + [0] * 7)
    world.native_readers[8] = 1
    link.initiator.free([108], 0)
    link.run()
    assert world.target.owners[8] == 2
    world.native_readers.clear()
    world.tick()
    assert not world.target.owners.any()


def test_an_entry_makes_no_move_that_it_may_not_make() -> None:
    target = ring_world().target
    target.reserve(0)
    with pytest.raises(AssertionError, match=r"^entry 0 is RESERVED, not IDLE$"):
        target.reserve(0)
    with pytest.raises(AssertionError, match=r"^entry 1 is IDLE, not BOUND$"):
        target.clear(1)


def test_a_target_needs_an_incarnation() -> None:
    with pytest.raises(ValueError, match=r"^a target's incarnation must not be zero$"):
        Target(LentPool(64, 64), BlockTable(1), name="target", incarnation=0)
