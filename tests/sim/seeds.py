"""Many seeds at once, in as many processes as there are processors, or in this one where pytest-xdist spreads the tests itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context

from tests.sim.ring import RingWorld
from tests.sim.world import run_world

SLICE = 10


@dataclass
class Tally:
    """What many runs have come to."""

    seeds: int = 0
    requests: int = 0
    answers: int = 0
    loads: int = 0
    faults: int = 0
    messages: int = 0
    executed: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.seeds += other.seeds
        self.requests += other.requests
        self.answers += other.answers
        self.loads += other.loads
        self.faults += other.faults
        self.messages += other.messages
        self.executed += other.executed
        self.failures += other.failures


def run_slice(first: int, count: int, requests: int) -> Tally:
    """Seeds [first, first + count), one after the other."""
    tally = Tally()
    for seed in range(first, first + count):
        tally.seeds += 1
        try:
            outcome = run_world(seed, requests=requests)
        except Exception as error:  # noqa: BLE001 - a failure of any kind fails its seed
            tally.failures.append(f"python -m tests.sim.replay {seed} {requests}: {type(error).__name__}: {error}")
        else:
            tally.requests += outcome.requests
            tally.answers += outcome.answers
            tally.loads += outcome.loads
            tally.faults += outcome.faults
            tally.messages += outcome.messages
            tally.executed += outcome.executed
    return tally


def run_ring_slice(first: int, count: int, steps: int) -> tuple[int, int, int, list[str]]:
    """Allocations, reclaims and deferred frees of ring worlds, and what failed."""
    allocations, reclaims, deferred, failures = 0, 0, 0, []
    for seed in range(first, first + count):
        try:
            outcome = RingWorld(seed, steps=steps).run()
        except Exception as error:  # noqa: BLE001 - a failure of any kind fails its seed
            failures.append(f"RingWorld({seed}, steps={steps}): {type(error).__name__}: {error}")
        else:
            allocations += outcome.allocations
            reclaims += outcome.reclaims
            deferred += outcome.deferred
    return allocations, reclaims, deferred, failures


@contextmanager
def workers() -> Iterator[Executor | None]:
    """Processes to run slices in; None under pytest-xdist, or where there is one processor."""
    count = os.cpu_count() or 1
    if "PYTEST_XDIST_WORKER" in os.environ or count == 1:
        yield None
        return
    with ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool:
        yield pool


def run_seeds(pool: Executor | None, first: int, count: int, requests: int) -> Tally:
    """As `run_slice`, spread over `pool`."""
    slices = [(at, min(SLICE, first + count - at), requests) for at in range(first, first + count, SLICE)]
    total = Tally()
    for tally in [run_slice(*s) for s in slices] if pool is None else pool.map(run_slice, *zip(*slices, strict=True)):
        total.add(tally)
    return total
