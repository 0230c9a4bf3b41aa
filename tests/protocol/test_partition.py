"""The partition of a session that allocates by itself: what the target makes of Head, and when it takes a ticket back."""

from __future__ import annotations

import pytest

from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.partition import DirectPolicy, Partition, PartitionState
from tests.protocol.test_draft_3_4 import abandon
from tests.protocol.test_draft_6_6 import direct_link


def partition_of(*offsets: int) -> Partition:
    return Partition(list(offsets), masked=True, timeout_s=1.0)


@pytest.mark.parametrize("timeout_s", [0.001, 0xFFFF_FFFF / 1000])
def test_a_ticket_timeout_fits_into_32_bits_of_milliseconds(timeout_s: float) -> None:
    assert DirectPolicy(ticket_timeout_s=timeout_s).ticket_timeout_s == timeout_s


@pytest.mark.parametrize("timeout_s", [0.0009, 0.0, -1.0, 4294967.2955])
def test_a_ticket_timeout_that_does_not_fit_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match=rf"^a ticket timeout of {timeout_s} s does not fit HELLO_ACK: 1 ms to 2\^32 ms$"):
        DirectPolicy(ticket_timeout_s=timeout_s)


def test_direct_loads_and_direct_allocations_are_for_one_domain_or_only_one_of_them_is_granted() -> None:
    for policy in [(["a"], []), ([], ["a", "b"]), (["a"], ["a"])]:
        DirectPolicy(load_domains=frozenset(policy[0]), alloc_domains=frozenset(policy[1]))
    with pytest.raises(ValueError) as refused:
        DirectPolicy(load_domains=frozenset({"b", "a"}), alloc_domains=frozenset({"a", "b"}))
    assert str(refused.value) == (
        "DIRECT_LOAD of trust domain 'a' would read blocks that 'b' can still write by DIRECT_ALLOC: "
        "grant both modes to the same single domain, or only one of them"
    )


def test_a_tickets_time_is_over_at_its_deadline_and_not_before() -> None:
    partition = partition_of(0, 64)
    partition.ring.take_ticket()
    assert partition.observe(5.0) == [0]
    partition.ring.take_ticket()
    assert partition.observe(5.5) == [64]
    assert not partition.is_overdue(5.999)
    assert partition.is_overdue(6.0)
    partition.state = PartitionState.REVOKED
    assert partition.abandon_overdue(5.999) == []
    assert partition.abandon_overdue(6.0) == [0]
    assert (partition.check(0, 0), partition.check(1, 64)) == (Status.TICKET_ABANDONED, Status.OK)
    assert not partition.is_overdue(6.0)
    partition.check_integrity()


def test_tickets_over_the_quota_are_told_from_a_head_that_no_fetch_add_leaves() -> None:
    for tickets, fault in [
        (2, None),
        (3, "it took 1 tickets more than its quota of 2 allows"),
        (4, "it took 2 tickets more than its quota of 2 allows"),
        (5, "its Head 0x0000000500000010 was not advanced by the FetchAdd of section 3.3"),
    ]:
        partition = partition_of(0, 64)
        for _ in range(tickets):
            partition.ring.take_ticket()
        assert partition.observe(0.0) == ([] if tickets == 5 else [0, 64])
        assert partition.fault == fault
        if fault is not None:
            partition.ring.take_ticket()
            assert (partition.observe(0.0), partition.fault) == ([], fault)  # the first fault stays


def test_tickets_over_the_quota_are_seen_whenever_they_are_taken() -> None:
    partition = partition_of(0, 64)
    partition.ring.take_ticket()
    assert partition.observe(0.0) == [0]
    partition.ring.take_ticket()
    partition.ring.take_ticket()
    assert partition.observe(0.0) == [64]
    assert partition.fault == "it took 1 tickets more than its quota of 2 allows"


def test_a_ticket_over_the_quota_gets_no_space_and_one_that_was_never_taken_is_invalid() -> None:
    partition = partition_of(0)
    for _ in range(3):
        partition.ring.take_ticket()
    assert partition.check(0, 0) == Status.TICKET_INVALID  # nobody has looked at Head yet
    partition.observe(0.0)
    answers = [partition.check(sequence, 0) for sequence in (0, 1, 2, 3, 0xFFFF_FFFF)]
    assert answers == [Status.OK, Status.NO_SPACE, Status.NO_SPACE, Status.TICKET_INVALID, Status.TICKET_INVALID]


def test_nothing_is_reclaimed_from_a_partition_that_is_not_revoked() -> None:
    for state in (PartitionState.OPEN, PartitionState.REVOKING):
        partition = partition_of(0)
        partition.state = state
        with pytest.raises(AssertionError, match=r"^a block was reclaimed while its initiator could still write to it"):
            partition.abandon_overdue(9.0)
        assert partition.allocate() is None


def test_blocks_that_the_target_takes_from_a_revoked_partition_are_no_tickets_of_the_initiator() -> None:
    link = direct_link(quota=2)
    link.fetch_add_head()
    abandon(link)
    partition = link.session.partition
    assert partition is not None
    for handle in (100, 101):
        stored = link.initiator.alloc_store_inline([handle], 0, [b"a"])
        link.run(stored)
        assert stored.status.tolist() == [Status.OK]
        link.world.tick()
        assert (partition.fault, partition.taken_offsets, link.closed_because) == (None, [], None)
    link.world.target.check_integrity()
    late = link.initiator.bind([102], 0, 2, 1, 0)
    link.run(late)
    assert late.status.tolist() == [Status.TICKET_INVALID]


def test_a_partition_sees_when_the_slot_of_a_ticket_is_not_its_own_any_more() -> None:
    partition = partition_of(0, 64)
    partition.ring.take_ticket()
    partition.observe(0.0)
    partition.check_integrity()
    partition.ring.slots["block_offset"][0] = 128
    with pytest.raises(AssertionError, match=r"^a ticket's slot was written for somebody else"):
        partition.check_integrity()


@pytest.mark.parametrize(("state", "is_seen"), [(PartitionState.OPEN, False), (PartitionState.REVOKED, True)])
def test_head_is_the_targets_to_answer_for_once_the_partition_is_revoked(state: PartitionState, is_seen: bool) -> None:
    partition = partition_of(0, 64)
    partition.state = state
    partition.ring.counters[0] = 1  # no FetchAdd leaves this
    if is_seen:
        with pytest.raises(AssertionError, match="has lost step"):
            partition.check_integrity()
    else:
        partition.check_integrity()
