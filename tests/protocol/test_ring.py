"""The free ring against a plain model: no block is lost or handed out twice, whatever the interleaving."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kbtp_core.protocol.constants import EMPTY_SLOT
from kbtp_core.protocol.ring import MASKED_ADD, SLOT, FreeRing, Ticket, add_mask, fetch_add


@pytest.mark.parametrize(
    ("n", "old", "new"),
    [
        (2, 0x0000000000000000, 0x0000000100000010),
        (2, 0x0000000300000030, 0x0000000400000000),
        (2, 0xFFFFFFFF00000030, 0x0000000000000000),
        (10, 0x0000000500000050, 0x0000000600000060),
        (10, 0xFFFFFFFF00003FF0, 0x0000000000000000),
        (28, 0xFFFFFFFFFFFFFFF0, 0x0000000000000000),
    ],
)
def test_a_masked_fetch_add_advances_ticket_and_slot_together(n: int, old: int, new: int) -> None:
    assert fetch_add(old, MASKED_ADD, add_mask(n)) == new


@pytest.mark.parametrize(("n", "mask"), [(2, 0x8000000080000020), (10, 0x8000000080002000), (28, 0x8000000080000000)])
def test_the_add_mask_ends_each_field(n: int, mask: int) -> None:
    assert add_mask(n) == mask


def test_without_a_mask_fetch_add_is_a_plain_addition() -> None:
    assert fetch_add((1 << 64) - 1, 2, 0) == 1


def test_a_new_ring_lists_its_blocks_and_marks_the_other_slots_consumed() -> None:
    ring = FreeRing([0x1000, 0x2000, 0x3000])
    octets = ring.slots.tobytes()
    assert octets[:16].hex() == "00000000" + "00000000" + "0000000000001000"
    assert octets[32:48].hex() == "00000002" + "00000000" + "0000000000003000"
    assert octets[48:64].hex() == "ffffffff" + "00000000" + "ffffffffffffffff"
    assert [hex(int(c)) for c in ring.counters] == ["0x0", "0x300000030"]


def test_a_full_ring_starts_its_tail_at_the_first_slot() -> None:
    assert int(FreeRing([0, 1, 2, 3]).counters[1]) == 0x0000000400000000


def test_the_unmasked_form_keeps_only_tickets_in_its_counters() -> None:
    ring = FreeRing([7, 8, 9], masked=False)
    assert [ring.allocate(), ring.allocate()] == [7, 8]
    ring.give_back(7)
    assert [int(c) for c in ring.counters] == [2 << 32, 4 << 32]
    assert [ring.allocate(), ring.allocate(), ring.allocate()] == [9, 7, None]
    ring.check_integrity()


def test_a_free_waits_until_the_slot_that_it_gets_is_consumed() -> None:
    ring = FreeRing([10, 20])
    slow, quick = ring.take_ticket(), ring.take_ticket()
    assert ring.read(quick) == 20
    ring.consume(quick)
    assert ring.give_back(20) is False  # the slow allocation has not read its slot yet
    assert ring.read(slow) == 10
    later = ring.take_ticket()
    assert later == Ticket(2, 0)
    assert ring.read(later) is None
    ring.consume(slow)
    assert ring.read(later) == 20
    ring.check_integrity()


def test_several_frees_wait_for_one_slot_in_order() -> None:
    ring = FreeRing([10, 20])
    slow = ring.take_ticket()
    assert ring.allocate() == 20
    ring.give_back(20)  # ticket 2, slot 0: waits
    waiting = ring.take_ticket()  # ticket 2
    assert ring.read(waiting) is None
    assert ring.allocate() is None
    ring.check_integrity()
    ring.consume(slow)
    assert ring.read(waiting) == 20


def test_a_ring_of_one_block_still_has_two_slots() -> None:
    ring = FreeRing([64])
    assert ring.slot_count == 2
    for _ in range(5):
        assert ring.allocate() == 64
        assert ring.allocate() is None
        ring.give_back(64)
    with pytest.raises(ValueError, match="n must be 1"):
        FreeRing([64], log2_slots=0)


def test_the_block_of_a_ticket_is_known_while_it_waits_in_line_for_its_slot() -> None:
    ring = FreeRing([10, 20, 30, 40])
    slow = ring.take_ticket()
    assert [ring.allocate() for _ in range(3)] == [20, 30, 40]
    assert [ring.give_back(offset) for offset in (20, 30, 40)] == [False, True, True]  # tickets 4, 5 and 6; 4 waits for slot 0
    ring.take_ticket()
    assert [ring.allocate() for _ in range(2)] == [30, 40]
    assert [ring.give_back(offset) for offset in (40, 30)] == [True, False]  # tickets 7 and 8; 8 waits behind 4
    assert [ring.block_for(ring.ticket_at(sequence)) for sequence in (0, 4, 7, 8)] == [10, 20, 40, 30]
    for sequence in (1, 12):
        with pytest.raises(ValueError, match=rf"^no block was given back for ticket {sequence}$"):
            ring.block_for(ring.ticket_at(sequence))
    ring.consume(slow)
    assert ring.deferred_count == 1
    assert [ring.block_for(ring.ticket_at(sequence)) for sequence in (4, 8)] == [20, 30]
    ring.consume(ring.ticket_at(4))
    assert (ring.deferred_count, ring.read(ring.ticket_at(8))) == (0, 30)
    ring.check_integrity()


def test_frees_that_wait_for_different_slots_are_counted_together() -> None:
    ring = FreeRing([10, 20, 30, 40])
    slow = [ring.take_ticket(), ring.take_ticket()]
    assert [ring.allocate(), ring.allocate()] == [30, 40]
    assert [ring.give_back(30), ring.give_back(40)] == [False, False]
    assert ring.deferred_count == 2
    for left, ticket in zip((1, 0), slow, strict=True):
        ring.consume(ticket)
        assert ring.deferred_count == left
        ring.check_integrity()


def test_no_ticket_is_taken_for_a_block_that_waits_in_line_for_its_slot() -> None:
    ring = FreeRing([10, 20])
    slow = ring.take_ticket()
    assert ring.allocate() == 20
    ring.give_back(20)  # ticket 2, whose slot the slow allocation has not read
    assert (ring.free_count, ring.allocate(), ring.free_count) == (1, None, 1)
    ring.consume(slow)
    assert ring.allocate() == 20


class OneBlock:
    """An executor that moves a ring of one block."""

    def __init__(self, block_offset: int) -> None:
        self.given = [block_offset]

    def allocate(self) -> int | None:
        return self.given.pop() if self.given else None

    def give_back(self, block_offset: int) -> None:
        self.given.append(block_offset)


def test_a_ring_that_an_executor_shares_is_moved_by_the_executor_alone() -> None:
    ring = FreeRing([10, 20])
    ring.driver = executor = OneBlock(20)
    counters = ring.counters.tolist()
    assert (ring.allocate(), ring.allocate()) == (20, None)
    assert ring.give_back(10)
    assert (executor.given, ring.counters.tolist()) == ([10], counters)
    assert (ring.is_masked, FreeRing([10], masked=False).is_masked) == (True, False)


def test_a_slot_is_not_consumed_for_a_ticket_that_it_was_not_written_for() -> None:
    ring = FreeRing([10, 20])
    with pytest.raises(ValueError, match=r"^slot 1 does not hold a block for ticket 3$"):
        ring.consume(ring.ticket_at(3))
    ring.consume(ring.ticket_at(1))
    with pytest.raises(ValueError, match=r"^slot 1 does not hold a block for ticket 1$"):
        ring.consume(ring.ticket_at(1))


def test_more_tickets_than_free_blocks_make_the_count_negative() -> None:
    ring = FreeRing([10], first_sequence=2**32 - 2)
    counts = [ring.free_count]
    for _ in range(3):
        ring.take_ticket()
        counts.append(ring.free_count)
    assert counts == [1, 0, -1, -2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"log2_slots": 0}, "2 blocks in 2^0 slots: n must be 1 ... 28 and hold all blocks"),
        ({"log2_slots": 29}, "2 blocks in 2^29 slots: n must be 1 ... 28 and hold all blocks"),
        ({"first_sequence": 3}, "first_sequence 3 must be a multiple of the 2 slots"),
        ({"slots": np.zeros(2, "V16")}, "ring memory must be 2 entries of dtype SLOT and two counters"),
        ({"slots": np.zeros(3, SLOT)}, "ring memory must be 2 entries of dtype SLOT and two counters"),
        ({"counters": np.zeros(1, np.uint64)}, "ring memory must be 2 entries of dtype SLOT and two counters"),
    ],
)
def test_a_ring_that_does_not_fit_its_memory_or_its_tickets_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        FreeRing([0, 64], **arguments)
    assert str(refused.value) == message


def test_a_ring_lies_in_memory_that_the_caller_supplies() -> None:
    slots, counters = np.zeros(4, SLOT), np.zeros(2, np.uint64)
    ring = FreeRing([64, 128, 192], slots=slots, counters=counters)
    assert slots["block_offset"].tolist() == [64, 128, 192, EMPTY_SLOT]
    ring.allocate()
    assert slots["block_offset"].tolist() == [EMPTY_SLOT, 128, 192, EMPTY_SLOT]
    assert counters.tolist() == [1 << 32 | 16, 3 << 32 | 48]


class RingModel(RuleBasedStateMachine):
    """Allocators that take a ticket, dawdle, read and consume; owners that give back in any order."""

    @initialize(count=st.integers(1, 9), masked=st.booleans(), wraps=st.booleans(), spare=st.integers(0, 1))
    def start(self, count: int, masked: bool, wraps: bool, spare: int) -> None:
        n = max(1, (count - 1).bit_length()) + spare
        first = (1 << 32) - (1 << n) if wraps else 0
        self.ring = FreeRing([64 * i for i in range(count)], log2_slots=n, masked=masked, first_sequence=first)
        self.order: deque[int] = deque(64 * i for i in range(count))  # what the ring must hand out, by ticket
        self.tickets: list[tuple[Ticket, int]] = []  # taken, with the block that it must yield
        self.owned: list[int] = []
        self.all = set(self.order)

    @precondition(lambda self: self.order)
    @rule()
    def take_ticket(self) -> None:
        self.tickets.append((self.ring.take_ticket(), self.order.popleft()))

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def read_and_consume(self, data: st.DataObject) -> None:
        ticket, expected = self.tickets[data.draw(st.integers(0, len(self.tickets) - 1))]
        offset = self.ring.read(ticket)
        if offset is None:
            return
        assert offset == expected
        self.ring.consume(ticket)
        self.tickets.remove((ticket, expected))
        self.owned.append(offset)

    @rule()
    def allocate(self) -> None:
        offset = self.ring.allocate()
        if offset is not None:
            assert offset == self.order.popleft()
            self.owned.append(offset)
        elif not self.tickets:
            assert not self.order

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        offset = self.owned.pop(data.draw(st.integers(0, len(self.owned) - 1)))
        self.ring.give_back(offset)
        self.order.append(offset)

    @invariant()
    def nothing_is_lost_or_owned_twice(self) -> None:
        self.ring.check_integrity()
        assert self.ring.free_count == len(self.order)
        assert sorted([*self.ring.listed_offsets(), *self.owned]) == sorted(self.all)

    def teardown(self) -> None:
        if not hasattr(self, "ring"):
            return
        while self.tickets:  # every ticket is served in the end: at least the oldest one can always read
            before = len(self.tickets)
            for ticket, expected in list(self.tickets):
                if self.ring.read(ticket) is not None:
                    assert self.ring.read(ticket) == expected
                    self.ring.consume(ticket)
                    self.tickets.remove((ticket, expected))
            assert len(self.tickets) < before
        assert self.ring.deferred_count == 0


TestRingModel = RingModel.TestCase
TestRingModel.settings = settings(max_examples=150, stateful_step_count=60)


def test_an_empty_slot_is_all_ones() -> None:
    assert EMPTY_SLOT == 2**64 - 1
