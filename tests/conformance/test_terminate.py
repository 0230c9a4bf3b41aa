"""The Terminate message: RFC 5040 sections 4.8, 5.4, 6.2 and 7.1. Which error has which code is tested with the rule broken."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, CompletionStatus, Op, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.victim import expect_end
from tests.fabric.wire import Opcode, ReadRequest, Segment, Tagged, Terminate, Untagged, frame, read_response, send, write
from tests.fabric.world import request

# Sender ---------------------------------------------------------------------------------------------------------------


def terminate_for(*segments: Segment | bytes) -> Untagged:
    """What a device answers to these segments, the header of the Terminate message included."""
    with receiving(receives=1) as stage:
        stage.peer.send(*segments)
        answer = stage.peer.receive_untagged()
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        stage.end.drain()
        return answer


@rule("RFC 5040 section 5.4", "sender", "A Terminate is untagged, on queue 2, with MSN 1 and offset 0.")
def test_where_a_terminate_goes() -> None:
    answer = terminate_for(Untagged(0xC, 1))
    assert answer.header().hex() == "4147" + "00000000" + "00000002" + "00000001" + "00000000"


@rule("RFC 5040 section 4.8", "sender", "Layer, error type and error code stand in the first two octets.")
@pytest.mark.parametrize(
    ("culprit", "octets"),
    [(Untagged(0xC, 1), "0206"), (send(b"", 9), "1203"), (write(1, 0, b"x"), "1100"), (replace(send(b""), rdmap_version=0), "0205")],
    ids=["RDMAP", "DDP untagged", "DDP tagged", "RDMAP version"],
)
def test_the_first_octets_name_the_error(culprit: Segment, octets: str) -> None:
    assert terminate_for(culprit).payload[:2].hex() == octets


@rule("RFC 5040 section 4.8", "sender", "The 13 bits behind the three header bits are zero.")
@pytest.mark.parametrize("culprit", [Untagged(0xC, 1), write(1, 0, b"x"), ReadRequest(1, 2, 3, 4, 5).segment()])
def test_reserved_bits_are_zero(culprit: Segment) -> None:
    assert int.from_bytes(terminate_for(culprit).payload[2:4], "big") & 0x1FFF == 0


@rule("RFC 5040 section 4.8", "sender", "An error of MPA comes without headers: M, D and R are 0.")
def test_an_error_of_mpa_quotes_nothing() -> None:
    spoilt = bytearray(send(b"x").frame())
    spoilt[-1] ^= 1
    assert terminate_for(bytes(spoilt)).payload.hex() == "20020000"


@rule("RFC 5040 section 4.8", "sender", "An error of DDP comes with the DDP header, not with one of RDMAP: M and D are 1, R is 0.")
@pytest.mark.parametrize("culprit", [send(b"abc", 9), ReadRequest(1, 2, 3, 4, 5).segment(9)], ids=["send", "read"])
def test_an_error_of_ddp_quotes_the_ddp_header(culprit: Segment) -> None:
    expected = Terminate(1, 2, 3, len(culprit.ulpdu()), culprit.header())
    assert terminate_for(culprit).payload == expected.encode()
    assert len(expected.encode()) == 24


@rule("RFC 5040 section 4.8", "sender", "A tagged header is quoted with its 14 octets.")
def test_a_tagged_header_has_fourteen_octets() -> None:
    culprit = write(1, 2, b"xyz")
    assert terminate_for(culprit).payload.hex() == "1100" + "c000" + "0011" + culprit.header().hex()


@rule("RFC 5040 section 4.8", "sender", "A protection error of a Read comes with both headers: M, D and R are 1.")
def test_a_protection_error_of_a_read_quotes_both_headers() -> None:
    culprit = ReadRequest(1, 2, 3, 4, 5).segment()
    assert terminate_for(culprit).payload.hex() == "0100" + "e000" + "002e" + culprit.ulpdu().hex()


@rule("RFC 5040 section 4.8", "sender", "A protection error of a Send with Invalidate has no RDMAP header to quote.")
def test_a_protection_error_of_an_invalidation_quotes_the_ddp_header() -> None:
    culprit = Untagged(Opcode.SEND_INVALIDATE, 1, b"x", invalidate_stag=1)
    assert terminate_for(culprit).payload.hex() == "0109" + "c000" + "0013" + culprit.header().hex()


@rule("RFC 5040 section 4.8", "sender", "A remote operation error comes with the DDP header and not with one of RDMAP.")
@pytest.mark.parametrize("culprit", [Untagged(0xE, 1, b"xy"), Tagged(0xE, 1, 2, b"xy")], ids=["untagged", "tagged"])
def test_an_operation_error_quotes_the_ddp_header(culprit: Segment) -> None:
    assert terminate_for(culprit).payload == Terminate(0, 2, 6, len(culprit.ulpdu()), culprit.header()).encode()


@rule("RFC 5040 section 4.8", "sender", "The DDP Segment Length is the length that DDP handed up.")
@pytest.mark.parametrize("count", [0, 1, 200, 3000])
def test_the_segment_length_is_that_of_the_ulpdu(count: int) -> None:
    assert Terminate.decode(terminate_for(Untagged(0xC, 1, bytes(count))).payload).segment_length == 18 + count


@rule("RFC 5040 section 4.8", "sender", "The header is quoted as it came, reserved bits and all.")
def test_the_header_is_quoted_octet_for_octet() -> None:
    ulpdu = bytearray(Untagged(0xC, 0x01020304, b"x", 0x05060708, 0x0A0B0C0D).ulpdu())
    ulpdu[0] |= 0x3C
    assert Terminate.decode(terminate_for(frame(bytes(ulpdu))).payload).ddp_header == bytes(ulpdu[:18])


@rule("RFC 5040 section 4.8", "sender", "A Read that ends half-way is quoted with sink, size and source moved to where it stopped.")
def test_a_read_that_loses_its_source_is_quoted_as_far_as_it_went() -> None:
    length = 32 << 20
    with receiving(buffer_bytes=1 << 16) as stage:
        source = stage.it.device.memory(np.full(length, 1, np.uint8), Access.REMOTE_READ)
        asked = ReadRequest(7, 1000, length, source.stag, 0).segment()
        stage.peer.send(asked)
        assert stage.peer.receive(verify=False).opcode == Opcode.READ_RESPONSE
        source.region.close()
        received = 0
        while (segment := stage.peer.receive(verify=False)).opcode == Opcode.READ_RESPONSE:
            received = segment.offset + len(segment.payload) - 1000
        left = ReadRequest(7, 1000 + received, length - received, source.stag, received)
        assert Terminate.decode(segment.payload) == Terminate(0, 1, 0, 46, asked.header(), left.encode())
        stage.peer.close()
        stage.end.drain()


@rule("RFC 5040 section 5.4", "sender", "Nothing is sent behind a Terminate.")
def test_a_terminate_is_the_last_message() -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        length = 16 << 20
        source = stage.it.device.memory(np.zeros(length, np.uint8), Access.NONE)
        stage.end.post(request(Op.WRITE, source, length, to=(1, 0)), request(Op.SEND))
        stage.peer.send(Untagged(0xC, 1), ReadRequest(1, 2, 0, 0, 0).segment())
        while (segment := stage.peer.receive(verify=False)).opcode == Opcode.WRITE:
            pass
        assert segment == Terminate.about(Untagged(0xC, 1), 0, 2, 6).segment()
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        stage.end.drain()


@rule("RFC 5040 section 7.1", "sender", "When several errors come, the first is the one that is told.")
def test_the_first_error_is_told() -> None:
    culprits: list[Segment] = [Untagged(0xC, 1, b"x"), send(b"x", 9), Tagged(Opcode.WRITE, 1, 0, b"x")]
    assert terminate_for(*culprits).payload == Terminate.about(culprits[0], 0, 2, 6).encode()


@rule("RFC 5040 section 7.1", "sender", "An error in making a request sends a Terminate instead of it, without headers.")
@pytest.mark.parametrize("op", [Op.SEND, Op.WRITE, Op.READ])
def test_a_bad_local_request_sends_a_terminate_instead(op: Op) -> None:
    with sending() as stage:
        short = stage.device.memory(8)
        stage.end.post(request(Op.SEND, short, 8, wr_id=1), request(op, short, 9, to=(1, 0), wr_id=2), request(Op.SEND, wr_id=3))
        assert stage.untagged() == send(bytes(8))
        assert stage.untagged() == Untagged(Opcode.TERMINATE, 1, bytes(4))
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        assert stage.end.expect(Op.SEND).wr_id == 1
        assert stage.end.expect(op, CompletionStatus.LOCAL_PROTECTION).wr_id == 2
        assert stage.end.expect(Op.SEND, CompletionStatus.FLUSHED).wr_id == 3
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(0, 0, 0)


@rule("RFC 5040 section 7.1", "sender", "A buffer that cannot take a Send is an error of this side: a Terminate without headers.")
def test_a_bad_receive_buffer_sends_a_terminate() -> None:
    with receiving(receives=0) as stage:
        gone = stage.memory(64, Access.LOCAL_WRITE)
        stage.end.receive_into(gone, 64)
        gone.region.close()
        stage.peer.send(send(b"where to"))
        assert stage.peer.receive_terminate() == Terminate(0, 0, 0)
        stage.peer.close()
        stage.end.expect(Op.RECEIVE, CompletionStatus.LOCAL_PROTECTION)
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(0, 0, 0)


@rule("RFC 5040 section 6.2.1", "sender", "A Terminate is followed by an orderly end of TCP, so that it arrives.")
def test_a_terminate_reaches_a_peer_that_keeps_talking() -> None:
    with receiving() as stage:
        culprit = write(stage.it.unknown_stag, 0, b"x")
        stage.peer.send(culprit)
        noise = write(stage.it.unknown_stag, 0, bytes(60_000)).frame()
        for _ in range(40):
            if not stage.peer.send_while_it_lasts(noise):
                break
        stage.is_terminated(culprit, 1, 1, 0)


# Receiver -------------------------------------------------------------------------------------------------------------


@rule("RFC 5040 section 5.4", "receiver", "A Terminate is delivered to the ULP.")
@pytest.mark.parametrize(("layer", "kind", "code"), [(0, 2, 0xFF), (1, 1, 2), (2, 0, 2), (0, 0, 0)])
def test_a_terminate_is_reported(layer: int, kind: int, code: int) -> None:
    with receiving(receives=0) as stage:
        stage.peer.send(Terminate(layer, kind, code).segment())
        last = stage.end.expect(Op.DISCONNECTED)
        assert (last.value, last.flags) == (terminate_code(layer, kind, code), CompletionFlag.REMOTE)


@rule("RFC 5040 section 4.8", "receiver", "A Terminate is understood with and without the headers that it may quote.")
@pytest.mark.parametrize("culprit", [send(b"x", 9), write(1, 2, b"x")], ids=["untagged", "tagged"])
def test_a_terminate_with_headers_is_reported(culprit: Segment) -> None:
    with receiving(receives=0) as stage:
        stage.peer.send(Terminate.about(culprit, 1, 2, 3).segment())
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(1, 2, 3)


@rule("RFC 5040 section 4.8", "receiver", "The reserved bits of a Terminate are ignored.")
def test_reserved_bits_of_a_terminate_are_ignored() -> None:
    with receiving(receives=0) as stage:
        stage.peer.send(Untagged(Opcode.TERMINATE, 1, bytes.fromhex("02ff1fff")))
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(0, 2, 0xFF)


@rule("RFC 5040 section 5.4", "receiver", "A Terminate takes a buffer of its own queue, none of the ULP.")
def test_a_terminate_needs_no_buffer_of_the_ulp() -> None:
    with receiving(receives=1) as stage:
        stage.peer.send(Terminate(0, 2, 0xFF).segment())
        assert stage.end.expect(Op.RECEIVE, CompletionStatus.FLUSHED).wr_id == 0
        stage.end.expect(Op.DISCONNECTED)


@rule("RFC 5040 section 6.2.1", "receiver", "A Terminate completes everything outstanding in error.")
def test_a_terminate_flushes_what_is_outstanding() -> None:
    with sending() as stage:
        sink = stage.device.memory(64)
        stage.end.receive_into(sink, 8)
        stage.end.post(request(Op.READ, sink, 8, wr_id=1), request(Op.FETCH_ADD, wr_id=2))
        stage.untagged()
        stage.untagged()
        stage.peer.send(Terminate(1, 1, 0).segment())
        for op in (Op.READ, Op.FETCH_ADD, Op.RECEIVE):
            stage.end.expect(op, CompletionStatus.FLUSHED)
        assert stage.end.expect(Op.DISCONNECTED).flags == CompletionFlag.REMOTE


@rule("RFC 5040 section 7", "receiver", "A Terminate about a Read fails that Read, and the ULP learns that it was refused.")
def test_a_terminate_about_a_read_names_the_read() -> None:
    with sending() as stage:
        stage.end.post(request(Op.READ, wr_id=1), request(Op.READ, wr_id=2))
        asked = stage.untagged()
        stage.peer.send(Terminate.about(asked, 0, 1, 1, with_rdma=True).segment())
        assert stage.end.expect(Op.READ, CompletionStatus.REMOTE_ACCESS).wr_id == 1
        assert stage.end.expect(Op.READ, CompletionStatus.FLUSHED).wr_id == 2
        stage.end.expect(Op.DISCONNECTED)


@rule("RFC 5040 section 5.4", "receiver", "What comes behind a Terminate is not heard.")
def test_nothing_behind_a_terminate_is_heard() -> None:
    with receiving() as stage:
        late: list[Segment] = [replace(Terminate(1, 1, 1).segment(), msn=2), write(stage.it.writable.stag, 0, b"late"), send(b"late")]
        stage.peer.send_while_it_lasts(Terminate(0, 2, 0xFF).segment(), *late)
        stage.peer.read_to_end()
        *events, last = stage.end.drain()
        assert last.value == terminate_code(0, 2, 0xFF)
        assert all(event.status == CompletionStatus.FLUSHED for event in events)


@rule("RFC 5040 section 5.4", "receiver", "A Terminate that makes no sense ends the stream all the same, with an error.")
@pytest.mark.parametrize("payload", [b"", b"\x01", bytes(3), b"\0\0\xe0\0" + bytes(2), b"\xff\xff\xff\xff" + bytes(60)])
def test_a_terminate_that_makes_no_sense_ends_the_stream(payload: bytes) -> None:
    with receiving() as stage:
        stage.peer.send(Untagged(Opcode.TERMINATE, 1, payload))
        stage.peer.read_to_end()
        stage.peer.close()
        assert stage.end.drain()[-1].value != 0


@rule("RFC 5040 section 6.2.1", "receiver", "What was answered before a Terminate stays done.")
def test_an_answer_before_a_terminate_counts() -> None:
    with sending() as stage:
        sink = stage.device.memory(8)
        stage.end.post(request(Op.READ, sink, 8))
        stage.untagged()
        stage.peer.send(read_response(sink.stag, 0, b"answered"), Terminate(0, 2, 7).segment())
        stage.end.expect(Op.READ)
        assert sink.read() == b"answered"
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(0, 2, 7)


@rule("RFC 5040 section 6.2", "receiver", "A stream that is lost without a Terminate is reported too.")
def test_a_lost_peer_flushes_and_names_the_loss() -> None:
    with sending() as stage:
        stage.end.post(request(Op.FETCH_ADD))
        stage.untagged()
        stage.peer.reset()
        stage.end.expect(Op.FETCH_ADD, CompletionStatus.FLUSHED)
        expect_end(stage.end, terminate_code(2, 0, 1))
