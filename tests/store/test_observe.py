"""The address by which a store is watched."""

from __future__ import annotations

import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from kbtp_core.store import observe
from kbtp_core.store.observe import Observatory, notify_service_manager


class World:
    def __init__(self) -> None:
        registry = CollectorRegistry()
        Gauge("kbtp_answer", "The answer.", registry=registry).set(42)
        self.reason: str | None = None
        self.observatory = Observatory("127.0.0.1", 0, registry, lambda: self.reason)

    def get(self, path: str) -> tuple[int, str]:
        host, port = self.observatory.address
        try:
            with urllib.request.urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.observatory.close()


def test_metrics_are_in_the_text_format(world: World) -> None:
    status, text = world.get("/metrics")
    assert status == 200
    assert "kbtp_answer 42.0" in text.splitlines()


def test_an_unready_store_is_still_alive(world: World) -> None:
    assert world.get("/readyz") == (200, "ready\n")
    world.reason = "disk /a is read-only"
    assert world.get("/readyz") == (503, "disk /a is read-only\n")
    assert world.get("/healthz") == (200, "alive\n")


def test_other_paths_are_told_what_there_is(world: World) -> None:
    status, text = world.get("/")
    assert status == 404
    assert "/metrics" in text


def test_clients_that_say_nothing_are_cut_off_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "_REQUEST_LIMIT_S", 0.3)
    world = World()
    silent = [socket.create_connection(world.observatory.address) for _ in range(8)]
    assert world.get("/healthz")[0] == 200
    deadline = time.monotonic() + 5
    for peer in silent:
        peer.settimeout(max(0.1, deadline - time.monotonic()))
        assert peer.recv(1) == b""
        peer.close()
    world.observatory.close()


def test_the_service_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notify_service_manager("READY=1")  # nobody asked
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        notify_service_manager("READY=1")
        assert manager.recv(100) == b"READY=1"
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    notify_service_manager("STOPPING=1")
