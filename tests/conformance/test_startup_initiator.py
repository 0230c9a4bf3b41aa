"""Start-up of the device as Initiator: RFC 5044 section 7.1 and the frames of RFC 6581 section 6."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kbtp_core.fabric.api import CompletionFlag, CompletionStatus, Op, QueueLimits, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import sending
from tests.fabric.peer import Peer, closing, listening
from tests.fabric.victim import expect_end
from tests.fabric.wire import StartUp, Terminate, send
from tests.fabric.world import End, Node, node, request

ACCEPT = StartUp(is_reply=True)


@contextmanager
def meeting(octets: bytes = b"", private_data: bytes = b"", timeout_s: float = 1.0) -> Iterator[tuple[Node, End, Peer, bytes]]:
    """The device has connected; its Request, the fourth, is answered with `octets`."""
    with node() as device, listening() as listener:
        end = device.create_qp(QueueLimits(ird=16, ord=16, startup_timeout_s=timeout_s))
        end.qp.connect("127.0.0.1", listener.port, private_data)
        with closing(listener.accept()) as peer:
            asked = peer.receive_start_octets()
            peer.send(octets)
            yield device, end, peer, asked


def fails(octets: bytes, value: int = terminate_code(2, 0, 4)) -> None:
    """A Reply of these octets ends the connection without another octet, and the ULP hears why."""
    with meeting(octets) as (_, end, peer, _):
        assert end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED).value == value
        assert peer.read_to_end() == b""


@rule("RFC 5044 section 7.1.2", "sender", "An Initiator sends a Request first, unasked.")
def test_the_initiator_sends_a_request() -> None:
    with meeting() as (_, _, _, asked):
        assert asked == StartUp().encode()


@rule("RFC 5044 section 7.1.1", "sender", "The Key of a Request is 'MPA ID Req Frame' in ASCII.")
def test_the_key_of_a_request() -> None:
    with meeting() as (_, _, _, asked):
        assert asked[:16].hex() == "4d504120494420526571204672616d65"


@rule("RFC 5044 section 7.1.1", "sender", "R and the reserved flags are 0 in a Request.")
def test_the_flags_of_a_request() -> None:
    with meeting() as (_, _, _, asked):
        assert asked[16] & 0x2F == 0


@rule("RFC 5044 section 4.4", "sender", "A Request asks for CRCs by default.")
def test_a_request_wants_crcs() -> None:
    with meeting() as (_, _, _, asked):
        assert asked[16] & 0x40 == 0x40


@rule("RFC 5044 section 7.1.1", "sender", "M is 0 in the Request of an endpoint that does not need markers.")
def test_a_request_wants_no_markers() -> None:
    with meeting() as (_, _, _, asked):
        assert asked[16] & 0x80 == 0


@rule("RFC 6581 section 6", "sender", "A Request with enhanced data has S = 1 and revision 2.")
def test_a_request_is_enhanced() -> None:
    with meeting() as (_, _, _, asked):
        assert asked[16] & 0x10 == 0x10
        assert asked[17] == 2


@rule("RFC 6581 section 6", "sender", "PD_Length of a Request counts the enhanced data and the private data of the ULP.")
@pytest.mark.parametrize("count", [0, 1, 252])
def test_the_private_data_of_a_request(count: int) -> None:
    with meeting(private_data=b"p" * count) as (_, _, _, asked):
        assert int.from_bytes(asked[18:20], "big") == 4 + count
        assert asked[24:] == b"p" * count


@rule("RFC 5044 section 7.1.2", "sender", "An Initiator sends no frame before it has the Reply.")
def test_the_initiator_says_nothing_before_the_reply() -> None:
    with meeting() as (_, end, peer, _):
        end.post(request(Op.SEND))
        peer.expect_silence()
        peer.send(ACCEPT.encode())
        assert peer.receive() == send(b"")


@rule("RFC 5044 section 7.1.2", "sender", "Without markers the first octets of full operation are ULPDU_Length.")
def test_the_first_octets_after_the_request_are_a_length() -> None:
    with meeting(ACCEPT.encode()) as (_, end, peer, _):
        end.post(request(Op.SEND))
        assert peer.receive_octets(4).hex() == "00124143"


@rule("RFC 5044 section 7.1.1", "receiver", "An Initiator closes the connection when the Key is not that of a Reply.")
@pytest.mark.parametrize("octets", [bytes(range(200)), b"MPA ID Rep Fram\x00" + ACCEPT.encode()[16:]], ids=["garbage", "one wrong octet"])
def test_another_key_fails(octets: bytes) -> None:
    fails(octets)


@rule("RFC 5044 section 7.1.2", "receiver", "Two Initiators that meet find out, because a Request is no Reply.")
def test_a_request_for_an_answer_fails() -> None:
    fails(StartUp().encode())


@rule("RFC 5044 section 7.1.1", "receiver", "A Reply of a revision that the Initiator cannot work with is closed.")
@pytest.mark.parametrize("revision", [0, 3, 255])
def test_an_unknown_revision_fails(revision: int) -> None:
    fails(StartUp(is_reply=True, revision=revision).encode())


@rule("RFC 5044 section 7.1.1", "receiver", "A Reply with more than 512 octets of private data is closed.")
def test_too_much_private_data_fails() -> None:
    fails(StartUp(is_reply=True, private_data=bytes(509)).encode())


@rule("RFC 5044 section 7.1.2", "receiver", "A Reply must come whole: one that is cut off fails.")
@pytest.mark.parametrize("count", [0, 19, 20, 23])
def test_a_reply_that_is_cut_off_fails(count: int) -> None:
    with meeting(ACCEPT.encode()[:count]) as (_, end, peer, _):
        peer.finish()
        assert end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED).value == terminate_code(2, 0, 1)


@rule("RFC 5044 section 7.1.2", "receiver", "The wait for the Reply has a time limit, which octets that drip in do not extend.")
def test_a_reply_that_never_ends_fails_at_the_deadline() -> None:
    with meeting(timeout_s=0.3) as (_, end, peer, _):
        began = time.monotonic()
        for octet in StartUp(is_reply=True, private_data=bytes(200)).encode():
            if not peer.send_while_it_lasts(bytes([octet])):
                break
            time.sleep(0.02)
        end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
        assert time.monotonic() - began < 2.0


@rule("RFC 5044 section 7.1.2", "receiver", "A Reply with R = 1 ends the start-up; its private data says why.")
def test_a_rejecting_reply_is_reported() -> None:
    with meeting(StartUp(is_reply=True, is_rejected=True, private_data=b"no room").encode()) as (_, end, peer, _):
        last = end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
        assert (last.value, last.flags) == (0, CompletionFlag.REMOTE)
        assert end.qp.peer_private_data == b"no room"
        assert peer.read_to_end() == b""


@rule("RFC 5044 section 7.1.2", "receiver", "A Reply with R = 0 starts full operation; its private data goes to the ULP.")
@pytest.mark.parametrize("count", [0, 1, 508])
def test_an_accepting_reply_is_reported(count: int) -> None:
    with meeting(StartUp(is_reply=True, private_data=b"p" * count).encode()) as (_, end, _, _):
        assert end.expect(Op.CONNECTED).length == count
        assert end.qp.peer_private_data == b"p" * count


@rule("RFC 5044 section 7.1.1", "receiver", "Reserved flags of a Reply are not checked.")
def test_reserved_flags_of_a_reply_are_not_checked() -> None:
    octets = bytearray(ACCEPT.encode())
    octets[16] |= 0x0F
    with meeting(bytes(octets)) as (_, end, _, _):
        end.expect(Op.CONNECTED)


@rule("RFC 5044 section 7.1.2", "receiver", "The octet after the private data of a Reply is the first of the first frame.")
def test_the_first_frame_follows_the_reply() -> None:
    with meeting() as (device, end, peer, _):
        inbox = device.memory(8)
        end.receive_into(inbox, 8)
        end.post(request(Op.SEND))
        peer.send(StartUp(is_reply=True, private_data=b"\0\x16odd").encode(), send(b"first"))
        end.expect(Op.CONNECTED)
        assert {end.node.next_done(end.qp.number).op for _ in range(2)} == {Op.SEND, Op.RECEIVE}
        assert inbox.read(0, 5) == b"first"


@rule("RFC 5044 section 4.4", "receiver", "An Initiator that asked for CRCs checks them although the Reply has C = 0.")
def test_crcs_are_checked_although_the_responder_would_do_without() -> None:
    with sending(StartUp(is_reply=True, wants_crc=False)) as stage:
        stage.end.post(request(Op.SEND))
        stage.read()
        stage.end.expect(Op.SEND)
        octets = bytearray(send(b"x").frame())
        octets[-1] ^= 1
        stage.peer.send(bytes(octets))
        assert stage.peer.receive_terminate() == Terminate(2, 0, 2)
        stage.peer.close()
        expect_end(stage.end, terminate_code(2, 0, 2))


@rule("RFC 6581 section 10", "receiver", "An enhanced Request needs an enhanced Reply.")
@pytest.mark.parametrize("revision", [1, 2])
def test_a_plain_reply_to_an_enhanced_request_fails(revision: int) -> None:
    fails(StartUp(is_reply=True, enhanced=None, revision=revision).encode())


@rule("RFC 6581 section 6", "receiver", "An enhanced Reply whose private data does not hold the enhanced data is malformed.")
def test_enhanced_data_cut_short_fails() -> None:
    fails(StartUp(is_reply=True, stated_bytes=3).encode()[:-1])
