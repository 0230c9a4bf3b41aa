"""The initiator's machines of the direct modes: several blocks at once, and what becomes of tickets whose blocks are not bound."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import NO_STATUS, Capability, Status
from kbtp_core.protocol.direct import DirectAllocator, DirectKind, DirectLoad, DirectStore
from kbtp_core.protocol.hello import DirectAccess, HelloAck
from tests.protocol.test_draft_6_6 import direct_link, direct_world
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import HEAD, PARTITION, POOL, SLOTS, TABLE

ACK = HelloAck(
    0,
    capabilities=int(Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS),
    block_bytes=64,
    block_count=8,
    quota=4,
    direct=DirectAccess(
        ticket_timeout_ms=1000,
        partition_stag=PARTITION,
        ring_stag=SLOTS,
        ring_offset=(1 << 63) + 0x1000,
        ring_log2_slots=2,
        head_stag=HEAD,
        head_offset=8,
    ),
)
NOTHING = np.zeros(0, np.uint64)


def store_of(allocator: DirectAllocator, *lengths: int, bound: int = 0) -> DirectStore:
    return DirectStore(allocator, bound, np.arange(len(lengths), dtype=np.uint64) * np.uint64(64), np.array(lengths, np.uint32))


def test_several_blocks_are_read_at_once_each_to_its_place() -> None:
    world = direct_world()
    owner, reader = ready(world, quota=2), direct_link(world, quota=1)
    put(owner, 100, b"first")
    put(owner, 101, b"second")
    machine = reader.load_direct([101, 103, 100, 116], [2, 2, 2, 2])
    assert machine.status.tolist() == [Status.OK, Status.NOT_BOUND, Status.OK, Status.NOT_PERMITTED]
    assert machine.data_length.tolist() == [6, 0, 5, 0]
    assert machine.block_offset.tolist() == [128, 0, 64, 0]  # block 0 is in the partition of the reader
    assert machine.generation.tolist() == [2, 1, 2, 0]
    assert reader.memory[:6].tobytes() == b"second"
    assert reader.memory[128:133].tobytes() == b"first"


def test_a_block_longer_than_its_place_is_not_read() -> None:
    world = direct_world()
    put(ready(world, quota=1), 100, b"data")
    reader = direct_link(world, quota=1)
    assert reader.load_direct([100], [0], length=3).status.tolist() == [Status.LENGTH]
    assert reader.load_direct([100], [0], length=4).status.tolist() == [Status.OK]


def entry(length: int, offset: int, generation: int = 2) -> bytes:
    """A valid, sealed entry."""
    return bytes.fromhex(f"0003{generation:04x}{length:08x}{offset:016x}")


@pytest.mark.parametrize(
    ("length", "offset", "at"),
    [
        (1, 0x1000, 0),
        (64, 0x1000, 0),
        (64, 0x11C0, 448),  # the last block
        (1, 0x11FF, 511),
        (0, 0x1000, None),
        (65, 0x1000, None),
        (1, 0x1200, None),
        (2, 0x11FF, None),
        (1, 0xFFF, None),
        (1, (1 << 64) - 1, None),
    ],
)
def test_no_octet_outside_the_pool_is_read(length: int, offset: int, at: int | None) -> None:
    direct = DirectAccess(table_stag=1, table_offset=0x500, pool_stag=2, pool_offset=(1 << 64) - 0x1000)  # Block Offsets start at 0x1000
    ack = HelloAck(0, block_bytes=64, block_count=8, table_base=100, table_count=16, direct=direct)
    handles, generations = np.array([101, 102], np.uint64), np.array([2, 0], np.uint16)
    machine = DirectLoad(ack, handles, generations, np.array([256, 512], np.uint64), np.array([99, 99], np.uint32))
    assert machine.start(0.0)["offset"].tolist() == [0x510, 0x520]
    for place in range(2):
        machine.scratch[16 * place : 16 * place + 16] = np.frombuffer(entry(length, offset), np.uint8)
    operations = machine.advance(NOTHING, 0.0)
    if at is not None:
        assert operations["offset"].tolist() == [at, at]
        assert (operations["length"].tolist(), operations["local_offset"].tolist()) == ([length] * 2, [256, 512])
        operations = machine.advance(NOTHING, 0.0)
    assert operations["local_offset"].tolist() == [32, 48]  # the second look
    machine.scratch[32:] = machine.scratch[:32]
    assert machine.advance(NOTHING, 0.0).size == 0
    assert machine.status.tolist() == [Status.DATA_CORRUPT if at is None else Status.OK] * 2


def test_a_block_is_good_only_if_its_own_two_looks_agree() -> None:
    world = direct_world()
    put(ready(world, quota=1), 100, b"data")
    reader = direct_link(world, quota=1)
    carry_out, rounds = reader.carry_out, []

    def disturbed(operations: np.ndarray) -> np.ndarray:
        values = carry_out(operations)
        rounds.append(int(operations["stag"][0]))
        if len(rounds) in (1, 5):
            first = 0 if len(rounds) == 1 else 16
            reader.machine.scratch[first + 8 : first + 16] = np.frombuffer((0x40).to_bytes(8, "big"), np.uint8)  # torn
        return values

    reader.carry_out = disturbed  # type: ignore[method-assign]
    assert reader.load_direct([100], [0]).status.tolist() == [Status.OK]
    assert rounds == [TABLE, POOL] * 4 + [TABLE]
    assert reader.memory[:4].tobytes() == b"data"


def test_results_are_arrays_of_the_widths_of_the_wire() -> None:
    machine = store_of(DirectAllocator(ACK), 1)
    results = (machine.status, machine.generation, machine.data_length, machine.block_offset)
    assert [result.dtype for result in results] == [np.uint16, np.uint16, np.uint32, np.uint64]


def test_a_block_in_question_has_no_status_yet() -> None:
    world = direct_world()
    put(ready(world, quota=1), 100, b"data")
    reader = direct_link(world, quota=1)
    carry_out, seen = reader.carry_out, []

    def disturbed(operations: np.ndarray) -> np.ndarray:
        values = carry_out(operations)
        seen.append(int(reader.machine.status[0]))
        if len(seen) == 1:
            reader.machine.scratch[8:16] = 0x11  # torn
        return values

    reader.carry_out = disturbed  # type: ignore[method-assign]
    assert reader.load_direct([100], [0]).status.tolist() == [Status.OK]
    assert set(seen) == {NO_STATUS}


def test_tickets_are_taken_for_what_the_quota_leaves() -> None:
    allocator = DirectAllocator(ACK)
    machine = store_of(allocator, 64, 65, 0, 1, 1, 1, bound=1)
    operations = machine.start(5.0)
    assert operations["kind"].tolist() == [DirectKind.FETCH_ADD] * 3
    assert operations["index"].tolist() == [0, 3, 4]
    assert (operations["stag"] == HEAD).all()
    assert (operations["offset"] == 8).all()
    assert machine.status.tolist() == [NO_STATUS, Status.LENGTH, Status.LENGTH, NO_STATUS, NO_STATUS, Status.NO_SPACE]
    assert allocator.held_count == 3
    slots = machine.advance(np.array([0x1_00000010, 0x2_00000020, 0x4_00000000], np.uint64), 5.5)
    assert slots["offset"].tolist() == [(1 << 63) + 0x1010, (1 << 63) + 0x1020, (1 << 63) + 0x1000]
    assert slots["local_offset"].tolist() == [0, 48, 64]
    assert machine.tickets.tolist() == [1, 0, 0, 2, 4, 0]
    assert machine.bindable.tolist() == []


def test_tickets_of_a_store_that_was_given_up_are_used_by_the_next() -> None:
    allocator = DirectAllocator(ACK)
    first = store_of(allocator, 1, 1)
    first.start(5.0)
    first.advance(np.array([0x1_00000010, 0x2_00000020], np.uint64), 5.0)
    first.give_up()
    assert (allocator.spare, allocator.is_over) == ([(0x1_00000010, 6.0), (0x2_00000020, 6.0)], False)
    second = store_of(allocator, 1, 1, 1)
    assert second.start(5.5)["kind"].tolist() == [DirectKind.FETCH_ADD]
    assert second.tickets.tolist() == [1, 2, 0]
    assert (allocator.spare, allocator.held_count) == ([], 3)
    slots = second.advance(np.array([0x3_00000030], np.uint64), 5.5)
    assert (slots["index"].tolist(), second.tickets.tolist()) == ([0, 1, 2], [1, 2, 3])


def test_tickets_that_another_store_holds_count_against_the_quota() -> None:
    allocator = DirectAllocator(ACK)
    store_of(allocator, 1, 1, 1).start(0.0)
    second = store_of(allocator, 1, 1)
    assert second.start(0.0)["index"].tolist() == [0]
    assert second.status.tolist() == [NO_STATUS, Status.NO_SPACE]
    assert allocator.held_count == 4


@pytest.mark.parametrize(
    "slot",
    ["00000001 00000000 ffffffffffffffff", "00000005 00000000 0000000000000040", "00000000 00000000 ffffffffffffffff"],
    ids=["consumed", "of another ticket", "of another ticket and consumed"],
)
def test_a_slot_that_was_not_written_for_the_ticket_is_read_again(slot: str) -> None:
    machine = store_of(DirectAllocator(ACK), 1)
    machine.start(0.0)
    operations = machine.advance(np.array([0x1_00000010], np.uint64), 0.0)
    for _ in range(3):
        assert (operations["kind"].tolist(), operations["offset"].tolist()) == ([DirectKind.READ], [(1 << 63) + 0x1010])
        machine.scratch[:16] = np.frombuffer(bytes.fromhex(slot), np.uint8)
        operations = machine.advance(NOTHING, 0.0)
    assert machine.bindable.tolist() == []


def test_a_ticket_whose_fetch_add_was_not_answered_is_lost_and_ends_the_mode() -> None:
    allocator = DirectAllocator(ACK)
    first = store_of(allocator, 1)
    first.start(5.0)
    first.give_up()
    assert (allocator.spare, allocator.is_over) == ([], True)
    again = store_of(allocator, 1, 1)
    assert again.start(5.0).size == 0
    assert again.status.tolist() == [Status.UNSUPPORTED] * 2
    again.give_up()
    assert allocator.is_over


def test_a_spare_ticket_that_has_run_out_ends_the_mode() -> None:
    for now, is_over in [(5.999, False), (6.0, True)]:
        allocator = DirectAllocator(ACK)
        allocator.spare, allocator.held_count = [(0x1_00000010, 6.0), (0x2_00000020, 7.0)], 2
        store_of(allocator, 1).start(now)
        assert allocator.is_over == is_over


def test_a_ticket_that_runs_out_before_its_block_is_written_is_abandoned() -> None:
    allocator = DirectAllocator(ACK)
    machine = store_of(allocator, 1, 0)
    machine.start(5.0)
    assert machine.advance(np.array([0x1_00000010], np.uint64), 5.999).size == 1
    assert machine.advance(NOTHING, 6.0).size == 0
    assert allocator.is_over
    assert machine.status.tolist() == [Status.TICKET_ABANDONED, Status.LENGTH]


@pytest.mark.parametrize(
    ("status", "spares", "held", "is_over"),
    [
        (Status.OK, 0, 0, False),
        (Status.MALFORMED, 1, 1, False),
        (Status.NOT_PERMITTED, 1, 1, False),
        (Status.ALREADY_BOUND, 1, 1, False),
        (Status.STALE_GENERATION, 1, 1, False),
        (Status.LENGTH, 1, 1, False),
        (Status.BUSY, 1, 1, False),
        (Status.SHUTTING_DOWN, 1, 1, False),
        (Status.TICKET_ABANDONED, 0, 1, True),
        (Status.TICKET_INVALID, 0, 0, False),
        (NO_STATUS, 0, 1, False),
    ],
)
def test_a_ticket_stays_ours_where_its_bind_failed_for_another_reason(status: int, spares: int, held: int, is_over: bool) -> None:
    allocator = DirectAllocator(ACK)
    machine = store_of(allocator, 9)
    machine.start(5.0)
    machine.advance(np.array([0x1_00000010], np.uint64), 5.0)
    slot = np.frombuffer(bytes.fromhex("00000001 00000000 0000000000000040"), np.uint8)
    for _ in range(2):
        machine.scratch[:16] = slot
        write = machine.advance(NOTHING, 5.0)
    assert (write["kind"].tolist(), write["length"].tolist(), write["offset"].tolist()) == ([DirectKind.WRITE], [9], [0x40])
    assert machine.advance(NOTHING, 5.0).size == 0
    machine.settle(np.array([status], np.uint16), np.array([4], np.uint16))
    assert allocator.spare == [(0x1_00000010, 6.0)] * spares
    assert (allocator.held_count, allocator.is_over) == (held, is_over)
    assert (machine.status[0], machine.generation[0]) == (status, 4)
    assert (machine.data_length[0], machine.block_offset[0]) == ((9, 0x40) if status == Status.OK else (0, 0))


def test_without_the_capability_there_is_no_allocator() -> None:
    with pytest.raises(ValueError, match=r"^the target did not grant DIRECT_ALLOC$"):
        DirectAllocator(HelloAck(0, capabilities=int(Capability.DIRECT_LOAD)))
