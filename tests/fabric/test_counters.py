"""The counters of queue pairs and devices, each with the value that what happened must give it."""

from __future__ import annotations

import ctypes
import re
import socket
import struct
from pathlib import Path

from kbtp_core.fabric.api import Access, Op, QueueLimits, QueuePair, WrFlag, terminate_code
from kbtp_core.fabric.counters import BY_CODE, COUNTERS, DEVICE_VALUES, PAIR_VALUES
from tests.fabric.peer import Peer, closing, dial
from tests.fabric.test_capture import accept_from
from tests.fabric.wire import Enhanced, StartUp, Terminate, send, write
from tests.fabric.world import Node, connect, node, pattern, request, wait_until

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "counters.md"
DROP_EVERYTHING = struct.pack("=HBBI", 0x06, 0, 0, 0)
"""A classic BPF program: return 0."""


def by_code(stats: dict[str, int]) -> dict[str, int]:
    return {name: count for name, count in stats.items() if re.fullmatch(r"terminates_(sent|received)_\d_\d_[0-9a-f]{2}", name)}


def test_every_counter_is_declared_and_on_its_page() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right)
        assert set(a.qp.stats()) == {*COUNTERS, *PAIR_VALUES}
        assert set(left.fabric.stats()) == {*COUNTERS, *DEVICE_VALUES}
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", PAGE.read_text(), re.MULTILINE))
    assert rows == {**COUNTERS, **BY_CODE, **PAIR_VALUES, **DEVICE_VALUES}


def test_both_sides_count_the_same_octets_fpdus_and_messages() -> None:
    with node(mulpdu=1500) as left, node() as right:
        a, b = connect(left, right)
        sink = right.memory(pattern(100_000), Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_ATOMIC)
        local = left.memory(100_000)
        b.receive_into(right.memory(300), 100, count=3)
        a.post(
            request(Op.WRITE, local, 50_000, to=(sink.stag, 0)),
            request(Op.READ, local, 70_000, to=(sink.stag, 0)),
            request(Op.FETCH_ADD, to=(sink.stag, 8), operand=1),
            request(Op.IMMEDIATE, operand=7),
            request(Op.SEND_SE, local, 100),
        )
        for op in (Op.WRITE, Op.READ, Op.FETCH_ADD, Op.IMMEDIATE, Op.SEND_SE):
            a.expect(op)
        b.expect(Op.RECEIVE_IMMEDIATE)
        b.expect(Op.RECEIVE)
        mine, its = a.qp.stats(), b.qp.stats()
        first_write, messages, answers = 1, 5, 2
        assert mine["messages_sent"] == its["messages_received"] == first_write + messages
        assert its["messages_sent"] == mine["messages_received"] == answers
        room_of_a_write, room_of_a_read_response = 1500 - 14, 61440
        assert mine["fpdus_sent"] == its["fpdus_received"] == first_write + -(-50_000 // room_of_a_write) + 4
        assert its["fpdus_sent"] == mine["fpdus_received"] == -(-70_000 // room_of_a_read_response) + 1
        for octets in ("bytes_sent", "bytes_received"):
            assert mine[octets] == its[{"bytes_sent": "bytes_received", "bytes_received": "bytes_sent"}[octets]]
        assert mine["bytes_received"] == 70_000 + 2 * (2 + 14 + 4) + 36


def test_a_device_keeps_what_queue_pairs_that_ended_had_counted() -> None:
    with node() as left, node() as right:
        for _ in range(3):
            a, b = connect(left, right)
            b.receive_into(right.memory(8), 8)
            a.post(request(Op.SEND, left.memory(8), 8))
            b.expect(Op.RECEIVE)
            a.qp.close()
            a.drain()
            b.drain()
        connect(left, right)
        wait_until(lambda: left.fabric.stats()["queue_pairs_ended"] == 3)
        stats = left.fabric.stats()
        assert (stats["queue_pairs"], stats["queue_pairs_ended"]) == (1, 3)
        assert stats["messages_sent"] == 4 + 3  # the first Writes, the Sends
        assert stats["bytes_sent"] == 4 * 20 + 3 * (2 + 18 + 8 + 4)
        left.fabric.close()
        after = left.fabric.stats()
        assert (after["queue_pairs"], after["queue_pairs_ended"]) == (0, 4)
        assert after["messages_sent"] == 4 + 3


def connected(device: Node) -> tuple[Peer, QueuePair]:
    """A scripted peer that has said its first frame."""
    peer = dial(device.listen())
    end = accept_from(device, peer)
    peer.receive_start()
    peer.send(write(0, 0, b""))
    end.expect(Op.CONNECTED)
    return peer, end.qp


def test_a_wrong_crc_is_counted_and_so_is_the_terminate_by_its_code() -> None:
    with node() as device:
        for _ in range(2):
            peer, qp = connected(device)
            with closing(peer):
                octets = bytearray(send(b"spoilt", 1).frame())
                octets[-1] ^= 1
                peer.send(bytes(octets))
                assert peer.receive_terminate().code == 2
            stats = qp.stats()
            assert (stats["crc_errors"], stats["terminates_sent"], by_code(stats)) == (1, 1, {"terminates_sent_2_0_02": 1})
        wait_until(lambda: device.fabric.stats()["queue_pairs_ended"] == 2)
        stats = device.fabric.stats()
        assert (stats["crc_errors"], stats["terminates_sent"], by_code(stats)) == (2, 2, {"terminates_sent_2_0_02": 2})


def test_a_terminate_of_the_peer_is_counted_by_its_code() -> None:
    with node() as device:
        peer, qp = connected(device)
        with closing(peer):
            peer.send(Terminate.about(send(b"too long", 1), 1, 2, 5).segment())
            peer.read_to_end()
        stats = device.fabric.stats()
        assert (stats["terminates_received"], by_code(stats)) == (1, {"terminates_received_1_2_05": 1})
        assert by_code(qp.stats()) == {"terminates_received_1_2_05": 1}
        assert terminate_code(1, 2, 5) & 0xFF == 5


def test_each_read_that_waits_for_another_is_one_ord_stall() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right, QueueLimits(ird=1, ord=1))
        source, local = right.memory(64, Access.REMOTE_READ), left.memory(64)
        a.post(request(Op.READ, local, 64, to=(source.stag, 0)))
        a.expect(Op.READ)
        assert a.qp.stats()["ord_stalls"] == 0
        a.post(*[request(Op.READ, local, 64, to=(source.stag, 0)) for _ in range(5)])
        for _ in range(5):
            a.expect(Op.READ)
        assert a.qp.stats()["ord_stalls"] == 4


def test_a_peer_that_reads_slowly_is_a_socket_stall() -> None:
    with node() as device:
        peer = dial(device.listen(), receive_buffer_bytes=4096)
        with closing(peer):
            end = accept_from(device, peer)
            peer.receive_start()
            peer.send(write(0, 0, b""))
            end.expect(Op.CONNECTED)
            assert end.qp.stats()["socket_stalls"] == 0
            end.post(request(Op.SEND, device.memory(16 << 20), 16 << 20, flags=WrFlag.NONE))
            wait_until(lambda: len(peer.sock.recv(1 << 20)) > 0 and end.qp.stats()["socket_stalls"] > 0)


def test_what_the_kernel_sends_again_is_counted() -> None:
    with node() as device:
        peer, qp = connected(device)
        with closing(peer):
            program = ctypes.create_string_buffer(DROP_EVERYTHING)
            peer.sock.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER
            assert qp.stats()["retransmitted_segments"] == 0
            memory = device.memory(b"lost at first")
            qp.post_send(request(Op.SEND, memory, 13, flags=WrFlag.NONE))
            wait_until(lambda: qp.stats()["retransmitted_segments"] > 0)
            peer.sock.setsockopt(socket.SOL_SOCKET, 27, b"\0\0\0\0")  # SO_DETACH_FILTER
            assert peer.receive_untagged().payload == b"lost at first"
            lost = qp.stats()["retransmitted_segments"]
        wait_until(lambda: device.fabric.stats()["queue_pairs_ended"] == 1)
        assert device.fabric.stats()["retransmitted_segments"] >= lost


def test_what_the_peer_said_of_its_reads_is_there_to_see() -> None:
    with node() as device:
        peer = dial(device.listen())
        with closing(peer):
            peer.send(StartUp(enhanced=Enhanced(ird=5, ord=9)).encode())
            end = device.serve()
            stats = end.qp.stats()
            assert (stats["peer_ird"], stats["peer_ord"]) == (5, 9)
