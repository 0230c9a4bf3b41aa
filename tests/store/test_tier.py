"""The RAM tier over a disk: write-back, promotion, removal, and what waits for what (docs/store-protocol.md, "Rules")."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kbtp_core.protocol import Status, keyed
from kbtp_core.protocol.keyed import NO_HANDLE, LookupFlag, PublishFlag, Tier
from kbtp_core.protocol.wire import DataDescriptor
from kbtp_core.store.disk import DiskStatus
from tests.store.keyed_world import BLOCK, TENANT, Got, Peer, World, completion, data_of, ids_of, published
from tests.store.memory_engine import MemoryEngine

numbers = itertools.count(1 << 40)


class Tiered(World):
    def __init__(self, blocks: int = 8, **options: Any) -> None:
        self.disk = MemoryEngine()
        super().__init__(blocks, disk=self.disk, **options)

    def wait(self, condition: Callable[[], bool], seconds: float = 5.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.001)
            self.tick()

    def wait_clean(self) -> None:
        self.wait(lambda: self.store.stats()["dirty"] == 0)

    def answer(self, peer: Peer, request_id: int) -> bytes:
        found: list[bytes] = []

        def came() -> bool:
            octets = peer.answer_to(request_id)
            found.extend([] if octets is None else [octets])
            return bool(found)

        self.wait(came)
        return found[0]

    def evict_all(self, peer: Peer) -> None:
        """Push everything out of RAM that may go."""
        for name in range(1 << 20, (1 << 20) + 2 * self.store.block_count):
            assert peer.put(name, data_of(name), tenant=99).status == Status.OK
            self.wait_clean()

    def close(self) -> None:
        self.disk.puts.set()
        self.disk.gets.set()
        assert self.store.close(5.0)
        self.check()


@pytest.fixture
def world() -> Iterator[Tiered]:
    world = Tiered()
    yield world
    world.close()


def lookup(peer: Peer, name: int, flags: int = 0) -> Any:
    return peer.lookup(name, flags=flags)[0]


def test_a_value_is_answered_from_ram_and_then_written_to_disk(world: Tiered) -> None:
    peer = world.peer()
    world.disk.puts.clear()
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7))
    assert peer.put(1, b"one").status == Status.OK
    assert lookup(peer, 1)["flags"] == keyed.ValueFlag.DIRTY
    assert peer.get(1) == b"one"
    world.disk.puts.set()
    world.wait_clean()
    (value,) = world.disk.values.values()
    assert (value.octets, value.crc, value.namespace, value.expiry) == (b"one", 1, 7, 0)
    assert lookup(peer, 1)["flags"] == 0


def test_what_is_not_on_disk_yet_is_not_evicted_and_new_keys_are_refused_over_the_watermark() -> None:
    world = Tiered(blocks=8, dirty_share=0.5)
    peer = world.peer(quota=1)
    world.disk.puts.clear()
    assert [peer.put(name, data_of(name)).status for name in range(6)] == [Status.OK] * 4 + [Status.NO_SPACE] * 2
    assert world.store.stats()["refused_dirty"] == 2
    assert [peer.get(name) for name in range(4)] == [data_of(name) for name in range(4)]
    assert peer.put(0, b"again").status == Status.ALREADY_BOUND
    world.disk.puts.set()
    world.wait_clean()
    assert peer.put(4, data_of(4)).status == Status.OK
    world.close()


def test_a_durable_publish_is_answered_after_the_disk_commit_and_others_go_on(world: Tiered) -> None:
    peer, other = world.peer(), world.peer()
    world.disk.puts.clear()
    peer.alloc(0, b"durable")
    message = peer.publish_message([1], [0], PublishFlag.DURABLE)
    peer.send(message.encode())
    assert other.put(2, b"plain").status == Status.OK
    assert peer.put(3, b"plain, too", at=1).status == Status.OK
    world.tick()
    assert peer.answer_to(message.request_id) is None
    world.disk.puts.set()
    assert published(world.answer(peer, message.request_id))[0].status == Status.OK
    assert b"durable" in [value.octets for value in list(world.disk.values.values())]


def test_a_writer_of_an_id_whose_first_writer_waits_for_the_disk_waits_with_it(world: Tiered) -> None:
    first, second = world.peer(), world.peer()
    world.disk.puts.clear()
    first.alloc(0, b"first")
    durable = first.publish_message([1], [0], PublishFlag.DURABLE)
    first.send(durable.encode())
    second.alloc(0, b"second")
    plain = second.publish_message([1], [0])
    second.send(plain.encode())
    world.tick()
    assert second.answer_to(plain.request_id) is None
    world.disk.puts.set()
    (won,) = published(world.answer(first, durable.request_id))
    assert published(world.answer(second, plain.request_id)) == [Got(Status.ALREADY_BOUND, won.handle, won.generation)]


def test_a_durable_publish_that_the_disk_does_not_take_fails_and_leaves_no_value(world: Tiered) -> None:
    peer = world.peer()
    world.disk.put_status = DiskStatus.NO_SPACE
    peer.alloc(0, b"durable")
    message = peer.publish_message([1], [0], PublishFlag.DURABLE)
    peer.send(message.encode())
    assert published(world.answer(peer, message.request_id))[0].status == Status.NO_SPACE
    assert lookup(peer, 1)["tier"] == Tier.ABSENT
    world.disk.put_status = None


def test_a_plain_value_that_the_disk_does_not_take_stays_in_ram(world: Tiered) -> None:
    peer = world.peer()
    world.disk.put_status = DiskStatus.IO_ERROR
    peer.put(1, b"in RAM alone")
    world.wait_clean()
    assert peer.get(1) == b"in RAM alone"
    assert world.store.stats()["flush_failed"] == 1
    world.disk.put_status = None


def test_a_value_on_disk_alone_is_promoted_once_for_all_who_want_it(world: Tiered) -> None:
    peer, other = world.peer(), world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    assert lookup(peer, 1)["tier"] == Tier.DISK
    assert lookup(peer, 1)["handle"] == 0 or lookup(peer, 1)["handle"] == NO_HANDLE
    world.disk.gets.clear()
    first, second = lookup(peer, 1, LookupFlag.PROMOTE), lookup(other, 1, LookupFlag.PROMOTE)
    assert first["tier"] == second["tier"] == Tier.PROMOTING
    assert (first["handle"], first["generation"]) == (second["handle"], second["generation"])
    load = other.load_message(int(first["handle"]), int(first["generation"]))
    other.send(load.encode())
    world.tick()
    assert other.answer_to(load.request_id) is None
    assert peer.put(2, b"meanwhile").status == Status.OK
    world.disk.gets.set()
    answer = completion(world.answer(other, load.request_id))
    assert (answer.status, answer.generation) == (Status.OK, first["generation"])
    assert other.memory[: answer.data_length].tobytes() == data_of(1)
    assert world.disk.get_calls == [1]
    assert lookup(peer, 1)["tier"] == Tier.RAM


def test_loads_of_one_session_that_wait_for_a_promotion_are_answered_in_order(world: Tiered) -> None:
    peer = world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    world.disk.gets.clear()
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    messages: list[Any] = [peer.load_message(int(item["handle"]), int(item["generation"])) for _ in range(2)]
    descriptor = DataDescriptor(1, 1000, BLOCK)
    messages.append(keyed.LoadRange(next(numbers), int(item["handle"]), int(item["generation"]), descriptor, offset=2, length=5))
    for message in messages:
        peer.send(message.encode())
    world.disk.gets.set()
    answers = [completion(world.answer(peer, message.request_id)) for message in messages]
    assert [answer.status for answer in answers] == [Status.OK] * 3
    assert peer.memory[1000:1005].tobytes() == data_of(1)[2:7]


def test_a_promotion_that_fails_makes_its_load_fail_with_not_bound(world: Tiered) -> None:
    peer = world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    world.disk.gets.clear()
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(item["handle"]), int(item["generation"]))
    peer.send(load.encode())
    world.disk.is_corrupt = True
    world.disk.gets.set()
    assert completion(world.answer(peer, load.request_id)).status == Status.NOT_BOUND
    assert peer.load(int(item["handle"]), int(item["generation"]))[0] in (Status.NOT_BOUND, Status.STALE_GENERATION)
    world.disk.is_corrupt = False
    again = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(again["handle"]), int(again["generation"]))
    peer.send(load.encode())
    assert completion(world.answer(peer, load.request_id)).status == Status.OK


def test_a_session_that_ends_while_its_load_waits_leaves_the_promotion_alone(world: Tiered) -> None:
    peer, other = world.peer(), world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    world.disk.gets.clear()
    item = lookup(other, 1, LookupFlag.PROMOTE)
    other.send(other.load_message(int(item["handle"]), int(item["generation"])).encode())
    other.disconnect()
    world.disk.gets.set()
    world.wait(lambda: peer.get(1) == data_of(1))


def test_without_room_a_value_on_disk_gets_no_handle(world: Tiered) -> None:
    peer = world.peer(quota=2)
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    world.disk.puts.clear()
    for name in range(10, 20):
        peer.put(name, data_of(name))
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    assert (item["tier"], item["data_length"]) == (Tier.DISK, len(data_of(1)))


def test_the_disks_value_wins_over_a_later_writers(world: Tiered) -> None:
    peer = world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    assert peer.put(1, b"other octets") == Got(Status.ALREADY_BOUND, NO_HANDLE, 0)
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(item["handle"]), int(item["generation"]))
    peer.send(load.encode())
    answer = completion(world.answer(peer, load.request_id))
    assert peer.memory[: answer.data_length].tobytes() == data_of(1)


def test_a_value_removed_before_it_was_written_never_comes_back(world: Tiered) -> None:
    peer = world.peer()
    world.disk.puts.clear()
    peer.put(1, data_of(1))
    assert world.disk.put_started.wait(5)
    remove = keyed.Remove(next(numbers), TENANT, ids_of(1))
    peer.send(remove.encode())
    assert peer.get(1) is None
    assert world.free_count < world.store.block_count  # the write uses the block
    assert peer.answer_to(remove.request_id) is None
    world.disk.puts.set()
    assert completion(world.answer(peer, remove.request_id)).data_length == 1
    assert not world.disk.values  # what was answered can't come back after a crash either
    world.wait(lambda: world.free_count == world.store.block_count)
    assert lookup(peer, 1)["tier"] == Tier.ABSENT
    assert peer.put(1, b"new").status == Status.OK
    world.wait_clean()
    assert [value.octets for value in world.disk.values.values()] == [b"new"]


def test_a_new_value_is_not_written_before_the_removed_one_is_off_the_disk(world: Tiered) -> None:
    peer = world.peer()
    world.disk.puts.clear()
    peer.put(1, b"old")
    assert world.disk.put_started.wait(5)
    peer.send(keyed.Remove(next(numbers), TENANT, ids_of(1)).encode())
    assert peer.put(1, b"new").status == Status.OK
    assert peer.get(1) == b"new"
    world.disk.puts.set()
    world.wait_clean()
    world.wait(lambda: [value.octets for value in world.disk.values.values()] == [b"new"])
    world.evict_all(peer)
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(item["handle"]), int(item["generation"]))
    peer.send(load.encode())
    answer = completion(world.answer(peer, load.request_id))
    assert peer.memory[: answer.data_length].tobytes() == b"new"


def test_a_value_removed_while_it_is_promoted_is_a_miss(world: Tiered) -> None:
    peer = world.peer()
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    world.disk.gets.clear()
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(item["handle"]), int(item["generation"]))
    peer.send(load.encode())
    remove = keyed.Remove(next(numbers), TENANT, ids_of(1))
    peer.send(remove.encode())
    assert lookup(peer, 1)["tier"] == Tier.ABSENT
    world.disk.gets.set()
    assert completion(world.answer(peer, load.request_id)).status == Status.NOT_BOUND
    assert completion(world.answer(peer, remove.request_id)).data_length == 1
    assert lookup(peer, 1)["tier"] == Tier.ABSENT


def test_a_namespace_is_removed_from_disk_too_with_what_was_read_of_it(world: Tiered) -> None:
    peer = world.peer()
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7))
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    world.wait(lambda: lookup(peer, 1)["tier"] == Tier.RAM)
    peer.put(2, data_of(2))
    remove = keyed.RemoveNamespace(next(numbers), TENANT, 7)
    peer.send(remove.encode())
    assert completion(world.answer(peer, remove.request_id)).data_length == 2
    assert peer.lookup(1, 2)["tier"].tolist() == [0, 0]
    assert peer.load(int(item["handle"]), int(item["generation"]))[0] in (Status.NOT_BOUND, Status.STALE_GENERATION)
    world.wait(lambda: all(int.from_bytes(key[:8], "big") == 99 for key in world.disk.values))


def test_a_list_goes_on_with_what_is_on_disk_alone(world: Tiered) -> None:
    peer = world.peer(quota=1)
    for name in range(20):
        assert peer.put(name, data_of(name)).status == Status.OK
        world.wait_clean()
    seen: dict[int, int] = {}
    cursor = 0
    while True:
        page = keyed.parse_keyed_answer(peer.ask(keyed.List(next(numbers), TENANT, 0, cursor, 6)))
        assert isinstance(page, keyed.ListResult)
        for item in page.items:
            name = int.from_bytes(bytes(item["id"]), "big")
            assert name not in seen
            seen[name] = int(item["tier"])
            assert item["data_length"] == len(data_of(name))
        cursor = page.cursor
        if not cursor:
            break
    assert sorted(seen) == list(range(20))
    assert set(seen.values()) == {Tier.RAM, Tier.DISK}


def test_values_that_expired_on_disk_leave_ram_too(world: Tiered) -> None:
    world.set_time(1000)
    peer = world.peer()
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7, ttl_s=60))
    peer.put(1, data_of(1))
    world.wait_clean()
    world.evict_all(peer)
    lookup(peer, 1, LookupFlag.PROMOTE)
    world.wait(lambda: lookup(peer, 1)["tier"] == Tier.RAM)
    world.set_time(1061)
    world.wait(lambda: lookup(peer, 1)["tier"] == Tier.ABSENT)


def test_writing_around_keeps_nothing_in_ram_until_it_is_asked_for() -> None:
    world = Tiered(writes_around=True)
    peer = world.peer()
    peer.alloc(0, data_of(1))
    message = peer.publish_message([1], [0])
    peer.send(message.encode())
    (got,) = published(world.answer(peer, message.request_id))
    assert got.status == Status.OK
    assert world.store.used_count == 0
    assert lookup(peer, 1)["tier"] == Tier.DISK
    assert peer.load(got.handle, got.generation)[0] == Status.NOT_BOUND
    item = lookup(peer, 1, LookupFlag.PROMOTE)
    load = peer.load_message(int(item["handle"]), int(item["generation"]))
    peer.send(load.encode())
    assert completion(world.answer(peer, load.request_id)).status == Status.OK
    assert lookup(peer, 1)["tier"] == Tier.RAM
    world.close()


@pytest.mark.parametrize("how", ["acks_on_disk", "quota"])
def test_publishes_wait_for_the_disk_where_they_are_told_to_or_a_quota_is_counted_there(how: str) -> None:
    world = Tiered(acks_on_disk=how == "acks_on_disk")
    if how == "quota":
        world.store.set_quota(TENANT, 1000)
    peer = world.peer()
    world.disk.puts.clear()
    peer.alloc(0, b"x")
    message = peer.publish_message([1], [0])
    peer.send(message.encode())
    world.tick()
    assert peer.answer_to(message.request_id) is None
    world.disk.put_status = DiskStatus.QUOTA if how == "quota" else None
    world.disk.puts.set()
    expected = Status.NO_SPACE if how == "quota" else Status.OK
    assert published(world.answer(peer, message.request_id))[0].status == expected
    world.close()


def test_closing_writes_what_is_dirty_first() -> None:
    world = Tiered(blocks=16)
    peer = world.peer(quota=1)
    for name in range(10):
        assert peer.put(name, data_of(name)).status == Status.OK
    world.close()
    assert sorted(value.octets for value in world.disk.values.values()) == sorted(data_of(name) for name in range(10))


def test_closing_does_not_wait_for_ever_for_a_disk_that_hangs() -> None:
    world = Tiered()
    peer = world.peer()
    world.disk.puts.clear()
    peer.put(1, b"x")
    start = time.monotonic()
    assert not world.store.close(0.3)
    assert time.monotonic() - start < 2
    world.disk.puts.set()


def test_values_are_written_in_batches(world: Tiered) -> None:
    peer = world.peer(quota=1)
    world.disk.puts.clear()
    peer.put(0, data_of(0))
    assert world.disk.put_started.wait(5)
    for name in range(1, 6):
        peer.put(name, data_of(name))
    world.disk.puts.set()
    world.wait_clean()
    assert len(world.disk.put_calls) <= 4
    assert sum(world.disk.put_calls) == 6


def test_many_readers_and_writers_over_a_small_ram_see_only_right_values() -> None:
    world = Tiered(blocks=16, dirty_share=0.5)
    peer = world.peer(quota=1)
    rng = np.random.default_rng(3)
    read = 0
    for _ in range(600):
        name = int(rng.integers(0, 60))
        item = lookup(peer, name, LookupFlag.PROMOTE)
        if item["tier"] == Tier.ABSENT:
            world.wait(lambda name=name: peer.put(name, data_of(name)).status != Status.NO_SPACE)  # type: ignore[misc]
        elif item["tier"] in (Tier.RAM, Tier.PROMOTING):
            load = peer.load_message(int(item["handle"]), int(item["generation"]))
            peer.send(load.encode())
            answer = completion(world.answer(peer, load.request_id))
            if answer.status == Status.OK:
                assert peer.memory[: answer.data_length].tobytes() == data_of(name)
                read += 1
    assert read > 300
    world.close()
