"""Who may touch a block, and when: order per handle, draining, disconnects, clearing, lent handles."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kbtp_core.protocol.constants import Flag, Status
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.target import EntryState, HandleRanges
from kbtp_core.protocol.wire import AllocStore, Completion, DataDescriptor, Free, Load, Store, parse
from tests.protocol.test_draft_6_6 import direct_link
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, lent_world, ring_world


def test_requests_for_one_handle_take_effect_in_the_order_sent_while_others_pass() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 101, b"other")
    world.hold_operations = True
    link.memory[:4] = [1, 2, 3, 4]
    chain = [
        link.initiator.alloc_store([100], 0, STAG, 0, 4),
        link.initiator.load([100], 0, STAG, 100, 64, Flag.ALLOW_UNSEALED),
        link.initiator.store_inline([100], 0, [b"new"], Flag.SEAL),
        link.initiator.load([100], 0, STAG, 200, 64),
        link.initiator.free([100], 0),
        link.initiator.alloc_store_inline([100], 0, [b"reborn"], Flag.SEAL),
        link.initiator.load([101], 0, STAG, 300, 64),
    ]
    link.run()
    assert [batch.is_done for batch in chain] == [False] * 6 + [True]
    link.finish_operations()
    world.tick()  # the block of the FREE has drained
    assert [batch.status[0] for batch in chain] == [Status.OK] * 7
    assert link.memory[100:104].tolist() == [1, 2, 3, 4]
    assert link.memory[200:203].tobytes() == b"new"
    assert [int(batch.generation[0]) for batch in chain[:6]] == [2, 2, 2, 2, 3, 4]
    world.target.check_integrity()


def test_an_unsealed_block_is_written_from_a_snapshot_and_a_sealed_one_is_not() -> None:
    link = ready(ring_world())
    put(link, 100, b"open", 0)
    put(link, 101, b"sealed")
    load = Load(1, 100, 0, DataDescriptor(STAG, 0, 64), Flag.ALLOW_UNSEALED)
    assert link.session.receive(load.encode(), 0.0)[0].snapshot is True  # type: ignore[union-attr]
    load = Load(2, 101, 0, DataDescriptor(STAG, 0, 64))
    assert link.session.receive(load.encode(), 0.0)[0].snapshot is False  # type: ignore[union-attr]


def test_a_block_that_its_writer_can_still_change_is_written_from_a_snapshot() -> None:
    link = direct_link()
    link.bind_taken(link.take_direct([b"sealed"]), [100])
    load = Load(1, 100, 0, DataDescriptor(STAG, 0, 64))
    assert link.session.receive(load.encode(), 0.0)[0].snapshot is True  # type: ignore[union-attr]
    raw = np.frombuffer(load.encode(), np.uint8).reshape(1, 40)
    assert link.session.receive_loads(raw, 0.0)[0].snapshot is True  # type: ignore[union-attr]


def test_a_freed_block_stays_out_of_the_ring_while_a_write_reads_it() -> None:
    world = ring_world(blocks=1)
    owner, reader = ready(world, quota=1), world.link().greet()
    generation = put(owner, 100, b"data")
    world.hold_operations = True
    reader.run(reader.initiator.load([100], [generation], STAG, 0, 64))
    freed = owner.initiator.free([100], [generation])
    owner.run()
    assert not freed.is_done  # the block is not back yet, and the completion says that it is
    late = reader.initiator.load([100], [generation], STAG, 0, 64)
    reader.run(late)
    assert (late.status[0], late.generation[0]) == (Status.NOT_BOUND, generation + 1)
    world.tick()
    world.target.check_integrity()
    assert world.block(0, 4) == b"data"
    reader.finish_operations()
    world.tick()
    assert freed.status.tolist() == [Status.OK]
    assert reader.memory[:4].tobytes() == b"data"
    assert not world.pool_memory.any()  # cleared for whoever comes next
    world.target.check_integrity()


def test_a_freed_block_stays_out_of_the_ring_until_the_last_of_its_readers_is_done() -> None:
    world = ring_world(blocks=1)
    owner, readers = ready(world, quota=1), [world.link().greet() for _ in range(2)]
    put(owner, 100, b"data")
    world.hold_operations = True
    for reader in readers:
        reader.run(reader.initiator.load([100], 0, STAG, 0, 64))
    freed = owner.initiator.free([100], 0)
    owner.run()
    for reader in readers:
        world.tick()
        assert not freed.is_done
        reader.finish_operations()
    world.tick()
    assert freed.status.tolist() == [Status.OK]
    assert [reader.memory[:4].tobytes() for reader in readers] == [b"data"] * 2
    world.target.check_integrity()


def test_each_operation_of_a_session_has_a_token_of_its_own_and_none_is_zero() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 100, b"data")
    world.hold_operations = True
    link.run(link.initiator.load([100] * 4, 0, STAG, 0, 64))
    link.initiator.alloc_store([101], 0, STAG, 0, 64)
    link.run()
    (many,) = link.session.receive_loads(
        np.frombuffer(Load(99, 100, 0, DataDescriptor(STAG, 0, 64)).encode(), np.uint8).reshape(1, 40), 0.0
    )
    tokens = [operation.token for operation in link.held] + [many.token]  # type: ignore[union-attr]
    assert len(set(tokens)) == 6
    assert min(tokens) > 0


def test_a_freed_block_stays_out_of_the_ring_while_a_native_reader_reads_it() -> None:
    world = ring_world(blocks=1)
    link = ready(world, quota=1)
    put(link, 100, b"data")
    world.native_readers[0] = 1
    freed = link.initiator.free([100], 0)
    again = link.initiator.alloc_store_inline([100], 0, [b"next"])
    link.run()
    world.tick()
    assert not freed.is_done
    assert world.target.pool.count(BlockState.DRAINING) == 1  # type: ignore[union-attr]
    world.native_readers.clear()
    world.tick()
    assert (freed.status[0], again.status[0]) == (Status.OK, Status.OK)
    world.target.check_integrity()


def test_a_disconnect_frees_everything_that_the_session_bound_or_had_taken() -> None:
    world = ring_world(blocks=4)
    link = ready(world, quota=3)
    put(link, 100, b"sealed")
    put(link, 101, b"open", 0)
    world.hold_operations = True
    link.initiator.alloc_store([102], 0, STAG, 0, 64)
    link.run()
    assert world.target.pool.count(BlockState.TAKEN) == 1  # type: ignore[union-attr]
    link.disconnect()
    assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
    assert not world.pool_memory.any()
    assert not world.target.sessions
    assert world.target.table.entries["generation"][:3].tolist() == [3, 3, 1]
    world.target.check_integrity()


def test_quota_and_handles_of_a_gone_session_wait_for_its_readers() -> None:
    world = ring_world(blocks=2, handles=4)
    owner, reader = ready(world, quota=2, handles=4), world.link().greet()
    put(owner, 100, b"data")
    world.hold_operations = True
    reader.run(reader.initiator.load([100], 0, STAG, 0, 64))
    owner.disconnect()
    ack = ready(world, quota=2, handles=4).initiator.ack
    assert ack is not None
    assert (ack.quota, ack.handle_count) == (0, 0)
    reader.disconnect()  # fences its Write
    world.tick()
    ack = ready(world, quota=2, handles=4).initiator.ack
    assert ack is not None
    assert (ack.quota, ack.handle_count) == (2, 4)
    world.target.check_integrity()


def test_a_disconnect_with_a_free_that_still_drains_loses_nothing() -> None:
    world = ring_world(blocks=2)
    owner, reader = ready(world, quota=2), world.link().greet()
    put(owner, 100, b"data")
    put(owner, 101, b"more")
    world.hold_operations = True
    reader.run(reader.initiator.load([100], 0, STAG, 0, 64))
    owner.initiator.free([100], 0)
    owner.run()
    owner.disconnect()
    assert world.target.pool.count(BlockState.FREE) == 1  # type: ignore[union-attr]
    reader.finish_operations()
    world.tick()
    assert world.target.pool.count(BlockState.FREE) == 2  # type: ignore[union-attr]
    assert owner.session.number not in world.target.sessions
    world.target.check_integrity()


def test_with_a_single_trust_domain_freed_blocks_need_no_clearing() -> None:
    world = ring_world(trust_domains=frozenset({""}))
    link = ready(world)
    put(link, 100, b"data")
    link.run(link.initiator.free([100], 0))
    assert world.block(0, 4) == b"data"


def test_a_reclaimed_lent_handle_is_refused_at_once_and_given_back_once_nothing_reads_it() -> None:
    world = lent_world()
    (generation,) = world.target.bind([101], [64], [64])
    link = world.link().greet()
    world.hold_operations = True
    link.run(link.initiator.load([101], [generation], STAG, 0, 64))
    assert world.target.reclaim([101, 102]).tolist() == [True, False]
    assert world.target.reclaim([101]).tolist() == [False]
    late = link.initiator.load([101], [generation], STAG, 0, 64)
    link.run(late)
    assert (late.status[0], late.generation[0]) == (Status.NOT_BOUND, generation + 1)
    assert world.target.take_drained().size == 0
    with pytest.raises(ValueError, match="101 is DRAINING"):
        world.target.bind([101], [0], [64])
    link.finish_operations()
    assert world.target.take_drained().tolist() == [101]
    assert world.target.bind([101], [0], [64]).tolist() == [generation + 2]
    stale = link.initiator.load([101], [generation], STAG, 0, 64)
    link.run(stale)
    assert stale.status[0] == Status.STALE_GENERATION


def test_several_lent_handles_may_name_one_block() -> None:
    world = lent_world()
    world.target.bind([101, 102], [64, 64], [64, 32])
    link = world.link().greet()
    batch = link.initiator.load([101, 102], 0, STAG, [0, 64], 64)
    link.run(batch)
    assert batch.data_length.tolist() == [64, 32]
    world.target.reclaim([101])
    assert world.target.entry_state[2] == EntryState.BOUND


@pytest.mark.parametrize(
    ("offset", "length", "why"),
    [(256, 1, "outside the region"), (200, 64, "outside"), (2**64 - 1, 2, "outside"), (0, 65, "1 to 64"), (0, 0, "1 to 64")],
)
def test_a_lent_bind_outside_the_region_is_refused(offset: int, length: int, why: str) -> None:
    world = lent_world(blocks=4, block_bytes=64)
    with pytest.raises(ValueError, match=why):
        world.target.bind([101], [offset], [length])
    world.target.check_integrity()


def test_handle_ranges_are_disjoint_and_merge_again() -> None:
    ranges = HandleRanges(10, 100)
    assert [ranges.take(40), ranges.take(40), ranges.take(40)] == [(10, 40), (50, 40), (90, 20)]
    ranges.give_back(10, 40)
    ranges.give_back(90, 20)
    assert ranges.take(100) == (10, 40)
    ranges.give_back(50, 40)
    ranges.give_back(10, 40)
    assert ranges.take(100) == (10, 100)


operations = st.lists(
    st.tuples(
        st.sampled_from(["put", "fetch", "store", "load", "free", "finish", "fail", "leave", "tick", "native"]),
        st.integers(0, 1),
        st.integers(0, 3),
        st.integers(0, 3),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_whatever_two_sessions_do_no_block_is_lost(steps: list[tuple[str, int, int, int]]) -> None:
    world = ring_world(blocks=4, handles=8)
    world.hold_operations = True
    links = [ready(world, quota=2, handles=4) for _ in range(2)]
    for serial, (what, who, handle, generation) in enumerate(steps):
        link = links[who]
        name = 100 + 4 * who + handle
        data = DataDescriptor(STAG, 64 * handle, 64)
        match what:
            case "put":
                inline = AllocStore(serial, name, 0, DataDescriptor(0, 0, 2), Flag.INLINE, None, b"ab")
                link.apply(link.session.receive(inline.encode(), 0.0))
            case "fetch":
                link.apply(link.session.receive(AllocStore(serial, name, 0, data, Flag.SEAL).encode(), 0.0))
            case "store":
                link.apply(link.session.receive(Store(serial, name, generation, data).encode(), 0.0))
            case "load":
                name = 100 + (4 * who + handle) % 8
                link.apply(link.session.receive(Load(serial, name, generation, data, Flag.ALLOW_UNSEALED).encode(), 0.0))
            case "free":
                link.apply(link.session.receive(Free(serial, name, generation).encode(), 0.0))
            case "finish" | "fail":
                link.finish_operations(ok=what == "finish")
            case "leave":
                link.disconnect()
                links[who] = ready(world, quota=2, handles=4)
            case "tick":
                world.tick()
            case "native":
                world.native_readers[4 * who + handle] = generation
        world.target.check_integrity()
    world.native_readers.clear()
    for link in world.links:
        if link.is_connected:
            link.disconnect()
    world.tick()
    world.target.check_integrity()
    assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
    assert not world.target.sessions


def test_a_completion_is_sent_right_behind_the_write_that_it_vouches_for() -> None:
    link = ready(ring_world())
    put(link, 100, b"data")
    write, send = link.session.receive(Load(7, 100, 2, DataDescriptor(STAG, 5, 64)).encode(), 0.0)
    assert (write.block_offset, write.length, write.stag, write.offset) == (0, 4, STAG, 5)  # type: ignore[union-attr]
    assert parse(send.data) == Completion(7, 100, 2, Status.OK, 4, 0)  # type: ignore[union-attr]
    assert np.count_nonzero(link.memory) == 0
