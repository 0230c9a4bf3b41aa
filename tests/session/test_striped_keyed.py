"""Values by key over several connections to one store."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import DeadlineExceeded, SessionClosed
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, HelloParameters, Status
from kbtp_core.protocol.constants import NO_STATUS
from kbtp_core.protocol.keyed import LookupFlag, Tier
from kbtp_core.session import InitiatorSession, StripedSession, TargetServer
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.ram import RamOptions, RamStore
from tests.session.conftest import soon, wait_until

BLOCK = 4096
TENANT = 0x7E
STRIPES = 4
EACH = 4  # handles of a stripe


class World:
    """A store, its server, and sessions with it over several connections."""

    def __init__(self, use_executor: bool) -> None:
        self.fabric = SoftRnic()
        self.store = RamStore(BLOCK, 256 * BLOCK, options=RamOptions(session_handles=1024))
        self.server = TargetServer(self.fabric, self.store.target, self.store.pool_region, use_executor=use_executor)
        self.sessions: list[StripedSession] = []

    def connect(self) -> StripedSession:
        count = STRIPES * EACH
        wishes = HelloParameters(int(Capability.STORE), quota=count, handle_count=count, outstanding=64, inline_bytes=1024)
        session = StripedSession.connect(self.fabric, *self.server.address, wishes, stripes=STRIPES)
        assert session.open_count == STRIPES
        self.sessions.append(session)
        return session

    def client(self, **options: Any) -> Client:
        return Client(
            "{}:{}".format(*self.server.address),
            b"ns",
            options=LinkOptions(stripes=STRIPES, quota=STRIPES * EACH, outstanding=64, inline_bytes=1024, **options),
            fabric=self.fabric,
            timeout_s=10.0,
        )

    def close(self) -> None:
        for session in self.sessions:
            session.close(1.0)
        self.server.close(2.0)
        self.server.check_integrity()
        self.store.check_integrity()
        self.fabric.close()


@pytest.fixture(params=[True, False], ids=["executor", "without-executor"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    made = World(request.param)
    yield made
    made.close()


def ids_of(count: int, seed: int = 1) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 16), np.uint8)


def mixed_handles(session: StripedSession) -> NDArray[np.uint64]:
    """EACH handles of every stripe, in turns."""
    return np.stack([np.arange(base, base + EACH, dtype=np.uint64) for base, _ in session.ranges], 1).reshape(-1)


def values_of(count: int, size: int) -> NDArray[np.uint8]:
    """(n, size): value i is of octets i + 1."""
    return np.repeat(np.arange(count, dtype=np.uint8)[:, np.newaxis] + 1, size, axis=1)


def put(session: StripedSession, ids: NDArray[np.uint8], values: NDArray[np.uint8], deadline: float | None = None) -> Any:
    count, size = values.shape
    addresses = values.ctypes.data + np.arange(count, dtype=np.uint64) * size
    region = session.register(values) if size > session.put_inline_bytes else None
    return session.put(
        ids,
        TENANT,
        mixed_handles(session)[:count],
        addresses,
        np.full(count, size, np.uint32),
        deadline=deadline or soon(),
        region=region,
        offsets=np.arange(count, dtype=np.uint64) * size,
    )


def read(session: StripedSession, ids: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
    found = session.lookup(ids, TENANT, deadline=soon()).wait()
    assert found.tier.tolist() == [Tier.RAM] * len(ids)
    memory = np.zeros((len(ids), size), np.uint8)
    region = session.register(memory)
    assert session.load(found.handle, found.generation, region, np.arange(len(ids)) * size, size, deadline=soon()).wait().ok
    return memory


def lose(session: StripedSession, number: int) -> InitiatorSession:
    """Break one connection, as a network would."""
    lost = session._stripes[number].session
    assert lost is not None
    lost._core.qp.abort()
    wait_until(lambda: lost.poll() or not lost.is_open)  # type: ignore[func-returns-value]
    return lost


@pytest.mark.parametrize("size", [700, BLOCK], ids=["inline", "from-memory"])
def test_a_put_goes_through_the_stripes_of_its_handles_and_all_find_it(world: World, size: int) -> None:
    session, other = world.connect(), world.connect()
    ids, values = ids_of(STRIPES * EACH), values_of(STRIPES * EACH, size)
    result = put(session, ids, values).wait()
    assert result.stored.tolist() == result.status.tolist() == [Status.OK] * len(ids)
    assert result.is_settled.all()
    assert session.posted_bytes == [EACH * size] * STRIPES
    assert np.array_equal(read(session, ids, size), values)
    assert np.array_equal(read(other, ids, size), values)
    again = put(session, ids, values).wait()
    assert again.status.tolist() == [Status.ALREADY_BOUND] * len(ids)
    assert (again.handle == result.handle).all()


def test_blocks_that_were_stored_are_published_through_their_stripes(world: World) -> None:
    session = world.connect()
    ids, handles = ids_of(STRIPES * EACH), mixed_handles(session)
    session.alloc_store_inline(handles[:-1], 0, [bytes([at]) * 100 for at in range(15)], deadline=soon())
    result = session.publish(ids, TENANT, handles, deadline=soon()).wait()
    assert result.status.tolist() == [Status.OK] * 15 + [Status.NOT_BOUND]
    assert session.free(handles[:-1], 0, deadline=soon()).wait().status.tolist() == [Status.NOT_BOUND] * 15
    found = session.lookup(ids, TENANT, deadline=soon(), flags=LookupFlag.PREFIX).wait()
    assert (found.prefix_count, found.data_length.tolist()) == (15, [100] * 15 + [0])
    assert session.pin(result.handle[:15], result.generation[:15], deadline=soon()).wait().status.tolist() == [Status.OK] * 15
    assert session.remove(ids, TENANT, deadline=soon()).wait().count == 15


def test_a_namespace_is_told_to_every_stripe_and_to_one_that_is_made_anew(world: World) -> None:
    session = world.connect()
    assert session.set_namespace(TENANT, 7, deadline=soon()).wait().status == Status.OK
    ids, values = ids_of(STRIPES * EACH), values_of(STRIPES * EACH, 100)
    put(session, ids, values).wait()
    assert len(session.list_values(TENANT, 7, deadline=soon()).wait().items) == len(ids)
    lose(session, 1)

    def is_whole() -> bool:
        session.lookup(ids[:1], TENANT, deadline=soon()).wait()  # whoever uses the session has it connected again
        return session.open_count == STRIPES

    wait_until(is_whole)
    more = ids_of(STRIPES * EACH, seed=2)
    assert put(session, more, values).wait().status.tolist() == [Status.OK] * len(more)
    assert len(session.list_values(TENANT, 7, deadline=soon()).wait().items) == 2 * len(ids)
    session.set_namespace(TENANT, 8, deadline=soon()).wait()
    last = ids_of(STRIPES * EACH, seed=3)
    put(session, last, values).wait()
    assert len(session.list_values(TENANT, 8, deadline=soon()).wait().items) == len(last)
    assert session.remove_namespace(TENANT, 7, deadline=soon()).wait().count == 2 * len(ids)


def test_a_lost_stripe_fails_its_values_and_no_others(world: World) -> None:
    session = world.connect()
    ids, values = ids_of(STRIPES * EACH), values_of(STRIPES * EACH, 100)
    handles = mixed_handles(session)
    base, count = session.ranges[2]
    lose(session, 2)
    batch = put(session, ids, values)
    with pytest.raises(SessionClosed, match="stripe that has these handles is lost"):
        batch.wait()
    is_lost = (handles >= base) & (handles < base + count)
    assert batch.status.tolist() == np.where(is_lost, NO_STATUS, Status.OK).tolist()
    assert batch.is_kept.tolist() == (~is_lost).tolist()
    assert np.array_equal(read(session, np.ascontiguousarray(ids[~is_lost]), 100), values[~is_lost])


def test_a_deadline_fences_the_memory_on_all_stripes(world: World) -> None:
    session = world.connect()
    ids, values = ids_of(STRIPES * EACH), values_of(STRIPES * EACH, BLOCK)
    region = session.register(values)
    parts = [region.on(stripe.session) for stripe in session._stripes if stripe.session is not None]
    addresses = values.ctypes.data + np.arange(len(ids), dtype=np.uint64) * BLOCK
    lengths = np.full(len(ids), BLOCK, np.uint32)
    handles, offsets = mixed_handles(session), np.arange(len(ids), dtype=np.uint64) * BLOCK
    batch = session.put(ids, TENANT, handles, addresses, lengths, deadline=time.monotonic() - 1, region=region, offsets=offsets)
    with pytest.raises(DeadlineExceeded):
        batch.wait()
    assert [part.is_valid for part in parts] == [False] * STRIPES
    assert session.is_open


def test_a_client_over_stripes_keeps_all_values_and_all_handles(world: World) -> None:
    with world.client() as client:
        for turn in range(6):
            keys = [f"{turn}/{at}" for at in range(40)]
            values = [bytes([turn + 1, at]) * (50 + 50 * at) for at in range(40)]
            assert client.put(keys, values).tolist() == [ItemStatus.OK] * 40
            buffers = [bytearray(len(value)) for value in values]
            assert client.get(keys, buffers).ok.all()
            assert [bytes(buffer) for buffer in buffers] == values
        assert len(list(client.list())) == 240
        assert client.remove_all() == 240


def test_a_client_goes_on_while_a_stripe_is_lost_and_with_the_new_one(world: World) -> None:
    with world.client() as client:
        assert client.put(["first"], [b"value"]).tolist() == [ItemStatus.OK]
        session: Any = client._links[next(iter(client._links))].session(soon())  # type: ignore[union-attr]
        lose(session, 3)
        deadline = time.monotonic() + 20
        turn = 0
        while session.open_count < STRIPES or turn < 10:
            assert time.monotonic() < deadline
            keys = [f"{turn}/{at}" for at in range(24)]
            assert client.put(keys, [b"x" * 500] * 24).tolist() == [ItemStatus.OK] * 24
            assert client.exists(keys).all()
            turn += 1
        channel = client._links[next(iter(client._links))]._dialer.open  # type: ignore[union-attr]
        assert channel is not None
        assert channel.session is session, "one stripe of several was lost, and not the session"
        assert client.put([f"last/{at}" for at in range(64)], [b"y" * 500] * 64).tolist() == [ItemStatus.OK] * 64
        assert sorted(channel.handles.free) == sorted(mixed_handles(session).tolist())


def test_many_threads_share_a_client_over_stripes(world: World) -> None:
    failures: list[Any] = []
    with world.client() as client:

        def work(number: int) -> None:
            for turn in range(10):
                keys = [f"{number}/{turn}/{at}" for at in range(5)]
                value = bytes([number + 1]) * 900
                buffers = [bytearray(900) for _ in keys]
                if not (client.put(keys, [value] * 5) == ItemStatus.OK).all() or not client.get(keys, buffers).ok.all():
                    failures.append(keys)
                elif any(bytes(buffer) != value for buffer in buffers):
                    failures.append(buffers)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
