"""Captures: the very octets of both directions, start-up included, in packets that are whole; and a file that never hurts a stream."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kbtp_core.errors import ConfigError
from kbtp_core.fabric.api import Access, FabricError, Op, terminate_code
from kbtp_core.fabric.capture import Capture
from kbtp_core.fabric.softrnic import SoftRnic
from tests.fabric.pcap import ACK, FIN, RST, SYN, packets, streams
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import StartUp, Untagged, send, write
from tests.fabric.world import End, Node, connect, node, pattern, request

ROOT = Path(__file__).resolve().parent.parent.parent


def accept_from(device: Node, peer: Peer, receives: int = 4) -> End:
    """The device's side of a connection that `peer` asks for."""
    peer.send(StartUp().encode())
    end = device.serve()
    end.receive_into(device.memory(64 * receives), 64, count=receives)
    end.qp.accept()
    return end


def test_the_passive_side_writes_down_the_very_octets_of_both_directions(tmp_path: Path) -> None:
    path = tmp_path / "passive.pcap"
    with node(capture=path) as device:
        peer = dial(device.listen())
        with closing(peer):
            end = accept_from(device, peer)
            reply = peer.receive_start_octets()
            here, there = peer.sock.getsockname()[:2], peer.sock.getpeername()[:2]
            frames = write(0, 0, b"").frame() + send(b"to the device", 1).frame()
            peer.send(frames)
            end.expect(Op.CONNECTED)
            end.expect(Op.RECEIVE)
            end.post(request(Op.SEND, device.memory(b"from the device"), 15))
            end.expect(Op.SEND)
            answer = peer.receive()
            end.qp.close()
            assert peer.sock.recv(1) == b""
        end.drain()
    carried = streams(packets(path))
    assert carried == {(here, there): StartUp().encode() + frames, (there, here): reply + answer.frame()}


def test_the_active_side_writes_down_its_request_first_and_its_fin_last(tmp_path: Path) -> None:
    path = tmp_path / "active.pcap"
    with node(capture=path) as device, listening() as server:
        end = device.create_qp()
        end.qp.connect("127.0.0.1", server.port)
        peer = server.accept()
        with closing(peer):
            asked = peer.answer()
            end.expect(Op.CONNECTED)
            end.qp.close()
            assert peer.sock.recv(1) == b""
        end.expect(Op.DISCONNECTED)
    found = packets(path)
    here = found[0].source
    assert [(p.source == here, p.flags & ~8) for p in found] == [
        (True, SYN),
        (False, SYN | ACK),
        (True, ACK),
        (True, ACK),
        *[(False, ACK)] * (len(found) - 7),
        (True, FIN | ACK),
        (False, FIN | ACK),
        (True, ACK),
    ]
    assert found[3].payload == asked.encode()
    assert all(a.time_ns <= b.time_ns for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("mulpdu", [68, 61458])
def test_much_data_in_both_directions_is_there_without_a_gap(tmp_path: Path, mulpdu: int) -> None:
    paths = [tmp_path / "left.pcap", tmp_path / "right.pcap"]
    size = 700_001 if mulpdu > 1000 else 30_001
    with node(capture=paths[0], mulpdu=mulpdu) as left, node(capture=paths[1], mulpdu=mulpdu) as right:
        a, b = connect(left, right)
        source, sink = left.memory(pattern(size)), right.memory(size, Access.REMOTE_WRITE | Access.REMOTE_READ)
        a.post(request(Op.WRITE, source, size, to=(sink.stag, 0)))
        a.post(request(Op.READ, left.memory(size), size, to=(sink.stag, 0)))
        a.expect(Op.WRITE)
        a.expect(Op.READ)
        a.qp.close()
        a.drain()
        b.drain()
        sent = a.qp.stats()
    at_left, at_right = (streams(packets(path)) for path in paths)
    assert at_left == at_right
    start_up = 2 * 24
    assert sum(map(len, at_left.values())) == sent["bytes_sent"] + sent["bytes_received"] + start_up
    assert max(len(p.payload) for p in packets(paths[0])) <= 65475


def test_an_answer_never_stands_before_what_it_answers(tmp_path: Path) -> None:
    path = tmp_path / "order.pcap"
    with node(capture=path) as left, node() as right:
        a, _ = connect(left, right)
        word = right.memory(8, Access.REMOTE_ATOMIC)
        for _ in range(200):
            a.post(request(Op.FETCH_ADD, to=(word.stag, 0), operand=1))
            a.expect(Op.FETCH_ADD)
    found = [p for p in packets(path) if p.payload]
    start_up_and_first_write = next(i for i, p in enumerate(found) if len(p.payload) == 20 and p.payload[:2] == b"\0\x0e") + 1
    here = found[0].source
    assert [p.source == here for p in found[start_up_and_first_write:]] == [True, False] * 200
    streams(packets(path))  # acknowledges nothing that was not sent


def test_a_connection_between_two_pairs_of_one_device_is_there_once(tmp_path: Path) -> None:
    path = tmp_path / "self.pcap"
    with node(capture=path) as device:
        a, b = connect(device, device)
        b.receive_into(device.memory(64), 64)
        a.post(request(Op.SEND, device.memory(b"to itself"), 9))
        b.expect(Op.RECEIVE)
        a.qp.close()
        a.drain()
        b.drain()
    carried = streams(packets(path))
    assert len(carried) == 2
    assert sum(b"to itself" in octets for octets in carried.values()) == 1


def test_ipv6_connections_have_ipv6_headers(tmp_path: Path) -> None:
    path = tmp_path / "six.pcap"
    with node(capture=path) as left, node() as right:
        right.listener = right.fabric.listen("::1", 0, right.cq)
        a = left.create_qp()
        a.qp.connect("::1", right.listener.address[1])
        right.serve().qp.accept()
        a.expect(Op.CONNECTED)
    assert {p.source[0] for p in packets(path)} == {"::1"}
    assert all(p.has_checksums for p in packets(path))


def test_checksums_can_be_left_out_as_where_a_nic_computes_them(tmp_path: Path) -> None:
    path = tmp_path / "offload.pcap"
    with node(capture=Capture(path, checksums=False)) as left, node() as right:
        connect(left, right)
    assert not any(p.has_checksums for p in packets(path))


def test_a_refused_request_is_there_with_its_rejecting_reply(tmp_path: Path) -> None:
    path = tmp_path / "refused.pcap"
    with node(capture=path) as device:
        peer = dial(device.listen())
        with closing(peer):
            peer.send(StartUp().encode())
            device.next_request().reject(b"no")
            reply = peer.receive_start_octets()
            assert peer.sock.recv(1) == b""
        there_here = list(streams(packets(path)).values())
    assert there_here == [StartUp().encode(), reply]
    assert reply.endswith(b"no")


def test_a_peer_that_resets_the_connection_is_seen_to_do_so(tmp_path: Path) -> None:
    path = tmp_path / "reset.pcap"
    with node(capture=path) as device:
        peer = dial(device.listen())
        end = accept_from(device, peer)
        peer.receive_start()
        here = peer.sock.getsockname()[:2]
        peer.reset()
        end.drain()
    assert [(p.source, p.flags) for p in packets(path)][-1] == (here, RST | ACK)


def test_a_terminate_is_the_last_thing_that_the_file_has(tmp_path: Path) -> None:
    path = tmp_path / "terminate.pcap"
    with node(capture=path) as device:
        peer = dial(device.listen())
        with closing(peer):
            end = accept_from(device, peer)
            peer.receive_start()
            peer.send(write(0, 0, b""), Untagged(3, 7, b"wrong MSN"))
            peer.receive()
            assert end.drain()[-1].value == terminate_code(1, 2, 3)
    last = [p for p in packets(path) if p.payload][-1]
    assert last.payload[2:4] == b"\x41\x47"


def test_a_full_file_stops_growing_and_the_stream_does_not_notice(tmp_path: Path) -> None:
    path, limit = tmp_path / "full.pcap", 100_000
    with node(capture=Capture(path, limit_bytes=limit)) as left, node() as right:
        a, b = connect(left, right)
        sink = right.memory(500_000, Access.REMOTE_WRITE)
        for _ in range(3):
            a.post(request(Op.WRITE, left.memory(pattern(500_000)), 500_000, to=(sink.stag, 0)))
            a.expect(Op.WRITE)
        b.receive_into(right.memory(64), 64)
        a.post(request(Op.SEND, left.memory(b"x"), 1))
        b.expect(Op.RECEIVE)
        stats = left.fabric.stats()
        assert sink.read() == pattern(500_000).tobytes()
    assert path.stat().st_size == stats["capture_bytes"] <= limit
    assert len(packets(path)) == stats["capture_packets"] > 5
    assert stats["capture_dropped_packets"] > 10
    assert stats["capture_errors"] == 0


FAILING_FILE = """
import resource, sys
from kbtp_core.fabric.api import Access, Op
from tests.fabric.world import connect, node, pattern, request

with node(capture=sys.argv[1]) as left, node() as right:
    a, b = connect(left, right)
    sink = right.memory(100_000, Access.REMOTE_WRITE | Access.REMOTE_READ)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
    a.post(request(Op.WRITE, left.memory(pattern(100_000)), 100_000, to=(sink.stag, 0)), request(Op.READ))
    a.expect(Op.WRITE)
    a.expect(Op.READ)
    assert sink.read() == pattern(100_000).tobytes()
    stats = left.fabric.stats()
    print(stats["capture_errors"], stats["capture_packets"], stats["capture_dropped_packets"] > 0)
"""


def test_an_error_of_the_file_is_counted_and_leaves_whole_packets_behind(tmp_path: Path) -> None:
    path = tmp_path / "failing.pcap"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", FAILING_FILE, str(path)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    found = packets(path)
    assert done.stdout.split() == ["1", str(len(found)), "True"]
    assert len(found) >= 6


def test_a_file_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "no" / "such" / "folder.pcap"
    with pytest.raises(FabricError, match=r"cannot write a capture to .*folder\.pcap: No such file or directory"):
        SoftRnic(capture=path)


def test_others_cannot_read_a_capture_for_it_holds_what_the_blocks_hold(tmp_path: Path) -> None:
    path = tmp_path / "private.pcap"
    SoftRnic(capture=path).close()
    assert path.stat().st_mode & 0o777 == 0o600


def test_the_environment_asks_for_a_file_of_its_own_for_every_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_CAPTURE_FOLDER", str(tmp_path))
    monkeypatch.setenv("KBTP_CAPTURE_LIMIT_MIB", "3")
    monkeypatch.setenv("KBTP_CAPTURE_CHECKSUMS", "false")
    with node() as left, node() as right:
        connect(left, right)
        assert isinstance(left.fabric, SoftRnic)
        assert left.fabric.capture is not None
        assert (left.fabric.capture.limit_bytes, left.fabric.capture.checksums) == (3 << 20, False)
    files = sorted(tmp_path.glob(f"kbtp-*-{os.getpid()}-*.pcap"))
    assert len(files) == 2
    assert streams(packets(files[0])) == streams(packets(files[1]))


def test_a_misspelt_variable_is_an_error_that_names_the_right_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_CAPTURE_FOLDERS", "here")
    with pytest.raises(ConfigError, match="KBTP_CAPTURE_FOLDER"):
        SoftRnic()


def test_without_a_wish_there_is_no_capture() -> None:
    with node() as device:
        assert isinstance(device.fabric, SoftRnic)
        assert device.fabric.capture is None
        assert device.fabric.stats()["capture_bytes"] == 0
