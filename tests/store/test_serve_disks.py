"""A real `kbtp serve` over two disks of which one fails: who is told what, who goes on, and what is there after a restart.

What clients, the log, /metrics and /readyz have to say is the table in docs/operations.md, "When a disk fails".
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.client import Client, ItemStatus
from kbtp_core.cluster.placement import Placement
from kbtp_core.store.disk_group import DISK_WEIGHT
from kbtp_core.store.identity import object_ids
from kbtp_core.store.link import LinkOptions
from tests.soak.served import ServedStore

OK, MISSING, NO_SPACE, TIMED_OUT = ItemStatus.OK, ItemStatus.MISSING, ItemStatus.NO_SPACE, ItemStatus.TIMED_OUT
PAGE, COUNT = 65536, 6
GOES_ON_S = 4.0  # what a call may take that has nothing to do with the disk that fails
DISK_TIMEOUT_S, PATIENCE_S = 6.0, 15.0
TENANTS = (b"one", b"two")


@dataclass(frozen=True)
class Failure:
    """What the bad disk does, and what is said of it."""

    name: str
    faults: tuple[tuple[str, str, int], ...]  # (point, action, amount), at every visit
    text: str  # the system's words, in the log
    kind: str  # of kbtp_disk_errors_total
    is_out: bool = True  # whether the disk is out of service afterwards
    is_found_by_reads: bool = field(default=False)


FULL = Failure(
    "full", (("payload_write", "no_space", 0), ("clear_write", "no_space", 0)), "No space left on device", "no_space", is_out=False
)
READ_ONLY = Failure("read-only", (("payload_write", "read_only", 0),), "Read-only file system", "read_only")
BAD_WRITES = Failure("bad writes", (("payload_write", "io_error", 0),), "Input/output error", "io")
BAD_SYNCS = Failure("bad syncs", (("payload_sync", "io_error", 0),), "Input/output error", "io")
BAD_READS = Failure("bad reads", (("payload_read", "io_error", 0),), "Input/output error", "io", is_found_by_reads=True)
HANGS = Failure("hangs", (("payload_write", "hang", 20_000),), "does not answer", "timeout")
FAILURES = (FULL, READ_ONLY, BAD_WRITES, BAD_SYNCS, BAD_READS, HANGS)


def page_of(key: str) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(list(key.encode())).integers(0, 256, PAGE - len(key), np.uint8)


class World:
    """A store over the disks "bad" and "good"."""

    def __init__(self, folder: Path) -> None:
        self.folders = {name: str(folder / name) for name in ("bad", "good")}
        flags = [flag for path in self.folders.values() for flag in ("--data-dir", path)]
        flags += ["--ram", "16MiB", "--disk", "64MiB", "--block", str(PAGE), "--disk-timeout-s", str(DISK_TIMEOUT_S)]
        self.store = ServedStore(folder, *flags, drain_s=1.0)
        self._placement = Placement(dict.fromkeys(self.folders.values(), DISK_WEIGHT))
        self.clients = {tenant: self._client(tenant) for tenant in TENANTS}

    def _client(self, tenant: bytes) -> Client:
        return Client(self.store.address, tenant, options=LinkOptions(block_bytes=PAGE, quota=16), timeout_s=GOES_ON_S)

    def keys(self, tenant: bytes, disk: str, what: str, count: int = COUNT) -> list[str]:
        """Keys that are the disk's."""
        names = [f"{what}-{at}" for at in range(12 * count)]
        owners = self._placement.owners(object_ids(tenant, names))
        own = self._placement.names.index(self.folders[disk])
        return [name for name, owner in zip(names, owners.tolist(), strict=True) if owner == own][:count]

    def restart(self, *failures: tuple[str, Failure]) -> None:
        """In order; with these failures of these disks."""
        self.store.stop()
        faults = [(self.folders[disk], point, 0, action, amount) for disk, one in failures for point, action, amount in one.faults]
        self.store.start(program=("-m", "tests.store.faulty_serve", json.dumps(faults)))

    def put(self, tenant: bytes, keys: list[str], *, durable: bool = True, timeout_s: float = GOES_ON_S) -> list[int]:
        statuses = self.clients[tenant].put(keys, [page_of(key) for key in keys], durable=durable, timeout_s=timeout_s)
        return [int(status) for status in statuses]

    def get(self, tenant: bytes, keys: list[str], timeout_s: float = GOES_ON_S) -> list[int]:
        """Statuses, after the octets of whatever was OK were compared."""
        buffers = [np.zeros(PAGE, np.uint8) for _ in keys]
        found = self.clients[tenant].get(keys, buffers, timeout_s=timeout_s)
        for at in np.flatnonzero(found.ok).tolist():
            assert (buffers[at][: found.lengths[at]] == page_of(keys[at])).all(), f"{keys[at]} has wrong octets"
        return [int(status) for status in found.status]

    def until_logged(self, *texts: str) -> str:
        """What the log says once all of `texts` are in one line of it."""
        deadline = time.monotonic() + 10
        while True:
            for line in self.store.words().splitlines():
                if all(text in line for text in texts):
                    return line
            assert time.monotonic() < deadline, f"no line with {texts} in:\n{self.store.words()}"
            time.sleep(0.1)

    def close(self) -> None:
        for client in self.clients.values():
            client.close()
        self.store.stop(9)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def provoke(world: World, failure: Failure) -> None:
    """Have the bad disk fail, and see what its keys' owner is told."""
    old = world.keys(b"one", "bad", "old")
    if failure.is_found_by_reads:
        for _ in range(4):  # a few bad sectors do not take a disk out of service; sixteen reads in a row do
            assert world.get(b"one", old) == [MISSING] * COUNT
    if failure is HANGS:
        assert world.put(b"one", world.keys(b"one", "bad", "late", 1), timeout_s=0.3) == [TIMED_OUT]
    assert world.put(b"one", world.keys(b"one", "bad", "new"), timeout_s=PATIENCE_S) == [NO_SPACE] * COUNT


def goes_on(world: World, turn: str) -> None:
    """What the bad disk has no part in."""
    for tenant in TENANTS:
        new = world.keys(tenant, "good", f"new-{turn}", 3)
        assert world.put(tenant, new) == [OK] * 3, f"{tenant!r} can't put on the good disk"
        assert world.get(tenant, new + world.keys(tenant, "good", "old")) == [OK] * (3 + COUNT)
        assert world.clients[tenant].remove(new[:1], timeout_s=GOES_ON_S) == 1


@pytest.mark.parametrize("failure", FAILURES, ids=lambda one: one.name)
def test_a_disk_that_fails_costs_its_own_keys_and_is_named_everywhere(world: World, failure: Failure) -> None:
    for tenant in TENANTS:
        for disk in world.folders:
            assert world.put(tenant, world.keys(tenant, disk, "old")) == [OK] * COUNT
    world.restart(("bad", failure))
    turns, deadline = 0, time.monotonic() + 4 * PATIENCE_S
    with ThreadPoolExecutor(1) as beside:
        failing = beside.submit(provoke, world, failure)
        while not failing.done() or turns < 2:
            turns += 1
            assert time.monotonic() < deadline
            goes_on(world, str(turns))
            time.sleep(0.05)
        failing.result()

    bad, good = world.folders["bad"], world.folders["good"]
    line = world.until_logged(bad, failure.text)
    assert "ERROR" in line
    assert good not in line
    told = world.store.metrics()
    assert told[f"kbtp_disk_degraded/{bad}"] == failure.is_out
    assert told[f"kbtp_disk_errors_total/{bad}/{failure.kind}"] > 0
    assert told[f"kbtp_disk_degraded/{good}"] == 0
    assert sum(told[f"kbtp_disk_errors_total/{good}/{kind}"] for kind in ("io", "no_space", "read_only", "timeout")) == 0
    assert world.store.page("/readyz")[0] == 200
    assert told["kbtp_store_ready"] == 1

    for tenant in TENANTS:  # of the bad disk's keys RAM still takes values, and what was on it is there, or a miss
        assert world.get(tenant, world.keys(tenant, "bad", "old")) == [MISSING if failure.is_out else OK] * COUNT
        kept = world.keys(tenant, "bad", "in-ram")
        assert world.put(tenant, kept, durable=False) == [OK] * COUNT
        assert world.get(tenant, kept) == [OK] * COUNT
    goes_on(world, "last")

    world.restart()
    assert world.store.page("/readyz")[0] == 200
    for tenant in TENANTS:
        for disk in world.folders:
            assert world.get(tenant, world.keys(tenant, disk, "old")) == [OK] * COUNT
        assert world.get(tenant, world.keys(tenant, "good", "new-last", 3)) == [MISSING, OK, OK]
        assert world.put(tenant, world.keys(tenant, "bad", "newest")) == [OK] * COUNT
    assert world.get(b"one", world.keys(b"one", "bad", "new")) == [MISSING] * COUNT


def test_a_store_without_any_disk_left_is_not_ready_and_keeps_values_in_ram(world: World) -> None:
    world.restart(("bad", BAD_WRITES), ("good", READ_ONLY))
    for disk in world.folders:
        assert world.put(b"one", world.keys(b"one", disk, "new")) == [NO_SPACE] * COUNT
    status, text = world.store.page("/readyz")
    assert status == 503
    assert "no disk is in service" in text
    assert all(folder in text for folder in world.folders.values())
    assert "Input/output error" in text
    assert "Read-only file system" in text
    assert world.store.metrics()["kbtp_store_ready"] == 0
    assert world.store.page("/healthz")[0] == 200
    world.until_logged(world.folders["good"], "Read-only file system", "No disk is left")
    keys = world.keys(b"two", "bad", "in-ram") + world.keys(b"two", "good", "in-ram")
    assert world.put(b"two", keys, durable=False) == [OK] * 2 * COUNT
    assert world.get(b"two", keys) == [OK] * 2 * COUNT
