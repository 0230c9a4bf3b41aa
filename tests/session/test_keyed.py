"""Values by key between a real session and a real server, on every fabric (docs/store-protocol.md)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.api import Fabric
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, HelloParameters, Status
from kbtp_core.protocol.keyed import GET_ITEM, Get, GetResult, LookupFlag, Tier, ValueFlag, parse_keyed_answer
from kbtp_core.session import InitiatorSession, TargetServer
from kbtp_core.store.ram import RamOptions, RamStore
from tests.session.conftest import soon, threaded_rnic
from tests.session.loopback import LoopbackFabric

BLOCK = 4096
TENANT = 0x7E


class Keyed:
    """A store, its server, and sessions with it."""

    def __init__(self, fabric: Fabric, use_executor: bool, blocks: int = 256) -> None:
        self.fabric = fabric
        self.use_executor = use_executor
        self.store = RamStore(BLOCK, blocks * BLOCK, options=RamOptions(session_handles=512))
        self.server = TargetServer(fabric, self.store.target, self.store.pool_region, use_executor=use_executor)
        self.sessions: list[InitiatorSession] = []

    def connect(self, **wishes: Any) -> InitiatorSession:
        wishes = {"capabilities": int(Capability.STORE), "quota": 16, "handle_count": 16, "outstanding": 64, "inline_bytes": 4096, **wishes}
        self.sessions.append(InitiatorSession.connect(self.fabric, *self.server.address, HelloParameters(**wishes)))
        return self.sessions[-1]

    def close(self) -> None:
        for session in self.sessions:
            session.close(1.0)
        self.server.close(2.0)
        self.server.check_integrity()
        self.server.check()
        self.store.check_integrity()


@pytest.fixture(
    params=[(LoopbackFabric, False), (SoftRnic, True), (threaded_rnic, True), (SoftRnic, False)],
    ids=["loopback", "softrnic", "softrnic-of-3-threads", "softrnic-without-executor"],
)
def keyed(request: pytest.FixtureRequest) -> Iterator[Keyed]:
    kind, use_executor = request.param
    fabric = kind()
    world = Keyed(fabric, use_executor)
    yield world
    world.close()
    fabric.close()


def ids_of(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def put(session: InitiatorSession, ids: NDArray[np.uint8], data: list[bytes]) -> Any:
    """ALLOC_STOREs and the PUBLISH behind them, in one round trip."""
    handles = session.target.handle_base + np.arange(len(ids), dtype=np.uint64)
    session.alloc_store_inline(handles, 0, data, deadline=soon())
    return session.publish(ids, TENANT, handles, deadline=soon()).wait()


def test_a_batch_is_put_found_and_loaded_by_another_session(keyed: Keyed) -> None:
    writer, reader = keyed.connect(), keyed.connect()
    ids = ids_of(16)
    data = [bytes([i + 1]) * (1000 + i) for i in range(16)]
    result = put(writer, ids, data)
    assert result.status.tolist() == [Status.OK] * 16
    found = reader.lookup(ids, TENANT, deadline=soon()).wait()
    assert found.tier.tolist() == [Tier.RAM] * 16
    assert found.data_length.tolist() == [len(octets) for octets in data]
    assert (found.handle == result.handle).all()
    assert found.prefix_count == 16
    memory = np.zeros((16, BLOCK), np.uint8)
    region = reader.register(memory)
    batch = reader.load(found.handle, found.generation, region, np.arange(16) * BLOCK, BLOCK, deadline=soon()).wait()
    assert batch.ok
    assert [memory[i, : len(octets)].tobytes() for i, octets in enumerate(data)] == data


def test_thousands_of_ids_are_looked_up_in_one_call(keyed: Keyed) -> None:
    session = keyed.connect()
    ids = ids_of(5000)
    put(session, ids[1000:1016], [b"x"] * 16)
    found = session.lookup(ids, TENANT, deadline=soon()).wait()
    assert np.flatnonzero(found.tier).tolist() == list(range(1000, 1016))
    prefix = session.lookup(ids[1000:], TENANT, deadline=soon(), flags=LookupFlag.PREFIX).wait()
    assert prefix.prefix_count == 16
    assert not prefix.tier[16:].any()


def test_a_range_of_a_value_is_loaded(keyed: Keyed) -> None:
    session = keyed.connect()
    (result,) = [put(session, ids_of(1), [b"0123456789"])]
    memory = np.zeros(BLOCK, np.uint8)
    region = session.register(memory)
    batch = session.load_range(result.handle, result.generation, region, [0], [BLOCK], [3], [4], deadline=soon()).wait()
    assert (batch.status.tolist(), batch.data_length.tolist()) == ([Status.OK], [10])
    assert memory[:5].tobytes() == b"3456\0"


def test_removing_pinning_and_listing(keyed: Keyed) -> None:
    session = keyed.connect()
    ids = ids_of(8)
    assert session.set_namespace(TENANT, 7, deadline=soon()).wait().status == Status.OK
    result = put(session, ids, [b"x"] * 8)
    assert session.pin(result.handle, result.generation, deadline=soon()).wait().status.tolist() == [Status.OK] * 8
    assert session.remove(ids[:3], TENANT, deadline=soon()).wait().count == 3
    page = session.list_values(TENANT, 7, deadline=soon()).wait()
    assert {bytes(item["id"]) for item in page.items} == {bytes(one) for one in ids[3:]}
    assert page.cursor == 0
    assert session.remove_namespace(TENANT, 7, deadline=soon()).wait().count == 5
    assert len(session.list_values(TENANT, deadline=soon()).wait().items) == 0


def test_of_eight_writers_of_one_id_one_wins(keyed: Keyed) -> None:
    sessions = [keyed.connect(quota=4, handle_count=4) for _ in range(8)]
    rounds = 20
    results: list[list[tuple[int, int, int]]] = [[] for _ in sessions]

    def write(at: int) -> None:
        for turn in range(rounds):
            got = put(sessions[at], ids_of(1, turn), [bytes([at]) * 100])
            results[at].append((int(got.status[0]), int(got.handle[0]), int(got.generation[0])))

    threads = [threading.Thread(target=write, args=(at,)) for at in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for turn in range(rounds):
        statuses = [result[turn][0] for result in results]
        assert sorted(statuses) == [Status.OK] + [Status.ALREADY_BOUND] * 7
        assert len({result[turn][1:] for result in results}) == 1
        memory = np.zeros(BLOCK, np.uint8)
        _, handle, generation = results[0][turn]
        reader = sessions[0]
        reader.load([handle], [generation], reader.register(memory), [0], [BLOCK], deadline=soon()).wait()
        assert memory[:100].tobytes() == bytes([statuses.index(Status.OK)]) * 100
    assert keyed.store.used_count == rounds


def test_values_of_any_size_and_in_pieces_are_put_in_one_go(keyed: Keyed) -> None:
    session, reader = keyed.connect(inline_bytes=1000), keyed.connect()
    count = 12
    memory = np.random.default_rng(1).integers(0, 256, (count, 2, 2048), np.uint8)
    lengths = np.array([[at * 340 // 2, at * 340 - at * 340 // 2] for at in range(1, count + 1)], np.uint32)
    addresses = memory.ctypes.data + np.arange(2 * count, dtype=np.uint64).reshape(count, 2) * 2048
    values = [b"".join(memory[at, piece, : lengths[at, piece]].tobytes() for piece in range(2)) for at in range(count)]
    far = np.zeros((count, BLOCK), np.uint8)  # where the target reads the longer ones
    for at, value in enumerate(values):
        far[at, : len(value)] = np.frombuffer(value, np.uint8)
    ids, handles = ids_of(count), session.target.handle_base + np.arange(count, dtype=np.uint64)
    region = session.register(far)
    result = session.put(ids, TENANT, handles, addresses, lengths, region=region, offsets=np.arange(count) * BLOCK, deadline=soon()).wait()
    assert result.status.tolist() == result.stored.tolist() == [Status.OK] * count
    assert result.is_settled.all()
    seen = np.zeros((count, BLOCK), np.uint8)
    found = reader.lookup(ids, TENANT, deadline=soon()).wait()
    assert (found.handle == result.handle).all()
    assert (found.generation == result.generation).all()
    reader.load(found.handle, found.generation, reader.register(seen), np.arange(count) * BLOCK, BLOCK, deadline=soon()).wait()
    assert [seen[at, : len(value)].tobytes() for at, value in enumerate(values)] == values
    again = session.put(ids, TENANT, handles, addresses, lengths, region=region, offsets=np.arange(count) * BLOCK, deadline=soon()).wait()
    assert again.status.tolist() == [Status.ALREADY_BOUND] * count
    assert again.is_kept.all()
    assert (again.handle == result.handle).all()


def test_more_values_than_one_publish_holds_are_put_in_one_call(keyed: Keyed) -> None:
    session = keyed.connect(inline_bytes=256, quota=64, handle_count=64)
    count = 64
    memory = np.arange(count, dtype=np.uint8).repeat(100)
    addresses = memory.ctypes.data + np.arange(count, dtype=np.uint64) * 100
    handles = session.target.handle_base + np.arange(count, dtype=np.uint64)
    for turn in range(3):
        result = session.put(ids_of(count, turn), TENANT, handles, addresses, np.full(count, 100, np.uint32), deadline=soon()).wait()
        assert result.status.tolist() == [Status.OK] * count
    found = session.lookup(ids_of(count, 2), TENANT, deadline=soon()).wait()
    assert found.data_length.tolist() == [100] * count


def test_a_put_over_the_quota_says_which_values_did_not_fit(keyed: Keyed) -> None:
    session = keyed.connect(quota=4, handle_count=8)
    memory = np.ones(800, np.uint8)
    addresses = memory.ctypes.data + np.arange(8, dtype=np.uint64) * 100
    handles = session.target.handle_base + np.arange(8, dtype=np.uint64)
    result = session.put(ids_of(8), TENANT, handles, addresses, np.full(8, 100, np.uint32), deadline=soon()).wait()
    assert result.stored.tolist() == [Status.OK] * 4 + [Status.NO_SPACE] * 4
    assert result.status.tolist() == [Status.OK] * 4 + [Status.NOT_BOUND] * 4
    assert result.is_settled.all()


def test_a_long_value_without_a_region_is_a_mistake(keyed: Keyed) -> None:
    session = keyed.connect(inline_bytes=100)
    memory = np.ones(200, np.uint8)
    address = np.array([memory.ctypes.data], np.uint64)
    with pytest.raises(ValueError, match="register its memory"):
        session.put(
            ids_of(1), TENANT, np.array([session.target.handle_base], np.uint64), address, np.array([200], np.uint32), deadline=soon()
        )


def test_answers_and_values_in_many_segments_find_their_way() -> None:
    fabric = SoftRnic(mulpdu=300)
    world = Keyed(fabric, True)
    session = world.connect(inline_bytes=4096, quota=16)
    ids = ids_of(257 + 100)
    data = np.arange(16, dtype=np.uint8).repeat(1000)
    addresses = data.ctypes.data + np.arange(16, dtype=np.uint64) * 1000
    handles = session.target.handle_base + np.arange(16, dtype=np.uint64)
    result = session.put(ids[250:266], TENANT, handles, addresses, np.full(16, 1000, np.uint32), deadline=soon()).wait()
    assert result.status.tolist() == [Status.OK] * 16
    found = session.lookup(ids, TENANT, deadline=soon()).wait()
    assert np.flatnonzero(found.tier).tolist() == list(range(250, 266))
    memory = np.zeros((16, BLOCK), np.uint8)
    region = session.register(memory)
    at = slice(250, 266)
    batch = session.load(found.handle[at], found.generation[at], region, np.arange(16) * BLOCK, BLOCK, deadline=soon()).wait()
    assert batch.ok
    assert (memory[:, :1000] == np.arange(16)[:, None]).all()
    world.close()
    fabric.close()


def test_values_outlive_the_session_that_wrote_them(keyed: Keyed) -> None:
    writer = keyed.connect()
    put(writer, ids_of(1), [b"stays"])
    writer.close()
    assert keyed.connect().lookup(ids_of(1), TENANT, deadline=soon()).wait().tier.tolist() == [Tier.RAM]


def test_a_session_that_did_not_ask_for_store_is_told(keyed: Keyed) -> None:
    session = keyed.connect(capabilities=0)
    with pytest.raises(ValueError, match="did not grant STORE"):
        session.lookup(ids_of(1), TENANT, deadline=soon())


def test_a_closed_session_says_so(keyed: Keyed) -> None:
    session = keyed.connect()
    session.close()
    with pytest.raises(SessionClosed):
        session.lookup(ids_of(1), TENANT, deadline=soon())


def test_overload_evicts_and_every_value_that_is_found_is_right(keyed: Keyed) -> None:
    session = keyed.connect()
    memory = np.zeros((16, BLOCK), np.uint8)
    region = session.register(memory)
    for turn in range(60):
        ids = ids_of(16, turn)
        assert put(session, ids, [bytes([turn]) * 64] * 16).status.tolist() == [Status.OK] * 16
        back = ids_of(16, max(0, turn - 20))
        found = session.lookup(back, TENANT, deadline=soon()).wait()
        at = np.flatnonzero(found.has_handle)
        if len(at):
            batch = session.load(found.handle[at], found.generation[at], region, at * BLOCK, BLOCK, deadline=soon()).wait()
            good = at[batch.status == Status.OK]
            assert (memory[good, :64] == max(0, turn - 20)).all()
    assert keyed.store.stats()["evicted"] > 0


def test_sessions_that_put_get_and_remove_at_once_find_the_right_values_or_none(keyed: Keyed) -> None:
    """Four sessions, each on its own thread here and perhaps there, want more values than the store has room for."""
    ids = ids_of(400)
    wrong: list[tuple[int, int]] = []
    finished: list[int] = []

    def churn(session: InitiatorSession, seed: int) -> None:
        random = np.random.default_rng(seed)
        memory = np.zeros((16, BLOCK), np.uint8)
        region = session.register(memory)
        for turn in range(40):
            put(session, ids[(mine := random.choice(400, 16, replace=False))], [ids[i].tobytes() * 64 for i in mine])
            wanted = random.choice(400, 16, replace=False)
            found = session.lookup(ids[wanted], TENANT, deadline=soon()).wait()
            if len(at := np.flatnonzero(found.has_handle)):
                batch = session.load(found.handle[at], found.generation[at], region, at * BLOCK, BLOCK, deadline=soon()).wait()
                for i in at[batch.status == Status.OK]:
                    if memory[i, :1024].tobytes() != ids[wanted[i]].tobytes() * 64:
                        wrong.append((seed, turn))
            session.remove(ids[random.choice(400, 2)], TENANT, deadline=soon()).wait()
        finished.append(seed)

    threads = [threading.Thread(target=churn, args=(keyed.connect(), seed)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert sorted(finished) == [0, 1, 2, 3]
    assert keyed.store.stats()["evicted"] > 0


def test_a_get_writes_what_fits_and_says_where_the_rest_is(keyed: Keyed) -> None:
    writer, reader = keyed.connect(), keyed.connect()
    ids = ids_of(4)
    put(writer, ids, [bytes([65 + at]) * (100 + at) for at in range(4)])
    memory = np.zeros(1000, np.uint8)
    region = reader.register(memory)
    items = np.zeros(5, GET_ITEM)
    items["id"][:4], items["id"][4] = ids, ids_of(1, 99)
    items["offset"] = [0, 200, 400, (1 << 64) - 50, 800]
    items["room"] = [100, 500, 101, 200, 100]  # the third is one octet short, the fourth wraps, the fifth is absent
    asked = reader.ask(lambda first: [Get(first, TENANT, 0, region.stag, items).encode()], soon())
    asked.wait()
    answer = parse_keyed_answer(asked.answers[0])
    assert isinstance(answer, GetResult)
    assert answer.items["tier"].tolist() == [Tier.RAM] * 4 + [Tier.ABSENT]
    assert answer.items["data_length"].tolist() == [100, 101, 102, 103, 0]
    is_written = (answer.items["flags"] & ValueFlag.WRITTEN) != 0
    assert is_written.tolist() == [keyed.use_executor] * 2 + [False] * 3
    wanted = np.zeros(1000, np.uint8)
    for at in np.flatnonzero(is_written).tolist():
        start = int(items["offset"][at])
        wanted[start : start + 100 + at] = 65 + at
    assert (memory == wanted).all()
    loaded = reader.load(
        answer.items["handle"][:4], answer.items["generation"][:4], region, 200 * np.arange(4), 200, deadline=soon()
    ).wait()
    assert loaded.status.tolist() == [Status.OK] * 4
    assert memory[600:703].tolist() == [68] * 103
