"""Draft section 5.2, Descriptors. Each test quotes the sentence that it checks."""

from __future__ import annotations

import pytest

from kbtp_core.protocol.constants import Capability, Flag, Status
from kbtp_core.protocol.effects import Read, Record, Write
from kbtp_core.protocol.wire import AllocStore, CompletionDescriptor, DataDescriptor, Load, parse
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import ring_world


def test_a_data_descriptor_is_stag_offset_and_length() -> None:
    """A Data Descriptor is 16 octets: STag (32 bits), Tagged Offset (64 bits), and Length (32 bits), naming a buffer of the
    initiator."""
    assert DataDescriptor(0x11223344, 0x5566778899AABBCC, 0xDDEEFF00).encode().hex() == "11223344" + "5566778899aabbcc" + "ddeeff00"


def test_for_a_load_it_is_the_destination() -> None:
    """For LOAD it is the destination"""
    link = ready(ring_world())
    put(link, 100, b"data")
    write = link.session.receive(Load(1, 100, 0, DataDescriptor(7, 8, 64)).encode(), 0.0)[0]
    assert isinstance(write, Write)
    assert (write.stag, write.offset, write.length) == (7, 8, 4)


def test_for_a_store_it_is_the_source() -> None:
    """for STORE and ALLOC_STORE it is the source that the target reads with RDMA Read"""
    link = ready(ring_world())
    (read,) = link.session.receive(AllocStore(1, 100, 0, DataDescriptor(7, 8, 9)).encode(), 0.0)
    assert isinstance(read, Read)
    assert (read.stag, read.offset, read.length) == (7, 8, 9)


@pytest.mark.parametrize(("stag", "offset", "length"), [(1, 0, 3), (0, 1, 3), (0, 0, 2), (0, 0, 4)])
def test_inline_names_no_buffer_but_its_length(stag: int, offset: int, length: int) -> None:
    """unless INLINE is set, in which case STag and Tagged Offset are zero, Length is the inline data length, and the data follows the
    message."""
    link = ready(ring_world())
    wrong = AllocStore(1, 100, 0, DataDescriptor(stag, offset, length), Flag.INLINE, None, b"abc").encode()
    (answer,) = link.session.receive(wrong, 0.0)
    assert parse(answer.data).status == Status.MALFORMED  # type: ignore[union-attr]
    put(link, 100, b"abc")


def test_a_completion_descriptor_names_a_record_slot() -> None:
    """A Completion Descriptor is 16 octets: STag (32 bits), Tagged Offset (64 bits), and 32 reserved bits, naming a 24-octet completion
    record slot of the initiator."""
    slot = CompletionDescriptor(0x11223344, 0x5566778899AABBCC)
    assert slot.encode().hex() == "11223344" + "5566778899aabbcc" + "00000000"
    link = ring_world().link(capabilities=Capability.RECORD_COMPLETION, offers=Capability.RECORD_COMPLETION).greet()
    request = Load(1, 100, 0, DataDescriptor(1, 2, 3), Flag.RECORD, slot).encode()
    reserved_set = request[:-4] + b"\1\2\3\4"  # dropped on receipt
    (record,) = link.session.receive(reserved_set, 0.0)
    assert isinstance(record, Record)
    assert (record.stag, record.offset, len(record.data)) == (slot.stag, slot.offset, 24)
