"""Ends: RFC 5044 section 7.2 and RFC 5041 section 6.2."""

from __future__ import annotations

import time

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op, QueuePairClosed, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.wire import ReadRequest, Tagged, read_response, send
from tests.fabric.world import request


@rule("RFC 5044 section 7.2", "sender", "A graceful end closes this half of TCP behind the last frame.")
def test_a_close_ends_with_fin() -> None:
    with sending() as stage:
        stage.end.qp.close()
        assert stage.peer.read_to_end() == b""
        stage.peer.close()
        assert stage.end.expect(Op.DISCONNECTED).value == 0


@rule("RFC 5041 section 6.2.1", "sender", "A graceful end sends all that was submitted first.")
def test_a_close_sends_what_was_posted() -> None:
    with sending() as stage:
        length = 2 << 20
        stage.end.post(request(Op.WRITE, stage.device.memory(length, Access.NONE), length, to=(1, 0)), request(Op.SEND))
        stage.end.qp.close(10.0)
        received = 0
        while isinstance(segment := stage.read(), Tagged):
            received += len(segment.payload)
        assert (received, segment) == (length, send(b""))
        assert stage.peer.read_to_end() == b""


@rule("RFC 5041 section 6.2.1", "sender", "After a graceful end was asked for, further requests are refused.")
def test_nothing_can_be_posted_after_a_close() -> None:
    with sending() as stage:
        stage.end.qp.close()
        stage.peer.read_to_end()
        with pytest.raises(QueuePairClosed):
            stage.end.post(request(Op.SEND))


@rule("RFC 5041 section 6.2.1", "receiver", "After this side has ended, what the peer still sends is received.")
def test_messages_are_received_after_the_own_end() -> None:
    with sending() as stage:
        inbox = stage.device.memory(8)
        stage.end.receive_into(inbox, 8)
        stage.end.qp.close(5.0)
        assert stage.peer.read_to_end() == b""
        stage.peer.send(send(b"late"))
        stage.end.expect(Op.RECEIVE)
        assert inbox.read(0, 4) == b"late"
        stage.peer.finish()
        assert stage.end.expect(Op.DISCONNECTED).value == 0


@rule("RFC 5044 section 7.2", "receiver", "An orderly end of the peer is reported, and is no error.")
def test_a_fin_is_reported_as_an_orderly_end() -> None:
    with receiving(receives=1) as stage:
        stage.peer.finish()
        assert stage.peer.read_to_end() == b""
        stage.end.expect(Op.RECEIVE, CompletionStatus.FLUSHED)
        assert stage.end.expect(Op.DISCONNECTED).value == 0


@rule("RFC 5041 section 6.2.1", "sender", "After the peer's end, what was submitted before is still sent.")
def test_what_was_posted_before_a_fin_is_sent() -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        length = 1 << 20
        source = stage.memory(length, Access.NONE)
        stage.end.post(request(Op.WRITE, source, length, to=(1, 0)), request(Op.SEND))
        stage.peer.finish()
        received = 0
        while isinstance(segment := stage.peer.receive(), Tagged):
            received += len(segment.payload)
        assert (received, segment) == (length, send(b""))
        assert stage.peer.read_to_end() == b""


@rule("RFC 5041 section 6.2.1", "sender", "After the peer's end, its Reads are still answered.")
def test_a_read_before_a_fin_is_answered() -> None:
    with receiving() as stage:
        source = stage.memory(b"r" * 300_000, Access.REMOTE_READ)
        stage.peer.send(ReadRequest(7, 0, 300_000, source.stag, 0).segment(1), ReadRequest(8, 0, 0, 0, 0).segment(2))
        stage.peer.finish()
        received = 0
        while received < 300_000:
            received += len(stage.peer.receive().payload)
        assert stage.peer.receive() == read_response(8, 0, b"")
        assert stage.peer.read_to_end() == b""


@rule("RFC 5041 section 6.2.2", "receiver", "A stream that ends between the segments of a message is broken off, not ended.")
def test_a_fin_inside_a_message_is_an_error() -> None:
    with receiving() as stage:
        target = stage.memory(64, Access.REMOTE_WRITE)
        stage.peer.send(Tagged(0, target.stag, 0, b"half", is_last=False))
        stage.peer.finish()
        stage.peer.read_to_end()
        stage.peer.close()
        assert stage.end.drain()[-1].value == terminate_code(2, 0, 1)


@rule("RFC 5041 section 6.2.2", "receiver", "When the stream is lost, all outstanding requests complete in error, each once.")
def test_a_lost_stream_flushes_everything_once() -> None:
    with sending() as stage:
        sink = stage.device.memory(64)
        stage.end.receive_into(sink, 8, count=3)
        stage.end.post(request(Op.READ, sink, 8, wr_id=11), request(Op.SEND, wr_id=12))
        stage.read()
        stage.read()
        stage.peer.reset()
        *events, last = stage.end.drain()
        assert [event.wr_id for event in events if event.op == Op.RECEIVE] == [0, 1, 2]
        assert sorted(event.wr_id for event in events if event.op != Op.RECEIVE) == [11, 12]
        assert last.value == terminate_code(2, 0, 1)
        assert stage.end.is_idle(0.05)


@rule("RFC 5041 section 6.2.2", "receiver", "After the end nothing is placed any more.")
def test_nothing_is_placed_after_an_abort() -> None:
    with receiving() as stage:
        target = stage.memory(50_000, Access.REMOTE_WRITE)
        octets = Tagged(0, target.stag, 0, b"x" * 50_000).frame()
        stage.peer.send(octets[:20_000])
        stage.end.qp.abort()
        stage.end.drain()
        before = target.read()
        stage.peer.send_while_it_lasts(octets[20_000:])
        time.sleep(0.02)
        assert target.read() == before


@rule("RFC 5041 section 6.2.1", "sender", "An end that the peer does not answer is forced after a time.")
def test_a_close_ends_by_force_when_the_peer_does_not_read() -> None:
    with sending() as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(32 << 20), 32 << 20, to=(1, 0)))
        began = time.monotonic()
        stage.end.qp.close(0.2)
        events = stage.end.drain(2.0)
        assert time.monotonic() - began < 1.0
        assert events[0].status == CompletionStatus.FLUSHED
