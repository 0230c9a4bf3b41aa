"""Untagged segments that arrive: RFC 5041 sections 4.1, 4.3, 5 and 7."""

from __future__ import annotations

import pytest

from kbtp_core.fabric.api import CompletionStatus, Op
from tests.conformance.rule import rule
from tests.conformance.stage import receiving
from tests.fabric.victim import RECEIVE_BYTES, attack, expect_terminate
from tests.fabric.wire import Opcode, Terminate, Untagged, frame, send
from tests.fabric.world import untagged_stream

SEGMENT = b"x" * 10


@rule("RFC 5041 section 4.1", "receiver", "DV must be 1 in an untagged segment.")
@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_wrong_version_is_refused(version: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", ddp_version=version), 1, 2, 6)


@rule("RFC 5041 section 4.1", "receiver", "The reserved bits of the control field are not checked.")
def test_reserved_bits_are_not_checked() -> None:
    with receiving() as stage:
        ulpdu = bytearray(send(b"reserved").ulpdu())
        ulpdu[0] |= 0x3C
        stage.peer.send(frame(bytes(ulpdu)))
        assert stage.receive()[1] == b"reserved"


@rule("RFC 5041 section 4.1", "receiver", "A message is delivered on its last segment, not before.")
def test_a_message_waits_for_its_last_segment() -> None:
    with receiving() as stage:
        first, second = untagged_stream(b"0123456789", 5, Opcode.SEND)
        stage.peer.send(first)
        assert stage.end.is_idle(0.05)
        stage.peer.send(second)
        assert stage.receive()[1] == b"0123456789"


@rule("RFC 5041 section 5.2", "receiver", "The payload of each segment is placed at its Message Offset.")
@pytest.mark.parametrize("cut", [1, 7, 100, 255])
def test_segments_are_put_together(cut: int) -> None:
    with receiving() as stage:
        message = bytes(range(256))
        stage.peer.send(*untagged_stream(message, cut, Opcode.SEND))
        assert stage.receive()[1] == message


@rule("RFC 5041 section 5.4", "receiver", "The length of a message is the offset of its last segment plus what that holds.")
@pytest.mark.parametrize("length", [0, 1, 10, RECEIVE_BYTES])
def test_the_length_of_a_message_is_reported(length: int) -> None:
    with receiving() as stage:
        stage.peer.send(*untagged_stream(b"m" * length, 10, Opcode.SEND))
        assert stage.receive()[0].length == length


@rule("RFC 5041 section 5.2", "receiver", "A message of no octets is one segment and consumes its buffer.")
def test_an_empty_message_is_delivered() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"", 1), send(b"next", 2))
        assert [(stage.receive()[0].wr_id) for _ in range(2)] == [0, 1]


@rule("RFC 5041 section 5.2", "receiver", "A segment of no octets that is not the last is none that a sender may make.")
def test_an_empty_segment_that_is_not_the_last_is_refused() -> None:
    attack(Untagged(Opcode.SEND, 1, b"", is_last=False), 0, 2, 0xFF)


@rule("RFC 5041 section 5.3", "receiver", "Messages are delivered in the order in which they were sent.")
def test_messages_are_delivered_in_order() -> None:
    with receiving() as stage:
        stage.peer.send(*(send(bytes([at]), at) for at in range(1, 5)))
        received = [stage.receive() for _ in range(4)]
        assert [(done.wr_id, octets) for done, octets in received] == [(at - 1, bytes([at])) for at in range(1, 5)]


@rule("RFC 5041 section 5.3", "receiver", "A message is delivered at most once: its number cannot come again.")
def test_a_repeated_number_is_refused() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"x", 1), send(b"x", 1))
        stage.receive()
        stage.is_terminated(send(b"x", 1), 1, 2, 3)


@rule("RFC 5041 section 7.1", "receiver", "The QN must be valid for the stream.")
@pytest.mark.parametrize("queue", [1, 2, 3, 4, 0xFFFFFFFF])
def test_another_queue_is_refused(queue: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", queue=queue), 1, 2, 1)


@rule("RFC 5041 section 7.1", "receiver", "QN and MSN must have a buffer.")
def test_a_message_without_a_buffer_is_refused() -> None:
    attack(send(b"x"), 1, 2, 2, receives=0)


@rule("RFC 5041 section 7.1", "receiver", "Buffers that are used up are gone: the next message has none.")
def test_a_message_beyond_the_posted_buffers_is_refused() -> None:
    with receiving(receives=2) as stage:
        stage.peer.send(send(b"1", 1), send(b"2", 2), send(b"3", 3))
        assert [stage.receive()[1] for _ in range(2)] == [b"1", b"2"]
        stage.is_terminated(send(b"3", 3), 1, 2, 2)


@rule("RFC 5041 section 7.1", "receiver", "The MSN must be in the range of the buffers of its queue.")
@pytest.mark.parametrize("msn", [0, 2, 5, 0xFFFFFFFF])
def test_a_number_out_of_sequence_is_refused(msn: int) -> None:
    attack(send(b"x", msn), 1, 2, 3)


@rule("RFC 5041 section 7.1", "receiver", "The MO must be in the range of the buffer.")
@pytest.mark.parametrize("offset", [1, RECEIVE_BYTES, RECEIVE_BYTES + 1, 0xFFFFFFFF])
def test_a_first_segment_with_an_offset_is_refused(offset: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", offset), 1, 2, 4)


@rule("RFC 5041 section 7.1", "receiver", "Over a stream segments leave no gap and do not overlap.")
@pytest.mark.parametrize("offset", [0, 9, 11, 0xFFFFFFF6])
def test_a_later_segment_with_a_gap_or_overlap_is_refused(offset: int) -> None:
    attack(Untagged(Opcode.SEND, 1, SEGMENT, offset), 1, 2, 4, Untagged(Opcode.SEND, 1, SEGMENT, is_last=False))


@rule("RFC 5041 section 7.1", "receiver", "MO and payload together must fit into the buffer, to the octet.")
@pytest.mark.parametrize("excess", [1, 1000, 50_000])
def test_a_message_longer_than_its_buffer_is_refused(excess: int) -> None:
    attack(send(b"x" * (RECEIVE_BYTES + excess)), 1, 2, 5)


@rule("RFC 5041 section 7.1", "receiver", "A message that grows too long in a later segment is refused there.")
def test_a_message_that_grows_too_long_is_refused() -> None:
    first = Untagged(Opcode.SEND, 1, b"x" * RECEIVE_BYTES, is_last=False)
    attack(Untagged(Opcode.SEND, 1, b"y", RECEIVE_BYTES), 1, 2, 5, first)


@rule("RFC 5041 section 7.1", "receiver", "A message that just fits is delivered.")
def test_a_message_that_fills_its_buffer_is_delivered() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"f" * RECEIVE_BYTES))
        assert stage.receive()[1] == b"f" * RECEIVE_BYTES


@rule("RFC 5041 section 4.3", "receiver", "Each queue counts its own messages.")
def test_requests_do_not_move_the_numbers_of_sends() -> None:
    with receiving() as stage:
        stage.sync()
        stage.peer.send(send(b"one", 1))
        assert stage.receive()[1] == b"one"


@rule("RFC 5041 section 7.1", "receiver", "After an error later segments are dropped in silence.")
def test_frames_after_a_fault_are_dropped() -> None:
    with receiving() as stage:
        culprit = send(b"x", 7)
        stage.peer.send(culprit, send(b"late", 1), send(b"late", 8))
        stage.is_terminated(culprit, 1, 2, 3)


@rule("RFC 5041 section 7.1", "receiver", "After an error the ULP may send one more message, the Terminate.")
def test_one_message_goes_out_after_a_fault() -> None:
    with receiving() as stage:
        culprit = send(b"x", 7)
        stage.peer.send(culprit)
        assert stage.peer.receive_terminate() == Terminate.about(culprit, 1, 2, 3)
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        stage.end.drain()


@rule("RFC 5041 section 6.2.2", "receiver", "An error of DDP completes everything outstanding in error.")
def test_a_fault_flushes_the_posted_buffers() -> None:
    with receiving(receives=3) as stage:
        stage.peer.send(send(b"x", 7))
        stage.peer.receive_terminate()
        stage.peer.close()
        *events, last = stage.end.drain()
        assert [(event.op, event.status, event.wr_id) for event in events] == [
            (Op.RECEIVE, CompletionStatus.FLUSHED, at) for at in range(3)
        ]
        assert last.op == Op.DISCONNECTED


@rule("RFC 5041 section 5.4", "receiver", "A message whose last segment never comes is not delivered.")
def test_a_message_without_its_last_segment_is_flushed() -> None:
    with receiving(receives=1) as stage:
        stage.peer.send(Untagged(Opcode.SEND, 1, b"half", is_last=False))
        stage.peer.finish()
        stage.peer.read_to_end()
        stage.peer.close()
        first, last = stage.end.drain()
        assert (first.op, first.status) == (Op.RECEIVE, CompletionStatus.FLUSHED)
        assert last.value != 0


@rule("RFC 5041 section 7.2", "receiver", "An error is reported with the header of the segment and its length.")
def test_a_fault_in_a_later_segment_quotes_that_segment() -> None:
    with receiving() as stage:
        culprit = Untagged(Opcode.SEND, 1, b"y" * 33, 11)
        stage.peer.send(Untagged(Opcode.SEND, 1, SEGMENT, is_last=False), culprit)
        expect_terminate(stage.peer, stage.end, Terminate(1, 2, 4, 18 + 33, culprit.header()))
