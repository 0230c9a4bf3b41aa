"""A client's calls that the provider makes by itself: they answer as the general way does, which has the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.client import Client, ItemStatus
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.session import TargetServer
from kbtp_core.store import places
from kbtp_core.store.identity import object_ids
from kbtp_core.store.link import Link, LinkOptions
from kbtp_core.store.ram import RamStore

BLOCK = 128 * 1024
OK, EXISTS, MISSING = int(ItemStatus.OK), int(ItemStatus.EXISTS), int(ItemStatus.MISSING)


class Store:
    """A store of 64 blocks, and clients of it."""

    def __init__(self, *, use_executor: bool = True) -> None:
        self.fabric = SoftRnic()
        self.ram = RamStore(BLOCK, 64 * BLOCK)
        self.server = TargetServer(self.fabric, self.ram.target, self.ram.pool_region, use_executor=use_executor)
        self.clients: list[Client] = []

    def client(self, quota: int = 16) -> Client:
        host, port = self.server.address
        self.clients.append(Client(f"{host}:{port}", b"ns", fabric=self.fabric, options=LinkOptions(quota=quota)))
        return self.clients[-1]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close(1.0)
        self.server.check_integrity()
        self.ram.check_integrity()
        self.fabric.close()


@pytest.fixture
def store() -> Iterator[Store]:
    world = Store()
    yield world
    world.close()


def octets(seed: int, length: int) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, length, np.uint8)


def link(client: Client) -> Link:
    client.exists(["connect"])
    (only,) = client._links.values()
    assert isinstance(only, Link)
    return only


def soon() -> float:
    return time.monotonic() + 5.0


LENGTHS = {
    "one": [1],
    "small": [1, 2, 4095, 4096],
    "a message of two segments": [65_536],
    "equal and large": [100_000] * 6,
    "as large as a block": [BLOCK],
}


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
def test_values_of_any_length_are_put_and_read_in_one_call_each(store: Store, lengths: list[int]) -> None:
    writer, reader = store.client(), store.client()
    values = [octets(at, length) for at, length in enumerate(lengths)]
    keys = [f"k{at}" for at in range(len(values))]
    assert link(writer).put_at_once(keys, values, soon(), durable=False, pin=False) is not None
    for who in (reader, reader, writer):  # unknown, remembered, and remembered from the put
        buffers = [np.zeros(length, np.uint8) for length in lengths]
        found = link(who).get_at_once(keys, buffers, soon())
        assert found is not None
        assert (found[0].tolist(), found[1].tolist()) == ([OK] * len(keys), lengths)
        assert all((buffer == wanted).all() for buffer, wanted in zip(buffers, values, strict=True))


def test_a_get_of_values_that_are_partly_known_and_partly_absent_says_so_of_each(store: Store) -> None:
    writer, reader = store.client(), store.client()
    values = [octets(at, 3000) for at in range(4)]
    writer.put([f"k{at}" for at in range(4)], values)
    assert reader.get(["k1"], [np.zeros(3000, np.uint8)]).ok.all()
    buffers = [np.zeros(3000, np.uint8) for _ in range(6)]
    found = link(reader).get_at_once(["k0", "none", "k1", "k2", "nothing", "k3"], buffers, soon())
    assert found is not None
    assert found[0].tolist() == [OK, MISSING, OK, OK, MISSING, OK]
    assert found[1].tolist() == [3000, 0, 3000, 3000, 0, 3000]
    for at, wanted in ((0, 0), (2, 1), (3, 2), (5, 3)):
        assert (buffers[at] == values[wanted]).all()
    assert not buffers[1].any()
    assert not buffers[4].any()


def test_pieces_of_one_size_are_filled_in_order(store: Store) -> None:
    client = store.client()
    memory, back = octets(1, 6 * 30_000).reshape(6, -1), np.zeros((6, 30_000), np.uint8)
    rows = memory.ctypes.data + 30_000 * np.arange(6, dtype=np.uint64).reshape(2, 3)
    assert client.put_from(["a", "b"], places.of_addresses(rows, 30_000, memory)).tolist() == [OK, OK]
    into = back.ctypes.data + 30_000 * np.array([[5, 3, 1], [0, 2, 4]], np.uint64)
    found = link(client).get_at_once(["a", "b"], (into, np.full((2, 3), 30_000, np.uint32)), soon())
    assert found is not None
    assert found[1].tolist() == [90_000, 90_000]
    assert (back[[5, 3, 1, 0, 2, 4]] == memory).all()


def test_a_put_of_which_some_exist_gives_every_handle_back(store: Store) -> None:
    client = store.client(quota=8)
    for turn in range(20):
        keys = [f"k{turn}", f"k{turn}", "same"]
        status = client.put(keys, [b"first", b"second", b"third"])
        assert status.tolist() == [OK, EXISTS, OK if turn == 0 else EXISTS]
    assert store.server.session_count == 1
    buffer = bytearray(6)
    assert client.get(["k7"], [buffer]).lengths.tolist() == [5]
    assert bytes(buffer) == b"first\0"


def test_a_value_that_was_replaced_is_looked_up_again(store: Store) -> None:
    client, other = store.client(), store.client()
    client.put(["a", "b"], [b"old", b"bbb"])
    assert other.remove(["a"]) == 1
    assert other.put(["a"], [b"fresh"]).tolist() == [OK]
    buffers = [bytearray(5), bytearray(5)]
    found = client.get(["a", "b"], buffers)
    assert (found.status.tolist(), found.lengths.tolist()) == ([OK, OK], [5, 3])
    assert bytes(buffers[0]) == b"fresh"


def test_what_is_out_of_the_ordinary_is_refused_and_done_the_general_way(store: Store) -> None:
    client = store.client()
    values = [octets(1, 70_000), octets(2, 90_000)]  # neither inside their messages, nor of one size
    assert link(client).put_at_once(["a", "b"], values, soon(), durable=False, pin=False) is None
    assert client.put(["a", "b"], values).tolist() == [OK, OK]
    buffers = [np.zeros(70_000, np.uint8), np.zeros(90_000, np.uint8)]
    assert link(client).get_at_once(["a", "b"], buffers, soon()) is None
    assert client.get(["a", "b"], buffers).ok.all()
    assert all((buffer == wanted).all() for buffer, wanted in zip(buffers, values, strict=True))
    found = client.get(["a"], [bytearray(10)])
    assert (found.status.tolist(), found.lengths.tolist()) == ([ItemStatus.TOO_LARGE], [70_000])
    assert link(client).get_at_once(["a"], [bytes(70_000)], soon()) is None  # bytes can't be written to
    with pytest.raises(ValueError, match="2 keys, but 1 buffers"):
        client.get(["a", "b"], [bytearray(1)])


def test_a_target_without_an_executor_says_where_values_are_and_they_are_loaded() -> None:
    world = Store(use_executor=False)
    writer, reader = world.client(), world.client()
    assert writer.put(["a", "b"], [b"1", b"22"]).tolist() == [OK, OK]
    buffers = [bytearray(2), bytearray(2), bytearray(2)]
    found = link(reader).get_at_once(["a", "none", "b"], buffers, soon())
    assert found is not None
    assert (found[0].tolist(), found[1].tolist()) == ([OK, MISSING, OK], [1, 0, 2])
    assert (bytes(buffers[0]), bytes(buffers[2])) == (b"1\0", b"22")
    world.close()


def test_other_threads_that_poll_or_use_the_session_hold_up_no_call(store: Store) -> None:
    client = store.client()
    client.put([f"k{at}" for at in range(8)], [bytes([at]) * 500 for at in range(8)])
    session = link(client).session(soon())
    is_over = threading.Event()

    def poll() -> None:
        while not is_over.is_set():
            session.poll()

    def look() -> None:
        while not is_over.is_set():
            assert client.exists(["k0", "none"]).tolist() == [True, False]

    threads = [threading.Thread(target=work) for work in (poll, look)]
    for thread in threads:
        thread.start()
    buffers = [bytearray(500) for _ in range(8)]
    for turn in range(300):
        begun = time.monotonic()
        assert client.get([f"k{at}" for at in range(8)], buffers).ok.all()
        assert client.put([f"new{turn}"], [b"x"]).tolist() == [OK]
        assert time.monotonic() - begun < 5.0
    is_over.set()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
    assert [bytes(buffer) for buffer in buffers] == [bytes([at]) * 500 for at in range(8)]


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A store of its own process, and its address."""
    command = [sys.executable, "-m", "kbtp_core.cli", "serve", "--listen", "127.0.0.1:0", "--metrics-listen", "off", "--ram", "64MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(line.rpartition("serving at ")[2].split()[0] for line in process.stdout if "serving at " in line)
            yield process, address
        finally:
            process.kill()


def stop(process: subprocess.Popen[str]) -> None:
    """Stop the process, and wait until each of its threads has."""
    os.kill(process.pid, signal.SIGSTOP)
    deadline = time.monotonic() + 10
    while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in Path(f"/proc/{process.pid}/task").glob("*/stat")):
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("length", [100, 60_000])
def test_a_store_that_stands_still_costs_a_call_its_deadline_and_its_memory_stays_as_it_is(length: int) -> None:
    with served() as (process, address), Client(address, b"ns") as client:
        keys, values = ["a", "b"], [octets(at, length) for at in range(2)]
        assert client.put(keys, values).tolist() == [OK, OK]
        memory = np.zeros((2, length), np.uint8)
        stop(process)
        for call in (
            lambda: client.get(keys, [*memory], timeout_s=0.2).status.tolist(),
            lambda: client.get(["new", "c"], [*memory], timeout_s=0.2).status.tolist(),
            lambda: client.put(["c", "d"], values, timeout_s=0.2).tolist(),
        ):
            begun = time.monotonic()
            assert call() == [ItemStatus.TIMED_OUT] * 2
            assert 0.15 < time.monotonic() - begun < 2.0
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.3)
        assert not memory.any()
        deadline = time.monotonic() + 10
        while not client.get(keys, [*memory], timeout_s=2.0).ok.all():
            assert time.monotonic() < deadline
        assert (memory == values).all()


def test_a_store_that_dies_during_a_call_ends_it_at_once() -> None:
    with served() as (process, address), Client(address, b"ns") as client:
        client.put(["a"], [b"v"])
        stop(process)
        threading.Timer(0.2, process.kill).start()
        begun = time.monotonic()
        assert client.get(["a"], [bytearray(1)], timeout_s=20.0).status.tolist() == [ItemStatus.UNAVAILABLE]
        assert time.monotonic() - begun < 10.0


def test_lengths_are_asked_in_one_call_and_what_was_found_is_remembered(store: Store) -> None:
    writer, reader = store.client(), store.client()
    keys = [f"k{at}" for at in range(10)]
    writer.put(keys[::2], [bytes(100 + at) for at in range(5)])
    found = link(reader).lengths_at_once(keys, soon(), touch=False, promote=False)
    assert found is not None
    assert found.tolist() == [100, 0, 101, 0, 102, 0, 103, 0, 104, 0]
    known = [np.empty(10, kind) for kind in (np.uint64, np.uint16, np.bool_)]
    channel = link(reader)._dialer.open
    assert channel is not None
    assert channel.cache.find(object_ids(b"ns", keys), *known) == 5
    many = [f"m{at}" for at in range(10_000)]
    assert not reader.exists(many).any()
    assert reader.exists([*many, "k0"]).sum() == 1
