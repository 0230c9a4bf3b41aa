"""Measuring: sides in alternation, medians, and the CPU time of both processes.

A case has three sides: the raw stream, the native loop and KBTP. They run in slices, first to last and then last to first
(A B C C B A, twice), so that a machine that grows slower or faster weighs on all of them alike; a figure is the median of a
side's slices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cli.bench.baseline import NativeLoop, RawStream, copy_gib_per_s
from kbtp_core.cli.bench.clients import ClientsRow, run_clients
from kbtp_core.cli.bench.interpreter import InterpreterRow, run_interpreter
from kbtp_core.cli.bench.kbtp import BenchInitiator, octets
from kbtp_core.cli.bench.large import LargeRow, run_large
from kbtp_core.cli.bench.peer import Peer
from kbtp_core.cli.bench.plan import WARM_UP_S, BenchOp, Case, Plan
from kbtp_core.cli.bench.round_trip import RoundTripRow, run_round_trip
from kbtp_core.cli.bench.timed import Cpu, run_kbtp

ROUNDS = 4  # slices of a side in one case
STANDARD = Case(BenchOp.LOAD, 4096, 32)  # whose native loop the summary names, and which the extras measure
CLIENT_COUNT = 2


@dataclass(frozen=True)
class Row:
    """One case's figures; times are of a batch, from its posting until all of it is done."""

    op: str
    size: int
    batch: int
    blocks_per_s: float
    gib_per_s: float
    p50_us: float
    p99_us: float
    cpu_us_per_block: float  # both processes, user and system
    target_cpu_us_per_block: float  # of that, the target's process
    raw_tcp_gib_per_s: float
    native_loop_blocks_per_s: float
    native_loop_p50_us: float
    ratio_raw_tcp: float  # of octets a second
    ratio_native_loop: float  # of blocks a second


@dataclass(frozen=True)
class Result:
    congestion_control: str  # that the kernel used, on all connections
    raw_tcp_gib_per_s: float
    native_loop_blocks_per_s: float  # LOAD, 4 KiB, 32 in flight
    memcpy_gib_per_s: float
    rows: tuple[Row, ...]
    python_target: Row | None  # the standard case with a target that has no executor
    clients: ClientsRow | None
    interpreter: InterpreterRow | None
    large: tuple[LargeRow, ...]
    round_trip: RoundTripRow | None


class Bench:
    """One run against one child process."""

    def __init__(self, plan: Plan, peer: Peer) -> None:
        self._plan, self._peer = plan, peer
        self._memory = octets(plan.pool_bytes, seed=2)
        # Written, so that their pages are there; KBTP's own is left alone, so that its bytes can be compared in the end.
        self._sink, self._kbtp_sink = np.ones(plan.pool_bytes, np.uint8), np.ones(plan.pool_bytes, np.uint8)
        self._raw = RawStream(peer.open_baseline("stream"), self._sink, plan.congestion_control)
        self._raw.run(WARM_UP_S)
        self._raw_rates: list[float] = []
        self._copy_rates: list[float] = []

    def run_case(self, case: Case, *, is_native: bool = True) -> Row:
        """Measure all sides. `is_native`: the target has its executor."""
        plan, peer = self._plan, self._peer
        slice_s = plan.seconds / ROUNDS
        memory = self._memory if case.op is BenchOp.ALLOC_STORE else self._sink
        loop = NativeLoop(peer.open_baseline(case.op.value), case, memory, plan.congestion_control)
        initiator = BenchInitiator(
            peer.open_target(case, is_native=is_native, stripes=plan.stripes),
            case,
            self._memory if case.op is BenchOp.ALLOC_STORE else self._kbtp_sink,
            plan.congestion_control,
            stripes=plan.stripes,
        )
        raw_rates: list[float] = []
        loop_slices: list[NDArray[np.uint64]] = []
        slices: list[NDArray[np.uint64]] = []
        cpu_s: Cpu = (0.0, 0.0)

        def raw_side() -> None:
            octets, seconds = self._raw.run(slice_s)
            raw_rates.append(octets / seconds / 2**30)

        def loop_side() -> None:
            loop_slices.append(loop.run(slice_s))

        def kbtp_side() -> None:
            nonlocal cpu_s
            times, cpu = run_kbtp(peer, initiator, slice_s)
            slices.append(times)
            cpu_s = (cpu_s[0] + cpu[0], cpu_s[1] + cpu[1])

        try:
            loop.run(WARM_UP_S)
            run_kbtp(peer, initiator, WARM_UP_S)
            for turn in range(ROUNDS):
                for side in (raw_side, loop_side, kbtp_side)[:: 1 if turn % 2 == 0 else -1]:
                    side()
            self._copy_rates.append(copy_gib_per_s(self._memory, self._sink, min(slice_s, 0.25)))
        finally:
            loop.close()
            initiator.close()
            peer.close_targets()
        self._raw_rates += raw_rates
        return _row(case, slices, cpu_s, float(np.median(raw_rates)), loop_slices)

    def finish(self, rows: list[Row]) -> Result:
        """The rest of the run, and all of its figures."""
        plan, peer, has_extras = self._plan, self._peer, self._plan.has_extras
        name = (STANDARD.op.value, STANDARD.block_bytes, STANDARD.batch)
        standard = [row.native_loop_blocks_per_s for row in rows if (row.op, row.size, row.batch) == name]
        result = Result(
            congestion_control=self._raw.congestion_control,
            raw_tcp_gib_per_s=float(np.median(self._raw_rates)),
            native_loop_blocks_per_s=standard[0] if standard else self._standard_loop(),
            memcpy_gib_per_s=float(np.median(self._copy_rates)),
            rows=tuple(rows),
            python_target=self.run_case(STANDARD, is_native=False) if has_extras else None,
            clients=run_clients(plan, peer, STANDARD, CLIENT_COUNT, ROUNDS) if has_extras else None,
            interpreter=run_interpreter(plan, peer, ROUNDS) if has_extras else None,
            large=run_large(plan, peer, self._raw, self._kbtp_sink, ROUNDS) if has_extras else (),
            round_trip=run_round_trip(plan, peer, ROUNDS) if has_extras else None,
        )
        self._raw.close()
        return result

    def _standard_loop(self) -> float:
        loop = NativeLoop(self._peer.open_baseline("load"), STANDARD, self._sink, self._plan.congestion_control)
        try:
            return _blocks_per_s([loop.run(self._plan.seconds / ROUNDS) for _ in range(ROUNDS)], STANDARD.batch)
        finally:
            loop.close()


def _row(case: Case, slices: list[NDArray[np.uint64]], cpu_s: Cpu, raw: float, loop_slices: list[NDArray[np.uint64]]) -> Row:
    times_us = np.concatenate(slices) / 1e3
    blocks_per_s = _blocks_per_s(slices, case.batch)
    gib_per_s = blocks_per_s * case.block_bytes / 2**30
    loop_blocks_per_s = _blocks_per_s(loop_slices, case.batch)
    return Row(
        op=case.op.value,
        size=case.block_bytes,
        batch=case.batch,
        blocks_per_s=blocks_per_s,
        gib_per_s=gib_per_s,
        p50_us=float(np.percentile(times_us, 50)),
        p99_us=float(np.percentile(times_us, 99)),
        cpu_us_per_block=sum(cpu_s) * 1e6 / (times_us.size * case.batch),
        target_cpu_us_per_block=cpu_s[1] * 1e6 / (times_us.size * case.batch),
        raw_tcp_gib_per_s=raw,
        native_loop_blocks_per_s=loop_blocks_per_s,
        native_loop_p50_us=float(np.median(np.concatenate(loop_slices)) / 1e3),
        ratio_raw_tcp=gib_per_s / raw,
        ratio_native_loop=blocks_per_s / loop_blocks_per_s,
    )


def _blocks_per_s(slices: list[NDArray[np.uint64]], batch: int) -> float:
    return float(np.median([times.size * batch / (float(times.sum()) / 1e9) for times in slices]))
