"""Start-up of the device as Responder: RFC 5044 section 7.1."""

from __future__ import annotations

import struct
import time

import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, Op, QueueLimits, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving
from tests.fabric.peer import closing, dial
from tests.fabric.victim import expect_end, expect_terminate, victim
from tests.fabric.wire import REPLY_KEY, Enhanced, StartUp, Terminate, crc_field, send, write
from tests.fabric.world import End, node, request

PLAIN = StartUp(enhanced=None, revision=1)


def is_closed_in_silence(octets: bytes) -> None:
    """What follows these octets is the end of the connection, and the ULP hears nothing."""
    with victim() as it, closing(dial(it.port)) as peer:
        assert peer.send_while_it_lasts(octets)
        assert peer.read_to_end() == b""
        assert it.device.poll_request(0.02) is None


def answered(frame: StartUp, private_data: bytes = b"") -> bytes:
    """The Reply to `frame`, as it came."""
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(frame.encode())
        device.next_request().create_qp(device.pd, device.cq).accept(private_data)
        return peer.receive_start_octets()


@rule("RFC 5044 section 7.1.1", "receiver", "A Responder closes the connection when the Key is not that of a Request.")
@pytest.mark.parametrize(
    "octets",
    [bytes(range(200)), bytes(64), b"GET / HTTP/1.1\r\nHost: kbtp\r\n\r\n", b"MPA ID Req Fram\x00" + StartUp().encode()[16:]],
    ids=["garbage", "zeros", "an HTTP request", "one wrong octet"],
)
def test_another_key_is_closed_without_an_answer(octets: bytes) -> None:
    is_closed_in_silence(octets)


@rule("RFC 5044 section 7.1.2", "receiver", "A Responder tells a Reply from a Request and closes on it.")
def test_a_reply_to_a_responder_is_closed_without_an_answer() -> None:
    is_closed_in_silence(StartUp(key=REPLY_KEY).encode())


@rule("RFC 5044 section 7.1.1", "receiver", "A revision that the receiver cannot work with is closed.")
@pytest.mark.parametrize("revision", [0, 3, 255])
def test_an_unknown_revision_is_closed_without_an_answer(revision: int) -> None:
    is_closed_in_silence(StartUp(revision=revision).encode())


@rule("RFC 5044 section 7.1.1", "receiver", "Private data of more than 512 octets is closed.")
@pytest.mark.parametrize("frame", [StartUp(private_data=bytes(509)), StartUp(stated_bytes=65535)], ids=["513", "65535"])
def test_too_much_private_data_is_closed_without_an_answer(frame: StartUp) -> None:
    is_closed_in_silence(frame.encode())


@rule("RFC 5044 section 7.1.1", "receiver", "512 octets of private data are taken and handed to the ULP whole.")
def test_the_longest_private_data_is_taken() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        data = bytes(range(256)) * 2
        peer.send(StartUp(enhanced=None, revision=1, private_data=data).encode())
        assert device.next_request().private_data == data


@rule("RFC 5044 section 7.1.1", "receiver", "PD_Length 0 means that there is no private data field.")
def test_no_private_data_is_taken_too() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(PLAIN.encode())
        assert device.next_request().private_data == b""


@rule("RFC 5044 section 7.1.1", "receiver", "Reserved flags of a Request are not checked.")
def test_reserved_flags_of_a_request_are_not_checked() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        octets = bytearray(StartUp(private_data=b"data").encode())
        octets[16] |= 0x0F
        peer.send(bytes(octets))
        assert device.next_request().private_data == b"data"


@rule("RFC 5044 section 7.1.1", "receiver", "R is not checked in a Request.")
def test_the_rejected_flag_of_a_request_is_not_checked() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(is_rejected=True, private_data=b"data").encode())
        assert device.next_request().private_data == b"data"


@rule("RFC 5044 section 7.1.2", "receiver", "A Responder waits for a whole Request before anything else.")
def test_a_request_without_its_last_octet_is_no_request() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        octets = StartUp(private_data=b"data").encode()
        peer.send(octets[:-1])
        assert device.poll_request(0.05) is None
        peer.send(octets[-1:])
        assert device.next_request().private_data == b"data"


@rule("RFC 5044 section 7.1.2", "receiver", "The wait for the Request has a time limit, which octets that drip in do not extend.")
def test_a_request_that_never_ends_is_dropped_at_the_deadline() -> None:
    with node() as device:
        began = time.monotonic()
        port = device.listen(startup_timeout_s=0.2)
        with closing(dial(port)) as silent, closing(dial(port)) as slow:
            octets = StartUp(private_data=bytes(200)).encode()
            sent = 0
            while sent < len(octets) and slow.send_while_it_lasts(octets[sent : sent + 1]):
                sent += 1
                time.sleep(0.02)
            assert sent < len(octets)
            assert silent.read_to_end() == b""
        assert time.monotonic() - began < 2.0
        assert device.poll_request(0.02) is None


@rule("RFC 5044 section 7.1.2", "receiver", "Octets behind a Request have no effect before full operation.")
def test_frames_glued_behind_a_request_reach_nobody_before_the_accept() -> None:
    with victim() as it, closing(dial(it.port)) as peer:
        peer.send(StartUp().encode(), write(it.writable.stag, 0, b"early"), send(b"early"))
        incoming = it.device.poll_request(0.1)
        if incoming is None:
            assert peer.read_to_end() == b""
        else:
            incoming.reject()
            peer.read_to_end()


@rule("RFC 5044 section 7.1.2", "receiver", "The octet after the private data is the first of the first frame.")
def test_the_first_frame_follows_the_private_data() -> None:
    with victim() as it:
        peer, end = it.connect(request=StartUp(private_data=b"\0\x16odd"))
        with closing(peer):
            peer.send(send(b"first"))
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 5


@rule("RFC 5044 section 7.1.1", "sender", "The Key of a Reply is 'MPA ID Rep Frame' in ASCII.")
def test_the_key_of_a_reply() -> None:
    assert answered(PLAIN)[:16].hex() == "4d504120494420526570204672616d65"


@rule("RFC 5044 section 7.1.1", "sender", "The reserved flags of a Reply are zero.")
def test_the_reserved_flags_of_a_reply_are_zero() -> None:
    octets = bytearray(StartUp().encode())
    octets[16] |= 0x0F
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(bytes(octets))
        device.next_request().create_qp(device.pd, device.cq).accept()
        assert peer.receive_start_octets()[16] & 0x0F == 0


@rule("RFC 5044 section 7.1.1", "sender", "PD_Length of a Reply is the number of octets of its private data.")
@pytest.mark.parametrize("count", [0, 1, 252])
def test_the_private_data_of_a_reply(count: int) -> None:
    octets = answered(PLAIN, b"p" * count)
    assert octets[18:] == struct.pack(">H", count) + b"p" * count


@rule("RFC 5044 section 7.1.2", "sender", "A Request that suits the ULP is answered with R = 0.")
def test_an_accepting_reply() -> None:
    assert answered(PLAIN, b"new") == StartUp(is_reply=True, enhanced=None, revision=1, private_data=b"new").encode()


@rule("RFC 5044 section 7.1.2", "sender", "A Request that does not suit the ULP is answered with R = 1, and the ULP may say why.")
def test_a_rejecting_reply() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(PLAIN.encode())
        device.next_request().reject(b"no room")
        assert peer.receive_start() == StartUp(is_reply=True, is_rejected=True, enhanced=None, revision=1, private_data=b"no room")
        assert peer.read_to_end() == b""


@rule("RFC 5044 section 7.1.2", "sender", "A Responder sends no frame before it has received and validated one.")
def test_the_responder_says_nothing_before_the_first_frame() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            end.post(request(Op.SEND, it.inbox, 5))
            peer.expect_silence()
            peer.send(write(0, 0, b""))
            assert peer.receive() == send(bytes(5))


@rule("RFC 5044 section 7.1.2", "sender", "A frame that is not valid does not let the Responder speak, not even to complain.")
def test_a_bad_first_frame_is_not_answered() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            octets = bytearray(send(b"spoilt").frame())
            octets[-1] ^= 1
            peer.send(bytes(octets))
            assert peer.read_to_end() == b""
            expect_end(end, terminate_code(2, 0, 2))


@rule("RFC 5044 section 7.1.2", "sender", "A valid frame that breaks a rule of DDP lets the Responder say so.")
def test_a_first_frame_that_breaks_another_rule_is_answered() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = write(it.unknown_stag, 0, b"x")
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 1, 1, 0))


@rule("RFC 5044 section 7.1.2", "receiver", "The wait for the first frame has a time limit too.")
@pytest.mark.parametrize("octets", [b"", send(b"never whole").frame()[:-1]], ids=["silence", "half a frame"])
def test_a_peer_whose_first_frame_never_comes_is_dropped(octets: bytes) -> None:
    with victim() as it:
        usual, it.limits = it.limits, QueueLimits(startup_timeout_s=0.3)
        began = time.monotonic()
        peer, end = it.connect()
        with closing(peer):
            peer.send(octets)
            peer.read_to_end()
            assert end.drain(2.0)[-1].value == terminate_code(2, 0, 4)
            assert 0.2 < time.monotonic() - began < 1.5
        it.limits = usual


@rule("RFC 5044 section 4.4", "sender", "By default an endpoint declares that it wants CRCs, whatever the other side says.")
def test_a_reply_wants_crcs() -> None:
    assert answered(StartUp(wants_crc=False))[16] & 0x40 == 0x40


def bad_crc(payload: bytes, msn: int = 1) -> bytes:
    octets = send(payload, msn).frame()
    return octets[:-4] + bytes(octet ^ 0xFF for octet in octets[-4:])


@rule("RFC 5044 section 4.4", "receiver", "CRCs are checked when only one of the two sides asked for them.")
def test_crcs_are_checked_although_the_peer_would_do_without() -> None:
    with receiving(request=StartUp(wants_crc=False)) as stage:
        stage.peer.send(bad_crc(b"spoilt"))
        expect_terminate(stage.peer, stage.end, Terminate(2, 0, 2))


@rule("RFC 5044 section 7.1.1", "sender", "CRCs are generated when only one of the two sides asked for them.")
def test_crcs_are_generated_although_the_peer_would_do_without() -> None:
    with receiving(request=StartUp(wants_crc=False)) as stage:
        stage.end.post(request(Op.SEND, stage.it.inbox, 5))
        octets = stage.peer.receive_octets(2 + 18 + 5 + 3 + 4)
        assert octets[-4:] == crc_field(octets[:-4])


# Revision 1 and enhanced frames, as far as a Responder is bound to both -----------------------------------------------


@rule("RFC 6581 section 6", "receiver", "Requests of revision 1 are still accepted.")
def test_a_revision_1_request_is_served() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        target = device.memory(8, Access.REMOTE_WRITE)
        peer.send(StartUp(enhanced=None, revision=1, private_data=b"old").encode())
        incoming = device.next_request()
        assert incoming.private_data == b"old"
        end = End(device, incoming.create_qp(device.pd, device.cq))
        end.qp.accept()
        peer.receive_start()
        peer.send(write(target.stag, 0, b"w" * 8))
        peer.finish()
        assert end.drain()[-1].value == 0
        assert target.read() == b"w" * 8


@rule("RFC 6581 section 6", "receiver", "In revision 1 the bit S is one of the reserved flags and is not looked at.")
def test_the_enhanced_flag_means_nothing_in_revision_1() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(revision=1, enhanced=Enhanced(1, 2), private_data=b"data").encode())
        assert device.next_request().private_data == Enhanced(1, 2).encode() + b"data"


@rule("RFC 6581 section 10", "sender", "A Request without enhanced data is answered without, in any revision.")
@pytest.mark.parametrize("revision", [1, 2])
def test_an_unenhanced_request_gets_an_unenhanced_reply(revision: int) -> None:
    assert StartUp.decode(answered(StartUp(enhanced=None, revision=revision))).enhanced is None


@rule("RFC 6581 section 10", "sender", "An enhanced Request is answered with an enhanced Reply.")
def test_an_enhanced_request_gets_an_enhanced_reply() -> None:
    reply = StartUp.decode(answered(StartUp()))
    assert reply.enhanced is not None
    assert reply.revision == 2


@rule("RFC 6581 section 6", "receiver", "An enhanced Request whose private data does not hold the enhanced data is malformed.")
def test_enhanced_data_cut_short_is_closed_without_an_answer() -> None:
    is_closed_in_silence(StartUp(stated_bytes=3).encode()[:-1])


@rule("RFC 6581 section 6", "receiver", "The enhanced data is no part of what the ULP is given as private data.")
def test_the_ulp_gets_the_private_data_without_the_enhanced_data() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(private_data=b"mine").encode())
        assert device.next_request().private_data == b"mine"


@rule("RFC 6581 section 6", "sender", "PD_Length counts the enhanced data with the private data.")
def test_the_length_of_a_reply_counts_the_enhanced_data() -> None:
    octets = answered(StartUp(), b"mine")
    assert octets[18:20] == bytes.fromhex("0008")
    assert octets[24:] == b"mine"


@rule("RFC 5044 section 8", "receiver", "A connection that is lost before its first frame is reported to the ULP.")
def test_a_peer_that_leaves_before_its_first_frame_is_reported() -> None:
    with victim() as it:
        peer, end = it.connect()
        peer.close()
        *_, last = end.drain()
        assert (last.value, last.flags) == (terminate_code(2, 0, 1), CompletionFlag(0))
