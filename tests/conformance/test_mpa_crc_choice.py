"""CRCs are off only by an explicit choice of both sides: RFC 5044 sections 4.1, 4.4 and 7.1.1."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kbtp_core.fabric.api import Access, Op, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import LIMITS
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import StartUp, Terminate, crc_field, read_response, send, write
from tests.fabric.world import End, Node, node, request

WITHOUT = StartUp(wants_crc=False)


@contextmanager
def responder(frame: StartUp) -> Iterator[tuple[Node, End, Peer, StartUp]]:
    """A device that would do without CRCs has accepted `frame`; the fourth is its Reply."""
    with node(wants_crc=False) as device, closing(dial(device.listen())) as peer:
        peer.send(frame.encode())
        end = device.serve(LIMITS)
        end.receive_into(device.memory(128), 64, count=2)
        end.qp.accept()
        reply = peer.receive_start()
        peer.send(write(0, 0, b""))
        end.expect(Op.CONNECTED)
        yield device, end, peer, reply


@contextmanager
def initiator(reply: StartUp) -> Iterator[tuple[Node, End, Peer, StartUp]]:
    """A device that would do without CRCs was answered with `reply`; the fourth is its Request."""
    with node(wants_crc=False) as device, listening() as listener:
        end = device.create_qp(LIMITS)
        end.receive_into(device.memory(128), 64, count=2)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            asked = peer.answer(reply)
            end.expect(Op.CONNECTED)
            yield device, end, peer, asked


def spoilt(octets: bytes) -> bytes:
    """The frame with another CRC field."""
    return octets[:-4] + bytes(octet ^ 0xFF for octet in octets[-4:])


@rule("RFC 5044 section 4.4", "sender", "A Request has C = 0 only on an explicit wish of the administrator.")
def test_a_request_without_the_wish_for_crcs() -> None:
    with initiator(StartUp(is_reply=True, wants_crc=False)) as (_, _, _, asked):
        assert not asked.wants_crc


@rule("RFC 5044 section 4.4", "sender", "A Reply has C = 0 only on an explicit wish of the administrator.")
@pytest.mark.parametrize("wants_crc", [True, False])
def test_a_reply_without_the_wish_for_crcs(wants_crc: bool) -> None:
    with responder(StartUp(wants_crc=wants_crc)) as (_, _, _, reply):
        assert not reply.wants_crc


@rule("RFC 5044 section 4.4", "receiver", "A Responder that wants no CRCs checks them when the Initiator does.")
def test_a_responder_checks_crcs_for_an_initiator_that_wants_them() -> None:
    with responder(StartUp()) as (_, end, peer, _):
        peer.send(spoilt(send(b"spoilt").frame()))
        assert peer.receive_terminate() == Terminate(2, 0, 2)
        peer.close()
        assert end.drain()[-1].value == terminate_code(2, 0, 2)


@rule("RFC 5044 section 4.4", "receiver", "An Initiator that wants no CRCs checks them when the Responder does.")
def test_an_initiator_checks_crcs_for_a_responder_that_wants_them() -> None:
    with initiator(StartUp(is_reply=True)) as (_, end, peer, _):
        peer.send(spoilt(send(b"spoilt").frame()))
        assert peer.receive_terminate() == Terminate(2, 0, 2)
        peer.close()
        assert end.drain()[-1].value == terminate_code(2, 0, 2)


@rule("RFC 5044 section 7.1.1", "sender", "CRCs are generated when the peer alone asked for them.")
def test_crcs_are_generated_for_a_peer_that_wants_them() -> None:
    with responder(StartUp()) as (device, end, peer, _):
        end.post(request(Op.SEND, device.memory(b"abc"), 3))
        octets = peer.receive_octets(28)
        assert octets[-4:] == crc_field(octets[:-4])


@rule("RFC 5044 section 7.1.1", "receiver", "With C = 0 in both frames a Responder does not check the CRC, whatever it is.")
@pytest.mark.parametrize("field", [bytes(4), b"\xff" * 4, b"junk"])
def test_a_responder_does_not_check_crcs_that_nobody_wants(field: bytes) -> None:
    with responder(WITHOUT) as (_, end, peer, _):
        peer.send(send(b"first", 1).frame()[:-4] + field, send(b"second", 2))
        assert [end.expect(Op.RECEIVE).length for _ in range(2)] == [5, 6]


@rule("RFC 5044 section 7.1.1", "receiver", "With C = 0 in both frames an Initiator does not check the CRC, whatever it is.")
def test_an_initiator_does_not_check_crcs_that_nobody_wants() -> None:
    with initiator(StartUp(is_reply=True, wants_crc=False)) as (device, end, peer, _):
        sink = device.memory(40_000)
        end.post(request(Op.READ, sink, 40_000))
        peer.receive(verify=False)
        octets = spoilt(read_response(sink.stag, 0, b"r" * 40_000).frame())
        for at in range(0, len(octets), 9_000):
            peer.send(octets[at : at + 9_000])
        end.expect(Op.READ)
        assert sink.read() == b"r" * 40_000


@rule("RFC 5044 section 4.1", "sender", "The CRC field is there even when nobody checks it.")
def test_the_crc_field_is_always_there() -> None:
    with responder(WITHOUT) as (device, end, peer, _):
        end.post(request(Op.SEND, device.memory(b"abc"), 3), request(Op.WRITE))
        octets = peer.receive_octets(28)
        assert octets[:-4] == send(b"abc").frame()[:-4]
        assert octets[-4:] == bytes(4)
        assert peer.receive(verify=False) == write(0, 0, b"")


@rule("RFC 5044 section 4.4", "receiver", "Without CRCs all other checks stay as they are.")
def test_other_checks_do_not_need_crcs() -> None:
    with responder(WITHOUT) as (device, end, peer, _):
        target = device.memory(8, Access.REMOTE_WRITE)
        culprit = write(target.stag, 1, b"x" * 8)
        peer.send(spoilt(culprit.frame()))
        assert peer.receive_terminate(skip=True) == Terminate.about(culprit, 1, 1, 1)
        peer.close()
        assert end.drain()[-1].value == terminate_code(1, 1, 1)
        assert target.read() == bytes(8)


@rule("RFC 5044 section 4.4", "sender", "A rejection has the same C as an acceptance would have.")
def test_a_rejection_says_the_same() -> None:
    with node(wants_crc=False) as device, closing(dial(device.listen())) as peer:
        peer.send(WITHOUT.encode())
        device.next_request().reject()
        assert not peer.receive_start().wants_crc
