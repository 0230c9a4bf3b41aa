"""Start-up frames that a peer must not send: no answer, no connection, no resource held longer than the deadline."""

from __future__ import annotations

import time

import pytest

from kbtp_core.fabric.api import CompletionStatus, FabricError, Op, QueueLimits, terminate_code
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.victim import victim
from tests.fabric.wire import REPLY_KEY, Enhanced, Opcode, StartUp, Terminate, Untagged, read_response, send, write
from tests.fabric.world import End, Node, node, request

BAD_REQUESTS = {
    "garbage": bytes(range(200)),
    "zeros": bytes(64),
    "an HTTP request": b"GET / HTTP/1.1\r\nHost: kbtp\r\n\r\n",
    "a key with one wrong octet": b"MPA ID Req Fram\x00" + StartUp().encode()[16:],
    "the key of a Reply": StartUp(key=REPLY_KEY).encode(),
    "revision 3": StartUp(revision=3).encode(),
    "revision 255": StartUp(revision=255).encode(),
    "513 octets of private data": StartUp(private_data=bytes(509)).encode(),
    "65535 octets of private data": StartUp(stated_bytes=65535).encode(),
    "enhanced data cut short": StartUp(stated_bytes=3).encode()[:-1],
}


@pytest.mark.parametrize("octets", BAD_REQUESTS.values(), ids=BAD_REQUESTS.keys())
def test_a_bad_request_is_closed_without_an_answer(octets: bytes) -> None:
    with victim() as it, closing(dial(it.port)) as peer:
        assert peer.send_while_it_lasts(octets)
        assert peer.read_to_end() == b""
        assert it.device.poll_request(0.02) is None


def test_revision_0_is_closed_without_an_answer_or_served_plainly() -> None:
    with victim() as it, closing(dial(it.port)) as peer:
        peer.send(StartUp(revision=0, enhanced=None).encode())
        if it.device.poll_request(0.1) is None:
            assert peer.read_to_end() == b""


def test_a_request_that_never_comes_is_dropped_at_the_deadline() -> None:
    with node() as device:
        port = device.listen(startup_timeout_s=0.2)
        with closing(dial(port)) as silent, closing(dial(port)) as slow:
            slow.send(StartUp().encode()[:-1])
            began = time.monotonic()
            assert silent.read_to_end() == slow.read_to_end() == b""
            assert time.monotonic() - began < 1.0
        assert device.poll_request(0.02) is None


def test_a_request_that_drips_does_not_extend_the_deadline() -> None:
    with node() as device:
        began = time.monotonic()
        with closing(dial(device.listen(startup_timeout_s=0.3))) as peer:
            octets = StartUp(private_data=bytes(200)).encode()
            sent = 0
            while sent < len(octets) and peer.send_while_it_lasts(octets[sent : sent + 1]):
                sent += 1
                time.sleep(0.02)
            assert sent < len(octets)
        assert time.monotonic() - began < 2.0
        assert device.poll_request(0.02) is None


def test_a_peer_that_connects_and_leaves_leaves_nothing() -> None:
    with victim() as it:
        for octets in (b"", b"MPA", StartUp().encode()[:20]):
            for _ in range(10):
                peer = dial(it.port)
                peer.send(octets)
                peer.close()
        assert it.device.poll_request(0.05) is None


def test_a_peer_that_leaves_before_it_is_accepted_is_an_error_or_a_lost_connection() -> None:
    with victim() as it:
        peer = dial(it.port)
        peer.send(StartUp().encode())
        waiting = it.device.next_request()
        peer.reset()
        time.sleep(0.02)
        try:
            end = End(it.device, waiting.create_qp(it.device.pd, it.device.cq))
        except FabricError:
            return
        end.qp.accept()
        assert end.drain()[-1].op == Op.DISCONNECTED


def test_silent_peers_do_not_keep_a_good_one_out() -> None:
    with victim() as it:
        crowd = [dial(it.port) for _ in range(64)]
        it.check()
        for peer in crowd:
            peer.close()


def test_a_flood_of_silent_peers_beyond_the_backlog_does_not_either() -> None:
    with victim() as it:
        crowd = [dial(it.port) for _ in range(300)]
        it.check()
        for peer in crowd:
            peer.close()


@pytest.mark.parametrize("octets", [b"", send(b"never whole").frame()[:-1]], ids=["silence", "half a frame"])
def test_a_peer_whose_first_frame_never_comes_is_dropped_at_the_deadline(octets: bytes) -> None:
    with victim() as it:
        it.limits = QueueLimits(startup_timeout_s=0.3)
        began = time.monotonic()
        peer, end = it.connect()
        with closing(peer):
            peer.send(octets)
            peer.read_to_end()
            last = end.drain(2.0)[-1]
            assert 0.2 < time.monotonic() - began < 1.5
            assert last.value != 0 or last.status == CompletionStatus.CONNECT_FAILED
        it.limits = QueueLimits()


def test_a_first_frame_that_drips_does_not_extend_the_deadline() -> None:
    with victim() as it:
        it.limits = QueueLimits(startup_timeout_s=0.3)
        peer, end = it.connect()
        with closing(peer):
            began, octets = time.monotonic(), send(b"x" * 100).frame()
            for at in range(len(octets)):
                if not peer.send_while_it_lasts(octets[at : at + 1]):
                    break
                time.sleep(0.02)
            assert time.monotonic() - began < 2.0
            end.drain(2.0)
        it.limits = QueueLimits()


def test_frames_glued_behind_a_request_reach_nobody_before_the_accept() -> None:
    with victim() as it, closing(dial(it.port)) as peer:
        original = it.writable.read()
        peer.send(StartUp().encode(), write(it.writable.stag, 0, b"early"), send(b"early"))
        incoming = it.device.poll_request(0.1)
        assert it.writable.read() == original
        if incoming is None:
            assert peer.read_to_end() == b""
        else:
            incoming.reject()
            peer.read_to_end()
            assert it.writable.read() == original


def test_the_reply_takes_no_more_than_the_peer_can_serve() -> None:
    with victim() as it, closing(dial(it.port)) as peer:
        peer.send(StartUp(enhanced=Enhanced(ird=2, ord=3)).encode())
        it.device.serve(QueueLimits(ird=4, ord=9)).qp.accept()
        enhanced = peer.receive_start().enhanced
        assert enhanced is not None
        assert enhanced.ord <= 2
        assert enhanced.ird >= 1


def test_a_peer_to_peer_request_is_mirrored_and_its_empty_write_is_no_message() -> None:
    with victim() as it:
        wish = StartUp(enhanced=Enhanced(4, 4, is_peer_to_peer=True, offers_send=True, offers_write=True, offers_read=True))
        peer = dial(it.port)
        with closing(peer):
            peer.send(wish.encode())
            end = it.device.serve()
            end.receive_into(it.inbox, 16)
            end.qp.accept()
            enhanced = peer.receive_start().enhanced
            assert enhanced is not None
            assert enhanced.is_peer_to_peer
            assert enhanced.offers_write
            peer.send(write(0, 0, b""), send(b"after"))
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 5


# The device as initiator, a hostile responder -----------------------------------------------------------------------


def meet(device: Node, octets: bytes, limits: QueueLimits = QueueLimits(ird=16, ord=16, startup_timeout_s=1.0)) -> tuple[End, Peer]:
    """The device connects; the responder answers the Request with `octets`."""
    with listening() as listener:
        end = device.create_qp(limits)
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
        peer.receive_start()
        peer.send(octets)
        return end, peer


BAD_REPLIES = {
    "garbage": bytes(range(200)),
    "the key of a Request": StartUp().encode(),
    "revision 3": StartUp(is_reply=True, revision=3).encode(),
    "513 octets of private data": StartUp(is_reply=True, private_data=bytes(509)).encode(),
    "enhanced data cut short": StartUp(is_reply=True, stated_bytes=3).encode()[:-1],
    "a plain Reply to an enhanced Request": StartUp(is_reply=True, enhanced=None).encode(),
}


@pytest.mark.parametrize("octets", BAD_REPLIES.values(), ids=BAD_REPLIES.keys())
def test_a_bad_reply_fails_the_connection(octets: bytes) -> None:
    with node() as device:
        end, peer = meet(device, octets)
        with closing(peer):
            end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
            peer.read_to_end()


@pytest.mark.parametrize("count", [0, 19, 21])
def test_a_reply_that_is_cut_off_fails_the_connection(count: int) -> None:
    with node() as device:
        end, peer = meet(device, StartUp(is_reply=True).encode()[:count])
        peer.close()
        end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)


def test_a_reply_that_drips_does_not_extend_the_deadline() -> None:
    with node() as device:
        end, peer = meet(device, b"", QueueLimits(startup_timeout_s=0.3))
        with closing(peer):
            began = time.monotonic()
            for octet in StartUp(is_reply=True, private_data=bytes(200)).encode():
                if not peer.send_while_it_lasts(bytes([octet])):
                    break
                time.sleep(0.02)
            end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
            assert time.monotonic() - began < 2.0


def test_a_responder_that_wants_more_reads_than_offered_is_told_so() -> None:
    with node() as device:
        end, peer = meet(device, StartUp(is_reply=True, enhanced=Enhanced(ird=16, ord=17)).encode())
        with closing(peer):
            assert peer.receive_terminate() == Terminate(2, 0, 6)
            peer.close()
            assert end.drain()[-1].value == terminate_code(2, 0, 6)


def test_a_responder_that_speaks_first_is_judged_like_any_other() -> None:
    with node() as device:
        end, peer = meet(device, StartUp(is_reply=True).encode())
        secret = device.memory(64)
        with closing(peer):
            end.expect(Op.CONNECTED)
            culprit = write(secret.stag, 0, b"early")
            peer.send(culprit)
            assert peer.receive_terminate() == Terminate.about(culprit, 1, 1, 0)
            peer.close()
            assert end.drain()[-1].value == terminate_code(1, 1, 0)
        assert secret.read() == bytes(64)


def read_from(device: Node, length: int = 64) -> tuple[End, Peer, int]:
    """A Read of `length` octets into fresh memory is outstanding; the sink's STag is the third."""
    end, peer = meet(device, StartUp(is_reply=True).encode())
    end.expect(Op.CONNECTED)
    sink = device.memory(4096)
    end.post(request(Op.READ, sink, length, offset=100))
    peer.receive()
    return end, peer, sink.stag


WRONG_ANSWERS = {
    "another STag": lambda stag: read_response(stag ^ 1, 100, bytes(64)),
    "an earlier offset": lambda stag: read_response(stag, 99, b"!" * 64),
    "a later offset": lambda stag: read_response(stag, 101, b"!" * 64),
    "one octet too many": lambda stag: read_response(stag, 100, b"!" * 65),
    "one octet too few": lambda stag: read_response(stag, 100, b"!" * 63),
    "an atomic response": lambda stag: Untagged(Opcode.ATOMIC_RESPONSE, 1, bytes(12)),
    "a Write to the sink": lambda stag: write(stag, 100, b"!" * 64),
}


@pytest.mark.parametrize("build", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS.keys())
def test_an_answer_that_does_not_match_its_read_is_refused(build: object) -> None:
    assert callable(build)
    with node() as device:
        end, peer, stag = read_from(device)
        with closing(peer):
            peer.send(build(stag))
            peer.receive_terminate()
            peer.close()
            events = end.drain()
            assert events[0].op == Op.READ
            assert events[0].status != CompletionStatus.OK
            assert events[-1].value != 0


def test_an_answer_without_a_question_writes_nothing() -> None:
    with node() as device:
        end, peer = meet(device, StartUp(is_reply=True).encode())
        end.expect(Op.CONNECTED)
        sink = device.memory(64)
        end.post(request(Op.SEND))
        with closing(peer):
            peer.receive()
            peer.send(read_response(sink.stag, 0, b"!" * 8))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0
        assert sink.read() == bytes(64)


def test_an_answer_that_comes_twice_writes_once() -> None:
    with node() as device:
        end, peer, stag = read_from(device)
        with closing(peer):
            peer.send(read_response(stag, 100, b"1" * 64), read_response(stag, 100, b"2" * 64))
            end.expect(Op.READ)
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


@pytest.mark.parametrize(
    ("msn", "payload"),
    [(1, b"\0\0\0\x09" + bytes(8)), (2, b"\0\0\0\x01" + bytes(8)), (1, b"\0\0\0\x01" + bytes(7)), (1, b"\0\0\0\x01" + bytes(9))],
    ids=["another identifier", "another number", "too short", "too long"],
)
def test_an_atomic_response_that_does_not_match_is_refused(msn: int, payload: bytes) -> None:
    with node() as device:
        end, peer = meet(device, StartUp(is_reply=True).encode())
        end.expect(Op.CONNECTED)
        end.post(request(Op.FETCH_ADD))
        with closing(peer):
            peer.receive()
            peer.send(Untagged(Opcode.ATOMIC_RESPONSE, msn, payload))
            peer.receive_terminate()
            peer.close()
            end.expect(Op.FETCH_ADD, CompletionStatus.FLUSHED)
            assert end.expect(Op.DISCONNECTED).value != 0
