"""Completion records end to end, on a fabric whose Writes keep their order."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.api import Access
from kbtp_core.protocol import Capability, Flag, Status
from kbtp_core.session import BUFFER_ACCESS
from tests.session.conftest import BLOCK, World, buffer, soon
from tests.session.loopback import WRITE_WITH_IMMEDIATE, LoopbackFabric

RECORDS = int(Capability.RECORD_COMPLETION)


@pytest.fixture
def ordered() -> Iterator[World]:
    fabric = LoopbackFabric(write_with_immediate=WRITE_WITH_IMMEDIATE)
    world = World(fabric, use_executor=False)  # type: ignore[arg-type]
    yield world
    world.close()
    fabric.close()


def test_every_request_is_completed_by_its_own_record(ordered: World) -> None:
    session = ordered.connect(ordered.ring(blocks=32), capabilities=RECORDS, outstanding=4, quota=32)
    assert session.target.capabilities == RECORDS
    memory = buffer(16)
    memory[: 10 * BLOCK] = np.random.default_rng(4).integers(0, 256, 10 * BLOCK)
    region = session.register(memory)
    handles = 1000 + np.arange(10)
    stored = session.alloc_store(handles, 0, region, np.arange(10) * BLOCK, 1 + np.arange(10), deadline=soon()).wait()
    assert stored.ok
    assert stored.data_length.tolist() == list(range(1, 11))
    loaded = session.load([*handles, 1010], 0, region, 12 * BLOCK, BLOCK, deadline=soon()).wait()
    assert loaded.status.tolist() == [Status.OK] * 10 + [Status.NOT_BOUND]
    inline = session.alloc_store_inline([1010, 1011], 0, [b"a" * 256, b"b"], deadline=soon()).wait()
    assert inline.data_length.tolist() == [256, 1]
    assert session.free([*handles, 1010, 1011], 0, deadline=soon()).wait().ok


def test_what_has_something_to_invalidate_is_completed_by_a_send(ordered: World) -> None:
    session = ordered.connect(ordered.ring(), capabilities=RECORDS)
    session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait()
    region = session.register(buffer(1), BUFFER_ACCESS | Access.REMOTE_INVALIDATE)
    assert session.load([1000], 0, region, 0, BLOCK, deadline=soon(), flags=Flag.INVALIDATE).wait().ok
    assert not region.is_valid


def test_whoever_does_not_want_records_gets_none(ordered: World) -> None:
    session = ordered.connect(ordered.ring())
    assert session.target.capabilities == 0
    assert session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait().ok


def test_an_immediate_that_announces_nothing_ends_the_session(ordered: World) -> None:
    server = ordered.ring()
    session = ordered.connect(server, capabilities=RECORDS)
    (connection,) = server._core._connections.values()
    for immediate in (0, 7, 32 * 1000):
        connection.qp.other.announce(immediate)  # type: ignore[attr-defined]
    session.poll()
    with pytest.raises(SessionClosed, match="announces no record"):
        session.free([1000], 0, deadline=soon())
