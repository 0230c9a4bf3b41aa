"""Draft section 6.2, Block Mapped Store. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Flag, Status
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world


def test_the_entry_must_be_valid_unsealed_and_ones_own() -> None:
    """The target reads the table entry, which MUST be VALID and not SEALED and MUST belong to the initiator's handle range."""
    world = ring_world()
    link, other = ready(world, quota=2), ready(world, quota=2)
    put(link, 100, b"sealed")
    put(other, 108, b"foreign", Flag.NONE)
    batch = link.initiator.store_inline([101, 100, 108], 0, [b"x"] * 3)
    link.run(batch)
    assert batch.status.tolist() == [Status.NOT_BOUND, Status.SEALED, Status.NOT_PERMITTED]
    assert world.block(64, 7) == b"foreign"


def test_data_comes_inline_or_by_read() -> None:
    """It obtains the data, from the inline payload or by RDMA Read from the Data Descriptor, and writes it into the block."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"....", Flag.NONE)
    link.run(link.initiator.store_inline([100], 0, [b"inline"]))
    assert world.block(0, 6) == b"inline"
    link.memory[50:54] = list(b"read")
    link.run(link.initiator.store([100], 0, STAG, 50, 4))
    assert world.block(0, 6) == b"readne"


def test_length_and_seal_follow_the_data() -> None:
    """It updates Data Length and, if SEAL is set, sets SEALED."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"....", Flag.NONE)
    world.hold_operations = True
    batch = link.initiator.store([100], 0, STAG, 0, 9, Flag.SEAL)
    link.run()
    entry = world.target.table.entry(0)
    assert (entry.data_length, entry.is_sealed) == (4, False)
    link.finish_operations()
    entry = world.target.table.entry(0)
    assert (entry.data_length, entry.is_sealed, entry.generation) == (9, True, 2)
    assert batch.is_done


def test_a_store_completes() -> None:
    """It completes the request."""
    link = ready(ring_world())
    put(link, 100, b"....", Flag.NONE)
    batch = link.initiator.store_inline([100], 2, [b"x"])
    link.run(batch)
    assert (batch.status[0], batch.generation[0], batch.data_length[0]) == (Status.OK, 2, 1)
