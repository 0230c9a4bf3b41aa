"""Two trust domains at one store, each of which loads every handle that there is while values come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, HelloParameters, Status
from kbtp_core.protocol.constants import NO_STATUS
from kbtp_core.session import InitiatorSession, TargetServer
from kbtp_core.store.ram import RamOptions, RamStore
from tests.session.conftest import soon, threaded_rnic

BLOCK = 256
BLOCKS = 32
SECRETS = {"ours": b"one", "theirs": b"two"}
TENANTS = {"ours": 0xA, "theirs": 0xB}
OCTETS = {"ours": 0x11, "theirs": 0x22}


@pytest.fixture(params=[True, False], ids=["executor", "without-executor"])
def server(request: pytest.FixtureRequest) -> Iterator[tuple[SoftRnic, TargetServer]]:
    fabric = threaded_rnic()
    tenants = {domain: frozenset({tenant}) for domain, tenant in TENANTS.items()}
    store = RamStore(BLOCK, BLOCKS * BLOCK, options=RamOptions(session_handles=64), secrets=SECRETS, tenants=tenants)
    made = TargetServer(fabric, store.target, store.pool_region, use_executor=request.param)
    yield fabric, made
    made.close(2.0)
    made.check_integrity()
    store.check_integrity()
    fabric.close()


def test_no_octet_of_another_domain_is_ever_loaded(server: tuple[SoftRnic, TargetServer]) -> None:
    fabric, target = server
    end = time.monotonic() + 2.0
    seen: dict[str, set[int]] = {domain: set() for domain in SECRETS}
    statuses: dict[str, set[int]] = {domain: set() for domain in SECRETS}

    def connect(domain: str) -> InitiatorSession:
        wishes = HelloParameters(int(Capability.STORE), quota=4, handle_count=4, outstanding=64, inline_bytes=BLOCK, trust_domain=domain)
        return InitiatorSession.connect(fabric, *target.address, wishes, secret=SECRETS[domain])

    def write(domain: str) -> None:
        draw = np.random.default_rng(OCTETS[domain])
        with connect(domain) as session:
            handles = session.target.handle_base + np.arange(4, dtype=np.uint64)
            while time.monotonic() < end:
                ids = draw.integers(0, 4, (4, 16), np.uint8)
                session.alloc_store_inline(handles, 0, [bytes([OCTETS[domain]]) * BLOCK] * 4, deadline=soon())
                session.publish(ids, TENANTS[domain], handles, deadline=soon()).wait()
                session.free(handles, 0, deadline=soon()).wait()
                session.remove(ids[:1], TENANTS[domain], deadline=soon()).wait()

    def sweep(domain: str) -> None:
        with connect(domain) as session:
            table = session.target.table_base + np.arange(session.target.table_count, dtype=np.uint64)
            memory = np.zeros((len(table), BLOCK), np.uint8)
            region = session.register(memory)
            while time.monotonic() < end:
                memory[:] = 0
                batch = session.load(table, 0, region, np.arange(len(table)) * BLOCK, BLOCK, deadline=soon()).wait()
                statuses[domain].update(batch.status.tolist())
                seen[domain].update(np.unique(memory).tolist())

    threads = [threading.Thread(target=run, args=(domain,)) for domain in SECRETS for run in (write, sweep)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    for domain in SECRETS:
        assert seen[domain] == {0, OCTETS[domain]}
        assert {Status.OK, Status.NOT_PERMITTED} <= statuses[domain]
        assert NO_STATUS not in statuses[domain]
