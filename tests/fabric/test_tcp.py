"""What a device asks of TCP: peers that vanish are noticed, and congestion control is as configured."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import logging
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kbtp_core.errors import ConfigError
from kbtp_core.fabric.api import FabricError, Op, QueueLimits
from kbtp_core.fabric.rnic_settings import RnicSettings
from kbtp_core.fabric.softrnic import SoftRnic
from tests.fabric.peer import Peer, closing, listening
from tests.fabric.world import End, Node, connect, node, request


def sockets_to(keep: contextlib.ExitStack, port: int, host: str = "127.0.0.1") -> list[socket.socket]:
    """Copies of this process's sockets whose peer is there, to be closed by `keep`; that closes nothing else."""
    found = []
    for link in [*Path("/proc/self/fd").iterdir()]:
        with contextlib.suppress(OSError), contextlib.ExitStack() as others:  # it is closed by now, or has no peer
            if str(link.readlink()).startswith("socket:"):  # asked of the kernel by name: other threads may close it meanwhile
                # A number that is not in the list: what the listing itself used is free again.
                copy = others.enter_context(socket.socket(fileno=fcntl.fcntl(int(link.name), fcntl.F_DUPFD_CLOEXEC, 500)))
                if copy.getpeername()[:2] == (host, port):
                    found.append(copy)
                    keep.push(others.pop_all())
    return found


def option(sock: socket.socket, name: int) -> int:
    return sock.getsockopt(socket.IPPROTO_TCP, name)


def congestion(sock: socket.socket) -> str:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def names() -> tuple[str, str]:
    """The system's congestion control, and another one that everybody may use, if there is one."""
    with socket.socket() as plain:
        system = congestion(plain)
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    return system, next((name for name in allowed if name != system), system)


@pytest.mark.parametrize(("keepalive_s", "idle_s", "interval_s"), [(None, 30, 6), (2, 1, 1), (600, 300, 60)])
def test_sockets_of_both_sides_notice_a_peer_without_a_sign_of_life(keepalive_s: int | None, idle_s: int, interval_s: int) -> None:
    with node(keepalive_s=keepalive_s) as left, node(keepalive_s=keepalive_s) as right, contextlib.ExitStack() as keep:
        connect(left, right)
        (active,) = sockets_to(keep, right.listen())
        (passive,) = sockets_to(keep, active.getsockname()[1])
        for sock in (active, passive):
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            assert option(sock, socket.TCP_KEEPIDLE) == idle_s
            assert option(sock, socket.TCP_KEEPINTVL) == interval_s
            assert option(sock, socket.TCP_USER_TIMEOUT) == 1000 * (keepalive_s or 60)


def vanish(peer: Peer) -> None:
    """From now on nothing reaches the peer's TCP, so it acknowledges nothing and says nothing: a filter drops every packet."""
    drop_all = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF: return 0
    program = struct.pack("HxxxxxxP", 1, ctypes.addressof(drop_all))
    peer.sock.setsockopt(socket.SOL_SOCKET, 26, program)  # SO_ATTACH_FILTER


@contextmanager
def scripted(device: Node) -> Iterator[tuple[End, Peer]]:
    with listening() as listener:
        end = device.create_qp(QueueLimits())
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
    with closing(peer):
        peer.answer()
        end.expect(Op.CONNECTED)
        yield end, peer


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_peer_whose_host_vanishes_is_given_up_in_time(is_idle: bool) -> None:
    with node(keepalive_s=2) as device, scripted(device) as (end, peer):
        vanish(peer)
        began = time.monotonic()
        if not is_idle:
            end.post(request(Op.SEND, device.memory(bytes(64)), 64))
            end.expect(Op.SEND)
        end.expect(Op.DISCONNECTED, timeout_s=20.0)
        assert 1.0 < time.monotonic() - began < 10.0


def test_an_idle_peer_that_is_alive_is_kept() -> None:
    with node(keepalive_s=2) as device, scripted(device) as (end, _):
        assert end.is_idle(4.0)


def test_congestion_control_is_chosen_by_where_the_peer_is() -> None:
    system, other = names()
    with (
        node(congestion_local=other, congestion_remote="") as left,
        node(congestion_local="", congestion_remote=other) as right,
        contextlib.ExitStack() as keep,
    ):
        connect(left, right)
        (active,) = sockets_to(keep, right.listen())
        (passive,) = sockets_to(keep, active.getsockname()[1])
        assert (congestion(active), congestion(passive)) == (other, system)


@pytest.mark.parametrize(
    ("peers", "is_other"),
    [
        ("", False),
        ("127.0.0.0/8={other}", True),
        ("10.0.0.0/8={other}, fd00::/8={other}", False),
        ("127.0.0.0/8={other}, 127.0.0.2/32={system}", False),
        ("127.0.0.2/31={other},127.0.0.0/8={system}", True),
        ("0.0.0.0/0={other}", True),
        ("::/0={other}", True),
    ],
)
def test_the_narrowest_network_that_has_the_peer_names_its_congestion_control(peers: str, is_other: bool) -> None:
    system, other = names()
    rules = peers.format(other=other, system=system)
    with listening("127.0.0.2") as listener, node(congestion_peers=rules, congestion_local=other, congestion_remote="") as device:
        end = device.create_qp(QueueLimits())
        end.qp.connect("127.0.0.2", listener.port)  # from 127.0.0.1: not this host, as far as addresses tell
        with closing(listener.accept()) as peer, contextlib.ExitStack() as keep:
            peer.answer()
            end.expect(Op.CONNECTED)
            (sock,) = sockets_to(keep, listener.port, "127.0.0.2")
            assert congestion(sock) == (other if is_other else system)


def test_a_congestion_control_that_there_is_not_is_named_once_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), node(congestion_local="nosuchcontrol") as left, node(congestion_local="nosuchcontrol") as right:
        connect(left, right)
    (said,) = [record.getMessage() for record in caplog.records if "nosuchcontrol" in record.getMessage()]
    assert "connections keep the system's" in said
    assert "The kernel allows" in said
    assert "reno" in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keepalive_s": 1}, "keepalive_s is 1"),
        ({"keepalive_s": 7201}, "keepalive_s is 7201"),
        ({"congestion_peers": "10.0.0.0/8"}, "10.0.0.0/8=dctcp"),
        ({"congestion_peers": "10.0.0.1/8=reno"}, "has host bits set"),
        ({"congestion_peers": "here=reno"}, "'here'"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(options: dict[str, str], text: str) -> None:
    with pytest.raises(FabricError, match=text):
        SoftRnic(**options)  # type: ignore[arg-type]


def test_the_environment_decides_what_the_maker_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KBTP_RNIC_PROGRESS_THREADS", "3")
    monkeypatch.setenv("KBTP_RNIC_KEEPALIVE_S", "90")
    device = SoftRnic(keepalive_s=30)
    assert (device.settings.progress_threads, device.settings.keepalive_s) == (3, 30)
    device.close()
    monkeypatch.setenv("KBTP_RNIC_KEEPALIV_S", "90")
    with pytest.raises(FabricError, match="KBTP_RNIC_KEEPALIVE_S"):
        SoftRnic()


def test_networks_are_ordered_by_how_much_they_say() -> None:
    settings = RnicSettings.read({"congestion_peers": "10.0.0.0/8=a, fd00::/8=b, 10.1.0.0/16=c"}, "a test")
    mapped = bytes(10) + b"\xff\xff"
    assert settings.networks == [
        (mapped + bytes([10, 1, 0, 0]), 112, "c"),
        (mapped + bytes([10, 0, 0, 0]), 104, "a"),
        (bytes([0xFD]) + bytes(15), 8, "b"),
    ]
    with pytest.raises(ConfigError, match="congestion_peers"):
        RnicSettings.read({"congestion_peers": "x"}, "a test")


def test_the_page_of_the_fabric_has_every_setting() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "fabric.md").read_text()
    rows = [f"| `{name}` | {kind} | `{default}` | {text} |" for name, kind, default, text in RnicSettings.describe()]
    assert [row for row in rows if row not in page] == []
