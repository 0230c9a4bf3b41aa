"""Many sessions at once, on several progress threads, over a store that is far too small for them: every octet is checked."""

from __future__ import annotations

import threading
import time

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Capability, HelloParameters, Status
from kbtp_core.session import InitiatorSession, TargetServer
from kbtp_core.store.ram import RamOptions, RamStore
from tests.session.conftest import soon

BLOCK = 16384
TENANT = 0x7E
BATCH = 8
SECONDS = 1.5


def octets_of(names: NDArray[np.int64]) -> NDArray[np.uint8]:
    """(n, BLOCK) What the values of these names are: no two share a row, and the first octets tell the name."""
    rows = np.zeros((len(names), BLOCK // 8), np.uint64)
    rows[:] = names.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + np.arange(BLOCK // 8, dtype=np.uint64)
    return rows.view(np.uint8)


def ids_of(names: NDArray[np.int64]) -> NDArray[np.uint8]:
    ids = np.zeros((len(names), 16), np.uint8)
    ids[:, :8] = names.astype(">u8").view(np.uint8).reshape(-1, 8)
    return ids


class Worker(threading.Thread):
    """Puts, finds, loads and removes values of a few hundred names. `inline_bytes` decides how they travel."""

    def __init__(self, fabric: SoftRnic, server: TargetServer, seed: int) -> None:
        super().__init__()
        parameters = HelloParameters(
            capabilities=int(Capability.STORE), quota=BATCH, handle_count=BATCH, outstanding=64, inline_bytes=32768 if seed % 2 else 512
        )
        self.session = InitiatorSession.connect(fabric, *server.address, parameters)
        self.rng = np.random.default_rng(seed)
        self.put_count = self.hit_count = 0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            end = time.monotonic() + SECONDS
            while time.monotonic() < end:
                names = self.rng.choice(200, BATCH, replace=False)
                self.put(names)
                self.get(self.rng.choice(200, BATCH, replace=False))
                if self.rng.random() < 0.1:
                    self.session.remove(ids_of(names[:2]), TENANT, deadline=soon()).wait()
        except BaseException as error:
            self.failure = error
            raise

    def put(self, names: NDArray[np.int64]) -> None:
        session, data = self.session, octets_of(names)
        lengths = np.full(BATCH, BLOCK, np.uint32)
        starts = np.arange(BATCH, dtype=np.uint64) * np.uint64(BLOCK)
        handles = session.target.handle_base + np.arange(BATCH, dtype=np.uint64)
        region = session.register(data)
        addresses = np.uint64(data.ctypes.data) + starts
        result = session.put(ids_of(names), TENANT, handles, addresses, lengths, region=region, offsets=starts, deadline=soon()).wait()
        region.close()
        statuses = set(result.status.tolist())
        assert statuses <= {Status.OK, Status.ALREADY_BOUND, Status.NO_SPACE, Status.BUSY}, statuses
        left = np.flatnonzero(~result.is_kept)
        if len(left):
            session.free(handles[left], 0, deadline=soon()).wait()
        self.put_count += int(np.count_nonzero(result.status == Status.OK))

    def get(self, names: NDArray[np.int64]) -> None:
        session = self.session
        found = session.lookup(ids_of(names), TENANT, deadline=soon()).wait()
        at = np.flatnonzero(found.has_handle)
        if not len(at):
            return
        memory = np.zeros((BATCH, BLOCK), np.uint8)
        region = session.register(memory)
        batch = session.load(found.handle[at], found.generation[at], region, at * BLOCK, BLOCK, deadline=soon()).wait()
        region.close()
        good = at[batch.status == Status.OK]
        assert (memory[good] == octets_of(names[good])).all()
        self.hit_count += len(good)


def test_every_value_that_is_found_is_right_whoever_puts_evicts_and_removes_meanwhile() -> None:
    fabric = SoftRnic(progress_threads=3)
    store = RamStore(BLOCK, 96 * BLOCK, options=RamOptions(session_handles=128))
    server = TargetServer(fabric, store.target, store.pool_region)
    workers = [Worker(fabric, server, seed) for seed in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.failure for worker in workers] == [None] * 6
    for worker in workers:
        worker.session.close(1.0)
    server.close(2.0)
    server.check_integrity()
    server.check()
    store.check_integrity()
    fabric.close()
    assert sum(worker.put_count for worker in workers) > 50
    assert sum(worker.hit_count for worker in workers) > 50
    assert store.stats()["evicted"] > 0
