"""Draft section 9.2, InfiniBand and RoCEv2. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Capability, Status
from kbtp_core.protocol.effects import Record
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.wire import CompletionDescriptor, Free
from tests.protocol.test_draft_6_6 import DIRECT, direct_link, direct_world
from tests.protocol.world import ring_world

UNMASKED = DIRECT & ~Capability.MASKED_ATOMICS


def test_unmasked_counters_hold_only_tickets() -> None:
    """With unmasked Fetch and Add, the Head and Tail counters hold the Ticket in their high 32 bits and zero in their low 32 bits (Add
    Data 0x0000000100000000)"""
    link = direct_link(quota=2, capabilities=UNMASKED)
    assert link.initiator.ack is not None
    assert link.initiator.ack.capabilities == UNMASKED
    partition = link.session.partition
    assert partition is not None
    assert partition.ring.counters.tolist() == [0, 2 << 32]
    link.take_direct([b"x"])
    assert link.allocator is not None
    assert (link.allocator.add, link.allocator.add_mask) == (0x0000_0001_0000_0000, 0)
    assert partition.ring.counters.tolist() == [1 << 32, 2 << 32]


def test_the_slot_follows_from_the_ticket() -> None:
    """the slot is computed as 16 * (ticket mod N) by the initiator in DIRECT_ALLOC or by the target in software."""
    link = direct_link(quota=2, capabilities=UNMASKED)
    for _ in range(5):
        machine = link.take_direct([b"a", b"b"])
        assert link.bind_taken(machine, [100, 101]).status.tolist() == [Status.OK, Status.OK]
        link.run(link.initiator.free([100, 101], 0))
    assert link.allocator is not None
    assert [link.allocator.slot_offset(ticket << 32) for ticket in range(4)] == [0, 16, 0, 16]
    link.world.target.check_integrity()


def test_a_provider_without_masks_gets_the_unmasked_form() -> None:
    """The InfiniBand specification defines an unmasked Fetch and Add; masked variants exist as vendor extensions."""
    policy = DirectPolicy(alloc_domains=frozenset({"gpu"}), masked=False)
    link = direct_link(direct_world(policy=policy))
    assert link.initiator.ack is not None
    assert link.initiator.ack.capabilities == Capability.DIRECT_ALLOC


def test_records_come_with_an_immediate() -> None:
    """Completion records on these transports MUST be written with RDMA Write with Immediate, so that the initiator learns of completion
    from its completion queue rather than by polling memory."""
    link = ring_world().link(handles=4, capabilities=Capability.RECORD_COMPLETION, offers=Capability.RECORD_COMPLETION).greet()
    (record,) = link.session.receive(Free(9, 100, 0, 4, CompletionDescriptor(1, 0x0102030405060708)).encode(), 0.0)
    assert isinstance(record, Record)
    assert record.immediate == 0x05060708
