"""The client: over one server, over several, and over a store in this process. What was put comes back whole, or is a miss."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import KbtpError
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.session import TargetServer
from kbtp_core.store import places
from kbtp_core.store.embedded import EmbeddedStore
from kbtp_core.store.identity import object_ids
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.ram import RamStore

BLOCK = 16384
OK, EXISTS, MISSING, TOO_LARGE = ItemStatus.OK, ItemStatus.EXISTS, ItemStatus.MISSING, ItemStatus.TOO_LARGE


class Stores:
    """Servers of one block size, and clients of them."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.fabric = SoftRnic()
        self.clients: list[Client] = []
        self.stores: list[RamStore] = []
        self.servers: list[TargetServer] = []
        for _ in range({"one": 1, "three": 3, "embedded": 0}[kind]):
            self.start()

    def start(self, port: int = 0) -> None:
        store = RamStore(BLOCK, 64 * BLOCK)
        self.stores.append(store)
        self.servers.append(TargetServer(self.fabric, store.target, store.pool_region, port=port))

    @property
    def members(self) -> list[str]:
        return [f"{host}:{port}" for host, port in (server.address for server in self.servers)]

    def client(self, namespace: bytes = b"ns", **options: object) -> Client:
        if self.kind == "embedded":
            client = Client.embedded(namespace, ram_bytes=64 * BLOCK, block_bytes=BLOCK)
        else:
            options.setdefault("options", LinkOptions(quota=8))
            client = Client(self.members, namespace, fabric=self.fabric, **options)  # type: ignore[arg-type]
        self.clients.append(client)
        return client

    def close(self) -> None:
        for client in self.clients:
            client.close()
        for server, store in zip(self.servers, self.stores, strict=True):
            server.close(1.0)
            server.check_integrity()
            store.check_integrity()
        self.fabric.close()


@pytest.fixture(params=["one", "three", "embedded"])
def stores(request: pytest.FixtureRequest) -> Iterator[Stores]:
    world = Stores(request.param)
    yield world
    world.close()


def value(key: int, length: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    return np.random.default_rng(key).integers(0, 256, length, np.uint8)


def test_a_value_comes_back_whole_and_the_first_writer_wins(stores: Stores) -> None:
    client = stores.client()
    assert client.put([b"a", b"b"], [b"first", b"x"]).tolist() == [OK, OK]
    assert client.put([b"a"], [b"second"]).tolist() == [EXISTS]
    buffer = np.zeros(BLOCK, np.uint8)
    found = client.get([b"a", b"none"], [buffer, bytearray(8)])
    assert (found.status.tolist(), found.lengths.tolist()) == ([OK, MISSING], [5, 0])
    assert bytes(buffer[:5]) == b"first"
    assert client.exists([b"a", b"none"]).tolist() == [True, False]
    assert client.lengths([b"a", b"none"]).tolist() == [5, 0]
    assert client.remove([b"a", b"none"]) == 1
    assert client.get([b"a"], [buffer]).status.tolist() == [MISSING]
    assert client.put([b"a"], [b"third"]).tolist() == [OK]
    assert bytes(buffer[:5]) == b"first"
    assert client.get(["a"], [buffer]).ok.all()
    assert bytes(buffer[:5]) == b"third"


def test_batches_larger_than_what_may_be_on_its_way_come_back_whole(stores: Stores) -> None:
    client = stores.client()
    keys = [f"key-{i}" for i in range(40)]
    values = [value(i, 1 + 400 * i) for i in range(40)]
    assert (client.put(keys, values) == OK).all()
    for _ in range(2):  # the second time from what is remembered
        buffers = [np.zeros(one.size, np.uint8) for one in values]
        found = client.get(keys[::-1], buffers[::-1])
        assert found.ok.all()
        assert found.lengths.tolist() == [one.size for one in values[::-1]]
        assert all((buffer == one).all() for buffer, one in zip(buffers, values, strict=True))
    assert client.prefix([*keys[:7], "none", *keys[7:]]) == 7
    assert client.prefix(keys) == 40


def test_values_in_pieces_are_gathered_and_scattered(stores: Stores) -> None:
    client = stores.client()
    memory = value(1, 6 * 1024)
    base = memory.ctypes.data
    where = places.of_addresses(base + np.array([[0, 1024], [2048, 4096]]), np.array([[1024, 512], [1024, 512]]), memory)
    assert client.put_from(["x", "y"], where).tolist() == [OK, OK]
    sink = np.zeros(6 * 1024, np.uint8)
    back = places.of_addresses(sink.ctypes.data + np.array([[4096, 0, 512], [1024, 2048, 3072]]), np.array([512, 512, 512]), sink)
    assert client.get_into(["x", "y"], back).lengths.tolist() == [1536, 1536]
    assert bytes(sink[4096:4608]) + bytes(sink[:1024]) == bytes(memory[:1536])
    assert bytes(sink[1024:1536]) + bytes(sink[2048:2560]) + bytes(sink[3072:3584]) == bytes(memory[2048:3072]) + bytes(memory[4096:4608])


def test_what_does_not_fit_is_said_for_its_item_alone(stores: Stores) -> None:
    client = stores.client()
    statuses = client.put(["large", "empty", "right"], [bytes(BLOCK + 1), b"", bytes(BLOCK)])
    assert statuses.tolist() == [TOO_LARGE, TOO_LARGE, OK]
    found = client.get(["right", "large"], [bytearray(BLOCK - 1), bytearray(1)])
    assert (found.status.tolist(), found.lengths.tolist()) == ([TOO_LARGE, MISSING], [BLOCK, 0])


def test_calls_that_make_no_sense_are_refused_before_anything_happens(stores: Stores) -> None:
    client = stores.client()
    with pytest.raises(ValueError, match="1 keys, but 2 buffers"):
        client.put([b"k"], [b"1", b"2"])
    with pytest.raises(ValueError, match="read-only"):
        client.get([b"k"], [b"12"])
    with pytest.raises(ValueError, match="not contiguous"):
        client.put([b"k"], [np.zeros((4, 4), np.uint8)[:, :2]])
    with pytest.raises(ValueError, match="not empty"):
        client.put([b""], [b"1"])
    with pytest.raises(ValueError, match=r"shape \(n, 16\)"):
        client.get(np.zeros((2, 8), np.uint8), [bytearray(1), bytearray(1)])
    assert client.exists([b"k"]).tolist() == [False]


def test_object_ids_name_the_same_values_as_their_keys(stores: Stores) -> None:
    client = stores.client()
    client.put(["k"], [b"value"])
    ids = object_ids(b"ns", ["k"])
    buffer = bytearray(5)
    assert client.get(ids, [buffer]).ok.all()
    assert bytes(buffer) == b"value"


def test_empty_batches_are_answered(stores: Stores) -> None:
    client = stores.client()
    assert client.put([], []).tolist() == []
    assert client.get([], []).status.tolist() == []
    assert client.exists([]).tolist() == []
    assert client.remove([]) == 0


def test_a_namespace_can_be_listed_and_forgotten_and_others_stay(stores: Stores) -> None:
    client = stores.client()
    keys = [f"k{i}" for i in range(10)]
    client.put(keys, [bytes(i + 1) for i in range(10)])
    if stores.kind != "embedded":
        other = stores.client(b"other")
        other.put(keys, [b"x"] * 10)
    listed = {one.object_id: (one.length, one.tier) for one in client.list()}
    assert listed == {row.tobytes(): (i + 1, "ram") for i, row in enumerate(object_ids(b"ns", keys))}
    assert client.remove_all() == 10
    assert not client.exists(keys).any()
    assert list(client.list()) == []
    if stores.kind != "embedded":
        assert other.exists(keys).all()


def test_a_pinned_value_outlives_any_number_of_others(stores: Stores) -> None:
    client = stores.client()
    client.put(["pinned", "not"], [b"1", b"2"])
    assert client.pin(["pinned", "none"], lease_s=30).tolist() == [OK, MISSING]
    for turn in range(40):
        client.put([f"{turn}/{i}" for i in range(8)], [bytes(BLOCK)] * 8)
    assert client.exists(["pinned", "not"]).tolist() == [True, False]
    assert client.unpin(["pinned"]).tolist() == [OK]
    for turn in range(40, 80):
        client.put([f"{turn}/{i}" for i in range(8)], [bytes(BLOCK)] * 8)
    assert client.exists(["pinned"]).tolist() == [False]


def test_what_is_remembered_of_a_value_never_leads_to_another(stores: Stores) -> None:
    """Its block is another value's by now: the generation says so, and the get is a miss or the value again."""
    reader, writer = stores.client(), stores.client() if stores.kind != "embedded" else None
    writer = writer or reader
    buffer = bytearray(BLOCK)
    for turn in range(60):
        keys = [f"{turn}/{i}" for i in range(8)]
        writer.put(keys, [bytes([turn + 1]) * BLOCK] * 8)
        assert reader.get([keys[0]], [buffer]).ok.all()
        for past in range(0, turn + 1, 7):
            if reader.get([f"{past}/0"], [buffer]).ok.all():
                assert bytes(buffer) == bytes([past + 1]) * BLOCK


@pytest.fixture
def one() -> Iterator[Stores]:
    world = Stores("one")
    yield world
    world.close()


def test_a_store_that_is_gone_is_a_miss_at_once_and_is_found_again(one: Stores) -> None:
    client = one.client(timeout_s=3.0)
    client.put(["k"], [b"v"])
    port = one.servers[0].address[1]
    one.servers[0].close(0.2)
    begun = time.monotonic()
    assert client.get(["k"], [bytearray(1)]).status.tolist() == [ItemStatus.UNAVAILABLE]
    assert client.put(["l"], [b"v"]).tolist() == [ItemStatus.UNAVAILABLE]
    assert client.exists(["k"]).tolist() == [False]
    with pytest.raises(KbtpError, match=f"127.0.0.1:{port}"):
        client.remove(["k"])
    assert time.monotonic() - begun < 2.0
    one.start(port)
    deadline = time.monotonic() + 10
    while client.put(["k"], [b"w"]).tolist() != [OK]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    buffer = bytearray(1)
    assert client.get(["k"], [buffer]).ok.all()
    assert bytes(buffer) == b"w"


def test_a_deadline_ends_a_call_and_the_next_one_works(one: Stores) -> None:
    client = one.client()
    client.put(["k"], [b"v"])
    with one.servers[0]._lock:  # the store is busy
        begun = time.monotonic()
        assert client.get(["none"], [bytearray(1)], timeout_s=0.1).status.tolist() in ([ItemStatus.TIMED_OUT], [MISSING])
        assert client.put(["l"], [bytes(BLOCK)], timeout_s=0.1).tolist() in ([ItemStatus.TIMED_OUT], [OK])
        assert time.monotonic() - begun < 1.0
    deadline = time.monotonic() + 10
    while not (client.put(["m"], [b"v"]) < MISSING).all():
        assert time.monotonic() < deadline
    assert client.get(["k"], [bytearray(1)]).ok.all()


def test_one_lost_member_costs_its_own_keys_alone() -> None:
    world = Stores("three")
    client = world.client(timeout_s=3.0)
    keys = [f"k{i}" for i in range(60)]
    assert (client.put(keys, [b"v"] * 60) == OK).all()
    world.servers[1].close(0.2)
    status = client.get(keys, [bytearray(1) for _ in keys]).status
    assert {OK, ItemStatus.UNAVAILABLE} == set(status.tolist())
    assert 5 < np.count_nonzero(status == ItemStatus.UNAVAILABLE) < 45
    world.close()


def test_a_target_that_is_no_store_is_refused_by_name(one: Stores) -> None:
    from kbtp_core.protocol import BlockPool, BlockTable, Target

    target = Target(BlockPool(64, np.zeros(256, np.uint8)), BlockTable(16), name="plain", incarnation=1)
    memory = np.zeros(256, np.uint8)
    server = TargetServer(one.fabric, target, lambda pd: pd.register(memory, 1))  # type: ignore[arg-type, return-value]
    client = Client(f"127.0.0.1:{server.address[1]}", b"ns", fabric=one.fabric)
    with pytest.raises(KbtpError, match="without a store"):
        client.remove_all()
    client.close()
    server.close(1.0)


def test_many_threads_share_one_client(one: Stores) -> None:
    from concurrent.futures import ThreadPoolExecutor

    client = one.client()

    def work(number: int) -> int:
        done = 0
        for turn in range(30):
            keys = [f"{number}/{turn}/{i}" for i in range(3)]
            values = [value(number * 1000 + turn, 500 + i) for i in range(3)]
            buffers = [np.zeros(600, np.uint8) for _ in range(3)]
            assert set(client.put(keys, values).tolist()) <= {OK, ItemStatus.NO_SPACE}
            found = client.get(keys, buffers)
            for at in np.flatnonzero(found.ok).tolist():
                assert (buffers[at][: found.lengths[at]] == values[at]).all()
                done += 1
        return done

    with ThreadPoolExecutor(6) as threads:
        assert sum(threads.map(work, range(6))) > 300


class AgainstAModel(RuleBasedStateMachine):
    """The embedded store may forget; it may never answer with other bytes, or lose a block."""

    def __init__(self) -> None:
        super().__init__()
        self.store = EmbeddedStore(4 * 16, 16)
        self.model: dict[bytes, bytes] = {}

    @rule(key=st.integers(0, 9), octets=st.binary(min_size=1, max_size=16), pin=st.booleans())
    def put(self, key: int, octets: bytes, pin: bool) -> None:
        name = bytes([key]) * 16
        status = self.store.put(name, memoryview(octets), pin=pin)
        if status is OK:
            self.model[name] = octets
        else:
            assert status is ItemStatus.NO_SPACE or name in self.model

    @rule(key=st.integers(0, 9))
    def get(self, key: int) -> None:
        name, out = bytes([key]) * 16, bytearray(16)
        length = self.store.get_into(name, memoryview(out))
        if length >= 0:
            assert bytes(out[:length]) == self.model[name]

    @rule(key=st.integers(0, 9))
    def remove(self, key: int) -> None:
        name = bytes([key]) * 16
        if self.store.remove(name):
            del self.model[name]
        assert not self.store.length(name)

    @invariant()
    def blocks_are_whole(self) -> None:
        self.store.check_integrity()


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def test_a_call_with_little_time_ends_in_time_though_the_store_is_still_being_connected_to() -> None:
    fabric = SoftRnic()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        options = LinkOptions(connect_timeout_s=0.6)
        client = Client(f"127.0.0.1:{silent.getsockname()[1]}", b"ns", fabric=fabric, options=options)
        begun = time.monotonic()
        assert client.get([b"a"], [bytearray(8)], timeout_s=0.05).status.tolist() == [ItemStatus.TIMED_OUT]
        assert client.put([b"a"], [b"x"], timeout_s=0.05).tolist() == [ItemStatus.TIMED_OUT]
        assert time.monotonic() - begun < 0.4
        assert client.get([b"a"], [bytearray(8)], timeout_s=5).status.tolist() == [ItemStatus.UNAVAILABLE]
        assert 0.5 < time.monotonic() - begun < 2
        begun = time.monotonic()
        assert client.get([b"a"], [bytearray(8)], timeout_s=5).status.tolist() == [ItemStatus.UNAVAILABLE]
        assert time.monotonic() - begun < 0.1
        client.close()
    fabric.close()


def test_what_came_too_late_for_one_call_costs_the_next_nothing() -> None:
    fabric = SoftRnic()
    store = RamStore(1 << 20, 64 << 20)
    server = TargetServer(fabric, store.target, store.pool_region)
    keys, pages = [f"k{at}" for at in range(8)], [value(at, 1 << 20) for at in range(8)]
    with Client("{}:{}".format(*server.address), b"ns", fabric=fabric, options=LinkOptions(quota=8)) as client:
        assert (client.put(keys, pages) == OK).all()
        ended_early_count = 0
        for turn in range(60):
            buffers = [np.zeros(1 << 20, np.uint8) for _ in keys]
            ended_early_count += int((client.get(keys, buffers, timeout_s=0.0002 * (1 + turn % 10)).status == ItemStatus.TIMED_OUT).any())
            match turn % 3:
                case 0:
                    assert client.get(keys, buffers).ok.all()
                    assert all(map(np.array_equal, buffers, pages))
                case 1:
                    assert (client.put(keys, pages) == EXISTS).all()
                case _:
                    assert client.exists(keys).all()
        assert ended_early_count > 5
    server.close(1.0)
    fabric.close()


def test_a_client_that_the_store_has_promised_no_block_hears_at_once_that_there_is_no_space() -> None:
    fabric = SoftRnic()
    store = RamStore(BLOCK, 64 * BLOCK)
    server = TargetServer(fabric, store.target, store.pool_region)
    address = "{}:{}".format(*server.address)
    with Client(address, b"ns", fabric=fabric, options=LinkOptions(quota=1000)) as greedy:
        assert greedy.put([b"a"], [b"x"]).tolist() == [OK]
        with Client(address, b"ns", fabric=fabric) as late:
            begun = time.monotonic()
            assert late.put([b"b"], [b"y"]).tolist() == [ItemStatus.NO_SPACE]
            assert time.monotonic() - begun < 2
            assert late.get([b"a"], [bytearray(1)]).ok.all()
    server.close(1.0)
    fabric.close()
