"""Draft section 3.4, Allocation Quotas. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.partition import PartitionState
from kbtp_core.protocol.pool import BlockState
from tests.protocol.test_draft_6_6 import direct_link, direct_world
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import Link, ring_world


def usage(link: Link) -> int:
    return link.world.target.pool.usage(link.session.number)  # type: ignore[union-attr]


def count(link: Link, state: BlockState) -> int:
    return link.world.target.pool.count(state)  # type: ignore[union-attr]


def abandon(link: Link) -> None:
    """Let the ticket timeout pass at the target."""
    link.world.tick()
    link.world.now += 2.0
    link.world.tick()  # takes the STags back
    link.world.tick()


def test_the_sum_of_quotas_is_at_most_f() -> None:
    """The target assigns each initiator an Allocation Quota at session setup and keeps the sum of quotas not larger than F."""
    world = direct_world(blocks=6)
    quotas = [direct_link(world, quota=3), ready(world, quota=2), direct_link(world, quota=9), ready(world, quota=9)]
    assert [link.initiator.ack.quota for link in quotas if link.initiator.ack is not None] == [3, 2, 1, 0]
    world.target.check_integrity()


def test_usage_counts_bound_handles_and_open_tickets() -> None:
    """An initiator's usage is the number of handles it has bound plus the number of tickets it has taken and not yet bound."""
    link = direct_link(quota=3)
    link.bind_taken(link.take_direct([b"bound"]), [100])
    link.fetch_add_head()
    link.world.tick()
    assert usage(link) == 2
    link.world.target.check_integrity()


def test_an_initiator_takes_no_ticket_over_its_quota() -> None:
    """An initiator MUST NOT exceed its quota"""
    link = direct_link(quota=2)
    machine = link.take_direct([b"a", b"b", b"c"])
    assert machine.status.tolist()[2] == Status.NO_SPACE
    link.bind_taken(machine, [100, 101, 102])
    assert link.take_direct([b"d"]).status.tolist() == [Status.NO_SPACE]
    partition = link.session.partition
    assert partition is not None
    assert int(partition.ring.counters[0]) >> 32 == 2


def test_a_free_releases_a_unit_when_it_completes() -> None:
    """the target releases one unit of usage when a FREE completes"""
    world = ring_world(blocks=2)
    link = ready(world, quota=1)
    put(link, 100, b"x")
    world.native_readers[0] = 1
    freed = link.initiator.free([100], 0)
    link.run()
    assert (usage(link), freed.is_done) == (1, False)
    world.native_readers.clear()
    world.tick()
    assert (usage(link), freed.is_done) == (0, True)


def test_reclaiming_an_abandoned_ticket_releases_a_unit() -> None:
    """or when an abandoned ticket is reclaimed."""
    link = direct_link(quota=2)
    link.fetch_add_head()
    link.world.tick()
    assert usage(link) == 1
    abandon(link)
    assert usage(link) == 0
    link.world.target.check_integrity()


def test_within_the_quotas_every_ticket_finds_a_block() -> None:
    """When all initiators respect their quotas, the ring always holds a block for every ticket taken, so an allocation waits at most
    for an in-progress free to finish writing its slot."""
    world = ring_world(blocks=4)
    links = [ready(world, quota=2, handles=8), ready(world, quota=2, handles=8)]
    for turn in range(10):
        for i, link in enumerate(links):
            for j in range(2):
                put(link, 100 + 8 * i + j, bytes([turn + 1]))
        assert count(links[0], BlockState.FREE) == 0
        for i, link in enumerate(links):
            link.run(link.initiator.free([100 + 8 * i, 101 + 8 * i], 0))


def test_target_executed_allocations_share_one_ring() -> None:
    """Target-executed allocations take blocks from a ring shared by all initiators that the target serves this way."""
    world = ring_world(blocks=4)
    links = [ready(world, quota=2), ready(world, quota=2)]
    put(links[0], 100, b"a")
    put(links[1], 108, b"b")
    assert int(world.target.pool.ring.counters[0]) >> 32 == 2  # type: ignore[union-attr]


def test_a_direct_initiator_has_a_ring_over_a_partition_of_its_quota() -> None:
    """For DIRECT_ALLOC (Section 6.6), the target instead gives each initiator its own ring and Head counter over a partition of the
    pool whose size equals the initiator's quota, so that every ticket on that ring belongs to that initiator and the quota is enforced
    by the ring itself."""
    world = direct_world(blocks=6)
    links = [direct_link(world, quota=3), direct_link(world, quota=2)]
    partitions = [link.session.partition for link in links]
    assert [len(partition.block_offsets) for partition in partitions if partition is not None] == [3, 2]
    assert not set(partitions[0].block_offsets) & set(partitions[1].block_offsets)  # type: ignore[union-attr]
    instead = links[0].initiator.alloc_store_inline([100], 0, [b"x"])
    links[0].run(instead)
    assert instead.status.tolist() == [Status.NO_SPACE]  # its share of the shared ring is none
    world.target.check_integrity()


def test_a_ticket_is_abandoned_after_the_timeout_and_not_before() -> None:
    """A ticket that is not bound by BIND within the Ticket Timeout advertised in HELLO_ACK is abandoned."""
    link = direct_link(quota=2)
    assert link.initiator.ack is not None
    assert link.initiator.ack.direct.ticket_timeout_ms == 1000
    machine = link.take_direct([b"x"])
    link.world.tick()
    link.world.now = 0.999
    link.world.tick()
    assert link.bind_taken(machine, [100]).status.tolist() == [Status.OK]
    late = link.take_direct([b"y"])
    abandon(link)
    assert link.bind_taken(late, [101]).status.tolist() == [Status.TICKET_ABANDONED]


def test_a_block_is_reclaimed_only_once_no_write_can_reach_it() -> None:
    """Before reclaiming its block, the target MUST ensure that no RDMA Write of the initiator can still reach the block, by
    invalidating the initiator's Partition STag (Section 4)"""
    link = direct_link(quota=2)
    link.fetch_add_head()
    link.world.tick()
    link.world.now = 5.0
    effects = link.world.target.tick(5.0)
    assert effects == [link.session]
    partition = link.session.partition
    assert partition is not None
    assert partition.state is PartitionState.REVOKING
    link.world.target.tick(9.0)
    assert count(link, BlockState.TAKEN) == 1  # whatever the time, until the driver has invalidated the STags
    link.apply(link.session.take_effects())
    assert link.is_revoked
    assert count(link, BlockState.TAKEN) == 0


def test_direct_allocation_stays_off_once_the_stag_is_invalid() -> None:
    """which disables DIRECT_ALLOC for the rest of the session, or by terminating the connection."""
    link = direct_link(quota=2)
    machine = link.take_direct([b"x"])
    abandon(link)
    link.bind_taken(machine, [100])
    assert link.take_direct([b"y"]).status.tolist() == [Status.UNSUPPORTED]
    instead = link.initiator.alloc_store_inline([100, 101, 102], 0, [b"x"] * 3)
    link.run(instead)
    assert instead.status.tolist() == [Status.OK, Status.OK, Status.NO_SPACE]
    link.world.target.check_integrity()


def test_an_abandoned_block_returns_under_a_new_ticket() -> None:
    """It then consumes the slot, returns the block to the ring with a new ticket"""
    link = direct_link(quota=2)
    partition = link.session.partition
    assert partition is not None
    link.fetch_add_head()
    abandon(link)
    assert partition.ring.slots["sequence"].tolist() == [2, 1]  # the first block, under the ticket behind the second
    link.disconnect()
    assert count(link, BlockState.FREE) == 4
    link.world.target.check_integrity()


def test_a_late_bind_is_told_that_its_ticket_is_gone() -> None:
    """and rejects a later BIND for that ticket with status TICKET_ABANDONED."""
    link = direct_link(quota=1)
    machine = link.take_direct([b"x"])
    abandon(link)
    for _ in range(2):
        bound = link.initiator.bind([100], 0, machine.tickets, 1, machine.block_offset)
        link.run(bound)
        assert bound.status.tolist() == [Status.TICKET_ABANDONED]
    link.world.target.check_integrity()


def test_an_allocation_over_the_quota_gets_no_space() -> None:
    """If a target observes an allocation by an initiator that exceeds its quota, it completes the request with NO_SPACE"""
    link = ready(ring_world(blocks=4), quota=1)
    batch = link.initiator.alloc_store_inline([100, 101], 0, [b"a", b"b"])
    link.run(batch)
    assert batch.status.tolist() == [Status.OK, Status.NO_SPACE]
    direct = direct_link(quota=1)
    direct.fetch_add_head()
    over = direct.fetch_add_head()
    bound = direct.initiator.bind([100], 0, over >> 32, 1, 0)
    direct.run(bound)
    assert bound.status.tolist() == [Status.NO_SPACE]


def test_an_initiator_that_takes_too_many_tickets_may_lose_its_session() -> None:
    """and MAY terminate the session."""
    link = direct_link(quota=2)
    for _ in range(3):
        link.fetch_add_head()
    link.world.tick()
    assert link.closed_because == "it took 1 tickets more than its quota of 2 allows"
    link.disconnect()
    link.world.target.check_integrity()
    assert count(link, BlockState.FREE) == 4
