"""The measured side: every call of the library that the bench makes is in this file.

A target serves a pool of the case's blocks over the software RNIC. For LOAD all blocks are bound and sealed beforehand; for
ALLOC_STORE all are free, and between two measured stretches the initiator frees what it stored. Every answer is checked, and
before a session ends the bytes of its last batch are compared with what they must be.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cli.bench.plan import BenchOp, Case
from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Access, ProtectionDomain, Region
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import BlockPool, BlockTable, HelloParameters, LentPool, Status, Target, TargetLimits
from kbtp_core.protocol.constants import status_name
from kbtp_core.session import InitiatorSession, LoadBatch, StripedBatch, StripedSession, TargetServer, process_incarnation

TRUST_DOMAIN = "bench"
DEADLINE_S = 30.0


def octets(count: int, seed: int) -> NDArray[np.uint8]:
    """Random octets that both processes can make."""
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def _device(congestion_control: str, has_crc: bool, stripes: int) -> SoftRnic:
    threads = min(stripes, len(os.sched_getaffinity(0)))
    return SoftRnic(congestion_local=congestion_control, wants_crc=has_crc, progress_threads=threads)


@dataclass(frozen=True)
class TargetAddress:
    """Where a target is and what it serves: `generations` of handles 0, 1, … for LOAD, `seed` of its pool's octets."""

    port: int
    generations: NDArray[np.uint16]
    seed: int


class BenchTarget:
    """The target of one case; in the child."""

    def __init__(
        self,
        pool_bytes: int,
        case: Case,
        congestion_control: str,
        *,
        is_native: bool = True,
        has_crc: bool = True,
        stripes: int = 1,
        seed: int = 3,
    ) -> None:
        count = pool_bytes // case.block_bytes
        self._memory = octets(count * case.block_bytes, seed)
        is_load = case.op is BenchOp.LOAD
        target = Target(
            LentPool(case.block_bytes, self._memory.size) if is_load else BlockPool(case.block_bytes, self._memory),
            BlockTable(count),
            name="bench",
            incarnation=process_incarnation(),
            limits=TargetLimits(outstanding=max(1024, case.batch)),
            trust_domains=frozenset({TRUST_DOMAIN}),
        )
        self._fabric = _device(congestion_control, has_crc, stripes)
        self._server = TargetServer(self._fabric, target, self._register, use_executor=is_native)
        handles = np.arange(count, dtype=np.uint64)
        bound = (
            self._server.bind(handles, handles * np.uint64(case.block_bytes), case.block_bytes) if is_load else np.zeros(count, np.uint16)
        )
        self.address = TargetAddress(self._server.address[1], bound, seed)

    def close(self) -> None:
        self._server.close()
        self._server.check()
        self._fabric.close()

    def _register(self, pd: ProtectionDomain) -> Region:
        return pd.register(self._memory, Access.LOCAL_WRITE)


class BenchInitiator:
    """The initiator of one case; in the parent. Loads go to `memory`, stores come from it."""

    def __init__(
        self,
        address: TargetAddress,
        case: Case,
        memory: NDArray[np.uint8],
        congestion_control: str,
        *,
        has_crc: bool = True,
        stripes: int = 1,
    ) -> None:
        self._case, self._address, self._memory = case, address, memory
        count = len(address.generations)
        self._fabric = _device(congestion_control, has_crc, stripes)
        wish = HelloParameters(
            quota=count, handle_count=count, outstanding=max(256, case.batch), client_name="bench", trust_domain=TRUST_DOMAIN
        )
        self._session: Any  # a striped one has its own kind of region and of batch
        if stripes == 1:
            self._session = InitiatorSession.connect(self._fabric, "127.0.0.1", address.port, wish)
        else:
            self._session = StripedSession.connect(self._fabric, "127.0.0.1", address.port, wish, stripes=stripes)
        self._region = self._session.register(memory)
        whole = count // case.batch * case.batch
        self._handles = np.random.default_rng(7).permutation(count)[:whole].astype(np.uint64).reshape(-1, case.batch)
        self._offsets = np.arange(whole, dtype=np.uint64).reshape(-1, case.batch) * np.uint64(case.block_bytes)
        self._generations = address.generations[self._handles]
        self._next = 0  # row of the three above
        self._last: int | None = None
        self._stored: list[NDArray[np.uint64]] = []  # handles that hold a block, in batches

    def prepare(self) -> None:
        """Not measured: free what was stored."""
        for handles in self._stored:
            self._check(self._session.free(handles, 0, deadline=time.monotonic() + DEADLINE_S).wait())
        self._stored.clear()

    def run(self, limit_ns: int) -> list[int]:
        """Batch after batch until `limit_ns` are over or the pool is full; nanoseconds of each."""
        times: list[int] = []
        spent = 0
        while spent < limit_ns and len(self._stored) < len(self._handles):
            begun = time.perf_counter_ns()
            self._check(self._run(self._next))
            times.append(time.perf_counter_ns() - begun)
            spent += times[-1]
            if self._case.op is BenchOp.ALLOC_STORE:
                self._stored.append(self._handles[self._next])
            self._last = self._next
            self._next = (self._next + 1) % len(self._handles)
        return times

    def run_posts(self, limit_ns: int) -> list[int]:
        """As `run`; nanoseconds of the posting of each batch alone."""
        times: list[int] = []
        end = time.perf_counter_ns() + limit_ns
        while not times or time.perf_counter_ns() < end:
            begun = time.perf_counter_ns()
            batch = self._post(self._next)
            times.append(time.perf_counter_ns() - begun)
            self._check(batch.wait())
            self._last = self._next
            self._next = (self._next + 1) % len(self._handles)
        return times

    def close(self) -> None:
        """Compare the last batch's bytes, then end the session. Raises KbtpError if they differ."""
        try:
            if self._last is not None:
                self._compare(self._last)
        finally:
            self._session.close()
            self._region.close()
            self._fabric.close()

    def _post(self, row: int) -> LoadBatch | StripedBatch:
        handles, offsets, size = self._handles[row], self._offsets[row], self._case.block_bytes
        deadline = time.monotonic() + DEADLINE_S
        if self._case.op is BenchOp.LOAD:
            batch: LoadBatch | StripedBatch = self._session.load(
                handles, self._generations[row], self._region, offsets, size, deadline=deadline
            )
        else:
            batch = self._session.alloc_store(handles, 0, self._region, offsets, size, deadline=deadline)
        return batch

    def _run(self, row: int) -> LoadBatch | StripedBatch:
        session = self._session
        if self._case.op is not BenchOp.LOAD or not isinstance(session, InitiatorSession):
            return self._post(row).wait()
        handles, generations, offsets = self._handles[row], self._generations[row], self._offsets[row]
        deadline = time.monotonic() + DEADLINE_S
        return session.load_now(handles, generations, self._region, offsets, self._case.block_bytes, deadline=deadline)

    def _compare(self, row: int) -> None:
        size = self._case.block_bytes
        if self._case.op is BenchOp.LOAD:
            pool = octets(len(self._address.generations) * size, self._address.seed).reshape(-1, size)
            wanted, found = pool[self._handles[row]], self._memory[: self._offsets.size * size].reshape(-1, self._case.batch, size)[row]
        else:
            found = np.zeros((self._case.batch, size), np.uint8)
            region = self._session.register(found)
            places = np.arange(self._case.batch) * size
            self._check(self._session.load(self._handles[row], 0, region, places, size, deadline=time.monotonic() + DEADLINE_S).wait())
            region.close()
            wanted = self._memory[: self._offsets.size * size].reshape(-1, self._case.batch, size)[row]
        if not np.array_equal(wanted, found):
            raise KbtpError(f"the bench moved wrong bytes: {self._case}")

    def _check(self, batch: LoadBatch | StripedBatch) -> None:
        if not batch.ok:
            failed = batch.status[batch.status != Status.OK]
            raise KbtpError(f"{failed.size} of {batch.count} requests failed, the first with {status_name(int(failed[0]))}: {self._case}")
