"""What comes before what: delivery after placement, completions in order, fences, read depths, snapshots."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, Op, QueueLimits, WrFlag
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import Enhanced, ReadRequest, StartUp, Tagged
from tests.fabric.world import ALL_REMOTE, End, Node, connect, node, pattern, request


def connect_to_script(device: Node, peer_ird: int = 16, limits: QueueLimits = QueueLimits(ird=16, ord=16)) -> tuple[End, Peer]:
    """The device as initiator of a scripted responder that takes `peer_ird` Reads at once."""
    with listening() as listener:
        end = device.create_qp(limits)
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
        peer.answer(StartUp(is_reply=True, enhanced=Enhanced(ird=peer_ird, ord=1)))
        end.expect(Op.CONNECTED)
        return end, peer


def test_a_delivered_send_means_that_earlier_writes_are_there() -> None:
    with node() as left, node() as right:
        length = 300_001
        target, inbox = right.memory(length, Access.REMOTE_WRITE), right.memory(64)
        source = left.memory(length)
        a, b = connect(left, right)
        for round_number in range(20):
            b.receive_into(inbox, 64)
            source.fill(pattern(length, round_number))
            a.post(request(Op.WRITE, source, length, to=(target.stag, 0)), request(Op.SEND))
            b.expect(Op.RECEIVE)
            assert target.read() == pattern(length, round_number).tobytes()
            a.expect(Op.WRITE)
            a.expect(Op.SEND)


def test_messages_arrive_in_the_order_posted() -> None:
    with node() as left, node() as right:
        source, inbox = left.memory(bytes(range(200))), right.memory(200)
        a, b = connect(left, right)
        b.receive_into(inbox, 1, count=200)
        a.post(*(request(Op.SEND, source, 1, offset=at, wr_id=at) for at in range(200)))
        assert [b.expect(Op.RECEIVE).wr_id for _ in range(200)] == list(range(200))
        assert [a.expect(Op.SEND).wr_id for _ in range(200)] == list(range(200))
        assert inbox.read() == bytes(range(200))


def test_more_reads_than_any_depth_all_complete() -> None:
    with node() as left, node() as right:
        content = pattern(1000 * 64)
        source, sink = right.memory(content, Access.REMOTE_READ), left.memory(1000 * 64)
        a, _ = connect(left, right, QueueLimits(ird=3, ord=7))
        a.post(*(request(Op.READ, sink, 64, offset=64 * at, to=(source.stag, 64 * at), wr_id=at) for at in range(1000)))
        assert [a.expect(Op.READ).wr_id for _ in range(1000)] == list(range(1000))
        assert sink.read() == content.tobytes()


def test_a_read_sees_the_write_before_it() -> None:
    with node() as left, node() as right:
        target = right.memory(100_000, ALL_REMOTE)
        source, sink = left.memory(100_000), left.memory(100_000)
        a, _ = connect(left, right)
        for seed in range(10):
            source.fill(pattern(100_000, seed))
            write = request(Op.WRITE, source, 100_000, to=(target.stag, 0), flags=WrFlag.NONE)
            a.post(write, request(Op.READ, sink, 100_000, to=(target.stag, 0)))
            a.expect(Op.READ)
            assert sink.read() == pattern(100_000, seed).tobytes()


@pytest.mark.parametrize("op", [Op.WRITE, Op.SEND])
def test_a_snapshot_keeps_its_crc_while_the_source_changes(op: Op) -> None:
    with node() as device:
        length = 1 << 20
        source = device.memory(length)
        end, peer = connect_to_script(device)
        is_over = threading.Event()

        def scribble() -> None:
            value = 0
            while not is_over.is_set():
                source.arena[4096 : 4096 + length] = value % 256
                value += 1

        writer = threading.Thread(target=scribble)
        writer.start()
        try:
            with closing(peer):
                end.post(request(op, source, length, to=(1, 0), flags=WrFlag.SIGNALED | WrFlag.SNAPSHOT))
                received = 0
                while received < length:
                    received += len(peer.receive().payload)
        finally:
            is_over.set()
            writer.join()
        assert received == length
        end.expect(op)


def test_a_read_response_keeps_its_crc_while_the_source_changes() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        length = 1 << 20
        source = device.memory(length, Access.REMOTE_READ | Access.REMOTE_WRITE)
        peer.send(StartUp().encode())
        device.serve().qp.accept()
        peer.receive_start()
        is_over = threading.Event()

        def scribble() -> None:
            while not is_over.is_set():
                source.arena[4096 : 4096 + length] += np.uint8(1)

        writer = threading.Thread(target=scribble)
        writer.start()
        try:
            peer.send(ReadRequest(7, 0, length, source.stag, 0).segment())
            received = 0
            while received < length:
                segment = peer.receive()
                assert isinstance(segment, Tagged)
                assert (segment.stag, segment.offset) == (7, received)
                received += len(segment.payload)
        finally:
            is_over.set()
            writer.join()
