"""Frames: RFC 5044 sections 4.1, 4.4, 4.5, 5, 6 and 8."""

from __future__ import annotations

import struct

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.victim import LENGTH, expect_end, expect_terminate
from tests.fabric.wire import Opcode, Tagged, Terminate, Untagged, crc_field, frame, send, write
from tests.fabric.world import pattern, request


def spoilt(octets: bytes, at: int = -1) -> bytes:
    """The frame with one bit changed."""
    changed = bytearray(octets)
    changed[at] ^= 1
    return bytes(changed)


# Sender ---------------------------------------------------------------------------------------------------------------


@rule("RFC 5044 section 4.1", "sender", "ULPDU_Length counts the octets of the ULPDU alone: not itself, the pad or the CRC.")
@pytest.mark.parametrize("count", range(5))
def test_the_length_counts_the_ulpdu(count: int) -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(b"abcde"), count))
        assert struct.unpack(">H", stage.peer.receive_octets(2)) == (18 + count,)


@rule("RFC 5044 section 4.1", "sender", "The pad makes the frame a multiple of four octets.")
@pytest.mark.parametrize("count", range(5))
def test_a_frame_is_a_multiple_of_four(count: int) -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(b"abcde"), count), request(Op.WRITE))
        first = stage.peer.receive_octets(2 + 18 + (count + 3) // 4 * 4 + 4)
        assert len(first) % 4 == 0
        assert stage.peer.receive_octets(4).hex() == "000ec140"


@rule("RFC 5044 section 4.1", "sender", "Pad octets are zero.")
@pytest.mark.parametrize("count", [1, 2, 3])
def test_pad_octets_are_zero(count: int) -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(b"\xff" * 8), count))
        octets = stage.peer.receive_octets(2 + 18 + 4)
        assert octets[20:] == b"\xff" * count + bytes(4 - count)


@rule("RFC 5044 section 4.4", "sender", "The CRC-32C stands behind the pad, least significant octet first.")
def test_the_crc_of_a_published_frame() -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND, stage.device.memory(24), 24))
        figure_5_unmarked = bytes.fromhex("002a4143") + bytes(8) + bytes.fromhex("00000001") + bytes(28) + bytes.fromhex("b7243ec3")
        assert stage.peer.receive_octets(48).hex() == figure_5_unmarked.hex()


@rule("RFC 5044 section 4.4", "sender", "The CRC covers everything from ULPDU_Length to the last octet of the pad.")
@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 4096, 61441])
def test_the_crc_covers_the_whole_frame(count: int) -> None:
    with sending(mulpdu=64768) as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(pattern(max(count, 1)), Access.NONE), count, to=(1, 0)))
        received = 0
        while True:
            head = stage.peer.receive_octets(2)
            (length,) = struct.unpack(">H", head)
            covered = head + stage.peer.receive_octets(length + -(2 + length) % 4)
            assert stage.peer.receive_octets(4) == crc_field(covered)
            received += length - 14
            if covered[2] & 0x40:
                break
        assert received == count


@rule("RFC 5044 section 4.5", "sender", "No ULPDU is larger than MULPDU.")
@pytest.mark.parametrize("mulpdu", [128, 1500, 61458, 64768])
def test_no_ulpdu_is_larger_than_the_limit(mulpdu: int) -> None:
    with sending(mulpdu=mulpdu) as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(200_000), 200_000, to=(1, 0)))
        received = 0
        while received < 200_000:
            segment = stage.tagged()
            assert len(segment.ulpdu()) <= mulpdu
            received += len(segment.payload)


@rule("RFC 5044 section 4.5", "sender", "ULPDUs are as large as MULPDU allows, but for the alignment of pages.")
@pytest.mark.parametrize("mulpdu", [128, 1500])
def test_all_but_the_last_ulpdu_fill_the_limit(mulpdu: int) -> None:
    with sending(mulpdu=mulpdu) as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(10_000), 10_000, to=(1, 0)))
        while not (segment := stage.tagged()).is_last:
            assert len(segment.ulpdu()) == mulpdu


# Receiver -------------------------------------------------------------------------------------------------------------


@rule("RFC 5044 section 4.1", "receiver", "Pad octets are not looked at, but the CRC covers them.")
def test_pad_octets_are_not_judged() -> None:
    with receiving() as stage:
        covered = send(b"pad").frame()[:-5] + b"\x5a"
        stage.peer.send(covered + crc_field(covered))
        assert stage.receive()[1] == b"pad"


@rule("RFC 5044 section 4.3", "receiver", "The ULPDU reaches DDP without length, pad and CRC, and its bounds are kept.")
def test_frames_in_one_piece_stay_apart() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"one", 1), send(b"", 2), send(b"three", 3))
        assert [stage.receive()[1] for _ in range(3)] == [b"one", b"", b"three"]


@rule("RFC 5044 section 5.1", "receiver", "Where frames lie in TCP segments changes nothing.")
def test_a_frame_in_single_octets_is_one_frame() -> None:
    with receiving() as stage:
        for octet in send(b"drop by drop").frame():
            stage.peer.send(bytes([octet]))
        assert stage.receive()[1] == b"drop by drop"


@rule("RFC 5044 section 6", "receiver", "A ULPDU goes to DDP only when its whole frame is there.")
@pytest.mark.parametrize("missing", [1, 4, 5])
def test_a_frame_without_its_end_is_not_delivered(missing: int) -> None:
    with receiving() as stage:
        octets = send(b"whole").frame()
        stage.peer.send(octets[:-missing])
        assert stage.end.is_idle(0.05)
        stage.peer.send(octets[-missing:])
        assert stage.receive()[1] == b"whole"


@rule("RFC 5044 section 5.2", "receiver", "ULPDU_Length finds the next frame, whatever its size.")
@pytest.mark.parametrize("length", [1, 5000, 64768 - 14])
def test_the_length_finds_the_next_frame(length: int) -> None:
    with receiving() as stage:
        target = stage.memory(length, Access.REMOTE_WRITE)
        content = pattern(length).tobytes()
        stage.peer.send(write(target.stag, 0, content), send(b"next"))
        assert stage.receive()[1] == b"next"
        assert target.read() == content


@rule("RFC 5044 section 4.4", "receiver", "A frame whose CRC does not match is invalid: it is not delivered.")
@pytest.mark.parametrize("at", [1, 3, 10, 20, 25, -5, -1], ids=["length", "opcode", "header", "payload", "more", "pad", "crc"])
def test_one_wrong_bit_anywhere_is_found(at: int) -> None:
    with receiving() as stage:
        octets = spoilt(send(b"123456").frame(), at)
        stage.peer.send(octets, b"" if at != 1 else bytes(4))  # a longer frame swallows what follows
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 6", "receiver", "No field of a header is believed before the CRC is verified.")
def test_a_header_is_not_believed_before_its_crc() -> None:
    with receiving() as stage:
        stage.peer.send(spoilt(write(stage.it.unknown_stag, 0, b"x" * 100).frame(), 50))
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 8", "receiver", "A CRC that does not match is reported with code 2.")
def test_a_bad_crc_is_code_2() -> None:
    with receiving() as stage:
        stage.peer.send(spoilt(send(b"spoilt").frame()))
        assert stage.peer.receive_untagged().payload.hex() == "20020000"
        stage.peer.close()
        expect_end(stage.end, terminate_code(2, 0, 2))
        assert stage.end.qp.stats()["crc_errors"] == 1


@rule("RFC 5044 section 8", "receiver", "After an error no frame of that direction is delivered any more.")
def test_nothing_is_delivered_after_a_bad_crc() -> None:
    with receiving() as stage:
        stage.peer.send(spoilt(send(b"spoilt", 1).frame()), write(stage.it.writable.stag, 0, b"late"), send(b"late", 1))
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 8", "receiver", "MPA leaves TCP open after a bad CRC, so that the error can be told on the other direction.")
def test_the_connection_outlives_a_bad_crc_for_the_terminate() -> None:
    with receiving() as stage:
        stage.peer.send(spoilt(send(b"spoilt").frame()))
        assert stage.peer.receive_terminate() == Terminate(2, 0, 2)
        assert stage.peer.send_while_it_lasts(send(b"still open"))
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        expect_end(stage.end, terminate_code(2, 0, 2))


@rule("RFC 5044 section 4.4", "receiver", "Every frame is checked, a later segment of a message too.")
def test_a_bad_crc_on_a_later_segment_delivers_nothing() -> None:
    with receiving() as stage:
        second = spoilt(Untagged(Opcode.SEND, 1, b"b" * 60, 60).frame(), 30)
        stage.peer.send(Untagged(Opcode.SEND, 1, b"a" * 60, is_last=False), second)
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 4.4", "receiver", "A large payload that is placed while it arrives is of no use before its CRC is good.")
def test_a_bad_crc_on_a_large_segment_delivers_nothing() -> None:
    with receiving(receives=0) as stage:
        inbox = stage.memory(40_000, Access.LOCAL_WRITE)
        stage.end.receive_into(inbox, 40_000)
        octets = spoilt(send(b"x" * 40_000).frame(), 30_000)
        for at in range(0, len(octets), 10_000):
            stage.peer.send(octets[at : at + 10_000])
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 8", "receiver", "A connection that is reset is reported with code 1.")
def test_a_reset_is_code_1() -> None:
    with receiving() as stage:
        stage.peer.reset()
        expect_end(stage.end, terminate_code(2, 0, 1))


@rule("RFC 5044 section 8", "receiver", "A stream that ends inside a frame is lost: code 1, and nothing of the frame is delivered.")
def test_a_stream_that_ends_inside_a_frame_is_code_1() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"whole"), send(b"never whole", 2).frame()[:-1])
        assert stage.receive()[1] == b"whole"
        stage.peer.finish()
        stage.peer.read_to_end()
        stage.peer.close()
        expect_end(stage.end, terminate_code(2, 0, 1))


@rule("RFC 5041 section 7.1", "receiver", "A frame too short for a DDP header is an error.")
@pytest.mark.parametrize("ulpdu", [b"", b"\x41", b"\x41\x43" + bytes(15), b"\xc1\x40" + bytes(11)], ids=["0", "1", "17", "13 tagged"])
def test_a_frame_too_short_for_its_header_is_refused(ulpdu: bytes) -> None:
    with receiving() as stage:
        stage.peer.send(frame(ulpdu))
        assert stage.peer.receive_terminate().layer == 1
        stage.peer.close()
        assert stage.end.drain()[-1].value == terminate_code(1, 0, 0)


@rule("RFC 5041 section 7.1", "receiver", "The largest lengths that 16 bits hold are no way past the bounds.")
@pytest.mark.parametrize("length", [64769, 65535])
def test_the_largest_lengths_are_checked_like_any(length: int) -> None:
    with receiving() as stage:
        culprit = write(stage.it.writable.stag, LENGTH - 8, bytes(length - 14))
        stage.peer.send(culprit)
        assert stage.peer.receive_terminate() == Terminate.about(culprit, 1, 1, 1)
        stage.peer.close()
        expect_end(stage.end, terminate_code(1, 1, 1))


@rule("RFC 5044 section 7.1.2", "receiver", "A long silence inside a frame holds up nobody else.")
def test_a_frame_that_never_ends_costs_only_its_connection() -> None:
    with receiving() as stage:
        stage.peer.send(b"\xff\xff" + Tagged(Opcode.WRITE, 1, 0).ulpdu())
        stage.it.check()
        stage.peer.close()
        *events, last = stage.end.drain()
        assert last.value == terminate_code(2, 0, 1)
        assert all(event.status == CompletionStatus.FLUSHED for event in events)


@rule("RFC 5044 section 5.1", "receiver", "Many frames in one TCP segment are many frames.")
def test_many_frames_in_one_piece_are_all_delivered() -> None:
    with receiving(receives=0) as stage:
        inbox = stage.memory(200 * 8, Access.LOCAL_WRITE)
        stage.end.receive_into(inbox, 8, count=200)
        stage.peer.send(*(send(b"%07d" % at, at + 1) for at in range(200)))
        assert [stage.end.expect(Op.RECEIVE).wr_id for _ in range(200)] == list(range(200))
        assert inbox.read() == b"".join(b"%07d\0" % at for at in range(200))
