"""Requests between a linked initiator and target: every status, and that what failed changed nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kbtp_core.errors import SessionClosed
from kbtp_core.protocol.constants import NO_STATUS, Flag, Opcode, Status
from kbtp_core.protocol.effects import Send
from kbtp_core.protocol.initiator import InitiatorState
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.target import TargetLimits
from kbtp_core.protocol.wire import AllocStore, Bind, Completion, CompletionDescriptor, DataDescriptor, Free, Header, Load, Store, parse
from tests.protocol.world import STAG, Link, World, lent_world, ring_world


def ready(world: World, **wishes: int) -> Link:
    return world.link(**{"quota": 3, "handles": 8, **wishes}).greet()  # type: ignore[arg-type]


def put(link: Link, handle: int, data: bytes, flags: int = Flag.SEAL) -> int:
    """ALLOC_STORE inline; returns the generation."""
    batch = link.initiator.alloc_store_inline([handle], 0, [data], flags)
    link.run(batch)
    assert batch.status.tolist() == [Status.OK]
    return int(batch.generation[0])


def state_of(link: Link) -> InitiatorState:
    """As a call, so that a type checker doesn't think that it stays the same."""
    return link.initiator.state


def snapshot(world: World) -> tuple[bytes, bytes, bytes, int]:
    pool = world.target.pool
    ring = pool.ring.slots.tobytes() + pool.ring.counters.tobytes() if hasattr(pool, "ring") else b""
    usage = sum(pool.usage(number) for number in world.target.sessions) if hasattr(pool, "usage") else 0
    return world.target.table.entries.tobytes(), world.pool_memory.tobytes(), ring, usage


def test_blocks_are_stored_loaded_and_freed() -> None:
    world = ring_world(blocks=4, block_bytes=64)
    link = ready(world)
    link.memory[:100] = np.arange(100)
    stored = link.initiator.alloc_store([100, 101], 0, STAG, [0, 64], [64, 36], Flag.SEAL)
    link.run(stored)
    assert stored.status.tolist() == [Status.OK, Status.OK]
    assert stored.generation.tolist() == [2, 2]
    assert stored.block_offset.tolist() == [0, 64]
    assert stored.data_length.tolist() == [64, 36]
    loaded = link.initiator.load([101, 100], stored.generation, STAG, [1000, 2000], [64, 64])
    link.run(loaded)
    assert loaded.status.tolist() == [Status.OK, Status.OK]
    assert loaded.data_length.tolist() == [36, 64]
    assert link.memory[1000:1036].tolist() == list(range(64, 100))
    assert link.memory[2000:2064].tolist() == list(range(64))
    freed = link.initiator.free([100, 101], stored.generation)
    link.run(freed)
    assert freed.status.tolist() == [Status.OK, Status.OK]
    assert freed.generation.tolist() == [3, 3]
    world.target.check_integrity()
    assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]


def test_a_mapped_store_changes_length_and_seals_but_not_the_generation() -> None:
    world = ring_world()
    link = ready(world)
    generation = put(link, 100, b"first", 0)
    link.memory[:3] = [7, 8, 9]
    stored = link.initiator.store([100], [generation], STAG, 0, 3, Flag.SEAL)
    link.run(stored)
    assert (stored.status[0], stored.generation[0], stored.data_length[0]) == (Status.OK, generation, 3)
    assert world.block(0, 5) == bytes([7, 8, 9]) + b"st"
    again = link.initiator.store_inline([100], 0, [b"x"])
    link.run(again)
    assert again.status[0] == Status.SEALED


DATA = DataDescriptor(STAG, 0, 64)


@pytest.mark.parametrize(
    ("request_message", "status", "generation"),
    [
        (Load(9, 99, 0, DATA), Status.NOT_PERMITTED, 0),
        (Load(9, 116, 0, DATA), Status.NOT_PERMITTED, 0),
        (Load(9, 103, 0, DATA), Status.NOT_BOUND, 1),
        (Load(9, 103, 9, DATA), Status.NOT_BOUND, 1),
        (Load(9, 100, 1, DATA), Status.STALE_GENERATION, 2),
        (Load(9, 101, 1, DATA), Status.STALE_GENERATION, 2),
        (Load(9, 101, 2, DataDescriptor(STAG, 0, 0)), Status.NOT_SEALED, 2),
        (Load(9, 100, 0, DataDescriptor(STAG, 0, 5)), Status.LENGTH, 2),
        (Load(9, 100, 0, DATA, Flag.RECORD, CompletionDescriptor(1, 2)), Status.UNSUPPORTED, 2),
        (Store(9, 110, 0, DATA), Status.NOT_PERMITTED, 1),
        (Store(9, 99, 0, DATA), Status.NOT_PERMITTED, 0),
        (Store(9, 103, 0, DATA), Status.NOT_BOUND, 1),
        (Store(9, 100, 3, DATA), Status.STALE_GENERATION, 2),
        (Store(9, 100, 2, DataDescriptor(STAG, 0, 999)), Status.SEALED, 2),
        (Store(9, 101, 2, DataDescriptor(STAG, 0, 65)), Status.LENGTH, 2),
        (Store(9, 101, 2, DataDescriptor(STAG, 0, 0)), Status.LENGTH, 2),
        (Store(9, 101, 2, DataDescriptor(0, 0, 0), Flag.INLINE), Status.LENGTH, 2),
        (AllocStore(9, 110, 0, DATA), Status.NOT_PERMITTED, 1),
        (AllocStore(9, 116, 0, DATA), Status.NOT_PERMITTED, 0),
        (AllocStore(9, 100, 9, DataDescriptor(STAG, 0, 999)), Status.ALREADY_BOUND, 2),
        (AllocStore(9, 103, 2, DataDescriptor(STAG, 0, 999)), Status.STALE_GENERATION, 1),
        (AllocStore(9, 103, 1, DataDescriptor(STAG, 0, 999)), Status.LENGTH, 1),
        (AllocStore(9, 103, 0, DataDescriptor(0, 0, 0), Flag.INLINE), Status.LENGTH, 1),
        (AllocStore(9, 103, 0, DATA), Status.NO_SPACE, 1),
        (Free(9, 110, 0), Status.NOT_PERMITTED, 1),
        (Free(9, 116, 0), Status.NOT_PERMITTED, 0),
        (Free(9, 103, 5), Status.NOT_BOUND, 1),
        (Free(9, 100, 5), Status.STALE_GENERATION, 2),
        (Free(9, 100, 0, Flag.RECORD, CompletionDescriptor(1, 2)), Status.UNSUPPORTED, 2),
        (Bind(9, 103, 0, 0, 64, 0), Status.UNSUPPORTED, 1),
        (Header(0x80, 9, 103), Status.UNSUPPORTED, 1),
        (Header(77, 9, 999), Status.UNSUPPORTED, 0),
        (Completion(9, 100, 0, 0), Status.UNSUPPORTED, 2),
        (Header(Opcode.LOAD, 9, 100), Status.MALFORMED, 2),
        (Header(Opcode.FREE, 9, 100, version=2), Status.MALFORMED, 2),
        (Header(Opcode.FREE, 9, 100, flags=Flag.SEAL), Status.MALFORMED, 2),
    ],
)
def test_the_first_check_that_fails_answers_the_request_and_nothing_changes(
    request_message: Load | Store | Free | Bind | Header | Completion, status: Status, generation: int
) -> None:
    world = ring_world(blocks=4, handles=16)
    link = ready(world, quota=2)
    put(link, 100, b"sealed")
    put(link, 101, b"open", 0)
    before = snapshot(world)
    effects = link.session.receive(request_message.encode(), 0.0)
    assert len(effects) == 1
    handle = request_message.handle
    assert parse(effects[0].data) == Completion(9, handle, generation, status)  # type: ignore[union-attr]
    assert snapshot(world) == before
    assert link.session.unanswered_count == 0
    world.target.check_integrity()


def test_a_message_shorter_than_a_header_is_answered_with_what_came_of_its_request_id() -> None:
    link = ready(ring_world())
    (effect,) = link.session.receive(Free(0x0102030405060708, 1, 1).encode()[:8], 0.0)
    assert parse(effect.data) == Completion(0x0102030400000000, 0, 0, Status.MALFORMED)  # type: ignore[union-attr]


def test_inline_data_over_the_granted_length_is_malformed() -> None:
    link = ready(ring_world(limits=TargetLimits(inline_bytes=8)))
    for data, status in [(b"123456789", Status.MALFORMED), (b"12345678", Status.OK)]:
        request = AllocStore(1, 100, 0, DataDescriptor(0, 0, len(data)), Flag.INLINE, None, data)
        (effect,) = link.session.receive(request.encode(), 0.0)
        assert parse(effect.data).status == status  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="takes at most 8"):
        link.initiator.alloc_store_inline([100], 0, [b"123456789"])


def test_an_allow_unsealed_load_returns_an_open_block() -> None:
    link = ready(ring_world())
    put(link, 100, b"open", 0)
    batch = link.initiator.load([100], 0, STAG, 10, 64, Flag.ALLOW_UNSEALED)
    link.run(batch)
    assert (batch.status[0], batch.data_length[0]) == (Status.OK, 4)
    assert link.memory[10:14].tobytes() == b"open"


def test_invalidate_names_the_stag_of_the_data_descriptor_also_when_the_request_fails() -> None:
    link = ready(ring_world())
    put(link, 100, b"data")
    link.run(link.initiator.load([100, 105], 0, [STAG, STAG + 1], 0, 64, Flag.INVALIDATE))
    assert link.invalidated == [STAG, STAG + 1]


@pytest.mark.parametrize(
    ("change", "status", "stag"),
    [
        ({"request_id": 8}, Status.BUSY, STAG),
        ({"request_id": 7}, Status.MALFORMED, None),  # it may not be what its sender meant
        ({"request_id": 8, "flags": Flag.INVALIDATE | Flag.RECORD, "record": CompletionDescriptor(1, 2)}, Status.UNSUPPORTED, STAG),
        ({"request_id": 8, "flags": Flag.NONE}, Status.BUSY, None),
    ],
)
def test_invalidate_holds_for_a_request_that_is_not_run_as_well(change: dict[str, Any], status: Status, stag: int | None) -> None:
    link = ready(ring_world(limits=TargetLimits(outstanding=1)))
    link.session.receive(AllocStore(7, 100, 0, DATA).encode(), 0.0)
    (answer,) = link.session.receive(replace(Load(0, 101, 0, DATA, Flag.INVALIDATE), **change).encode(), 0.0)
    assert isinstance(answer, Send)
    assert (parse(answer.data), answer.invalidate_stag) == (Completion(change["request_id"], 101, 1, status), stag)


def test_a_free_names_no_block_in_its_completion() -> None:
    for native_readers in (0, 1):
        world = ring_world()
        link = ready(world)
        put(link, 100, b"first")
        put(link, 101, b"second")
        world.native_readers[1] = native_readers
        freed = link.initiator.free([101], 0)
        link.run()
        world.native_readers.clear()
        world.tick()
        assert (freed.status[0], freed.data_length[0], freed.block_offset[0]) == (Status.OK, 0, 0)


def test_two_outstanding_requests_with_one_id_are_malformed_and_the_later_is_not_run() -> None:
    world = ring_world()
    link = ready(world)
    world.hold_operations = True
    first = AllocStore(5, 100, 0, DATA).encode()
    (read,) = link.session.receive(first, 0.0)
    (answer,) = link.session.receive(Free(5, 101, 0).encode(), 0.0)
    assert parse(answer.data) == Completion(5, 101, 1, Status.MALFORMED)  # type: ignore[union-attr]
    (done,) = link.session.read_done(read.token, True, 0.0)  # type: ignore[union-attr]
    assert parse(done.data).status == Status.OK  # type: ignore[union-attr]


def test_more_requests_than_granted_are_busy() -> None:
    world = ring_world(limits=TargetLimits(outstanding=2))
    link = ready(world)
    for i in range(2):
        link.session.receive(AllocStore(i, 100 + i, 0, DATA).encode(), 0.0)
    (answer,) = link.session.receive(AllocStore(2, 102, 0, DATA).encode(), 0.0)
    assert parse(answer.data) == Completion(2, 102, 1, Status.BUSY)  # type: ignore[union-attr]


def test_a_target_that_shuts_down_answers_new_requests_so_and_finishes_the_old() -> None:
    world = ring_world()
    link = ready(world)
    (read,) = link.session.receive(AllocStore(1 << 32, 100, 0, DATA).encode(), 0.0)
    (session,) = world.target.shut_down()
    (goodbye,) = session.take_effects()
    assert parse(goodbye.data).status == Status.SHUTTING_DOWN  # type: ignore[union-attr]
    (answer,) = link.session.receive(AllocStore(2, 101, 0, DATA).encode(), 0.0)
    assert parse(answer.data).status == Status.SHUTTING_DOWN  # type: ignore[union-attr]
    (done,) = link.session.read_done(read.token, True, 0.0)  # type: ignore[union-attr]
    assert parse(done.data).status == Status.OK  # type: ignore[union-attr]


def test_a_failed_read_of_an_unmapped_store_gives_the_block_back_before_it_completes() -> None:
    world = ring_world(blocks=1)
    link = ready(world, quota=1)
    world.hold_operations = True
    batch = link.initiator.alloc_store([100], 0, STAG, 0, 64)
    link.run()
    assert world.target.pool.count(BlockState.TAKEN) == 1  # type: ignore[union-attr]
    link.finish_operations(ok=False)
    assert batch.status.tolist() == [Status.ACCESS]
    assert world.target.pool.count(BlockState.FREE) == 1  # type: ignore[union-attr]
    world.target.check_integrity()
    world.hold_operations = False
    put(link, 100, b"again")


def test_a_failed_read_into_a_bound_block_ends_the_session_so_that_nobody_takes_it_for_whole() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 100, b"whole", 0)
    world.hold_operations = True
    batch = link.initiator.store([100], 0, STAG, 0, 64)
    link.run()
    link.finish_operations(ok=False)
    assert batch.status.tolist() == [Status.ACCESS]
    assert link.closed_because == "an RDMA Read into a bound block failed"


def test_a_batch_larger_than_the_credit_is_sent_in_windows() -> None:
    world = ring_world(blocks=4)
    link = ready(world, outstanding=4)
    put(link, 100, b"data")
    batch = link.initiator.load(np.full(10, 100), 0, STAG, np.arange(10) * 64, 64)
    sizes = []
    while (window := link.initiator.take_window(100)) is not None:
        assert link.initiator.take_window(100) is None  # no credit left
        sizes.append(window.stop - window.start)
        for row in batch.messages[window.start : window.stop]:
            link.deliver(row.tobytes())
    assert sizes == [4, 4, 2]
    assert batch.is_done
    assert (batch.status == Status.OK).all()


def completion(request_id: int, status: int = 0) -> np.ndarray:
    return np.frombuffer(Completion(request_id, 100, 1, status).encode(), np.uint8).reshape(1, 40)


@pytest.mark.parametrize("request_id", [0, 1 << 32 | 2, 9 << 32, (1 << 64) - 1])
def test_a_completion_that_matches_nothing_closes_the_session(request_id: int) -> None:
    link = ready(ring_world())
    batch = link.initiator.load([100, 101], 0, STAG, 0, 64)
    link.initiator.take_window(10)
    link.initiator.receive_completions(completion(request_id))
    assert link.initiator.state is InitiatorState.CLOSED
    assert isinstance(link.initiator.error, SessionClosed)
    assert "not outstanding" in str(link.initiator.error)
    assert batch.status.tolist() == [NO_STATUS, NO_STATUS]


def test_a_completion_that_comes_twice_closes_the_session_in_one_array_or_in_two() -> None:
    for together in (True, False):
        link = ready(ring_world())
        link.initiator.load([100, 101], 0, STAG, 0, 64)
        link.initiator.take_window(10)
        one = completion(1 << 32)
        if together:
            link.initiator.receive_completions(np.concatenate([one, one]))
        else:
            link.initiator.receive_completions(one)
            assert state_of(link) is InitiatorState.READY
            link.initiator.receive_completions(one)
        assert state_of(link) is InitiatorState.CLOSED


def test_an_abandoned_batch_sends_no_more_and_its_answers_still_give_credit_back() -> None:
    link = ready(ring_world(), outstanding=2)
    batch = link.initiator.load([100, 101, 102], 0, STAG, 0, 64)
    link.initiator.take_window(10)
    link.initiator.abandon(batch)
    assert link.initiator.take_window(10) is None
    assert link.initiator.outstanding_count == 2
    link.initiator.receive_completions(np.concatenate([completion(1 << 32), completion(1 << 32 | 1)]))
    assert link.initiator.outstanding_count == 0
    assert link.initiator.state is InitiatorState.READY
    assert batch.is_abandoned


def test_goodbye_lets_outstanding_requests_finish_and_then_closes() -> None:
    world = ring_world()
    link = ready(world)
    world.hold_operations = True
    batch = link.initiator.alloc_store([100], 0, STAG, 0, 64)
    link.run()
    link.deliver(link.initiator.goodbye())
    assert not batch.is_done
    link.finish_operations()
    assert batch.status.tolist() == [Status.OK]
    assert link.closed_because == "goodbye"
    assert link.initiator.state is InitiatorState.CLOSED
    with pytest.raises(SessionClosed, match="is closing"):
        link.initiator.load([100], 0, STAG, 0, 64)


def test_a_request_after_goodbye_closes_at_once() -> None:
    world = ring_world()
    link = ready(world)
    link.session.receive(AllocStore(1, 100, 0, DATA).encode(), 0.0)
    link.session.receive(Header(Opcode.GOODBYE, 0).encode(), 0.0)
    link.deliver(Free(2, 101, 1).encode())
    assert link.closed_because == "a request after GOODBYE"


def test_a_peer_frees_a_lent_handle_only_with_its_generation_and_never_a_reserved_one() -> None:
    world = lent_world(reserved=1)
    generations = world.target.bind([100, 101], [0, 64], [64, 64])
    link = world.link().greet()
    for handle, generation, status in [
        (100, 2, Status.NOT_PERMITTED),
        (101, 0, Status.NOT_PERMITTED),
        (101, 9, Status.STALE_GENERATION),
        (101, generations[1], Status.OK),
        (101, generations[1], Status.NOT_BOUND),
    ]:
        batch = link.initiator.free([handle], [generation])
        link.run(batch)
        assert batch.status.tolist() == [status]
    assert world.target.take_drained().tolist() == [101]
    assert world.target.take_drained().tolist() == []
    world.target.check_integrity()


def test_stores_into_a_lent_pool_are_refused() -> None:
    world = lent_world()
    world.target.bind([101], [0], [64], sealed=False)
    link = world.link().greet()
    stored, allocated = link.initiator.store_inline([101], 0, [b"x"]), link.initiator.alloc_store_inline([102], 0, [b"x"])
    link.run(stored, allocated)
    assert (stored.status[0], allocated.status[0]) == (Status.NOT_PERMITTED, Status.NO_SPACE)
    assert world.pool_memory[0] == 1


def test_an_early_load_of_a_lent_handle_sees_the_generation_just_before_the_expected() -> None:
    world = lent_world()
    link = world.link().greet()
    early = link.initiator.load([105], [2], STAG, 0, 64)
    link.run(early)
    assert (early.status[0], early.generation[0]) == (Status.NOT_BOUND, 1)
    assert world.target.bind([105], [128], [64]).tolist() == [2]
    late = link.initiator.load([105], [2], STAG, 0, 64)
    link.run(late)
    assert late.status[0] == Status.OK
    assert (link.memory[:64] == 3).all()


def test_many_frees_at_once_are_answered_as_one_by_one() -> None:
    requests = [
        Free(1, 101, 2),
        Free(2, 100, 2),  # reserved
        Free(3, 102, 0),  # without a generation
        Free(4, 103, 7),
        Free(5, 104, 1),
        Free(6, 105, 2),
        Free(7, 99, 2),
        Free(8, 116, 2),
        Free(9, (1 << 64) - 1, 2),
    ]
    raw = np.frombuffer(b"".join(request.encode() for request in requests), np.uint8).reshape(-1, 24)
    answers = []
    tables = []
    for at_once in (True, False):
        world = lent_world(reserved=1)
        world.target.bind([100, 101, 102, 103, 105], 0, 64)
        link = world.link().greet()
        effects = link.session.receive_frees(raw, 0.0) if at_once else [link.session.receive(r.encode(), 0.0)[0] for r in requests]
        assert not at_once or effects[0].messages.shape == (9, 40)  # type: ignore[union-attr]
        octets = effects[0].messages if at_once else np.array([list(effect.data) for effect in effects], np.uint8)  # type: ignore[union-attr]
        answers.append(octets.tobytes())
        tables.append(world.target.table.entries.tobytes())
        assert world.target.take_drained().tolist() == [101, 105]
        world.target.check_integrity()
    assert answers[0] == answers[1]
    assert tables[0] == tables[1]


def test_a_run_of_frees_that_names_a_handle_twice_is_taken_one_by_one() -> None:
    world = lent_world()
    world.target.bind([101], 0, 64)
    link = world.link().greet()
    raw = np.frombuffer(Free(1, 101, 2).encode() + Free(2, 101, 2).encode(), np.uint8).reshape(-1, 24)
    first, second = link.session.receive_frees(raw, 0.0)
    assert parse(first.data).status == Status.OK  # type: ignore[union-attr]
    assert parse(second.data).status == Status.NOT_BOUND  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("odd", "statuses"),
    [
        (Free(2, 102, 2, Flag.SEAL), [Status.OK, Status.MALFORMED]),
        (Header(Opcode.LOAD, 2, 102, 2), [Status.OK, Status.MALFORMED]),
        (Free(1, 102, 2), [Status.OK, Status.OK]),
    ],
    ids=["undefined flag", "no FREE", "id twice"],
)
def test_a_run_of_frees_with_an_odd_message_is_taken_one_by_one(odd: Free | Header, statuses: list[Status]) -> None:
    world = lent_world()
    world.target.bind([101, 102], [0, 64], 64)
    link = world.link().greet()
    raw = np.frombuffer(Free(1, 101, 2).encode() + odd.encode(), np.uint8).reshape(-1, 24)
    effects = link.session.receive_frees(raw, 0.0)
    assert [type(effect) for effect in effects] == [Send, Send]
    assert [effect.data[23] for effect in effects if isinstance(effect, Send)] == statuses
