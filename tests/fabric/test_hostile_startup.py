"""Start-up frames that a peer must not send: no answer, no connection, no resource held longer than the deadline."""

from __future__ import annotations

import time

import pytest

from kbtp_core.fabric.api import CompletionStatus, FabricError, Op, QueueLimits, terminate_code
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.victim import victim
from tests.fabric.wire import Opcode, StartUp, Terminate, Untagged, read_response, send, write
from tests.fabric.world import End, Node, node, request


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
