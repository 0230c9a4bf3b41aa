"""Thousands of worlds, each from a seed: no wrong octet, no lost block, no wait past its deadline.

KBTP_SIM_SEEDS and KBTP_SIM_REQUESTS raise the number of seeds, and of requests in each, for a nightly run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor

import pytest

from tests.sim.seeds import run_ring_slice, run_seeds, workers
from tests.sim.world import REQUESTS, World

SEEDS = int(os.environ.get("KBTP_SIM_SEEDS", "2000"))
PER_WORLD = int(os.environ.get("KBTP_SIM_REQUESTS", str(REQUESTS)))
CHUNK = 100


@pytest.fixture(scope="module")
def pool() -> Iterator[Executor | None]:
    with workers() as pool:
        yield pool


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_seed_reads_wrong_octets_loses_a_block_or_waits_too_long(first: int, pool: Executor | None) -> None:
    tally = run_seeds(pool, first, min(CHUNK, SEEDS - first), PER_WORLD)
    assert not tally.failures, "\n".join(tally.failures[:10])
    assert tally.requests >= tally.seeds * PER_WORLD
    assert tally.loads > tally.requests // 10, "the worlds have hardly loaded anything: they prove nothing"
    assert tally.faults > 0
    assert tally.executed > tally.requests // 100, "the executors have hardly stored or freed anything"
    assert tally.messages > 1900 * tally.seeds or PER_WORLD < REQUESTS, "the worlds are small"


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_seed_loses_a_block_of_a_ring_that_initiators_allocate_from(first: int) -> None:
    allocations, _, deferred, failures = run_ring_slice(first, 20, 100)
    assert not failures, "\n".join(failures[:10])
    assert allocations > 1000
    assert deferred > 0, "no free has ever waited for its slot: the worlds prove nothing"


def test_a_seed_gives_the_same_trace_every_time() -> None:
    def trace(seed: int) -> list[str]:
        lines: list[str] = []
        World(seed, trace=lines, requests=300).run()
        return lines

    for seed in range(3):
        first = trace(seed)
        assert len(first) > 30
        assert first == trace(seed)
    assert trace(3) != trace(4)
