"""The RAM tier: each message's rules (docs/store-protocol.md), by the software target and by the executor."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kbtp_core.protocol import Status, keyed
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.keyed import NO_HANDLE, LookupFlag, PublishFlag, Tier
from kbtp_core.protocol.wire import DataDescriptor, Free, Goodbye, Header, Store
from tests.store.keyed_world import BLOCK, TENANT, Got, Peer, World, completion, data_of, ids_of, published

numbers = itertools.count(1 << 40)


@pytest.fixture(params=[False, True], ids=["target", "executor"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture
def world() -> World:
    return World()


def test_a_value_that_was_put_is_found_and_loaded(world: World, native: bool) -> None:
    peer = world.peer(native)
    got = peer.put(1, b"one")
    assert got.status == Status.OK
    (item,) = peer.lookup(1)
    assert (item["handle"], item["generation"], item["tier"], item["flags"], item["data_length"]) == (got.handle, got.generation, 1, 0, 3)
    assert peer.load(got.handle, got.generation) == (Status.OK, b"one")
    assert world.peer(native).get(1) == b"one"
    world.check()


def test_plain_messages_run_in_the_executor(world: World) -> None:
    peer = world.peer(True)
    peer.put(1, b"one")
    assert peer.get(1) == b"one"
    assert peer.remove(1) == 1
    assert peer.native_count == 5  # ALLOC_STORE, PUBLISH, LOOKUP, LOAD, REMOVE


def test_publishing_leaves_the_handle_free_and_the_quota_unused(world: World, native: bool) -> None:
    peer = world.peer(native, quota=1)
    for name in range(5):
        assert peer.put(name, data_of(name)).status == Status.OK
    assert world.store.pool.usage(peer.session.number) == 0
    assert world.store.used_count == 5
    world.check()


def test_the_stores_handles_lie_outside_every_sessions_range(world: World, native: bool) -> None:
    peer = world.peer(native)
    got = peer.put(1, b"one")
    assert got.handle not in peer.handles
    assert completion(peer.ask(Free(next(numbers), got.handle, 0))).status == Status.NOT_PERMITTED
    assert completion(peer.ask(Store(next(numbers), got.handle, 0, DataDescriptor(0, 0, 1), Flag.INLINE, inline=b"x"))).status == (
        Status.NOT_PERMITTED
    )
    assert peer.get(1) == b"one"


def test_the_first_writer_wins_and_the_others_block_goes_back(world: World, native: bool) -> None:
    first, second = world.peer(native), world.peer(native)
    won = first.put(1, b"first")
    free = world.free_count
    lost = second.put(1, b"second")
    assert lost == Got(Status.ALREADY_BOUND, won.handle, won.generation)
    assert world.free_count == free
    assert second.get(1) == b"first"
    assert world.store.pool.usage(second.session.number) == 0
    world.check()


def test_an_id_twice_in_one_message_is_two_writers(world: World, native: bool) -> None:
    peer = world.peer(native, quota=2)
    peer.alloc(0, b"a")
    peer.alloc(1, b"b")
    first, second = peer.publish([1, 1], [0, 1])
    assert first.status == Status.OK
    assert second == Got(Status.ALREADY_BOUND, first.handle, first.generation)
    world.check()


def test_a_handle_twice_in_one_message_is_bound_only_once(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.alloc(0, b"a")
    assert [got.status for got in peer.publish([1, 2], [0, 0])] == [Status.OK, Status.NOT_BOUND]
    world.check()


def test_tenants_do_not_see_each_others_values(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.put(1, b"one", tenant=1)
    assert peer.get(1, tenant=2) is None
    assert peer.put(1, b"two", tenant=2).status == Status.OK
    assert (peer.get(1, tenant=1), peer.get(1, tenant=2)) == (b"one", b"two")
    assert peer.remove(1, tenant=2) == 1
    assert peer.get(1, tenant=1) == b"one"


@pytest.mark.parametrize(
    ("status", "generation"), [(Status.NOT_BOUND, 0), (Status.STALE_GENERATION, 9), (Status.NOT_SEALED, 0), (Status.NOT_PERMITTED, 0)]
)
def test_a_block_that_can_not_be_adopted_says_why_and_stays(world: World, native: bool, status: Status, generation: int) -> None:
    peer, other = world.peer(native), world.peer(native)
    other.alloc(0, b"theirs")
    if status != Status.NOT_BOUND:
        peer.alloc(0, b"a", seal=status != Status.NOT_SEALED)
    message = peer.publish_message([1], [0], generations=generation)
    if status == Status.NOT_PERMITTED:
        message.items["handle"] = other.handles[0]
    (got,) = published(peer.ask(message))
    assert got == Got(status, NO_HANDLE, 0)
    assert peer.get(1) is None
    world.check()


def test_a_store_that_failed_makes_its_publish_fail_with_not_bound(world: World, native: bool) -> None:
    peer = world.peer(native, quota=1)
    peer.alloc(0, b"a")
    peer.alloc(1, b"b")  # over the quota
    assert [got.status for got in peer.publish([1, 2], [0, 1])] == [Status.OK, Status.NOT_BOUND]


def test_generation_zero_takes_what_the_store_before_it_made(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.hold = True
    request_id = peer.alloc(0, b"read from the initiator", inline=False)
    message = peer.publish_message([1], [0])
    peer.send(message.encode())
    assert peer.answer_to(request_id) is None
    assert peer.answer_to(message.request_id) is None
    peer.hold = False
    peer.finish()
    (got,) = published(peer.answer_to(message.request_id) or b"")
    assert got.status == Status.OK
    assert peer.get(1) == b"read from the initiator"
    world.check()


def test_what_comes_behind_a_publish_that_waits_waits_with_it(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.hold = True
    peer.alloc(0, b"first", inline=False)
    publish, lookup = peer.publish_message([1], [0]), keyed.Lookup(next(numbers), TENANT, 0, ids_of(1))
    peer.send(publish.encode())
    free = Free(next(numbers), int(peer.handles[0]), 0)
    peer.send(free.encode())
    peer.hold = False
    peer.finish()
    assert published(peer.answer_to(publish.request_id) or b"")[0].status == Status.OK
    assert completion(peer.answer_to(free.request_id) or b"").status == Status.NOT_BOUND
    assert keyed.parse_keyed_answer(peer.ask(lookup)).items["tier"][0] == Tier.RAM  # type: ignore[union-attr]
    world.check()


def test_a_block_that_is_read_is_adopted_when_its_reader_has_ended(world: World, native: bool) -> None:
    peer, reader = world.peer(native), world.peer(native)
    peer.alloc(0, b"read meanwhile")
    reader.hold = True
    reader.send(reader.load_message(int(peer.handles[0]), 0).encode())
    message = peer.publish_message([1], [0])
    peer.send(message.encode())
    world.tick()
    assert peer.answer_to(message.request_id) is None
    assert reader.lookup(1)["tier"][0] == Tier.ABSENT
    reader.hold = False
    reader.finish()
    assert published(peer.answer_to(message.request_id) or b"")[0].status == Status.OK
    assert reader.memory[:14].tobytes() == b"read meanwhile"
    world.check()


def test_a_publish_does_not_wait_for_ever_for_a_reader(world: World, native: bool) -> None:
    peer, reader = world.peer(native), world.peer(native)
    peer.alloc(0, b"read meanwhile")
    reader.hold = True
    reader.send(reader.load_message(int(peer.handles[0]), 0).encode())
    message = peer.publish_message([1], [0])
    peer.send(message.encode())
    world.now += 11
    world.tick()
    assert published(peer.answer_to(message.request_id) or b"") == [Got(Status.BUSY, NO_HANDLE, 0)]
    reader.finish()
    assert peer.free(0) == Status.OK
    world.check()


def test_a_block_that_its_writer_can_still_write_to_is_copied(world: World) -> None:
    peer = world.peer()
    request_id = peer.alloc(0, b"as published")
    stored = completion(peer.answer_to(request_id) or b"")
    index = world.store.target.table.index_of(int(peer.handles[0]))
    assert index is not None
    world.store.target.confined[index] = "a domain"  # as if it had been bound by DIRECT_ALLOC
    assert peer.publish([1], [0])[0].status == Status.OK
    world.store.memory[stored.block_offset : stored.block_offset + 4] = 0xEE
    assert peer.get(1) == b"as published"
    assert not world.store.target.confined
    assert world.store.pool.usage(peer.session.number) == 0
    world.check()


def test_a_prefix_lookup_ends_with_the_first_id_that_is_absent(world: World, native: bool) -> None:
    peer = world.peer(native)
    for name in (1, 2, 4):
        peer.put(name, data_of(name))
    assert peer.lookup(1, 2, 3, 4)["tier"].tolist() == [1, 1, 0, 1]
    assert peer.lookup(1, 2, 3, 4, flags=LookupFlag.PREFIX)["tier"].tolist() == [1, 1, 0]
    assert peer.lookup(1, 2, flags=LookupFlag.PREFIX)["tier"].tolist() == [1, 1]
    assert len(peer.lookup()) == 0


def test_a_removed_value_is_a_miss_at_once_even_for_who_has_its_handle(world: World, native: bool) -> None:
    peer = world.peer(native)
    got = peer.put(1, b"one")
    assert peer.remove(1, 2) == 1
    assert peer.get(1) is None
    assert peer.load(got.handle, got.generation) == (Status.NOT_BOUND, b"")
    assert peer.put(2, b"two").status == Status.OK
    assert peer.load(got.handle, got.generation)[0] in (Status.STALE_GENERATION, Status.NOT_BOUND)
    assert peer.remove(1) == 0
    world.check()


def test_a_removed_value_that_is_still_read_keeps_its_block_until_the_reader_has_ended(world: World, native: bool) -> None:
    peer, reader = world.peer(native), world.peer(native)
    got = peer.put(1, b"still read")
    reader.hold = True
    load = reader.load_message(got.handle, got.generation)
    reader.send(load.encode())
    free = world.free_count
    assert peer.remove(1) == 1
    world.tick()
    assert world.free_count == free
    assert world.store.kept_counts() == (1, 0)
    world.check()
    reader.finish()
    assert reader.memory[:10].tobytes() == b"still read"
    assert world.free_count == free + 1
    world.check()


def test_eviction_takes_what_was_not_read_lately(native: bool) -> None:
    world = World(blocks=8)
    peer = world.peer(native, quota=2)
    for name in range(6):
        assert peer.put(name, data_of(name)).status == Status.OK
    assert peer.get(0) == data_of(0)  # a LOAD counts
    peer.lookup(1, flags=LookupFlag.TOUCH)  # and so does this
    peer.lookup(2)  # but not this
    peer.put(6, data_of(6))
    peer.put(7, data_of(7))
    assert peer.lookup(*range(8))["tier"].tolist() == [1, 1, 0, 0, 1, 1, 1, 1]
    assert world.store.stats()["evicted"] == 2
    world.check()


def test_eviction_never_takes_a_block_that_is_read(native: bool) -> None:
    world = World(blocks=4)
    peer, reader = world.peer(native, quota=1), world.peer(native, quota=0)
    got = peer.put(1, b"read for long")
    reader.hold = True
    reader.send(reader.load_message(got.handle, got.generation).encode())
    for name in range(2, 20):
        assert peer.put(name, data_of(name)).status == Status.OK
        assert peer.lookup(1)["tier"][0] == Tier.RAM
        world.check()
    reader.finish()
    assert reader.memory[:13].tobytes() == b"read for long"
    for name in range(20, 30):
        peer.put(name, data_of(name))
    assert peer.lookup(1)["tier"][0] == Tier.ABSENT


def test_a_stale_get_is_a_miss_and_never_other_octets(native: bool) -> None:
    world = World(blocks=4)
    peer = world.peer(native, quota=1)
    seen = [peer.put(name, data_of(name)) for name in range(20)]
    for name, got in enumerate(seen):
        status, octets = peer.load(got.handle, got.generation)
        assert (status, octets) == (Status.OK, data_of(name)) or status in (Status.STALE_GENERATION, Status.NOT_BOUND)
    world.check()


def test_sessions_always_find_the_blocks_of_their_quota(native: bool) -> None:
    """Free blocks >= the sum of (quota - usage), whatever the store holds."""
    world = World(blocks=8)
    first = world.peer(native, quota=1)
    for name in range(7):
        assert first.put(name, data_of(name)).status == Status.OK
    assert world.store.used_count == 7
    second = world.peer(native, quota=3)
    assert second.ack.quota == 3
    assert world.store.used_count == 4
    for at in range(3):
        second.alloc(at, b"x")
        assert completion(second.answers.popleft()).status == Status.OK
    first.alloc(0, b"y")
    assert completion(first.answers.popleft()).status == Status.OK
    world.check()
    first.disconnect()
    second.disconnect()
    assert world.free_count == 4
    world.check()


def test_sessions_are_promised_half_of_the_pool_at_most() -> None:
    world = World(blocks=8)
    assert [world.peer(quota=3).ack.quota for _ in range(3)] == [3, 1, 0]


def test_a_quota_is_smaller_where_the_store_can_not_let_go(native: bool) -> None:
    world = World(blocks=4)
    peer = world.peer(native, quota=1)
    pinned = [peer.put(name, data_of(name)) for name in range(3)]
    assert [peer.pin(got) for got in pinned] == [Status.OK, Status.OK, Status.NO_SPACE]
    assert world.peer(quota=1).ack.quota == 1  # the third value went
    world.check()


def test_no_space_is_answered_where_nothing_can_be_evicted_and_the_block_stays(native: bool) -> None:
    world = World(blocks=4)
    peer = world.peer(native, quota=2)
    for name in range(2):
        assert peer.pin(peer.put(name, data_of(name))) == Status.OK
    peer.alloc(0, b"third")
    assert peer.publish([2], [0]) == [Got(Status.NO_SPACE, NO_HANDLE, 0)]
    assert peer.free(0) == Status.OK
    assert world.store.stats()["refused_full"] == 1
    world.check()


def test_a_pin_ends_with_unpin_or_with_its_lease(native: bool) -> None:
    world = World(blocks=4)
    world.set_time(1000)
    peer = world.peer(native, quota=1)
    kept, lost = peer.put(1, b"kept"), peer.put(2, b"lost")
    assert peer.pin(kept, lease_ms=5000) == Status.OK
    assert peer.lookup(1)["flags"][0] == 2
    for name in range(3, 10):
        peer.put(name, data_of(name))
    assert peer.load(kept.handle, kept.generation) == (Status.OK, b"kept")
    assert peer.pin(lost) in (Status.NOT_BOUND, Status.STALE_GENERATION)
    assert peer.pin(kept, flags=keyed.PinFlag.UNPIN) == Status.OK
    assert peer.lookup(1)["flags"][0] == 0
    peer.pin(kept, lease_ms=5000)
    world.set_time(1006)
    world.tick()
    assert peer.lookup(1)["flags"][0] == 0
    for name in range(10, 20):
        peer.put(name, data_of(name))
    assert peer.lookup(1)["tier"][0] == Tier.ABSENT
    world.check()


def test_a_value_can_be_pinned_as_it_is_published(native: bool) -> None:
    world = World(blocks=4, default_lease_s=10.0)
    peer = world.peer(native, quota=1)
    peer.put(1, b"kept", flags=PublishFlag.PIN)
    for name in range(2, 12):
        peer.put(name, data_of(name))
    assert peer.get(1) == b"kept"


def test_only_blocks_of_the_store_can_be_pinned(world: World) -> None:
    peer = world.peer()
    peer.alloc(0, b"mine")
    assert peer.pin(Got(0, int(peer.handles[0]), 0)) == Status.NOT_PERMITTED
    assert peer.pin(Got(0, 1 << 60, 0)) == Status.NOT_PERMITTED


def test_values_of_a_namespace_are_listed_and_removed_together(world: World, native: bool) -> None:
    peer = world.peer(native)
    for namespace, names in ((7, (1, 2)), (8, (3,))):
        assert peer.count(keyed.SetNamespace(next(numbers), TENANT, namespace)) == 0
        for name in names:
            peer.put(name, data_of(name))
    peer.put(9, b"other tenant", tenant=5)

    def names_of(namespace: int) -> list[int]:
        page = keyed.parse_keyed_answer(peer.ask(keyed.List(next(numbers), TENANT, namespace, 0, 100)))
        assert isinstance(page, keyed.ListResult)
        assert page.cursor == 0
        return sorted(int.from_bytes(bytes(item["id"]), "big") for item in page.items)

    assert names_of(7) == [1, 2]
    assert names_of(keyed.ANY_NAMESPACE) == [1, 2, 3]
    assert peer.count(keyed.RemoveNamespace(next(numbers), TENANT, 7)) == 2
    assert names_of(keyed.ANY_NAMESPACE) == [3]
    assert peer.lookup(1, 2, 3)["tier"].tolist() == [0, 0, 1]
    assert peer.get(9, tenant=5) == b"other tenant"
    world.check()


def test_a_long_list_comes_in_pages(native: bool) -> None:
    world = World(blocks=40)
    peer = world.peer(native)
    for name in range(30):
        peer.put(name, data_of(name))
    seen: list[int] = []
    cursor = pages = 0
    while pages == 0 or cursor:
        page = keyed.parse_keyed_answer(peer.ask(keyed.List(next(numbers), TENANT, 0, cursor, 7)))
        assert isinstance(page, keyed.ListResult)
        assert len(page.items) <= 7
        seen += [int.from_bytes(bytes(item["id"]), "big") for item in page.items]
        assert [int(length) for length in page.items["data_length"]] == [len(data_of(name)) for name in seen[len(seen) - len(page.items) :]]
        cursor, pages = page.cursor, pages + 1
    assert sorted(seen) == list(range(30))
    assert pages == 5


def test_a_value_ends_with_its_time(world: World, native: bool) -> None:
    world.set_time(1000)
    peer = world.peer(native)
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7, ttl_s=60))
    got = peer.put(1, b"mortal")
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7))
    peer.put(2, b"immortal")
    world.set_time(1059)
    page = keyed.parse_keyed_answer(peer.ask(keyed.List(next(numbers), TENANT, 7, 0, 100)))
    assert isinstance(page, keyed.ListResult)
    assert sorted(page.items["ttl_s"].tolist()) == [0, 1]
    assert peer.get(1) == b"mortal"
    world.set_time(1060)
    assert peer.lookup(1, 2)["tier"].tolist() == [0, 1]
    assert peer.load(got.handle, got.generation)[0] == Status.NOT_BOUND
    world.check()


def test_a_value_whose_time_is_over_goes_even_if_nobody_asks(world: World, native: bool) -> None:
    world.set_time(1000)
    peer = world.peer(native)
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7, ttl_s=5))
    got = peer.put(1, b"mortal")
    world.set_time(1005)
    world.tick()
    assert world.store.used_count == 0
    assert peer.load(got.handle, got.generation)[0] == Status.NOT_BOUND
    assert world.store.stats()["expired"] == 1


def test_a_namespace_counts_for_its_own_tenant_alone(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.count(keyed.SetNamespace(next(numbers), TENANT, 7))
    peer.put(1, b"other", tenant=5)
    assert peer.count(keyed.RemoveNamespace(next(numbers), 5, 7)) == 0
    assert peer.get(1, tenant=5) == b"other"


def test_a_tenant_over_its_quota_gets_no_space_and_the_others_go_on(world: World, native: bool) -> None:
    world.store.set_quota(1, 100)
    peer = world.peer(native)
    assert peer.put(1, bytes(60), tenant=1).status == Status.OK
    assert peer.put(2, bytes(41), tenant=1).status == Status.NO_SPACE
    assert peer.put(2, bytes(40), tenant=1).status == Status.OK
    assert peer.put(3, bytes(200), tenant=2).status == Status.OK
    assert peer.remove(1, tenant=1) == 1
    assert peer.put(4, bytes(60), tenant=1).status == Status.OK
    world.store.set_quota(1, None)
    assert peer.put(5, bytes(200), tenant=1).status == Status.OK
    assert world.store.stats()["refused_quota"] == 1
    world.check()


@pytest.mark.parametrize(
    ("offset", "length", "room", "status", "expected"),
    [
        (0, 0, BLOCK, Status.OK, b"0123456789"),
        (3, 4, BLOCK, Status.OK, b"3456"),
        (3, 0, BLOCK, Status.OK, b"3456789"),
        (3, 1000, 7, Status.OK, b"3456789"),
        (10, 0, 0, Status.OK, b""),
        (10, 5, BLOCK, Status.OK, b""),
        (11, 0, BLOCK, Status.LENGTH, b""),
        (3, 5, 4, Status.LENGTH, b""),
    ],
)
def test_a_range_is_cut_at_the_values_end(
    world: World, native: bool, offset: int, length: int, room: int, status: Status, expected: bytes
) -> None:
    peer = world.peer(native)
    got = peer.put(1, b"0123456789")
    peer.memory[:BLOCK] = 0xEE
    message = keyed.LoadRange(next(numbers), got.handle, got.generation, DataDescriptor(1, 0, room), offset=offset, length=length)
    answer = completion(peer.ask(message))
    assert answer.status == status
    assert answer.data_length == (10 if status == Status.OK else 0)
    assert peer.memory[: len(expected)].tobytes() == expected
    assert peer.memory[len(expected)] == 0xEE


def test_a_range_of_what_is_gone_fails_as_a_load_does(world: World) -> None:
    peer = world.peer()
    got = peer.put(1, b"one")
    peer.remove(1)
    message = keyed.LoadRange(next(numbers), got.handle, got.generation, DataDescriptor(1, 0, BLOCK))
    assert completion(peer.ask(message)).status == Status.NOT_BOUND


def test_without_store_keyed_messages_are_unsupported(world: World, native: bool) -> None:
    peer = world.peer(native, capabilities=0)
    assert completion(peer.ask(keyed.Lookup(next(numbers), TENANT, 0, ids_of(1)))).status == Status.UNSUPPORTED


@pytest.mark.parametrize("octets", ["", "00" * 8, "ff" * 40, "00" * 2000])
@pytest.mark.parametrize("opcode", range(0x80, 0x90))
def test_octets_that_are_no_message_get_malformed(world: World, native: bool, opcode: int, octets: str) -> None:
    peer = world.peer(native)
    data = Header(opcode, 77).encode() + bytes.fromhex(octets)
    peer.send(data)
    answer = peer.answer_to(77)
    assert answer is not None
    assert completion(answer).status == Status.MALFORMED
    world.check()


def test_a_message_longer_than_granted_is_malformed(world: World, native: bool) -> None:
    peer = world.peer(native, inline_bytes=100)
    limit = (100 + 64 - 40) // 16
    assert len(peer.lookup(*range(limit))) == limit
    assert completion(peer.ask(keyed.Lookup(next(numbers), TENANT, 0, ids_of(*range(limit + 1))))).status == Status.MALFORMED


def test_a_store_that_shuts_down_says_so(world: World) -> None:
    peer = world.peer()
    peer.put(1, b"one")
    world.store.target.shut_down()
    assert completion(peer.ask(keyed.Lookup(next(numbers), TENANT, 0, ids_of(1)))).status == Status.SHUTTING_DOWN


def test_a_keyed_message_behind_goodbye_ends_the_session(world: World) -> None:
    peer = world.peer()
    peer.hold = True
    peer.alloc(0, b"late", inline=False)
    peer.send(Goodbye().encode())
    peer.send(keyed.Lookup(next(numbers), TENANT, 0, ids_of(1)).encode())
    assert peer.session.state.value == "closed"


def test_a_session_that_ends_keeps_what_it_published_and_gives_back_the_rest(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.put(1, b"published")
    peer.alloc(0, b"not published")
    peer.disconnect()
    assert world.free_count == world.store.block_count - 1
    assert world.peer(native).get(1) == b"published"
    world.check()


def test_a_session_that_ends_while_its_publish_waits_leaves_nothing(world: World, native: bool) -> None:
    peer = world.peer(native)
    peer.hold = True
    peer.alloc(0, b"half", inline=False)
    peer.send(peer.publish_message([1], [0]).encode())
    peer.disconnect()
    assert world.peer(native).get(1) is None
    assert world.free_count == world.store.block_count
    assert not world.store.target.keyed_waiting
    world.check()


def test_index_memory_is_under_200_octets_a_value() -> None:
    world = World(blocks=1000)
    table = world.store.target.table
    per_entry = (table.entries.nbytes + table.generations.nbytes + world.store.target.owners.nbytes) / table.entry_count + 4 + 4 + 1
    assert world.store.native.memory_bytes / 1000 + per_entry + 16 + 1 < 200


def test_many_values_go_through_a_small_store_and_every_found_one_is_right(native: bool) -> None:
    world = World(blocks=100)
    peer: Peer = world.peer(native, quota=4)
    rng = np.random.default_rng(1)
    for step in range(1500):
        name = int(rng.zipf(1.3)) % 300
        octets = peer.get(name)
        if octets is None:
            assert peer.put(name, data_of(name)).status == Status.OK
        else:
            assert octets == data_of(name)
        if step % 100 == 0:
            world.check()
            world.tick()
    stats = world.store.stats()
    assert stats["evicted"] > 0
    assert stats["hits"] > stats["misses"]
