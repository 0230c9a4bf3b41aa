"""The software RNIC against the golden frames: it sends exactly these octets, and has the right effect when it gets them."""

from __future__ import annotations

import struct

import numpy as np

from kbtp_core.fabric.api import Access, CompletionFlag, CompletionStatus, Op, QueueLimits, terminate_code
from tests.fabric import golden
from tests.fabric.peer import Peer, PeerListener, closing, dial, listening
from tests.fabric.wire import StartUp, send, write
from tests.fabric.world import End, Node, node, request

LIMITS = QueueLimits(ird=16, ord=16)


def connect_to(device: Node, listener: PeerListener) -> tuple[End, Peer]:
    """The device as MPA initiator; both start-up frames are golden."""
    end = device.create_qp(LIMITS)
    end.qp.connect("127.0.0.1", listener.port)
    peer = listener.accept()
    assert peer.receive_start_octets() == golden.MPA_REQUEST
    peer.send(golden.MPA_REPLY)
    end.expect(Op.CONNECTED)
    return end, peer


def connect_from(device: Node) -> tuple[End, Peer]:
    """The device as MPA responder; both start-up frames are golden. Receives are to be posted before the peer sends."""
    peer = dial(device.listen())
    peer.send(golden.MPA_REQUEST)
    end = device.serve(LIMITS)
    end.qp.accept()
    assert peer.receive_start_octets() == golden.MPA_REPLY
    return end, peer


def test_a_rejecting_reply_is_golden() -> None:
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(golden.MPA_REQUEST)
        device.next_request().reject()
        octets = peer.receive_start_octets()
        assert octets[:18] == golden.MPA_REJECT[:18]
        assert StartUp.decode(octets).private_data == b""


def test_sends_and_immediates_leave_as_golden_frames() -> None:
    with node(mulpdu=68) as device, listening() as listener:
        source = device.memory(bytes(range(0x18)) + b"A" * 50 + b"B" * 20)
        end, peer = connect_to(device, listener)
        end.post(
            request(Op.SEND, source, 0x18, wr_id=1),
            request(Op.IMMEDIATE, operand=int.from_bytes(b"12345678", "big"), wr_id=2),
            request(Op.IMMEDIATE_SE, operand=int.from_bytes(b"abcdefgh", "big"), wr_id=3),
            request(Op.SEND, source, 70, offset=0x18, wr_id=4),
        )
        with closing(peer):
            for name in ("send", "immediate", "immediate_se", "long_send_1", "long_send_2"):
                assert peer.receive_frame() == golden.octets(name), name
        assert [end.expect(op).wr_id for op in (Op.SEND, Op.IMMEDIATE, Op.IMMEDIATE_SE, Op.SEND)] == [1, 2, 3, 4]


def test_sends_with_invalidate_leave_as_golden_frames() -> None:
    with node() as device, listening() as listener:
        source = device.memory(b"x" * 10 + b"y" * 10 + b"z" * 10)
        end, peer = connect_to(device, listener)
        end.post(
            request(Op.SEND_SE, source, 10),
            request(Op.SEND_INVALIDATE, source, 10, offset=10, to=(golden.SINK_STAG, 0)),
            request(Op.SEND_SE_INVALIDATE, source, 10, offset=20, to=(golden.SECOND_SINK_STAG, 0)),
        )
        with closing(peer):
            for name in ("send_se", "send_invalidate", "send_se_invalidate"):
                assert peer.receive_frame() == golden.octets(name), name


def test_writes_leave_as_golden_frames() -> None:
    with node() as device, listening() as listener:
        source = device.memory(b"w" * 33, Access.NONE)
        end, peer = connect_to(device, listener)
        end.post(request(Op.WRITE, source, 33, to=(golden.DATA_STAG, 0x4000)), request(Op.WRITE))
        with closing(peer):
            assert peer.receive_frame() == golden.octets("write")
            assert peer.receive_frame() == golden.octets("zero_length_write")


def test_reads_and_atomics_leave_as_golden_frames_and_take_golden_answers() -> None:
    with node(stags=[golden.SINK_STAG], first_atomic_id=0x77) as device, listening() as listener:
        sink = device.memory(0x3000)
        end, peer = connect_to(device, listener)
        end.post(
            request(Op.FETCH_ADD, to=(golden.COUNTER_STAG, 0x1000), operand=golden.KBTP_ADD, mask=golden.KBTP_MASK),
            request(Op.CMP_SWAP, to=(golden.COUNTER_STAG, 0x1000), operand=1, mask=0xFF, compare=2, compare_mask=0xFF),
            request(Op.READ, sink, 100, offset=0x2000, to=(golden.DATA_STAG, 0x3000)),
        )
        with closing(peer):
            for name in ("fetch_add", "cmp_swap", "read_request"):
                assert peer.receive_frame() == golden.octets(name), name
            for name in ("fetch_add_response", "cmp_swap_response", "read_response_1", "read_response_2"):
                peer.send(golden.octets(name))
            assert end.expect(Op.FETCH_ADD).value == 0x0000000500000050
            assert end.expect(Op.CMP_SWAP).value == 2
            assert end.expect(Op.READ).length == 100
            assert sink.read() == bytes(0x2000) + b"r" * 100 + bytes(0x1000 - 100)

            end.post(request(Op.READ, sink, 100, offset=0x2000, to=(golden.DATA_STAG, 0xFFFF0000), wr_id=9))
            assert peer.receive_frame() == golden.BAD_READ.segment(4).frame()
            peer.send(golden.octets("terminate"))
            assert end.expect(Op.READ, CompletionStatus.REMOTE_ACCESS).wr_id == 9
            last = end.expect(Op.DISCONNECTED)
            assert last.value == terminate_code(0, 1, 1)
            assert last.flags == CompletionFlag.REMOTE


def test_golden_sends_and_immediates_are_received() -> None:
    with node() as device:
        inbox = device.memory(4 * 128)
        end, peer = connect_from(device)
        with closing(peer):
            end.receive_into(inbox, 128, count=4)
            for name in ("send", "immediate", "immediate_se", "long_send_1", "long_send_2"):
                peer.send(golden.octets(name))
            end.expect(Op.CONNECTED)
            first, second, third, fourth = (end.expect(op) for op in (Op.RECEIVE, Op.RECEIVE_IMMEDIATE, Op.RECEIVE_IMMEDIATE, Op.RECEIVE))
        assert [done.wr_id for done in (first, second, third, fourth)] == [0, 1, 2, 3]
        assert (first.length, first.flags) == (0x18, CompletionFlag(0))
        assert inbox.read(0, 128) == bytes(range(0x18)) + bytes(128 - 0x18)
        assert (second.value, second.flags) == (int.from_bytes(b"12345678", "big"), CompletionFlag(0))
        assert (third.value, third.flags) == (int.from_bytes(b"abcdefgh", "big"), CompletionFlag.SOLICITED)
        assert fourth.length == 70
        assert inbox.read(3 * 128) == b"A" * 50 + b"B" * 20 + bytes(58)


def test_golden_sends_with_invalidate_invalidate() -> None:
    with node(stags=[golden.SINK_STAG, golden.SECOND_SINK_STAG]) as device:
        targets = [device.memory(64, Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE) for _ in range(2)]
        inbox = device.memory(3 * 16)
        assert [target.stag for target in targets] == [golden.SINK_STAG, golden.SECOND_SINK_STAG]
        end, peer = connect_from(device)
        with closing(peer):
            end.receive_into(inbox, 16, count=3)
            for name in ("send_se", "send_invalidate", "send_se_invalidate"):
                peer.send(golden.octets(name))
            end.expect(Op.CONNECTED)
            solicited, invalidating, both = (end.expect(Op.RECEIVE) for _ in range(3))
        assert (solicited.flags, solicited.stag) == (CompletionFlag.SOLICITED, 0)
        assert (invalidating.flags, invalidating.stag) == (CompletionFlag.INVALIDATED, golden.SINK_STAG)
        assert both.flags == CompletionFlag.SOLICITED | CompletionFlag.INVALIDATED
        assert both.stag == golden.SECOND_SINK_STAG
        assert inbox.read() == b"x" * 10 + bytes(6) + b"y" * 10 + bytes(6) + b"z" * 10 + bytes(6)
        assert not any(target.region.is_valid for target in targets)


def test_golden_requests_get_golden_responses() -> None:
    with node(stags=[golden.COUNTER_STAG, golden.DATA_STAG], mulpdu=74) as device:
        counters = device.memory(0x1010, Access.REMOTE_ATOMIC)
        data = device.memory(0x5000, Access.REMOTE_READ | Access.REMOTE_WRITE)
        data.fill(b"r" * 100, 0x3000)
        counters.fill(struct.pack("=Q", 0x0000000500000050), 0x1000)
        end, peer = connect_from(device)
        with closing(peer):
            peer.send(golden.octets("fetch_add"))
            end.expect(Op.CONNECTED)
            assert peer.receive_frame() == golden.octets("fetch_add_response")
            assert counters.read(0x1000, 8) == struct.pack("=Q", 0x0000000600000060)
            counters.fill(struct.pack("=Q", 2), 0x1000)
            peer.send(golden.octets("cmp_swap"))
            assert peer.receive_frame() == golden.octets("cmp_swap_response")
            assert counters.read(0x1000, 8) == struct.pack("=Q", 1)
            assert not any(counters.read(0, 0x1000))
            assert not any(counters.read(0x1008))

            peer.send(golden.octets("read_request"))
            assert peer.receive_frame() == golden.octets("read_response_1")
            assert peer.receive_frame() == golden.octets("read_response_2")

            peer.send(golden.BAD_READ.segment(4))
            assert peer.receive_frame() == golden.octets("terminate")
            peer.close()
            last = end.expect(Op.DISCONNECTED)
            assert (last.value, last.flags) == (terminate_code(0, 1, 1), CompletionFlag(0))


def test_golden_writes_land_and_an_empty_one_names_no_memory() -> None:
    with node(stags=[golden.DATA_STAG]) as device:
        data = device.memory(0x5000, Access.REMOTE_READ | Access.REMOTE_WRITE)
        end, peer = connect_from(device)
        end.receive_into(device.memory(8), 8)
        with closing(peer):
            peer.send(golden.octets("zero_length_write"), golden.octets("write"))
            peer.send(write(golden.DATA_STAG, 0x4FFF, b"!"), send(b""))
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 0
        expected = np.zeros(0x5000, np.uint8)
        expected[0x4000:0x4021] = ord("w")
        expected[0x4FFF] = ord("!")
        assert data.read() == expected.tobytes()
