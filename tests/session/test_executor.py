"""Plain LOADs are answered natively where the provider can, and everything else still reaches the target."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Status
from kbtp_core.session import InitiatorSession, TargetServer
from tests.session.conftest import BLOCK, World, buffer, soon, wait_until


@pytest.fixture
def native() -> Iterator[tuple[World, TargetServer, InitiatorSession]]:
    fabric = SoftRnic()
    world = World(fabric, use_executor=True)
    server = world.lent(blocks=8, handles=32)
    server.bind(1000 + np.arange(8), np.arange(8) * BLOCK, BLOCK)
    yield world, server, world.connect(server)
    world.close()
    fabric.close()


def executed(server: TargetServer) -> int:
    return sum(connection.qp.stats()["executed_loads"] for connection in server._core._connections.values())


def test_plain_loads_do_not_reach_the_interpreter(native: tuple[World, TargetServer, InitiatorSession]) -> None:
    _, server, session = native
    memory = buffer(8)
    with server._lock:  # the target could answer nothing
        batch = session.load(1000 + np.arange(8), 2, session.register(memory), np.arange(8) * BLOCK, BLOCK, deadline=soon()).wait()
    assert batch.ok
    assert memory[::BLOCK].tolist() == list(range(1, 9))
    assert executed(server) == 8


def test_what_is_not_plain_is_answered_by_the_target_and_then_loads_are_native_again(
    native: tuple[World, TargetServer, InitiatorSession],
) -> None:
    _, server, session = native
    region = session.register(buffer(8))
    failed = session.load([1000, 1020, 1001], [9, 0, 2], region, 0, BLOCK, deadline=soon()).wait()
    assert failed.status.tolist() == [Status.STALE_GENERATION, Status.NOT_BOUND, Status.OK]
    before = executed(server)
    assert session.load([1000, 1001], 2, region, [0, BLOCK], BLOCK, deadline=soon()).wait().ok
    wait_until(lambda: executed(server) == before + 2)
