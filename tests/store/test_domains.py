"""A trust domain has the values of its tenants, whatever a client of it names: tenants, ids, or handles that it guessed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kbtp_core.protocol import Status, keyed
from kbtp_core.protocol.keyed import LookupFlag, Tier
from kbtp_core.protocol.wire import DataDescriptor, Load
from tests.store.keyed_world import BLOCK, Got, Peer, World, completion, data_of, ids_of
from tests.store.memory_engine import MemoryEngine

OURS, THEIRS = 0xA, 0xB
REFUSED = Status.NOT_PERMITTED


def make_world(**options: Any) -> World:
    return World(tenants={"ours": frozenset({OURS}), "theirs": frozenset({THEIRS}), "all": None}, **options)


def client(world: World, native: bool, domain: str = "ours", **wishes: Any) -> Peer:
    return world.peer(native, trust_domain=domain, **wishes)


@pytest.fixture(params=[False, True], ids=["python", "native"])
def native(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


MESSAGES: dict[str, Callable[[Peer, int], Any]] = {
    "lookup": lambda _, tenant: keyed.Lookup(1 << 40, tenant, LookupFlag.NONE, ids_of(1)),
    "publish": lambda peer, tenant: peer.publish_message([1], [0], tenant=tenant),
    "remove": lambda _, tenant: keyed.Remove(1 << 40, tenant, ids_of(1)),
    "namespace": lambda _, tenant: keyed.SetNamespace(1 << 40, tenant, 3, 60),
    "remove namespace": lambda _, tenant: keyed.RemoveNamespace(1 << 40, tenant, 3),
    "list": lambda _, tenant: keyed.List(1 << 40, tenant, 0, 0, 10),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_that_names_a_foreign_tenant_is_refused_and_changes_nothing(native: bool, name: str) -> None:
    world = make_world()
    owner, stranger = client(world, native, "theirs"), client(world, native)
    owner.count(keyed.SetNamespace(1 << 41, THEIRS, 3))
    owner.put(1, data_of(1), tenant=THEIRS)
    stranger.alloc(0, data_of(2))
    before = stranger.native_count
    assert completion(stranger.ask(MESSAGES[name](stranger, THEIRS))).status == REFUSED
    assert stranger.native_count == before
    assert owner.get(1, tenant=THEIRS) == data_of(1)
    assert stranger.free(0) == Status.OK
    assert stranger.put(1, data_of(3), tenant=OURS).status == Status.OK
    assert stranger.get(1, tenant=OURS) == data_of(3)
    world.check()


def test_what_is_allowed_is_run_where_it_always_is() -> None:
    world = make_world()
    peer = client(world, True)
    got = peer.put(1, data_of(1), tenant=OURS)
    assert peer.get(1, tenant=OURS) == data_of(1)
    assert peer.load(got.handle, 0) == (Status.OK, data_of(1))
    assert peer.remove(1, tenant=OURS) == 1
    assert peer.native_count == 6  # ALLOC_STORE, PUBLISH, LOOKUP, LOAD, LOAD, REMOVE
    world.check()


@pytest.mark.parametrize("generation", ["any", "right"])
def test_a_handle_that_was_guessed_brings_no_octets_and_no_pin(native: bool, generation: str) -> None:
    world = make_world()
    owner, stranger = client(world, native, "theirs"), client(world, native)
    got = owner.put(1, data_of(1), tenant=THEIRS)
    wanted = got.generation if generation == "right" else 0
    assert stranger.load(got.handle, wanted) == (REFUSED, b"")
    stranger.memory[:] = 0xEE
    whole = keyed.LoadRange(1 << 40, got.handle, wanted, DataDescriptor(1, 0, BLOCK), offset=0, length=0)
    assert completion(stranger.ask(whole)).status == REFUSED
    many = np.frombuffer(b"".join(Load(at, got.handle, wanted, DataDescriptor(1, 0, BLOCK)).encode() for at in (71, 72)), np.uint8)
    stranger.apply(stranger.session.receive_loads(many.reshape(2, -1), 0.0))
    assert [completion(stranger.answer_to(at) or b"").status for at in (71, 72)] == [REFUSED, REFUSED]
    assert (stranger.memory == 0xEE).all()
    for flags in (keyed.PinFlag.PIN, keyed.PinFlag.UNPIN):
        assert stranger.pin(Got(0, got.handle, wanted), flags=flags) == REFUSED
    assert owner.pin(got) == Status.OK
    assert owner.load(got.handle, wanted) == (Status.OK, data_of(1))
    world.check()


def test_every_handle_of_the_table_brings_what_is_ones_own_alone(native: bool) -> None:
    world = make_world(blocks=16)
    owner, neighbour, stranger = client(world, native, "theirs"), client(world, native), client(world, native)
    for name in range(4):
        owner.put(name, b"theirs %d" % name, tenant=THEIRS)
        stranger.put(name, b"ours %d" % name, tenant=OURS)
    owner.alloc(0, b"theirs, not published")
    neighbour.alloc(0, b"ours, not published")
    seen = set()
    for handle in range(world.store.target.table.base_handle, world.store.target.table.base_handle + world.store.target.table.entry_count):
        status, octets = stranger.load(handle, 0)
        if status == Status.OK:
            seen.add(octets)
    assert seen == {b"ours, not published", *(b"ours %d" % name for name in range(4))}
    world.check()


def test_a_session_without_store_is_limited_all_the_same(native: bool) -> None:
    world = make_world()
    owner, stranger = client(world, native, "theirs"), client(world, False, capabilities=0)
    got = owner.put(1, data_of(1), tenant=THEIRS)
    assert not stranger.session.allows_executor
    assert stranger.load(got.handle, 0) == (REFUSED, b"")
    assert owner.session.allows_executor


def test_a_domain_for_all_has_all_and_an_unknown_one_has_nothing(native: bool) -> None:
    world = make_world()
    owner, everybody, nobody = client(world, native, "theirs"), client(world, native, "all"), client(world, native, "unheard of")
    got = owner.put(1, data_of(1), tenant=THEIRS)
    assert everybody.get(1, tenant=THEIRS) == data_of(1)
    assert everybody.put(2, data_of(2), tenant=OURS).status == Status.OK
    assert nobody.load(got.handle, 0) == (REFUSED, b"")
    assert completion(nobody.ask(keyed.Lookup(1 << 40, OURS, 0, ids_of(2)))).status == REFUSED


def test_a_publish_behind_its_stores_is_refused_in_its_turn() -> None:
    world = make_world()
    stranger = client(world, True)
    stranger.hold = True
    stored = stranger.alloc(0, data_of(1), inline=False)
    publish = stranger.publish_message([1], [0], tenant=THEIRS)
    stranger.send(publish.encode())
    assert stranger.answer_to(publish.request_id) is None
    stranger.hold = False
    stranger.finish()
    assert completion(stranger.answer_to(stored) or b"").status == Status.OK
    assert completion(stranger.answer_to(publish.request_id) or b"").status == REFUSED
    assert stranger.free(0) == Status.OK
    world.check()


def test_a_value_on_its_way_from_disk_is_promised_to_its_own_domain_alone() -> None:
    disk = MemoryEngine()
    world = make_world(disk=disk)
    owner, stranger = client(world, False, "theirs"), client(world, False)
    owner.put(1, data_of(1), flags=keyed.PublishFlag.NONE, tenant=THEIRS)
    assert world.store.close()
    again = make_world(disk=disk)
    owner, stranger = client(again, False, "theirs"), client(again, False)
    disk.gets.clear()
    (item,) = owner.lookup(1, flags=LookupFlag.PROMOTE, tenant=THEIRS)
    assert item["tier"] == Tier.PROMOTING
    assert completion(stranger.ask(stranger.load_message(int(item["handle"]), 0))).status == REFUSED
    disk.gets.set()
    again.store.close()


def test_refusals_are_told_once_in_a_while_for_each_domain(caplog: pytest.LogCaptureFixture) -> None:
    world = make_world()
    ours, theirs = client(world, False), client(world, False, "theirs")
    with caplog.at_level(logging.WARNING):
        for at in range(20):
            ours.ask(keyed.Lookup(1000 + at, THEIRS, 0, ids_of(1)))
            theirs.ask(keyed.Lookup(1000 + at, OURS, 0, ids_of(1)))
    assert [line.partition(":")[0] for line in caplog.messages] == [
        "trust domain 'ours' may not use tenant 000000000000000b",
        "trust domain 'theirs' may not use tenant 000000000000000a",
    ]
