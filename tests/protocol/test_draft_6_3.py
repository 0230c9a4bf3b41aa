"""Draft section 6.3, Block Unmapped Store. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import EMPTY_SLOT, Flag, Status
from kbtp_core.protocol.pool import BlockState
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world


def test_the_handle_must_be_ones_own_and_unbound() -> None:
    """The handle MUST be in the initiator's range and its entry MUST NOT be VALID."""
    link = ready(ring_world())
    put(link, 100, b"x")
    batch = link.initiator.alloc_store_inline([108, 100, 999], 0, [b"y"] * 3)
    link.run(batch)
    assert batch.status.tolist() == [Status.NOT_PERMITTED, Status.ALREADY_BOUND, Status.NOT_PERMITTED]


def test_a_block_is_taken_and_its_slot_consumed() -> None:
    """The target allocates a block from the ring and marks the slot consumed (Section 3.3)."""
    world = ring_world()
    link = ready(world)
    world.hold_operations = True
    link.initiator.alloc_store([100], 0, STAG, 0, 4)
    link.run()
    assert world.target.pool.count(BlockState.TAKEN) == 1  # type: ignore[union-attr]
    assert int(world.target.pool.ring.slots["block_offset"][0]) == EMPTY_SLOT  # type: ignore[union-attr]


def test_the_data_is_written_into_the_fresh_block() -> None:
    """It obtains the data and writes it into the block."""
    world = ring_world()
    link = ready(world)
    link.memory[:4] = list(b"data")
    link.run(stored := link.initiator.alloc_store([100], 0, STAG, 0, 4))
    assert world.block(int(stored.block_offset[0]), 4) == b"data"


def test_the_entry_gets_offset_length_flags_and_the_next_generation() -> None:
    """It writes the table entry with the Block Offset and Data Length, then with VALID, SEALED if requested, and the next Generation
    (incremented by one, skipping zero)."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"abc", Flag.SEAL)
    put(link, 101, b"de", Flag.NONE)
    assert tuple(world.target.table.entry(0)) == (3, 2, 3, 0)
    assert tuple(world.target.table.entry(1)) == (1, 2, 2, 64)


def test_the_completion_tells_offset_and_generation() -> None:
    """It completes the request with the Block Offset and Generation."""
    link = ready(ring_world())
    put(link, 100, b"x")
    link.run(stored := link.initiator.alloc_store_inline([101], 0, [b"y"]))
    assert (stored.block_offset[0], stored.generation[0]) == (64, 2)


def test_whoever_sees_valid_sees_the_data() -> None:
    """The entry is written after the data, so any initiator that observes VALID in the entry also observes the data."""
    world = ring_world()
    link = ready(world)
    world.hold_operations = True
    link.memory[:4] = list(b"data")
    link.initiator.alloc_store([100], 0, STAG, 0, 4)
    link.run()
    assert not world.target.table.entry(0).is_valid
    seen = []
    bind = world.target.table.bind_one

    def watched(index: int, offset: int, length: int, sealed: bool) -> int:
        seen.append(world.block(offset, length))
        return bind(index, offset, length, sealed)

    world.target.table.bind_one = watched  # type: ignore[method-assign]
    link.finish_operations()
    assert seen == [b"data"]
    assert world.target.table.entry(0).is_valid
