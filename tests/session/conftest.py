"""Worlds of servers and sessions, on every fabric; all of them run over the loopback and over the software RNIC."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.fabric.api import Access, Fabric, ProtectionDomain, Region
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import BlockPool, BlockTable, HelloParameters, LentPool, Target, TargetLimits
from kbtp_core.session import InitiatorSession, TargetServer
from tests.session.loopback import LoopbackFabric

BLOCK = 4096


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = soon(seconds)
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class World:
    """A server, its pool, and sessions with it."""

    def __init__(self, fabric: Fabric, use_executor: bool) -> None:
        self.fabric = fabric
        self.use_executor = use_executor
        self.sessions: list[InitiatorSession] = []
        self.servers: list[TargetServer] = []

    def ring(self, *, blocks: int = 16, handles: int = 64, limits: TargetLimits = TargetLimits(), **server: Any) -> TargetServer:
        self.memory = np.zeros(blocks * BLOCK, np.uint8)
        options = {name: server.pop(name) for name in ("secrets", "direct", "crc32c", "trust_domains") if name in server}
        target = Target(BlockPool(BLOCK, self.memory), BlockTable(handles, 1000), name="ring", incarnation=77, limits=limits, **options)
        return self._serve(target, **server)

    def lent(self, *, blocks: int = 16, handles: int = 64, limits: TargetLimits = TargetLimits(), **server: Any) -> TargetServer:
        """Block i holds i + 1 in every octet, and is bound to nothing yet."""
        self.memory = np.repeat(np.arange(blocks) + 1, BLOCK).astype(np.uint8)
        target = Target(LentPool(BLOCK, self.memory.size), BlockTable(handles, 1000), name="lent", incarnation=77, limits=limits)
        return self._serve(target, **server)

    def _serve(self, target: Target, **server: Any) -> TargetServer:
        memory = self.memory

        def pool_region(pd: ProtectionDomain) -> Region:
            return pd.register(memory, Access.LOCAL_WRITE)

        server.setdefault("use_executor", self.use_executor)
        self.servers.append(TargetServer(self.fabric, target, pool_region, **server))
        return self.servers[-1]

    def connect(self, server: TargetServer, secret: bytes | None = None, deadline_s: float = 5.0, **wishes: Any) -> InitiatorSession:
        wishes = {"quota": 8, "handle_count": 16, "outstanding": 32, "inline_bytes": 256, **wishes}
        session = InitiatorSession.connect(self.fabric, *server.address, HelloParameters(**wishes), deadline_s=deadline_s, secret=secret)
        self.sessions.append(session)
        return session

    def close(self) -> None:
        for session in self.sessions:
            session.close(1.0)
        for server in self.servers:
            server.close(2.0)
            server.check_integrity()
            server.check()


def buffer(count: int = 16) -> NDArray[np.uint8]:
    return np.zeros(count * BLOCK, np.uint8)


def threaded_rnic() -> SoftRnic:
    return SoftRnic(progress_threads=3)


@pytest.fixture(
    params=[(LoopbackFabric, False), (SoftRnic, True), (threaded_rnic, True), (SoftRnic, False)],
    ids=["loopback", "softrnic", "softrnic-of-3-threads", "softrnic-without-executor"],
)
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """The initiator can't tell these apart, so every test runs on all of them."""
    kind, use_executor = request.param
    fabric = kind()
    world = World(fabric, use_executor)
    yield world
    world.close()
    fabric.close()
