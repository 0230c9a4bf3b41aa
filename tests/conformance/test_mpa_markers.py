"""Markers: RFC 5044 sections 4.2 and 4.3, for a peer that asks for them. The device itself never does."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest

from kbtp_core.fabric.api import Access, Op
from tests.conformance.rule import rule
from tests.conformance.stage import Sending, receiving, sending
from tests.fabric.peer import closing, dial
from tests.fabric.wire import ReadRequest, StartUp, Terminate, crc32c, read_response, send, write
from tests.fabric.world import node, pattern, request

MARKED = StartUp(is_reply=True, wants_markers=True)
FRAME_492 = 492 - 4 - 2 - 18 - 4
"""Payload of a first frame that ends, its marker counted, at stream offset 492: RFC 5044 figure 6 follows it."""


def stream(stage: Sending, count: int) -> bytes:
    """The next `count` octets of the device's stream as they are."""
    return stage.peer.receive_octets(count)


def post_sends(stage: Sending, lengths: Sequence[int]) -> None:
    """Sends of zeros of these lengths."""
    source = stage.device.memory(max(lengths))
    stage.end.post(*(request(Op.SEND, source, length) for length in lengths))


@rule("RFC 5044 section 7.1.1", "sender", "A Responder inserts markers when M is 1 in the Request.")
def test_a_request_with_m_gets_markers() -> None:
    with receiving(request=StartUp(wants_markers=True)) as stage:
        stage.end.post(request(Op.WRITE))
        assert stage.peer.receive_octets(4 + 20) == bytes(4) + bytes.fromhex("000ec140") + bytes(12) + struct.pack(
            "<I", crc32c(bytes(4) + bytes.fromhex("000ec140") + bytes(12))
        )


@rule("RFC 5044 section 4.3", "sender", "Every MPA sender can generate markers when its peer declares that it needs them.")
def test_a_reply_with_m_gets_markers() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [2000])
        assert len(stage.untagged().payload) == 2000


@rule("RFC 5044 section 7.1.1", "sender", "Without M = 1 from the peer no marker is added.")
def test_without_m_there_are_no_markers() -> None:
    with sending() as stage:
        post_sends(stage, [2000])
        assert stream(stage, 2)[:2] == struct.pack(">H", 2018)
        assert len(stream(stage, 2018 + 4)) == 2022
        stage.peer.expect_silence(0.02)


@rule("RFC 5044 section 7.1.1", "sender", "M is 0 in the start-up frames of an endpoint that does not need markers.")
def test_the_device_does_not_ask_for_markers() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(wants_markers=True).encode())
        device.serve().qp.accept()
        assert not peer.receive_start().wants_markers


@rule("RFC 5044 section 7.1", "sender", "The start-up frames carry no markers, however long they are.")
def test_start_up_frames_have_no_markers() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(wants_markers=True, private_data=bytes(508)).encode())
        device.next_request().create_qp(device.pd, device.cq).accept(b"p" * 252)
        assert peer.receive_start().private_data == b"p" * 252


@rule("RFC 5044 section 7.1.2", "sender", "With markers the first octets of full operation are the marker 00000000.")
def test_the_first_octets_are_a_zero_marker() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [4])
        assert stream(stage, 8) == bytes(4) + bytes.fromhex("0016" + "4143")


@rule("RFC 5044 section 4.3", "sender", "A marker stands at every 512th octet of the stream, counted from the first marker.")
def test_markers_come_every_512_octets() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [5000])
        octets = stream(stage, 512 * 9 + 4)
        markers = [octets[at : at + 4] for at in range(0, len(octets), 512)]
        assert markers == [bytes(4), *(struct.pack(">HH", 0, 512 * n - 4) for n in range(1, 10))]


@rule("RFC 5044 section 4.2", "sender", "FPDUPTR counts from the first octet of ULPDU_Length to the first octet of the marker.")
def test_a_marker_points_to_the_start_of_its_frame() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [FRAME_492, 24])
        octets = stream(stage, 520)
        assert octets[512:516] == bytes.fromhex("00000014")
        assert octets[512 - 0x14 : 512 - 0x14 + 2] == bytes.fromhex("002a")


@rule("RFC 5044 section 4.2", "sender", "The reserved half of a marker and the two low bits of FPDUPTR are zero.")
def test_reserved_bits_of_markers_are_zero() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [1, 2, 3, 333, 777, 1001, 55, 4097])
        octets = stream(stage, 4096)
        for at in range(0, len(octets), 512):
            reserved, pointer = struct.unpack_from(">HH", octets, at)
            assert (reserved, pointer % 4) == (0, 0)


@rule("RFC 5044 section 4.3", "sender", "A marker between two frames has FPDUPTR 0.")
def test_a_marker_between_two_frames_is_zero() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [512 - 4 - 24, 4])
        octets = stream(stage, 520)
        assert octets[512:520] == bytes(4) + bytes.fromhex("00164143")


@rule("RFC 5044 section 4.3", "sender", "All markers of one frame point to the same octet, its first.")
@pytest.mark.parametrize("mulpdu", [1500, 61458, 64768])
def test_all_markers_of_a_frame_point_to_its_start(mulpdu: int) -> None:
    with sending(MARKED, mulpdu=mulpdu) as stage:
        content = pattern(200_001)
        stage.end.post(request(Op.WRITE, stage.device.memory(content, Access.NONE), 200_001, to=(1, 0)))
        received = b""
        while len(received) < 200_001:
            received += stage.tagged().payload  # the peer checks every marker
        assert received == content.tobytes()


@rule("RFC 5044 section 4.1", "sender", "ULPDU_Length does not count markers.")
def test_the_length_does_not_count_markers() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [3000])
        assert stream(stage, 6)[4:] == struct.pack(">H", 3018)


@rule("RFC 5044 section 4.4", "sender", "A marker right before ULPDU_Length is under the CRC of the frame that it precedes.")
def test_the_frame_of_figure_5_leaves_octet_for_octet() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [24])
        figure = bytes(4) + bytes.fromhex("002a4143") + bytes(8) + bytes.fromhex("00000001") + bytes(28) + bytes.fromhex("52239983")
        assert stream(stage, len(figure)).hex() == figure.hex()


@rule("RFC 5044 section 4.4", "sender", "A marker inside a frame is under its CRC.")
def test_the_frame_of_figure_6_leaves_octet_for_octet() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [FRAME_492, 24])
        figure = bytes.fromhex("002a4143") + bytes(8) + bytes.fromhex("00000002") + bytes(4) + bytes.fromhex("00000014") + bytes(24)
        assert stream(stage, 492 + 52)[492:].hex() == (figure + bytes.fromhex("84925898")).hex()


@rule("RFC 5044 section 4.4", "sender", "A marker between the pad and the CRC is under that CRC.")
def test_a_marker_before_the_crc_is_covered() -> None:
    with sending(MARKED) as stage:
        post_sends(stage, [512 - 4 - 20])
        octets = stream(stage, 520)
        assert octets[512:516] == struct.pack(">HH", 0, 508)
        assert octets[516:] == struct.pack("<I", crc32c(octets[:516]))


@rule("RFC 5044 section 4.3", "sender", "Markers are counted on through every kind of message, the Terminate too.")
def test_responses_and_the_terminate_have_markers_too() -> None:
    with receiving(request=StartUp(wants_markers=True)) as stage:
        source = stage.memory(b"r" * 1000, Access.REMOTE_READ)
        stage.peer.send(ReadRequest(7, 8, 1000, source.stag, 0).segment(1))
        assert stage.peer.receive() == read_response(7, 8, b"r" * 1000)
        culprit = write(stage.it.unknown_stag, 0, b"x")
        stage.peer.send(culprit)
        assert stage.peer.receive_terminate() == Terminate.about(culprit, 1, 1, 0)
        stage.peer.close()
        stage.end.drain()


@rule(
    "RFC 5044 section 7.1.1", "receiver", "Each direction has its own markers: a peer that asks for them sends none to one that does not."
)
def test_a_peer_that_asks_for_markers_is_read_without_them() -> None:
    with receiving(request=StartUp(wants_markers=True)) as stage:
        stage.peer.send(send(b"n" * 200, 1), send(b"o" * 250, 2))
        assert [stage.receive()[1], stage.receive()[1]] == [b"n" * 200, b"o" * 250]
