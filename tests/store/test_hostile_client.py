"""Clients that send what no client would: it costs them their session at most, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import SessionRefused
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, HelloParameters, Status, keyed
from kbtp_core.session import InitiatorSession
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.node import StoreNode
from kbtp_core.store.settings import StoreSettings
from tests.fabric.peer import dial
from tests.fabric.wire import Enhanced, StartUp
from tests.session.conftest import wait_until
from tests.store.disks import folder_in_memory
from tests.store.keyed_world import World, data_of, published
from tests.store.memory_engine import MemoryEngine

RAM = 64 << 20
PAGE = 65536
CURSORS = [0, 1, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, (1 << 63) + (1 << 48), (1 << 64) - 1]


class Node:
    """A store on disks, and sessions with it."""

    def __init__(self, folder: Path) -> None:
        self.node = StoreNode(
            StoreSettings(
                listen="127.0.0.1:0",
                metrics_listen="off",
                ram=RAM,  # type: ignore[arg-type]
                block=(PAGE,),  # type: ignore[arg-type]
                disk=64 << 20,  # type: ignore[arg-type]
                data_dir=(folder / "a", folder / "b"),
                drain_s=2.0,
            )
        )
        self.fabric = SoftRnic()
        self.sessions: list[InitiatorSession] = []

    def connect(self, block_bytes: int = 0) -> InitiatorSession:
        wishes = HelloParameters(int(Capability.STORE), block_bytes, quota=16, handle_count=16, outstanding=64, inline_bytes=4096)
        self.sessions.append(InitiatorSession.connect(self.fabric, *self.node.address, wishes))
        return self.sessions[-1]

    def client(self) -> Client:
        return Client("{}:{}".format(*self.node.address), b"ns", options=LinkOptions(block_bytes=PAGE), fabric=self.fabric)

    def close(self) -> None:
        for session in self.sessions:
            session.close(0.5)
        self.node.check_integrity()
        assert self.node.unready() is None
        self.node.close()
        self.fabric.close()


@pytest.fixture
def node() -> Iterator[Node]:
    with folder_in_memory() as folder:
        made = Node(folder)
        yield made
        made.close()


def soon() -> float:
    return time.monotonic() + 10


@pytest.mark.parametrize("limit", [0, 1, 0xFFFF_FFFF])
@pytest.mark.parametrize("cursor", CURSORS)
def test_a_list_from_any_cursor_is_answered(node: Node, cursor: int, limit: int) -> None:
    with node.client() as client:
        assert client.put(["a"], [b"value"], durable=True).tolist() == [ItemStatus.OK]
        page = node.connect().list_values(0x7E, 0, cursor, deadline=soon(), limit=limit).wait()
        assert (page.status, len(page.items)) == (Status.OK, 0)
        assert [value.length for value in client.list()] == [5]


def test_connections_that_say_nothing_keep_nobody_out_and_end_no_session(tmp_path: Path) -> None:
    settings = StoreSettings(listen="127.0.0.1:0", metrics_listen="off", ram=RAM, sessions=8)  # type: ignore[arg-type]
    with StoreNode(settings) as node:
        address = "{}:{}".format(*node.address)
        with Client(address, b"ns") as early, Client(address, b"ns") as late:
            assert early.put(["a"], [b"value"]).tolist() == [ItemStatus.OK]
            silent = [dial(node.address[1]) for _ in range(8)]
            for peer in silent[:7]:
                peer.request(StartUp(enhanced=Enhanced(16, 16)))
            wait_until(lambda: node.server.session_count == 8)
            time.sleep(1.2)  # longer than a session must have been idle to make room
            assert late.put(["b"], [b"value"]).tolist() == [ItemStatus.OK]
            assert early.exists(["a", "b"]).all()
            assert early._links[address].session(soon()).error is None  # type: ignore[union-attr]


def test_no_pool_is_made_whose_bookkeeping_would_be_more_than_its_octets(node: Node) -> None:
    for size in (64, 256, 512):
        with pytest.raises(SessionRefused, match="no pool of the block size"):
            node.connect(size)
    made = []
    for size in range(4096, 4096 + 64, 8):
        try:
            made.append(node.connect(size).target.block_bytes)
        except SessionRefused:
            break
    assert made == [4096, 4104, 4112]
    assert len(node.node.pools()) == 4


def test_a_disk_that_raises_costs_the_session_that_asked_and_no_other() -> None:
    class Broken(MemoryEngine):
        def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> object:  # type: ignore[override]
            raise OSError("no such sector")

    world = World(disk=Broken())
    first, second = world.peer(), world.peer()
    effects = first.session.receive(keyed.List(77, 0x7E, 0, 1 << 63, 10).encode(), 0.0)
    assert [getattr(effect, "reason", None) for effect in effects] == ["the store failed: OSError('no such sector')"]
    first.disconnect()
    assert second.put(1, data_of(1)).status == Status.OK
    assert second.get(1) == data_of(1)
    world.store.close()
    world.check()


@pytest.mark.parametrize("native", [False, True], ids=["python", "native"])
def test_pins_and_lifetimes_without_end_take_no_memory(native: bool) -> None:
    world = World(blocks=8)
    world.set_time(1000)
    peer = world.peer(native)
    peer.count(keyed.SetNamespace(1 << 40, 0x7E, 3, 0xFFFF_FFFF))
    usual = world.store.native.memory_bytes
    for _ in range(500):
        got = peer.put(1, b"value")
        assert peer.pin(got, lease_ms=3_600_000) == Status.OK
        assert peer.remove(1) == 1
    assert world.store.native.memory_bytes - usual <= 2 * 16 * 16
    kept = peer.put(2, b"kept")
    for _ in range(100):
        assert peer.pin(kept, lease_ms=5000) == Status.OK
    world.set_time(1004)
    world.tick()
    assert peer.lookup(2)["flags"][0] == 2
    world.set_time(1006)
    world.tick()
    assert peer.lookup(2)["flags"][0] == 0
    world.check()


def test_publishes_without_end_behind_a_store_are_not_copied_and_all_are_answered() -> None:
    world = World(blocks=8)
    peer = world.peer(True, outstanding=200)
    peer.hold = True
    peer.alloc(0, data_of(1), inline=False)
    publishes = [peer.publish_message([1], [0]) for _ in range(150)]
    for publish in publishes:
        peer.send(publish.encode())
    assert peer.native_count == 1 + 64
    peer.hold = False
    peer.finish()
    answers = [peer.answer_to(publish.request_id) for publish in publishes]
    assert [published(answer or b"")[0].status for answer in answers] == [Status.OK] + [Status.NOT_BOUND] * 149
    assert peer.get(1) == data_of(1)
    world.check()


def test_a_lease_that_was_ended_does_not_lengthen_the_next() -> None:
    world = World(blocks=8)
    world.set_time(1000)
    peer = world.peer()
    got = peer.put(1, b"value")
    assert peer.pin(got, lease_ms=3_000_000) == Status.OK
    assert peer.pin(got, flags=keyed.PinFlag.UNPIN) == Status.OK
    assert peer.pin(got, lease_ms=1000) == Status.OK
    world.set_time(1002)
    world.tick()
    assert peer.lookup(1)["flags"][0] == 0


def test_lifetimes_end_in_time_after_many_values_of_one_block() -> None:
    world = World(blocks=4)
    world.set_time(1000)
    peer = world.peer(quota=1)
    peer.count(keyed.SetNamespace(1 << 40, 0x7E, 3, 100_000))
    for _ in range(50):
        peer.put(1, b"long")
        peer.remove(1)
    peer.count(keyed.SetNamespace(1 << 41, 0x7E, 3, 5))
    for name in range(3):
        peer.put(name, b"short")
    world.set_time(1006)
    world.tick()
    assert world.store.stats()["expired"] == 3
    assert np.count_nonzero(peer.lookup(0, 1, 2)["tier"]) == 0
    world.check()
