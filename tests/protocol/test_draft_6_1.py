"""Draft section 6.1, Block Load. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Flag, Status
from kbtp_core.protocol.effects import Send, Write
from kbtp_core.protocol.wire import Completion, DataDescriptor, Load, parse
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world


def test_the_entry_must_be_valid_and_sealed() -> None:
    """The entry MUST be VALID, and SEALED unless ALLOW_UNSEALED is set."""
    link = ready(ring_world())
    put(link, 100, b"open", Flag.NONE)
    for handle, flags, status in [(101, 0, Status.NOT_BOUND), (100, 0, Status.NOT_SEALED), (100, Flag.ALLOW_UNSEALED, Status.OK)]:
        batch = link.initiator.load([handle], 0, STAG, 0, 64, flags)
        link.run(batch)
        assert batch.status.tolist() == [status]


def test_data_length_octets_are_written_and_no_more() -> None:
    """It RDMA-writes Data Length octets of the block to the Data Descriptor."""
    link = ready(ring_world())
    put(link, 100, b"data")
    link.memory[:] = 0xEE
    link.run(link.initiator.load([100], 0, STAG, 10, 64))
    assert link.memory[9:15].tobytes() == b"\xeedata\xee"


def test_a_block_longer_than_the_descriptor_is_refused() -> None:
    """Data Length MUST NOT exceed the descriptor Length."""
    link = ready(ring_world())
    put(link, 100, b"data")
    batch = link.initiator.load([100, 100], 0, STAG, 0, [3, 4])
    link.run(batch)
    assert batch.status.tolist() == [Status.LENGTH, Status.OK]


def test_the_completion_tells_offset_length_and_generation() -> None:
    """It completes the request (Section 6.5) with the Block Offset, Data Length, and Generation of the entry."""
    link = ready(ring_world())
    put(link, 100, b"first")
    put(link, 101, b"data")
    write, send = link.session.receive(Load(7, 101, 2, DataDescriptor(STAG, 5, 64)).encode(), 0.0)
    assert isinstance(write, Write)
    assert isinstance(send, Send)
    assert parse(send.data) == Completion(7, 101, 2, Status.OK, 4, 64)
