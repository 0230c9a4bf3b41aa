"""Draft section 6.4, Block Free. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.pool import BlockState
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world


def test_the_handle_must_be_ones_own_and_bound() -> None:
    """The handle MUST be in the initiator's range and VALID."""
    world = ring_world()
    link, other = ready(world, quota=1), ready(world, quota=1)
    put(other, 108, b"x")
    batch = link.initiator.free([108, 100], 0)
    link.run(batch)
    assert batch.status.tolist() == [Status.NOT_PERMITTED, Status.NOT_BOUND]
    assert world.target.table.entry(8).is_valid


def test_flags_are_cleared_and_the_generation_advances() -> None:
    """The target clears VALID and SEALED and increments the Generation (skipping zero) in the table entry."""
    world = ring_world()
    link = ready(world)
    world.target.table._generations[0] = 0xFFFE
    put(link, 100, b"x")
    assert tuple(world.target.table.entry(0))[:2] == (3, 0xFFFF)
    link.run(freed := link.initiator.free([100], 0xFFFF))
    assert tuple(world.target.table.entry(0))[:2] == (0, 1)
    assert freed.generation.tolist() == [1]


def test_the_block_returns_to_its_ring() -> None:
    """It returns the block to the ring from which it was allocated (Section 3.3), after the entry update is visible."""
    world = ring_world(blocks=1)
    link = ready(world)
    put(link, 100, b"x")
    link.run(link.initiator.free([100], 0))
    assert world.target.pool.ring.listed_offsets() == [0]  # type: ignore[union-attr]
    world.target.check_integrity()


def test_a_free_completes_when_the_block_is_back() -> None:
    """It completes the request."""
    world = ring_world(blocks=1)
    link = ready(world)
    put(link, 100, b"x")
    link.run(freed := link.initiator.free([100], 0))
    assert freed.status.tolist() == [Status.OK]
    assert world.target.pool.count(BlockState.FREE) == 1  # type: ignore[union-attr]


def test_a_late_loader_sees_the_changed_generation() -> None:
    """Initiators that may still be loading the block detect the free by the changed Generation."""
    world = ring_world(blocks=1)
    link = ready(world)
    generation = put(link, 100, b"x")
    link.run(link.initiator.free([100], 0))
    put(link, 100, b"y")
    link.run(late := link.initiator.load([100], generation, STAG, 0, 64))
    assert (late.status[0], late.generation[0]) == (Status.STALE_GENERATION, generation + 2)


def test_a_block_is_cleared_for_another_trust_domain() -> None:
    """If the block may next be allocated to an initiator of a different trust domain, the target clears its contents before returning
    it to the ring."""
    for domains, is_cleared in [(None, True), (frozenset({"", "b"}), True), (frozenset({""}), False)]:
        world = ring_world(blocks=1, trust_domains=domains)
        link = ready(world)
        put(link, 100, b"secret")
        link.run(link.initiator.free([100], 0))
        assert world.pool_memory.any() != is_cleared
