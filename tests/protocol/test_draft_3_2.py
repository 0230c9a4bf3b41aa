"""Draft section 3.2, Block Table. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.table import BlockTable
from tests.protocol.test_draft_6_6 import direct_link
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import TABLE, ring_world


def test_an_entry_is_where_its_handle_says() -> None:
    """The entry for handle h is at Table Offset + 16 * (h - Table Base Handle) within the Table STag."""
    world = ring_world(handles=16)
    link = ready(world)
    put(link, 105, b"abc")
    octets = world.target.table.entries.tobytes()
    assert len(octets) == 16 * 16
    assert octets[16 * 5 : 16 * 6].hex() == "0003" + "0002" + "00000003" + "0000000000000000"


def test_flags_say_whether_a_handle_is_bound_and_sealed() -> None:
    """Flags: 0x0001 VALID (the handle is bound), 0x0002 SEALED."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"open", Flag.NONE)
    put(link, 101, b"sealed", Flag.SEAL)
    assert world.target.table.entries["flags"][:3].tolist() == [1, 3, 0]


def test_data_length_counts_the_valid_octets() -> None:
    """Data Length is the number of valid octets in the block."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"12345", Flag.NONE)
    assert world.target.table.entries["data_length"][0] == 5
    link.run(link.initiator.store_inline([100], 0, [b"123"]))
    assert world.target.table.entries["data_length"][0] == 3


def test_generations_skip_zero() -> None:
    """Generation never takes the value zero."""
    table = BlockTable(1)
    seen = set()
    for _ in range(33000):
        seen.add(table.bind_one(0, 0, 1, True))
        seen.add(table.clear_one(0))
    assert seen == set(range(1, 65536))


def test_nobody_but_the_target_can_write_an_entry() -> None:
    """An entry is written only by the target"""
    link = direct_link()
    assert link.exposure.is_readable
    assert link.initiator.ack is not None
    direct = link.initiator.ack.direct
    assert direct.table_stag == TABLE  # readable, and its STag is none of those that allow more
    assert direct.table_stag not in (direct.partition_stag, direct.head_stag)


def test_binding_writes_length_and_offset_before_flags_and_generation() -> None:
    """when it binds an entry, the target writes Data Length and Block Offset before Flags and Generation."""
    seen = []

    class WatchedTable(BlockTable):
        def _publish_one(self, index: int, flags: int, generation: int) -> None:
            before = self.entry(index)
            super()._publish_one(index, flags, generation)
            seen.append((before, self.entry(index)))

    WatchedTable(4).bind_one(2, 0x1000, 77, True)
    ((before, after),) = seen
    assert (before.is_valid, before.data_length, before.block_offset) == (False, 77, 0x1000)
    assert (after.is_valid, after.generation) == (True, 2)
