"""Beginnings and ends: connecting, refusing, closing, flushing, losing the peer, many connections."""

from __future__ import annotations

import time

import pytest

from kbtp_core.fabric.api import (
    Access,
    CompletionStatus,
    FabricError,
    Op,
    QueueLimits,
    QueuePairClosed,
    WrFlag,
)
from tests.fabric.peer import closing, listening
from tests.fabric.world import connect, node, pattern, request


def test_private_data_travels_both_ways() -> None:
    with node() as left, node() as right:
        a = left.create_qp()
        a.qp.connect("127.0.0.1", right.listen(), b"from the left")
        incoming = right.next_request()
        assert incoming.private_data == b"from the left"
        assert incoming.peer.startswith("127.0.0.1:")
        qp = incoming.create_qp(right.pd, right.cq)
        qp.accept(b"from the right")
        assert a.expect(Op.CONNECTED).length == len(b"from the right")
        assert a.qp.peer_private_data == b"from the right"
        assert qp.peer_private_data == b"from the left"
        assert a.qp.peer == f"127.0.0.1:{right.listen()}"


def test_private_data_that_no_frame_holds_is_refused_by_name() -> None:
    with node() as device, pytest.raises(FabricError, match="253"):
        device.create_qp().qp.connect("127.0.0.1", device.listen(), bytes(253))


def test_a_rejected_connection_ends_with_the_reason() -> None:
    with node() as left, node() as right:
        a = left.create_qp()
        a.qp.connect("127.0.0.1", right.listen())
        right.next_request().reject(b"no room")
        a.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
        assert a.qp.peer_private_data == b"no room"
        with pytest.raises(QueuePairClosed):
            a.post(request(Op.SEND))


def test_connecting_where_nobody_listens_fails_at_once() -> None:
    with listening() as listener:
        port = listener.port
    with node() as device:
        end = device.create_qp()
        end.qp.connect("127.0.0.1", port)
        end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED, timeout_s=1.0)


def test_connecting_to_a_black_hole_fails_at_its_deadline() -> None:
    with listening() as listener, node() as device:
        end = device.create_qp(QueueLimits(startup_timeout_s=0.3))
        end.receive_into(device.memory(4), 4)
        began = time.monotonic()
        end.qp.connect("127.0.0.1", listener.port)
        events = end.drain(timeout_s=2.0)
        assert 0.25 < time.monotonic() - began < 1.0
        assert [event.status for event in events] == [CompletionStatus.FLUSHED, CompletionStatus.CONNECT_FAILED]


def test_a_port_in_use_is_refused_by_name() -> None:
    with node() as device, listening() as listener, pytest.raises(FabricError, match=str(listener.port)):
        device.fabric.listen("127.0.0.1", listener.port, device.cq)


def test_a_close_sends_what_was_posted_and_ends_both_sides_in_order() -> None:
    with node() as left, node() as right:
        length = 2 << 20
        target, inbox = right.memory(length, Access.REMOTE_WRITE), right.memory(8)
        content = pattern(length)
        a, b = connect(left, right)
        b.receive_into(inbox, 4, count=2)
        a.post(request(Op.WRITE, left.memory(content), length, to=(target.stag, 0)), request(Op.SEND))
        a.qp.close()
        done = [(event.op, event.status, event.value) for event in a.drain()]
        ok = CompletionStatus.OK
        assert done == [(Op.WRITE, ok, 0), (Op.SEND, ok, 0), (Op.DISCONNECTED, ok, 0)]
        b.expect(Op.RECEIVE)
        assert target.read() == content.tobytes()
        assert [(event.op, event.status, event.value) for event in b.drain()] == [
            (Op.RECEIVE, CompletionStatus.FLUSHED, 0),
            (Op.DISCONNECTED, ok, 0),
        ]


def test_an_abort_flushes_every_request_and_receive_once() -> None:
    with node() as device, listening() as listener:
        end = device.create_qp()
        sink = device.memory(64)
        end.receive_into(sink, 8, count=3)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer()
            end.expect(Op.CONNECTED)
            unsignaled = request(Op.SEND, flags=WrFlag.NONE, wr_id=13)
            end.post(request(Op.READ, sink, 8, wr_id=11), request(Op.SEND, wr_id=12), unsignaled)
            for _ in range(3):
                peer.receive()
            end.qp.abort()
            *events, last = end.drain()
        assert last.op == Op.DISCONNECTED
        sends = {event.wr_id: event.status for event in events if event.op < Op.RECEIVE}
        assert sends.pop(11) == CompletionStatus.FLUSHED
        assert sends.pop(12) in (CompletionStatus.OK, CompletionStatus.FLUSHED)
        assert set(sends.items()) <= {(13, CompletionStatus.FLUSHED)}
        receives = [(event.wr_id, event.status) for event in events if event.op == Op.RECEIVE]
        assert receives == [(at, CompletionStatus.FLUSHED) for at in range(3)]
        assert end.is_idle(0.05)
        with pytest.raises(QueuePairClosed):
            end.post(request(Op.SEND))
        with pytest.raises(QueuePairClosed):
            end.receive_into(sink, 8)


def test_closing_the_device_ends_its_connections() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right)
        right.fabric.close()
        assert a.drain()[-1].op == Op.DISCONNECTED


def test_many_connections_at_once_keep_their_own_data() -> None:
    with node() as left, node() as right:
        count, length = 64, 5000
        pairs = [connect(left, right) for _ in range(count)]
        targets = [right.memory(length, Access.REMOTE_WRITE) for _ in pairs]
        contents = [pattern(length, seed) for seed in range(count)]
        inbox = right.memory(4)
        for (a, b), target, content in zip(pairs, targets, contents, strict=True):
            b.receive_into(inbox, 4)
            a.post(request(Op.WRITE, left.memory(content), length, to=(target.stag, 0)), request(Op.SEND))
        for (_, b), target, content in zip(pairs, targets, contents, strict=True):
            b.expect(Op.RECEIVE)
            assert target.read() == content.tobytes()
        assert len({a.qp.number for a, _ in pairs}) == count


def test_connections_come_and_go() -> None:
    with node() as left, node() as right:
        for _ in range(100):
            a, b = connect(left, right)
            a.qp.close()
            assert a.drain()[-1].value == 0
            assert b.drain()[-1].value == 0


def test_a_name_with_several_addresses_is_tried_until_one_answers() -> None:
    """`localhost` may be ::1 first, where nobody listens."""
    with node() as left, node() as right:
        left.create_qp().qp.connect("localhost", right.listen(), b"found")
        assert right.next_request().private_data == b"found"


def test_connecting_from_a_closed_device_is_refused() -> None:
    with node() as left:
        end = left.create_qp()
        left.close()
        with pytest.raises(FabricError, match="device is closed"):
            end.qp.connect("127.0.0.1", 1)
