"""What a large load costs the Python interpreter of its initiator: how long it keeps other threads from running Python.

A spinning thread counts in Python beside the loads. What it does not get is either a core, which the kernel counts as time on the run
queue, or the GIL: all of the time in which the thread neither runs nor waits for a core. The latter is what the load costs Python.
The loads are also timed alone, since a thread that spins delays whoever else wants the GIL by the interpreter's switch interval.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kbtp_core.cli.bench.kbtp import BenchInitiator
from kbtp_core.cli.bench.peer import Peer
from kbtp_core.cli.bench.plan import BenchOp, Case, Plan

BLOCK_BYTES = 4096
BLOCK_COUNT = 10_000
SPIN_STEP = 1000  # counts between two looks at whether to stop
_SCHEDULE = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds on a run queue, slices


@dataclass(frozen=True)
class InterpreterRow:
    """A load of `batch` blocks in one call, medians."""

    size: int
    batch: int
    load_ms: float  # from posting until all of it is done, nothing else running
    post_ms: float  # of that, in `load`
    gil_ms: float  # of that, with the GIL held
    gil_share: float  # gil_ms of load_ms
    spin_share: float  # progress of the spinning thread beside loads, of its progress alone; it shares the cores with three others


@dataclass
class _Spun:
    """Of a spinning thread's life: what it counted, and where its time went."""

    count: int = 0
    wall_ns: int = 0
    core_ns: int = 0
    queue_ns: int = 0

    @property
    def gil_wait_ns(self) -> int:
        return max(0, self.wall_ns - self.core_ns - self.queue_ns)


class _Spinner:
    """A context manager: a thread that spins in Python; what it did is in `spun` afterwards."""

    def __init__(self) -> None:
        self.spun = _Spun()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="spinner", daemon=True)

    def __enter__(self) -> _Spun:
        self._thread.start()
        return self.spun

    def __exit__(self, *exc: object) -> None:
        self._stop = True
        self._thread.join()

    def _run(self) -> None:
        begun = _now()
        count = 0
        while not self._stop:
            for _ in range(SPIN_STEP):
                count += 1
        self.spun.wall_ns, self.spun.core_ns, self.spun.queue_ns = (after - before for after, before in zip(_now(), begun, strict=True))
        self.spun.count = count


def _now() -> tuple[int, int, int]:
    core_ns, queue_ns, _ = map(int, _SCHEDULE.read_text().split())
    return time.perf_counter_ns(), core_ns, queue_ns


def run_interpreter(plan: Plan, peer: Peer, rounds: int) -> InterpreterRow:
    """Measure; the pool may be too small for all blocks, and then fewer are loaded."""
    case = Case(BenchOp.LOAD, BLOCK_BYTES, min(BLOCK_COUNT, plan.pool_bytes // BLOCK_BYTES))
    initiator = BenchInitiator(peer.open_target(case), case, np.ones(plan.pool_bytes, np.uint8), plan.congestion_control)
    slice_ns = int(plan.seconds / rounds * 1e9)
    load_ns: list[int] = []
    post_ns: list[int] = []
    gil_ms: list[float] = []
    spin_shares: list[float] = []
    try:
        initiator.run(1)
        for _ in range(rounds):
            with _Spinner() as idle:
                time.sleep(plan.seconds / rounds)
            load_ns += initiator.run(slice_ns)
            post_ns += initiator.run_posts(slice_ns)
            with _Spinner() as beside:
                count = len(initiator.run(slice_ns))
            gil_ms.append(beside.gil_wait_ns / 1e6 / count)
            spin_shares.append(beside.count / beside.wall_ns / (idle.count / idle.wall_ns))
    finally:
        initiator.close()
        peer.close_targets()
    load_ms = float(np.median(load_ns)) / 1e6
    return InterpreterRow(
        size=case.block_bytes,
        batch=case.batch,
        load_ms=load_ms,
        post_ms=float(np.median(post_ns)) / 1e6,
        gil_ms=float(np.median(gil_ms)),
        gil_share=float(np.median(gil_ms)) / load_ms,
        spin_share=float(np.median(spin_shares)),
    )
