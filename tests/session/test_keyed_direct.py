"""Blocks that an initiator took and wrote by itself (DIRECT_ALLOC), given to a keyed store: it has copies of its own."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.fabric.api import Fabric
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, DirectPolicy, HelloParameters, Status
from kbtp_core.session import InitiatorSession, TargetServer
from kbtp_core.store.ram import RamOptions, RamStore
from tests.session.conftest import soon
from tests.session.loopback import LoopbackFabric

BLOCK = 4096
TENANT = 0x7E
QUOTA = 4
POLICY = DirectPolicy(load_domains=frozenset({"gpu"}), alloc_domains=frozenset({"gpu"}), ticket_timeout_s=5.0)


@pytest.fixture(params=[LoopbackFabric, SoftRnic], ids=["loopback", "softrnic"])
def fabric(request: pytest.FixtureRequest) -> Iterator[Fabric]:
    fabric: Fabric = request.param()
    yield fabric
    fabric.close()


def test_blocks_written_by_one_sided_operations_are_published_again_and_again(fabric: Fabric) -> None:
    store = RamStore(BLOCK, 64 * BLOCK, options=RamOptions(session_handles=64), direct=POLICY)
    server = TargetServer(fabric, store.target, store.pool_region)
    capabilities = int(Capability.STORE | Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS)
    wishes = HelloParameters(capabilities=capabilities, quota=QUOTA, handle_count=QUOTA, outstanding=32, trust_domain="gpu")
    session = InitiatorSession.connect(fabric, *server.address, wishes)
    assert session.target.capabilities == capabilities
    memory = np.zeros(QUOTA * BLOCK, np.uint8)
    region = session.register(memory)
    handles, places = session.target.handle_base + np.arange(QUOTA, dtype=np.uint64), np.arange(QUOTA) * BLOCK
    ids = np.arange(16, dtype=np.uint8)[None, :].repeat(QUOTA, axis=0)
    for life in range(5):  # many times the quota
        memory[:] = np.repeat(np.arange(QUOTA) + 10 * life + 1, BLOCK)
        stored = session.store_direct(handles, 0, region, places, BLOCK, deadline=soon()).wait()
        assert stored.status.tolist() == [Status.OK] * QUOTA
        ids[:, 0], ids[:, 1] = np.arange(QUOTA), life
        result = session.publish(ids, TENANT, handles, stored.generation, deadline=soon()).wait()
        assert result.status.tolist() == [Status.OK] * QUOTA
        memory[:] = 0
        loaded = session.load(result.handle, result.generation, region, places, BLOCK, deadline=soon()).wait()
        assert loaded.status.tolist() == [Status.OK] * QUOTA
        assert memory.reshape(QUOTA, BLOCK)[:, [0, -1]].tolist() == [[10 * life + at + 1] * 2 for at in range(QUOTA)]
        server.check_integrity()
    assert store.used_count == 5 * QUOTA
    session.close()
    server.close()
    server.check_integrity()
    store.check_integrity()
