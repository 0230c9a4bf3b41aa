"""A store that dies, hangs or has lost bytes costs misses and next to no time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
import torch

from tests.engines.sglang import hosts
from tests.engines.sglang.hosts import host, indices, octets
from tests.engines.sglang.test_backend import names
from tests.soak.served import ServedStore

_MOST_S = 1.0


def until_back(backend: hosts.KBTPHiCache, keys: list[str], count: int) -> None:
    deadline = time.monotonic() + 30
    while backend.batch_exists(keys) != count:
        assert time.monotonic() < deadline, backend.counts()
        time.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_dead_store_costs_less_than_a_second_in_all_and_is_used_again_when_it_is_back(tmp_path: Path, number: int) -> None:
    served = ServedStore(tmp_path, "--ram", "64M")
    backend = hosts.backend(served.address, host("page_first", seed=1), {"timeout_s": 0.6, "probe_s": 0.2})
    keys = names(8)
    try:
        assert all(backend.batch_set_v1(keys, indices(*range(8))))
        served.process.send_signal(number)
        if number == signal.SIGKILL:
            served.process.wait(10)

        begun = time.monotonic()
        for _ in range(50):
            assert backend.batch_get_v1(keys, indices(*range(8))) == [False] * 8
            assert backend.batch_set_v1(keys, indices(*range(8))) == [False] * 8
            assert backend.batch_exists(keys) == 0
        assert time.monotonic() - begun < _MOST_S

        if number == signal.SIGKILL:
            served.start()
            deadline = time.monotonic() + 30
            while not all(backend.batch_set_v1(keys, indices(*range(8)))):
                assert time.monotonic() < deadline, backend.counts()
                time.sleep(0.05)
        else:
            served.process.send_signal(signal.SIGCONT)
        until_back(backend, keys, 8)
        assert backend.batch_get_v1(keys, indices(*range(8))) == [True] * 8
        assert backend.counts()["breaker/trips"] >= 1
    finally:
        backend.close()
        served.process.send_signal(signal.SIGCONT) if served.process.poll() is None else None
        served.stop(signal.SIGKILL)


def test_a_store_that_was_never_there_keeps_no_engine_from_starting(tmp_path: Path) -> None:
    begun = time.monotonic()
    backend = hosts.backend("127.0.0.1:1", host("page_first", seed=1), {"timeout_s": 0.6})
    assert backend.batch_exists(names(2)) == 0
    assert backend.batch_set_v1(names(2), indices(0, 1)) == [False, False]
    assert backend.clear() is False
    backend.close()
    assert time.monotonic() - begun < 2 * _MOST_S


def test_a_page_whose_bytes_are_damaged_on_disk_is_a_miss(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    flags = ("--ram", "64M", "--data-dir", str(disk), "--disk", "64M")
    served = ServedStore(tmp_path, *flags, "--acknowledge", "disk")
    keys, source = names(4), host("page_first", seed=2)
    try:
        backend = hosts.backend(served.address, source)
        assert all(backend.batch_set_v1(keys, indices(0, 1, 2, 3)))
        backend.close()
        served.stop()
        damage(disk, octets(source, 1)[:256].numpy().tobytes())
        served.start()

        target = host("page_first")
        backend = hosts.backend(served.address, target)
        assert backend.batch_get_v1(keys, indices(0, 1, 2, 3)) == [True, False, True, True]
        assert not octets(target, 1).any()
        assert torch.equal(octets(target, 3), octets(source, 3))
        backend.close()
    finally:
        served.stop()


def damage(disk: Path, octets_: bytes) -> None:
    """Change one octet behind where these are."""
    for path in (path for path in disk.rglob("*") if path.is_file()):
        content = path.read_bytes()
        at = content.find(octets_)
        if at >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([content[at + 100] ^ 1]))
            return
    pytest.fail(f"the value is in no file of {disk}")
