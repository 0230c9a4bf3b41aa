"""`check_integrity` finds each broken promise and names it: everything else that is tested leans on it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np
import pytest

from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.ring import FreeRing
from kbtp_core.protocol.table import BlockTable
from kbtp_core.protocol.target import EntryState, Target
from tests.protocol.test_draft_6_6 import direct_link
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import ring_world


def broken(check: Callable[[], None], message: str) -> None:
    with pytest.raises(AssertionError) as found:
        check()
    assert str(found.value) == message


# The ring ------------------------------------------------------------------------------------------------------------


def lost_step(ring: FreeRing) -> None:
    ring.counters[0] = 1


def lost_step_of_tail(ring: FreeRing) -> None:
    ring.counters[1] += np.uint64(1)


def listed_twice(ring: FreeRing) -> None:
    ring.slots["block_offset"][1] = ring.slots["block_offset"][0]


def listed_too_many(ring: FreeRing) -> None:
    ring.slots["block_offset"][3] = 192


def lost(ring: FreeRing) -> None:
    ring.slots["block_offset"][0] = (1 << 64) - 1


def miscounted(ring: FreeRing) -> None:
    ring.deferred_count = 1


def foreign_sequence(ring: FreeRing) -> None:
    ring.slots["sequence"][1] = 2


def sequence_of_no_ticket(ring: FreeRing) -> None:
    ring.slots["sequence"][3] = 3


def waiting_for_nothing(ring: FreeRing) -> None:
    ring.take_ticket()
    ring.slots["block_offset"][0] = (1 << 64) - 1
    ring._deferred[0], ring.deferred_count = deque([(4, 0)]), 1


def out_of_order(ring: FreeRing) -> None:
    ring.take_ticket()
    ring.take_ticket()
    ring.consume(ring.ticket_at(1))
    ring._deferred[0], ring.deferred_count = deque([(8, 64)]), 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lost_step, "counter 0x0000000000000001 has lost step"),
        (lost_step_of_tail, "counter 0x0000000300000031 has lost step"),
        (listed_twice, "a block is listed twice"),
        (listed_too_many, "more blocks are listed than there are"),
        (lost, "a block was lost"),
        (miscounted, "deferred frees miscounted"),
        (foreign_sequence, "slot 1 carries foreign sequence 2"),
        (sequence_of_no_ticket, "slot 3 was written for a ticket not given out"),
        (waiting_for_nothing, "slot 0 is consumed, yet a free waits for it"),
        (out_of_order, "frees out of order"),
    ],
)
def test_a_damaged_ring_is_found(damage: Callable[[FreeRing], None], message: str) -> None:
    ring = FreeRing([0, 64, 128])
    ring.check_integrity()
    damage(ring)
    broken(ring.check_integrity, message)


def test_what_a_peer_does_to_head_is_no_damage_where_it_may() -> None:
    for damage in (lost_step, lost):
        ring = FreeRing([0, 64, 128])
        damage(ring)
        ring.check_integrity(remote_head=True)
    lost_step_of_tail(ring)
    broken(lambda: ring.check_integrity(remote_head=True), "counter 0x0000000300000031 has lost step")


# The table -----------------------------------------------------------------------------------------------------------


def test_a_damaged_table_is_found() -> None:
    for field, value, message in [
        ("generation", 7, "an entry was written by somebody else"),
        ("flags", 4, "undefined entry flags"),
        ("flags", 2, "sealed without being valid"),
    ]:
        table = BlockTable(3)
        table.bind([0, 1], [0, 64], [1, 1], sealed=True)
        table.check_integrity()
        table.entries[field][1] = value
        broken(table.check_integrity, message)
    table = BlockTable(3)
    table.entries["generation"][2] = 0
    table._generations[2] = 0
    broken(table.check_integrity, "generation zero")


# The pool ------------------------------------------------------------------------------------------------------------


def foreign_block(pool: BlockPool) -> None:
    pool._partitions[2].ring.slots["block_offset"][0] = 128


def listed_by_two_rings(pool: BlockPool) -> None:
    pool.ring.slots["block_offset"][3] = 64


def free_and_owned(pool: BlockPool) -> None:
    pool._state[3] = 1


def neither_free_nor_owned(pool: BlockPool) -> None:
    pool.ring.take_ticket()
    pool.ring.slots["block_offset"][3] = (1 << 64) - 1


def usage_too_high(pool: BlockPool) -> None:
    pool._allowances[1].usage += 1


def over_quota(pool: BlockPool) -> None:
    pool._allowances[1].quota = 0


def promised_too_much(pool: BlockPool) -> None:
    pool._allowances[2].quota = 4


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (foreign_block, "a partition lists blocks of others"),
        (listed_by_two_rings, "two rings list one block"),
        (free_and_owned, "the ring and the owner states differ"),
        (neither_free_nor_owned, "the ring and the owner states differ"),
        (usage_too_high, "usage miscounted"),
        (over_quota, "a quota is exceeded"),
        (promised_too_much, "more blocks were promised than there are"),
    ],
)
def test_a_damaged_pool_is_found(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(64, np.zeros(256, np.uint8))
    pool.carve(2, 2, masked=True, timeout_s=1.0)  # blocks 0 and 1
    pool.grant(1, 1)
    pool.bound(pool.take(1) or 0)  # block 2
    pool.check_integrity()
    damage(pool)
    broken(pool.check_integrity, message)


# The target ----------------------------------------------------------------------------------------------------------


def valid_and_idle(target: Target) -> None:
    target.entry_state[0] = EntryState.IDLE


def draining_miscounted(target: Target) -> None:
    target._draining_count += 1


def read_less_than_nothing(target: Target) -> None:
    target.reading[5] = -1


def bound_without_an_entry(target: Target) -> None:
    pool = target.pool
    assert isinstance(pool, BlockPool)
    pool.bound(pool.take(1) or 0)


def draining_without_an_entry(target: Target) -> None:
    pool = target.pool
    assert isinstance(pool, BlockPool)
    bound_without_an_entry(target)
    pool.drain(64)


def taken_without_an_entry(target: Target) -> None:
    pool = target.pool
    assert isinstance(pool, BlockPool)
    pool.take(1)


def reserved_without_a_block(target: Target) -> None:
    target.reserve(7)


def one_block_twice(target: Target) -> None:
    bound_without_an_entry(target)
    target.table.bind_one(1, 0, 1, True)
    target.entry_state[1] = EntryState.BOUND


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (valid_and_idle, "valid entries and entry states differ"),
        (draining_miscounted, "draining entries miscounted"),
        (read_less_than_nothing, "more reads ended than started"),
        (bound_without_an_entry, "bound blocks and bound entries differ"),
        (draining_without_an_entry, "draining blocks and draining entries differ"),
        (taken_without_an_entry, "taken blocks differ from reserved entries and tickets"),
        (reserved_without_a_block, "taken blocks differ from reserved entries and tickets"),
        (one_block_twice, "two handles name one block"),
    ],
)
def test_a_damaged_target_is_found(damage: Callable[[Target], None], message: str) -> None:
    world = ring_world()
    put(ready(world), 100, b"data")
    world.target.check_integrity()
    damage(world.target)
    broken(world.target.check_integrity, message)


def test_a_block_that_drains_and_another_handles_block_are_two() -> None:
    world = ring_world()
    link = ready(world)
    put(link, 100, b"data")
    world.native_readers[0] = 1
    link.initiator.free([100], 0)
    link.run()
    put(link, 101, b"more")
    world.target.check_integrity()
    world.target.table.entries["block_offset"][1] = 0
    broken(world.target.check_integrity, "two handles name one block")


def test_tickets_and_fetches_count_as_taken_blocks() -> None:
    link = direct_link(quota=2)
    plain = ready(link.world, quota=1)
    link.fetch_add_head()
    link.world.tick()
    link.world.hold_operations = True
    plain.initiator.alloc_store([108], 0, 0, 0, 1)
    plain.run()
    link.world.target.check_integrity()
