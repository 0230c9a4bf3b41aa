"""The RAM tier over a slab: the executor asks its index by itself, and values outlive a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbtp_core import _native
from kbtp_core.protocol import Status, keyed
from kbtp_core.protocol.keyed import LookupFlag, Tier
from kbtp_core.store.slab import SlabEngine
from tests.store.keyed_world import TENANT, Peer, World, completion

COUNT = 30


def data_of(name: int) -> bytes:
    return (b"value %d " % name * 32)[: 64 + name]


class OnSlab:
    """Values carry their real CRCs here, for the slab checks them."""

    def __init__(self, folder: Path) -> None:
        self.slab = SlabEngine(folder, 64 << 20, direct=False)
        self.world = World(blocks=8, disk=self.slab)

    def put(self, peer: Peer, name: int) -> int:
        peer.alloc(0, data_of(name))
        message = peer.publish_message([name], [0])
        message.items["crc"] = _native.crc32c(data_of(name))
        answer = keyed.parse_keyed_answer(peer.ask(message))
        assert isinstance(answer, keyed.PublishResult)
        return int(answer.items["status"][0])

    def wait_clean(self) -> None:
        deadline = time.monotonic() + 5
        while self.world.store.stats()["dirty"]:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.world.tick()

    def get(self, peer: Peer, name: int) -> bytes | None:
        (item,) = peer.lookup(name, flags=LookupFlag.PROMOTE)
        if item["tier"] not in (Tier.RAM, Tier.PROMOTING):
            return None
        load: Any = peer.load_message(int(item["handle"]), int(item["generation"]))
        peer.send(load.encode())
        deadline = time.monotonic() + 5
        while (octets := peer.answer_to(load.request_id)) is None:
            assert time.monotonic() < deadline
            time.sleep(0.001)
            self.world.tick()
        answer = completion(octets)
        return peer.memory[: answer.data_length].tobytes() if answer.status == Status.OK else None

    def close(self) -> None:
        assert self.world.store.close(5.0)
        self.world.check()
        self.slab.close()


@pytest.mark.parametrize("native", [False, True], ids=["target", "executor"])
def test_values_beyond_ram_are_read_from_the_slab_and_outlive_a_restart(tmp_path: Path, native: bool) -> None:
    store = OnSlab(tmp_path)
    peer = store.world.peer(native, quota=1)
    for name in range(COUNT):
        assert store.put(peer, name) == Status.OK
        store.wait_clean()
    tiers = peer.lookup(*range(COUNT))["tier"]
    assert np.count_nonzero(tiers == Tier.DISK) == COUNT - 7
    assert np.count_nonzero(tiers == Tier.RAM) == 7
    assert [store.get(peer, name) for name in range(COUNT)] == [data_of(name) for name in range(COUNT)]
    assert store.put(peer, 0) == Status.ALREADY_BOUND
    store.close()

    store = OnSlab(tmp_path)
    peer = store.world.peer(native, quota=1)
    assert (peer.lookup(*range(COUNT))["tier"] == Tier.DISK).all()
    assert store.put(peer, 5) == Status.ALREADY_BOUND
    assert [store.get(peer, name) for name in range(COUNT)] == [data_of(name) for name in range(COUNT)]
    store.close()


def test_with_a_slab_plain_messages_still_run_in_the_executor(tmp_path: Path) -> None:
    store = OnSlab(tmp_path)
    peer = store.world.peer(True)
    store.put(peer, 1)
    store.wait_clean()
    peer.lookup(1, 2)
    assert peer.native_count == 3  # ALLOC_STORE, PUBLISH, LOOKUP
    assert store.get(peer, 1) == data_of(1)
    assert peer.native_count == 5
    remove = keyed.Remove(1 << 50, TENANT, np.zeros((0, 16), np.uint8))
    peer.send(remove.encode())
    assert peer.native_count == 5
    store.close()
