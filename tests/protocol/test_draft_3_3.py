"""Draft section 3.3, Free-Block Ring. Each test quotes the sentence that it checks."""

from __future__ import annotations

import sys

import pytest

from kbtp_core.protocol.constants import EMPTY_SLOT
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.ring import MASKED_ADD, SLOT, FreeRing, Ticket, add_mask, fetch_add
from tests.protocol.test_draft_6_6 import direct_link
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import ring_world


@pytest.mark.parametrize(("blocks", "slots"), [(1, 2), (2, 2), (3, 4), (4, 4), (5, 8)])
def test_the_ring_has_a_power_of_two_of_slots(blocks: int, slots: int) -> None:
    """The free-block ring has N slots, where N = 2^n is a power of two not smaller than F"""
    ring = FreeRing([64 * i for i in range(blocks)])
    assert (ring.slot_count, 1 << ring.log2_slots) == (slots, slots)
    with pytest.raises(ValueError, match="hold all blocks"):
        FreeRing([64 * i for i in range(5)], log2_slots=2)


def test_counters_are_aligned() -> None:
    """two 64-bit counters, Head (used to allocate) and Tail (used to free), each aligned to 8 octets."""
    ring = FreeRing([0, 64])
    assert ring.counters.itemsize == 8
    assert ring.counters.ctypes.data % 8 == 0


def test_a_slot_has_16_octets() -> None:
    """Each slot is 16 octets"""
    assert [(SLOT.fields[name][1], SLOT.fields[name][0].itemsize) for name in SLOT.names] == [(0, 4), (4, 4), (8, 8)]  # type: ignore[index,union-attr]


def test_all_ones_is_an_empty_slot() -> None:
    """A slot whose Block Offset is all ones is empty (consumed)."""
    ring = FreeRing([0, 64])
    ring.allocate()
    assert int(ring.slots["block_offset"][0]) == 0xFFFF_FFFF_FFFF_FFFF == EMPTY_SLOT
    assert ring.listed_offsets() == [64]


def test_a_counter_holds_ticket_and_slot_offset() -> None:
    """a 32-bit Ticket in bits 63-32 and the Slot Offset, the byte offset of the current slot (16 times the slot number), in the low n+4
    bits. Bits 31 to n+4 are zero."""
    ring = FreeRing([64 * i for i in range(4)])
    for ticket in range(9):
        counter = int(ring.counters[0])
        assert counter == ticket << 32 | 16 * (ticket % 4)
        assert ring.ticket_of(counter) == Ticket(ticket, ticket % 4)
        ring.take_ticket()


def test_one_fetch_add_advances_both_fields() -> None:
    """The Add Mask makes each field add independently and discard its carry, so one FetchAdd returns the current Ticket and Slot Offset
    and advances the Ticket by one and the Slot Offset by one slot, wrapping at the end of the ring."""
    assert MASKED_ADD == 0x0000000100000010
    assert add_mask(3) == 1 << 63 | 1 << 31 | 1 << 6
    assert fetch_add(0xFFFFFFFF_00000070, MASKED_ADD, add_mask(3)) == 0
    assert fetch_add(0x00000005_00000050, MASKED_ADD, add_mask(3)) == 0x00000006_00000060


def test_counters_lie_in_the_targets_own_byte_order() -> None:
    """Counters are in the target's memory byte order, as RFC 7306 specifies for atomic operations; they are never read with RDMA
    Read."""
    ring = FreeRing([0, 64, 128])
    assert int.from_bytes(ring.counters[1:].tobytes(), sys.byteorder) == 3 << 32 | 48
    link = direct_link()
    assert link.initiator.ack is not None
    direct = link.initiator.ack.direct
    assert direct.head_stag not in (direct.ring_stag, direct.table_stag, direct.pool_stag)


def test_the_ring_starts_full() -> None:
    """Initialization: for s < F the target writes slot s = {Sequence s, Block Offset of the s-th free block}; for F <= s < N it writes
    {Sequence s - N (modulo 2^32), all ones}. It sets Head to Ticket 0 and Slot Offset 0, and Tail to Ticket F and Slot Offset 16 * (F
    mod N)."""
    ring = FreeRing([7, 8, 9])
    assert ring.slots["sequence"].tolist() == [0, 1, 2, (3 - 4) % 2**32]
    assert ring.slots["block_offset"].tolist() == [7, 8, 9, EMPTY_SLOT]
    assert ring.counters.tolist() == [0, 3 << 32 | 48]
    assert FreeRing([7, 8, 9, 10]).counters.tolist() == [0, 4 << 32]


def test_an_allocation_waits_for_the_slot_of_its_ticket() -> None:
    """The slot at o holds the block for this allocation once its Sequence equals t and its Block Offset is not all ones; until then the
    allocator re-reads the slot."""
    ring = FreeRing([10])
    first = ring.take_ticket()
    assert ring.read(first) == 10
    ring.consume(first)
    second = ring.take_ticket()
    assert ring.read(second) is None
    ring.give_back(10)
    assert ring.read(second) == 10
    assert ring.read(first) is None


def test_a_target_executed_allocation_consumes_its_slot_at_once() -> None:
    """Having taken the Block Offset, the slot is marked consumed by setting its Block Offset to all ones: by the target itself for
    target-executed allocations"""
    world = ring_world(blocks=2)
    put(ready(world), 100, b"x")
    assert world.target.pool.ring.slots["block_offset"].tolist() == [EMPTY_SLOT, 64]  # type: ignore[union-attr]


def test_a_direct_allocation_is_consumed_by_bind() -> None:
    """and by the target when it processes BIND for direct allocations (Section 6.6)."""
    link = direct_link(quota=2)
    machine = link.take_direct([b"x"])
    partition = link.session.partition
    assert partition is not None
    offset = int(machine.block_offset[0])
    assert offset in partition.ring.slots["block_offset"].tolist()
    link.bind_taken(machine, [100])
    assert offset not in partition.ring.slots["block_offset"].tolist()


def test_a_free_updates_the_entry_before_it_takes_a_tail_ticket() -> None:
    """Free: the target first updates the table entry (Section 6.4), then performs FetchAdd on Tail, obtaining ticket u and offset o."""
    world = ring_world(blocks=1)
    link = ready(world)
    put(link, 100, b"x")
    ring = world.target.pool.ring  # type: ignore[union-attr]
    seen = []

    def watched(offset: int) -> bool:
        seen.append((world.target.table.entry(0).is_valid, world.target.table.entry(0).generation, int(ring.counters[1]) >> 32))
        return FreeRing.give_back(ring, offset)

    ring.give_back = watched  # type: ignore[method-assign]
    link.run(link.initiator.free([100], 0))
    assert seen == [(False, 3, 1)]
    assert int(ring.counters[1]) >> 32 == 2


def test_a_consumed_slot_gets_offset_then_sequence() -> None:
    """If the slot at o is consumed, the target writes the Block Offset and then Sequence u."""
    ring = FreeRing([10, 20])
    ring.allocate()
    order: list[str] = []
    set_offset = ring._set_offset

    def watched(slot: int, offset: int) -> None:
        order.append(f"offset, while the sequence is {int(ring.slots['sequence'][slot])}")
        set_offset(slot, offset)

    ring._set_offset = watched  # type: ignore[method-assign]
    assert ring.give_back(10)
    assert order == ["offset, while the sequence is 0"]
    assert ring.slots["sequence"].tolist() == [2, 1]


def test_a_free_is_deferred_until_its_slot_is_consumed() -> None:
    """If it is not yet consumed, because the allocation that owns it has taken its ticket but not yet read it, the target MUST defer
    the write until the slot is consumed"""
    ring = FreeRing([10, 20])
    slow = ring.take_ticket()
    assert ring.allocate() is not None
    assert not ring.give_back(20)
    assert ring.deferred_count == 1
    ring.consume(slow)
    assert ring.deferred_count == 0
    assert ring.slots["block_offset"].tolist() == [20, EMPTY_SLOT]


def test_a_free_never_overwrites_a_slot() -> None:
    """it MUST NOT overwrite the slot."""
    link = direct_link(quota=2)
    machine = link.take_direct([b"a", b"b"])
    partition = link.session.partition
    assert partition is not None
    second = link.initiator.bind([101], 0, machine.tickets[1:], 1, machine.block_offset[1:], 2)
    link.run(second)
    link.run(link.initiator.free([101], 0))  # its Tail slot is the first one, whose ticket is not bound yet
    assert int(partition.ring.slots["block_offset"][0]) == int(machine.block_offset[0])
    assert partition.ring.deferred_count == 1
    first = link.initiator.bind([100], 0, machine.tickets[:1], 1, machine.block_offset[:1], 2)
    link.run(first)
    assert first.status.tolist() == [0]
    assert int(partition.ring.slots["block_offset"][0]) == int(machine.block_offset[1])


def test_no_block_is_lost_or_handed_out_twice() -> None:
    """With these rules no block is ever lost or handed out twice: each slot is written only after its previous content has been
    consumed, and each allocation reads exactly the slot written for its ticket."""
    ring = FreeRing([10, 20, 30], first_sequence=2**32 - 4)  # over the end of the ticket numbers
    for turn in range(12):
        taken = [ring.allocate() for _ in range(3)]
        assert sorted(offset for offset in taken if offset is not None) == [10, 20, 30]
        assert ring.allocate() is None
        for offset in taken[turn % 3 :] + taken[: turn % 3]:
            assert offset is not None
            ring.give_back(offset)
        ring.check_integrity()


def test_a_head_that_was_not_moved_by_fetch_add_ends_the_session() -> None:
    """Counters are modified only with FetchAdd"""
    for value in (0x0000_0001_0000_0000, 0x0000_0000_0000_0001, 0xFFFF_FFFF_0000_0010, 0x7000_0000_0000_0000):
        link = direct_link(quota=2)
        partition = link.session.partition
        assert partition is not None
        partition.ring.counters[0] = value
        link.world.tick()
        assert link.closed_because is not None
        link.disconnect()
        link.world.target.check_integrity()
        assert link.world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
