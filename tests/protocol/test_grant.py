"""What a session is granted: only what it wanted, what the operator allows, and what there is the means for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kbtp_core.protocol.constants import Capability
from kbtp_core.protocol.hello import DirectAccess, HelloAck
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.target_grant import Exposure
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import HEAD, PARTITION, POOL, SLOTS, TABLE, Link, World, ring_world

NONE, RECORD, CHECKSUM = Capability.NONE, Capability.RECORD_COMPLETION, Capability.CHECKSUM
LOAD, ALLOC, MASKED = Capability.DIRECT_LOAD, Capability.DIRECT_ALLOC, Capability.MASKED_ATOMICS
EVERYTHING = RECORD | CHECKSUM | LOAD | ALLOC | MASKED
BOTH = DirectPolicy(load_domains=frozenset({"gpu"}), alloc_domains=frozenset({"gpu"}), ticket_timeout_s=0.001)


def world_of(policy: DirectPolicy | None = BOTH, *, blocks: int = 4) -> World:
    return ring_world(blocks=blocks, direct=policy, crc32c=lambda octets: len(octets))


def link_of(world: World, wanted: Capability, *, quota: int = 2, domain: str = "gpu", offers: Capability = NONE) -> Link:
    return world.link(quota=quota, handles=4, trust_domain=domain, capabilities=wanted, offers=offers)


def ack_of(link: Link) -> HelloAck:
    assert link.initiator.ack is not None
    return link.initiator.ack


@pytest.mark.parametrize(
    ("wanted", "policy", "offers", "granted"),
    [
        (EVERYTHING, BOTH, RECORD, EVERYTHING),
        (EVERYTHING, BOTH, NONE, CHECKSUM | LOAD | ALLOC | MASKED),
        (EVERYTHING, None, RECORD, RECORD | CHECKSUM),
        (EVERYTHING, replace(BOTH, alloc_domains=frozenset()), NONE, CHECKSUM | LOAD),
        (EVERYTHING, replace(BOTH, load_domains=frozenset()), NONE, CHECKSUM | ALLOC | MASKED),
        (EVERYTHING, replace(BOTH, masked=False), NONE, CHECKSUM | LOAD | ALLOC),
        (EVERYTHING, DirectPolicy(load_domains=frozenset({"else"})), NONE, CHECKSUM),
        (EVERYTHING | Capability.STORE, BOTH, RECORD | CHECKSUM, EVERYTHING),
        (NONE, BOTH, RECORD, NONE),
        (RECORD, BOTH, RECORD, RECORD),
        (CHECKSUM, BOTH, RECORD, CHECKSUM),
        (RECORD | CHECKSUM, BOTH, RECORD, RECORD | CHECKSUM),
        (LOAD, BOTH, RECORD, LOAD),
        (ALLOC, BOTH, NONE, ALLOC),
        (ALLOC | CHECKSUM, BOTH, NONE, ALLOC | CHECKSUM),
        (MASKED, BOTH, NONE, NONE),
        (LOAD | MASKED, BOTH, NONE, LOAD),
    ],
)
def test_capabilities_are_what_is_wanted_allowed_and_possible(
    wanted: Capability, policy: DirectPolicy | None, offers: Capability, granted: Capability
) -> None:
    link = link_of(world_of(policy), wanted, offers=offers).greet()
    ack = ack_of(link)
    assert Capability(ack.capabilities) == granted
    assert (link.session.partition is not None) == bool(granted & ALLOC)
    assert (ack.quota, ack.handle_count) == (2, 4)
    assert [ack.direct.table_stag, ack.direct.partition_stag] == [TABLE * bool(granted & LOAD), PARTITION * bool(granted & ALLOC)]


def test_a_session_reaches_no_more_memory_than_its_modes_need() -> None:
    for wanted, is_readable, has_partition in [(LOAD, True, False), (ALLOC | MASKED, False, True), (LOAD | ALLOC, True, True)]:
        world = world_of()
        link = link_of(world, wanted).greet()
        exposure = link.exposure
        assert exposure.pool is world.target.pool
        assert (exposure.is_readable, exposure.partition is not None) == (is_readable, has_partition)
        assert exposure.partition is link.session.partition


def test_what_direct_allocation_needs_to_know_is_in_the_answer() -> None:
    for quota, slots in [(1, 1), (2, 1), (3, 2)]:
        direct = ack_of(link_of(world_of(), ALLOC | MASKED, quota=quota).greet()).direct
        assert (direct.ticket_timeout_ms, direct.ring_log2_slots) == (1, slots)
        assert (direct.pool_stag, direct.partition_stag, direct.ring_stag, direct.head_stag) == (POOL, PARTITION, SLOTS, HEAD)
    only_load = ack_of(link_of(world_of(), LOAD).greet()).direct
    assert (only_load.ticket_timeout_ms, only_load.ring_log2_slots, only_load.head_stag) == (0, 0, 0)


@pytest.mark.parametrize("wanted", [LOAD, ALLOC, LOAD | ALLOC | MASKED])
def test_where_memory_cant_be_registered_the_session_works_without_direct_modes(wanted: Capability) -> None:
    world = world_of()
    link = link_of(world, wanted | CHECKSUM)

    def no_memory(exposure: Exposure) -> DirectAccess | None:
        return None

    link.expose = no_memory  # type: ignore[assignment,method-assign]
    ack = ack_of(link.greet())
    assert (Capability(ack.capabilities), ack.quota, ack.direct) == (CHECKSUM, 2, DirectAccess())
    assert link.session.partition is None
    put(link, 100, b"a")
    put(link, 101, b"b")
    assert ack_of(ready(world, quota=9)).quota == 2
    world.target.check_integrity()


def test_where_nothing_is_left_there_is_no_partition_and_no_direct_allocation() -> None:
    world = world_of(blocks=2)
    ready(world, quota=2, handles=1)
    ack = ack_of(link_of(world, LOAD | ALLOC).greet())
    assert (Capability(ack.capabilities), ack.quota) == (LOAD, 0)
    ack = ack_of(link_of(world_of(), ALLOC, quota=0).greet())
    assert (Capability(ack.capabilities), ack.quota) == (NONE, 0)


def test_a_session_may_always_have_one_request_outstanding() -> None:
    assert [ack_of(ring_world().link(outstanding=count).greet()).outstanding for count in (0, 1, 2)] == [1, 1, 2]


def test_a_driver_that_registers_no_memory_gives_no_direct_modes() -> None:
    world = world_of()
    session = world.target.open_session("10.0.0.2:1")
    session.receive(link_of(world, EVERYTHING).initiator.hello(), 0.0)
    assert session.ack is not None
    assert Capability(session.ack.capabilities) == CHECKSUM
