"""Draft section 6.6, Direct Modes. Each test quotes the sentence that it checks."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import Capability, Flag, Status
from kbtp_core.protocol.direct import DirectKind
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.wire import Bind
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import HEAD, PARTITION, POOL, SLOTS, TABLE, Link, World, ring_world

DIRECT = Capability.DIRECT_LOAD | Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS
POLICY = DirectPolicy(load_domains=frozenset({"gpu"}), alloc_domains=frozenset({"gpu"}))


def direct_world(*, blocks: int = 4, policy: DirectPolicy = POLICY) -> World:
    return ring_world(blocks=blocks, direct=policy)


def direct_link(world: World | None = None, *, quota: int = 2, capabilities: Capability = DIRECT) -> Link:
    """A session of a listed trust domain, with handles from 100 on if it is the world's first."""
    world = world or direct_world()
    return world.link(quota=quota, handles=8, trust_domain="gpu", capabilities=capabilities).greet()


def test_direct_modes_are_optional() -> None:
    """Direct modes expose target structures to the initiator and are OPTIONAL."""
    for world in (ring_world(), direct_world()):
        link = ready(world, capabilities=DIRECT)
        assert link.initiator.ack is not None
        assert link.initiator.ack.capabilities == Capability.NONE
        put(link, 100, b"works without")


def test_only_listed_trust_domains_get_them() -> None:
    """A target MUST offer them only to initiators it trusts for all blocks reachable through the exposed STags."""
    world = direct_world()
    stranger = world.link(quota=1, handles=4, trust_domain="else", capabilities=DIRECT).greet()
    assert stranger.initiator.ack is not None
    assert stranger.initiator.ack.capabilities == Capability.NONE
    assert stranger.initiator.ack.direct.pool_stag == 0
    bound = stranger.initiator.bind([100], 0, 0, 1, 0)
    stranger.run(bound)
    assert bound.status.tolist() == [Status.UNSUPPORTED]
    with pytest.raises(ValueError, match="'a' would read blocks that 'b' can still write"):
        DirectPolicy(load_domains=frozenset({"a"}), alloc_domains=frozenset({"b"}))


def test_a_direct_load_reads_entry_block_entry_each_after_the_other() -> None:
    """through the read-only Table and Pool STags, the initiator RDMA-reads the table entry, then the block, then the entry again,
    issuing each read only after the previous one has completed."""
    link = direct_link()
    link.bind_taken(link.take_direct([b"data"]), [100])
    rounds: list[list[int]] = []
    carry_out = link.carry_out

    def watched(operations: np.ndarray) -> np.ndarray:
        rounds.append(operations["stag"].tolist())
        assert (operations["kind"] == DirectKind.READ).all()
        return carry_out(operations)

    link.carry_out = watched  # type: ignore[method-assign]
    machine = link.load_direct([100], [2])
    assert rounds == [[TABLE], [POOL], [TABLE]]
    assert (machine.status[0], machine.data_length[0], link.memory[:4].tobytes()) == (Status.OK, 4, b"data")


@pytest.mark.parametrize("change", ["freed", "rebound", "rebound with the same octets"])
def test_a_block_that_changed_under_a_direct_load_is_no_data(change: str) -> None:
    """The data is valid if both entry reads show the same Generation with VALID and SEALED set, because a sealed block does not change
    until it is freed and a free changes the Generation."""
    world = direct_world()
    owner = ready(world, quota=1)
    reader = direct_link(world, quota=1)
    put(owner, 100, b"old")
    carry_out = reader.carry_out
    turns = [lambda: None, lambda: disturb(owner, change)]

    def disturbed(operations: np.ndarray) -> np.ndarray:
        values = carry_out(operations)
        if turns:
            turns.pop(0)()
        return values

    reader.carry_out = disturbed  # type: ignore[method-assign]
    machine = reader.load_direct([100], [2])
    assert machine.status.tolist() == [Status.NOT_BOUND if change == "freed" else Status.STALE_GENERATION]
    turns[:] = [lambda: None, lambda: disturb(owner, "rebound")]
    if change != "freed":
        any_generation = reader.load_direct([100], [0])
        assert any_generation.status.tolist() == [Status.OK]  # read again until two looks agree
        assert reader.memory[:3].tobytes() == b"new"


def disturb(owner: Link, change: str) -> None:
    owner.run(owner.initiator.free([100], 0))
    if change != "freed":
        put(owner, 100, b"old" if change.endswith("octets") else b"new")


def test_an_unsealed_block_is_no_data_for_a_direct_load() -> None:
    """with VALID and SEALED set"""
    world = direct_world()
    put(ready(world, quota=1), 100, b"open", 0)
    machine = direct_link(world, quota=1).load_direct([100, 101, 200], [0, 0, 0])
    assert machine.status.tolist() == [Status.NOT_SEALED, Status.NOT_BOUND, Status.NOT_PERMITTED]


def test_a_torn_entry_is_read_again_and_never_leads_outside_the_pool() -> None:
    """a 16-octet read is not guaranteed to be atomic"""
    world = direct_world()
    put(ready(world, quota=1), 100, b"data")
    reader = direct_link(world, quota=1)
    carry_out = reader.carry_out
    tears: list[int] = []

    def torn(operations: np.ndarray) -> np.ndarray:
        values = carry_out(operations)
        if tears and operations["stag"][0] == TABLE and operations["local_offset"][0] == 0:
            reader.machine.scratch[8:16] = np.frombuffer(tears.pop(0).to_bytes(8, "big"), np.uint8)
        return values

    reader.carry_out = torn  # type: ignore[method-assign]
    for tear in (0x40, 1 << 40, (1 << 64) - 1):  # another block's offset, and some outside the pool
        tears.append(tear)
        reader.memory[:4] = 0
        machine = reader.load_direct([100], [0])
        assert (tears, machine.status[0], reader.memory[:4].tobytes()) == ([], Status.OK, b"data")
    world.target.table.entries["block_offset"][0] = 1 << 40
    assert reader.load_direct([100], [0]).status.tolist() == [Status.DATA_CORRUPT]


def test_a_direct_allocation_is_fetch_add_slot_slot_write_bind() -> None:
    """the initiator performs FetchAdd on its Head with the Add Data and Add Mask of Section 3.3, RDMA-reads the slot at the returned
    offset (re-reading until the Sequence equals its ticket and the Block Offset is not all ones, and then once more to confirm both
    values, since a 16-octet read is not guaranteed to be atomic), RDMA-writes the data into the block, and then sends BIND with the
    ticket, Data Length, and Block Offset."""
    link = direct_link()
    rounds: list[tuple[int, int]] = []
    carry_out = link.carry_out

    def watched(operations: np.ndarray) -> np.ndarray:
        rounds.append((int(operations["kind"][0]), int(operations["stag"][0])))
        values = carry_out(operations)
        if len(rounds) == 2:
            link.machine.scratch[:4] = 0xFF  # not written for this ticket yet
        if len(rounds) == 4:
            link.machine.scratch[8:16] = 0x22  # torn: the second look differs
        return values

    link.carry_out = watched  # type: ignore[method-assign]
    machine = link.take_direct([b"data"])
    slot = (DirectKind.READ, SLOTS)
    assert rounds == [(DirectKind.FETCH_ADD, HEAD), slot, slot, slot, slot, slot, (DirectKind.WRITE, PARTITION)]
    bound = link.bind_taken(machine, [100])
    assert (bound.status[0], bound.data_length[0], bound.block_offset[0]) == (Status.OK, 4, machine.block_offset[0])
    assert link.world.block(int(machine.block_offset[0]), 4) == b"data"


def test_bind_verifies_slot_and_block() -> None:
    """The target verifies that the ticket has not been abandoned, that the slot of the ticket holds that Block Offset, and that the
    initiator is within its quota"""
    link = direct_link()
    machine = link.take_direct([b"x"])
    ticket, offset = int(machine.tickets[0]), int(machine.block_offset[0])
    for wrong_ticket, wrong_offset in [(ticket, offset + 64), (ticket + 1, offset + 64), (77, offset), (ticket, (1 << 64) - 1)]:
        bound = link.initiator.bind([100], 0, wrong_ticket, 1, wrong_offset)
        link.run(bound)
        assert bound.status.tolist() == [Status.TICKET_INVALID], (wrong_ticket, wrong_offset)
    link.world.target.check_integrity()
    assert link.bind_taken(machine, [100]).status.tolist() == [Status.OK]
    link.run(again := link.initiator.bind([101], 0, ticket, 1, offset))
    assert again.status.tolist() == [Status.TICKET_INVALID]


def test_bind_checks_as_every_request_does_and_keeps_the_ticket_when_it_fails() -> None:
    """it then marks the slot consumed, writes the table entry, and completes."""
    link = direct_link()
    link.bind_taken(link.take_direct([b"one"]), [100])
    machine = link.take_direct([b"x"])
    ticket, offset = int(machine.tickets[0]), int(machine.block_offset[0])
    for handle, generation, length, status in [
        (108, 0, 1, Status.NOT_PERMITTED),
        (116, 0, 1, Status.NOT_PERMITTED),
        (100, 0, 1, Status.ALREADY_BOUND),
        (101, 5, 1, Status.STALE_GENERATION),
        (101, 0, 0, Status.LENGTH),
        (101, 0, 65, Status.LENGTH),
    ]:
        bound = link.initiator.bind([handle], generation, ticket, length, offset)
        link.run(bound)
        assert bound.status.tolist() == [status]
    unsealed = link.initiator.bind([101], 1, ticket, 1, offset)
    link.run(unsealed)
    assert (unsealed.status[0], unsealed.generation[0]) == (Status.OK, 2)
    assert not link.world.target.table.entry(1).is_sealed
    malformed = link.session.receive(Bind(9, 102, 0, ticket, 1, offset, Flag.INVALIDATE).encode(), 0.0)
    assert malformed[0].data[22:24] == b"\0\1"  # type: ignore[union-attr]


def test_the_initiator_has_no_right_to_write_slots() -> None:
    """The initiator never writes ring slots."""
    link = direct_link()
    assert link.initiator.ack is not None
    direct = link.initiator.ack.direct
    assert len({direct.table_stag, direct.pool_stag, direct.partition_stag, direct.ring_stag, direct.head_stag}) == 5
    partition = link.session.partition
    assert partition is not None
    before = partition.ring.slots.tobytes()
    link.take_direct([b"a", b"b"])
    assert partition.ring.slots.tobytes() == before


def test_direct_blocks_are_freed_by_free_into_their_own_ring() -> None:
    """Frees always use FREE."""
    link = direct_link(quota=2)
    partition = link.session.partition
    assert partition is not None
    for life in range(5):
        machine = link.take_direct([b"a", b"b"])
        assert link.bind_taken(machine, [100, 101]).status.tolist() == [0, 0]
        assert set(machine.block_offset.tolist()) == set(partition.block_offsets)
        link.run(freed := link.initiator.free([101, 100], 0))
        assert freed.status.tolist() == [0, 0]
        assert int(partition.ring.counters[1]) >> 32 == 2 * life + 4
    link.world.target.check_integrity()


def test_blocks_of_a_partition_are_cleared_before_anybody_else_has_them() -> None:
    """If the block may next be allocated to an initiator of a different trust domain, the target clears its contents before returning
    it to the ring."""
    link = direct_link(quota=2)
    machine = link.take_direct([b"bound", b"taken"])
    link.run(link.initiator.bind([100], 0, machine.tickets[:1], 5, machine.block_offset[:1]))
    assert link.world.pool_memory.any()
    link.disconnect()
    assert not link.world.pool_memory.any()
    link.world.target.check_integrity()
    assert not link.world.target.sessions
