"""Segments that the device sends: RFC 5041 sections 4 and 5."""

from __future__ import annotations

import struct

import pytest

from kbtp_core.fabric.api import Access, Op
from tests.conformance.rule import rule
from tests.conformance.stage import Sending, receiving, sending
from tests.fabric.wire import Opcode, ReadRequest, Tagged, Untagged, send
from tests.fabric.world import pattern, request

CONTENT = pattern(500)


def untagged_message(stage: Sending, length: int = 500) -> list[Untagged]:
    """The segments of one Send."""
    stage.end.post(request(Op.SEND, stage.device.memory(CONTENT), length))
    segments = [stage.untagged()]
    while not segments[-1].is_last:
        segments.append(stage.untagged())
    return segments


def tagged_message(stage: Sending, length: int = 500, *, to: tuple[int, int] = (0x11223344, 0x5566778899)) -> list[Tagged]:
    """The segments of one Write."""
    stage.end.post(request(Op.WRITE, stage.device.memory(CONTENT, Access.NONE), length, to=to))
    segments = [stage.tagged()]
    while not segments[-1].is_last:
        segments.append(stage.tagged())
    return segments


@rule("RFC 5041 section 4.1", "sender", "T is 1 in segments for tagged buffers and 0 in others.")
@pytest.mark.parametrize(("op", "bit"), [(Op.WRITE, 0x80), (Op.SEND, 0), (Op.READ, 0), (Op.FETCH_ADD, 0), (Op.IMMEDIATE, 0)])
def test_the_tagged_flag(op: Op, bit: int) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        assert stage.peer.receive_octets(3)[2] & 0x80 == bit


@rule("RFC 5041 section 4.1", "sender", "L is 1 on the last segment of a message and on no other.")
def test_the_last_flag() -> None:
    with sending(mulpdu=128) as stage:
        assert [segment.is_last for segment in untagged_message(stage)] == [False] * 4 + [True]
        assert [segment.is_last for segment in tagged_message(stage)] == [False] * 4 + [True]


@rule("RFC 5041 section 4.1", "sender", "The reserved bits of the control field are zero and DV is 1.")
@pytest.mark.parametrize("op", [Op.WRITE, Op.SEND, Op.SEND_SE_INVALIDATE, Op.READ, Op.CMP_SWAP, Op.IMMEDIATE_SE])
def test_reserved_bits_and_version(op: Op) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        assert stage.peer.receive_octets(3)[2] & 0x3F == 1


@rule("RFC 5041 section 4.2", "sender", "A tagged header has the STag and the Tagged Offset behind the control octets, 14 octets in all.")
def test_the_octets_of_a_tagged_header() -> None:
    with sending() as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(b"w", Access.NONE), 1, to=(0x01020304, 0x05060708090A0B0C)))
        assert stage.peer.receive_octets(17).hex() == "000f" + "c140" + "01020304" + "05060708090a0b0c" + b"w".hex()


@rule("RFC 5041 section 4.3", "sender", "An untagged header has reserved octets, QN, MSN and MO behind the control octets: 18 octets.")
def test_the_octets_of_an_untagged_header() -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(b"s"), 1))
        assert stage.peer.receive_octets(21).hex() == "0013" + "4143" + "00000000" + "00000000" + "00000001" + "00000000" + b"s".hex()


@rule("RFC 5041 section 4.2", "sender", "All segments of a tagged message have the same STag.")
def test_all_segments_have_the_stag_of_the_message() -> None:
    with sending(mulpdu=128) as stage:
        assert {segment.stag for segment in tagged_message(stage)} == {0x11223344}


@rule("RFC 5041 section 4.2", "sender", "All segments of a message have the same octet of the ULP.")
def test_all_segments_have_the_opcode_of_the_message() -> None:
    with sending(mulpdu=128) as stage:
        stage.end.post(request(Op.SEND_SE, stage.device.memory(CONTENT), 500))
        assert [stage.untagged().opcode for _ in range(5)] == [Opcode.SEND_SE] * 5


@rule("RFC 5041 section 4.3", "sender", "All segments of an untagged message have the same QN and the same MSN.")
def test_all_segments_have_the_number_of_the_message() -> None:
    with sending(mulpdu=128) as stage:
        untagged_message(stage)
        assert {segment.msn for segment in untagged_message(stage)} == {2}


@rule("RFC 5041 section 4.3", "sender", "The first MSN of each queue is 1.")
@pytest.mark.parametrize("op", [Op.SEND, Op.READ, Op.FETCH_ADD, Op.IMMEDIATE])
def test_the_first_number_is_one(op: Op) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        assert stage.untagged().msn == 1


@rule("RFC 5041 section 4.3", "sender", "The MSN rises by one with each message of its queue, whatever the other queues do.")
def test_each_queue_counts_its_own_messages() -> None:
    with sending() as stage:
        order = [Op.SEND, Op.READ, Op.SEND, Op.WRITE, Op.READ, Op.SEND]
        stage.end.post(*(request(op) for op in order))
        segments = [stage.read() for _ in order]
        assert [segment.msn for segment in segments if isinstance(segment, Untagged)] == [1, 1, 2, 2, 3]


@rule("RFC 5041 section 4.3", "sender", "The Message Offset of the first octet of a message is zero.")
def test_the_first_offset_is_zero() -> None:
    with sending(mulpdu=128) as stage:
        assert [untagged_message(stage)[0].offset for _ in range(2)] == [0, 0]


@rule("RFC 5041 section 5.2", "sender", "The Message Offset of a segment is the number of octets of the message before it.")
def test_message_offsets_count_what_was_sent_before() -> None:
    with sending(mulpdu=128) as stage:
        assert [segment.offset for segment in untagged_message(stage)] == [0, 110, 220, 330, 440]


@rule("RFC 5041 section 5.2", "sender", "The Tagged Offset of a segment is that of the message plus the octets before it.")
def test_tagged_offsets_count_what_was_sent_before() -> None:
    with sending(mulpdu=128) as stage:
        assert [segment.offset - 0x5566778899 for segment in tagged_message(stage)] == [0, 114, 228, 342, 456]


@rule("RFC 5041 section 5.2", "sender", "All octets of a message are sent, each once.")
@pytest.mark.parametrize("length", [1, 110, 111, 499, 500])
def test_the_segments_hold_the_message(length: int) -> None:
    with sending(mulpdu=128) as stage:
        assert b"".join(segment.payload for segment in untagged_message(stage, length)) == CONTENT[:length].tobytes()
        assert b"".join(segment.payload for segment in tagged_message(stage, length)) == CONTENT[:length].tobytes()


@rule("RFC 5041 section 5.2", "sender", "2048 octets at MULPDU 1500 are untagged segments of 1482 and 566 octets.")
def test_the_published_example_of_an_untagged_message() -> None:
    with sending(mulpdu=1500) as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(2048), 2048))
        assert [(segment.offset, len(segment.payload)) for segment in (stage.untagged(), stage.untagged())] == [(0, 1482), (1482, 566)]


@rule("RFC 5041 section 5.2", "sender", "2048 octets at MULPDU 1500 are tagged segments of 1486 and 562 octets.")
def test_the_published_example_of_a_tagged_message() -> None:
    with sending(mulpdu=1500) as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(2048, Access.NONE), 2048, to=(1, 16384)))
        assert [(segment.offset, len(segment.payload)) for segment in (stage.tagged(), stage.tagged())] == [(16384, 1486), (17870, 562)]


@rule("RFC 5041 section 5.2", "sender", "A message of no octets is exactly one segment, the last.")
@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE])
def test_an_empty_message_is_one_segment(op: Op) -> None:
    with sending() as stage:
        stage.end.post(request(op), request(Op.SEND, stage.device.memory(b"next"), 4))
        first = stage.read()
        assert (first.payload, first.is_last) == (b"", True)
        assert stage.untagged().payload == b"next"


@rule("RFC 5041 section 5.3", "sender", "Messages leave in the order in which they were submitted.")
def test_messages_leave_in_order() -> None:
    with sending() as stage:
        source = stage.device.memory(bytes(range(100)))
        stage.end.post(*(request(Op.SEND if at % 3 else Op.WRITE, source, 1, offset=at, to=(1, 0)) for at in range(100)))
        assert [stage.read().payload[0] for _ in range(100)] == list(range(100))


@rule("RFC 5041 section 5.3", "sender", "The segments of a message leave in rising order of their offsets.")
def test_segments_leave_in_rising_order() -> None:
    with sending(mulpdu=128) as stage:
        for offsets in ([s.offset for s in untagged_message(stage)], [s.offset for s in tagged_message(stage)]):
            assert offsets == sorted(offsets)


@rule("RFC 5041 section 5.4", "sender", "A message is complete once TCP has it: the peer need not have read it.")
def test_a_send_completes_before_the_peer_reads_it() -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(b"sent"), 4, wr_id=9))
        assert stage.end.expect(Op.SEND).wr_id == 9
        assert stage.read() == send(b"sent")


@rule("RFC 5041 section 4.2", "sender", "A response has the STag that the ULP of the request chose, in every segment.")
def test_all_segments_of_a_response_have_its_stag() -> None:
    with receiving() as stage:
        source = stage.memory(100_000, Access.REMOTE_READ)
        stage.peer.send(ReadRequest(0xFEDCBA98, 5, 100_000, source.stag, 0).segment())
        first, second = stage.peer.receive(), stage.peer.receive()
        assert isinstance(first, Tagged)
        assert isinstance(second, Tagged)
        assert (first.stag, second.stag) == (0xFEDCBA98, 0xFEDCBA98)
        assert struct.pack(">QQ", first.offset, second.offset) == struct.pack(">QQ", 5, 5 + len(first.payload))
