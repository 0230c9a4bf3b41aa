"""The oracle itself: every golden frame and every CRC vector, before it judges anybody."""

from __future__ import annotations

import socket

import pytest

from tests.fabric import golden
from tests.fabric.peer import Peer
from tests.fabric.wire import (
    AtomicRequest,
    AtomicResponse,
    Enhanced,
    ReadRequest,
    Segment,
    StartUp,
    Terminate,
    Untagged,
    WireError,
    crc32c,
    crc_field,
    decode_segment,
    frame,
    unframe,
)

FIGURE_5 = bytes.fromhex("002a4143") + bytes(8) + bytes.fromhex("00000001") + bytes(4 + 24)
FIGURE_6 = bytes.fromhex("002a4143") + bytes(8) + bytes.fromhex("00000002") + bytes(4)
ISCSI_PDU = bytes.fromhex("01c00000000000000000000000000000140000000000040000000014000000182800000000000000" + "0200000000000000")


@pytest.mark.parametrize(
    ("covered", "field"),
    [
        (b"123456789", "839206e3"),
        (bytes(32), "aa36918a"),
        (b"\xff" * 32, "43aba862"),
        (bytes(range(32)), "4e79dd46"),
        (bytes(reversed(range(32))), "5cdb3f11"),
        (ISCSI_PDU, "563a96d9"),
        (bytes(4) + FIGURE_5, "52239983"),
        (FIGURE_6 + bytes.fromhex("00000014") + bytes(24), "84925898"),
        (FIGURE_5, "b7243ec3"),
        (FIGURE_6 + bytes(24), "290fbede"),
    ],
)
def test_the_crc_of_a_published_vector_is_the_published_field(covered: bytes, field: str) -> None:
    assert crc_field(covered).hex() == field
    assert crc32c(covered + crc_field(covered)) == 0x48674BC7


@pytest.mark.parametrize("name", golden.FRAMES)
def test_the_fields_of_a_golden_frame_encode_to_its_octets(name: str) -> None:
    octets, segment = golden.octets(name), golden.FRAMES[name][1]
    assert segment.frame() == octets
    assert len(octets) % 4 == 0


@pytest.mark.parametrize("name", golden.FRAMES)
def test_a_golden_frame_decodes_to_its_fields(name: str) -> None:
    assert decode_segment(unframe(golden.octets(name))) == golden.FRAMES[name][1]


def test_the_rdmap_headers_decode_to_their_fields() -> None:
    def payload(name: str) -> bytes:
        return golden.FRAMES[name][1].payload

    assert ReadRequest.decode(payload("read_request")) == golden.READ
    assert AtomicRequest.decode(payload("fetch_add")) == golden.FETCH_ADD
    assert AtomicRequest.decode(payload("cmp_swap")) == golden.CMP_SWAP
    assert AtomicResponse.decode(payload("cmp_swap_response")) == AtomicResponse(0x78, 2)
    assert Terminate.decode(payload("terminate")) == Terminate(0, 1, 1, 46, golden.BAD_READ.segment(4).header(), golden.BAD_READ.encode())


def test_the_golden_start_up_frames_encode_and_decode() -> None:
    for octets, fields in (
        (golden.MPA_REQUEST, StartUp()),
        (golden.MPA_REPLY, StartUp(is_reply=True)),
        (golden.MPA_REJECT, StartUp(is_reply=True, is_rejected=True)),
    ):
        assert fields.encode() == octets
        assert StartUp.decode(octets) == fields


def test_the_enhanced_flags_stand_where_rfc_6581_puts_them() -> None:
    enhanced = Enhanced(16, 16, is_peer_to_peer=True, offers_write=True, offers_read=True)
    assert enhanced.encode().hex() == "8010c010"
    assert Enhanced.decode(enhanced.encode()) == enhanced
    assert Enhanced.decode(bytes.fromhex("40040002")) == Enhanced(4, 2, offers_send=True)


def test_a_revision_1_frame_has_private_data_only() -> None:
    frame_1 = StartUp(enhanced=None, revision=1, private_data=b"abc", wants_markers=True, wants_crc=False)
    assert frame_1.encode() == b"MPA ID Req Frame" + bytes.fromhex("80010003") + b"abc"
    assert StartUp.decode(frame_1.encode()) == frame_1


@pytest.mark.parametrize("payload_bytes", range(5))
def test_frames_are_padded_to_four_octets_with_zeros(payload_bytes: int) -> None:
    octets = Untagged(3, 1, b"p" * payload_bytes).frame()
    assert len(octets) == 24 + (payload_bytes + 3) // 4 * 4
    assert unframe(octets)[18:] == b"p" * payload_bytes


def test_a_frame_with_a_wrong_crc_or_pad_is_refused() -> None:
    octets = bytearray(golden.octets("send"))
    octets[20] ^= 1
    with pytest.raises(WireError, match="CRC"):
        unframe(bytes(octets))
    covered = bytes.fromhex("0013") + bytes(19) + b"\x01\x00\x00"
    with pytest.raises(WireError, match="pad"):
        unframe(covered + crc_field(covered))


def test_a_terminate_without_headers_has_four_octets() -> None:
    assert Terminate(2, 0, 2).encode().hex() == "20020000"
    assert Terminate.decode(bytes.fromhex("20020000")) == Terminate(2, 0, 2)


def test_a_terminate_about_a_tagged_frame_has_twenty_octets() -> None:
    culprit: Segment = golden.FRAMES["write"][1]
    octets = Terminate.about(culprit, 1, 1, 0).encode()
    assert octets == bytes.fromhex("1100c000002f") + culprit.header()
    assert len(octets) == 20


def _through_a_socket(octets: bytes, *, with_markers: bool) -> Peer:
    left, right = socket.socketpair()
    left.sendall(octets)
    left.close()
    peer = Peer(right, timeout_s=1.0)
    peer.reads_markers = with_markers
    return peer


def test_the_stream_of_rfc_5044_figure_5_is_read_through_its_marker() -> None:
    peer = _through_a_socket(bytes(4) + FIGURE_5 + bytes.fromhex("52239983"), with_markers=True)
    assert peer.receive() == Untagged(3, 1, bytes(24))
    peer.close()


def test_a_marker_inside_a_frame_points_to_its_start() -> None:
    filler = frame(bytes.fromhex("4143") + bytes(4 + 4) + bytes.fromhex("00000001") + bytes(4 + 462))
    first = bytes(4) + filler[:-4]
    first += crc_field(first)
    second = FIGURE_6 + bytes.fromhex("00000014") + bytes(24) + bytes.fromhex("84925898")
    assert len(first) == 512 - 0x14
    peer = _through_a_socket(first + second, with_markers=True)
    assert peer.receive() == Untagged(3, 1, bytes(462))
    assert peer.receive() == Untagged(3, 2, bytes(24))
    peer.close()


def test_a_marker_that_points_elsewhere_is_refused() -> None:
    peer = _through_a_socket(bytes.fromhex("00000004") + FIGURE_5 + bytes(4), with_markers=True)
    with pytest.raises(WireError, match="marker 00000004 at 0"):
        peer.receive()
    peer.close()


def test_a_read_past_the_end_of_the_stream_says_what_came() -> None:
    peer = _through_a_socket(b"\x00\x2a\x41", with_markers=False)
    with pytest.raises(EOFError, match="the stream ended after 41"):
        peer.receive_frame()
    peer.close()
