"""LOADs of 1 MiB against the raw stream of the same run: with CRC-32C and without it on both sides, and what a GiB costs in CPU time.

Sides alternate as in `measure`. The CPU time of the raw stream is that of its two processes too.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cli.bench.baseline import RawStream
from kbtp_core.cli.bench.kbtp import BenchInitiator
from kbtp_core.cli.bench.peer import Peer
from kbtp_core.cli.bench.plan import WARM_UP_S, BenchOp, Case, Plan
from kbtp_core.cli.bench.timed import run_kbtp, with_cpu

BLOCK_BYTES = 1 << 20
BATCHES = (1, 32)
GIB = 2**30


@dataclass(frozen=True)
class LargeRow:
    """LOADs of `size`, `batch` in flight; medians of slices. CPU times are of both processes, user and system."""

    size: int
    batch: int
    has_crc: bool
    gib_per_s: float
    cpu_s_per_gib: float
    raw_tcp_gib_per_s: float
    raw_tcp_cpu_s_per_gib: float
    ratio_raw_tcp: float  # of rates
    ratio_cpu: float  # of CPU times a GiB


def run_large(plan: Plan, peer: Peer, raw: RawStream, sink: NDArray[np.uint8], rounds: int) -> tuple[LargeRow, ...]:
    """Measure each batch that fits into the pool."""
    fitting = [batch for batch in BATCHES if batch * BLOCK_BYTES <= plan.pool_bytes]
    return tuple(row for batch in fitting for row in _run_batch(plan, peer, raw, sink, batch, rounds))


def _run_batch(plan: Plan, peer: Peer, raw: RawStream, sink: NDArray[np.uint8], batch: int, rounds: int) -> list[LargeRow]:
    case, slice_s = Case(BenchOp.LOAD, BLOCK_BYTES, batch), plan.seconds / rounds
    figures: dict[bool | None, list[tuple[float, float]]] = {}  # by whether CRCs are on, None for raw: GiB/s, CPU s a GiB
    with ExitStack() as stack:
        stack.callback(peer.close_targets)
        initiators = {}
        for has_crc in (True, False):
            address = peer.open_target(case, has_crc=has_crc)
            initiators[has_crc] = BenchInitiator(address, case, sink, plan.congestion_control, has_crc=has_crc)
            stack.callback(initiators[has_crc].close)
            run_kbtp(peer, initiators[has_crc], WARM_UP_S)

        def raw_side() -> None:
            (octets, seconds), cpu = with_cpu(peer, lambda: raw.run(slice_s))
            figures.setdefault(None, []).append((octets / GIB / seconds, sum(cpu) / (octets / GIB)))

        def kbtp_side(has_crc: bool) -> None:
            times, cpu = run_kbtp(peer, initiators[has_crc], slice_s)
            gib = times.size * batch * BLOCK_BYTES / GIB
            figures.setdefault(has_crc, []).append((gib / (float(times.sum()) / 1e9), sum(cpu) / gib))

        sides = (raw_side, lambda: kbtp_side(True), lambda: kbtp_side(False))
        for turn in range(rounds):
            for side in sides[:: 1 if turn % 2 == 0 else -1]:
                side()
    return [_row(batch, has_crc, figures[has_crc], figures[None]) for has_crc in (True, False)]


def _row(batch: int, has_crc: bool, slices: list[tuple[float, float]], raw_slices: list[tuple[float, float]]) -> LargeRow:
    rate, cpu = (float(value) for value in np.median(slices, axis=0))
    raw_rate, raw_cpu = (float(value) for value in np.median(raw_slices, axis=0))
    return LargeRow(BLOCK_BYTES, batch, has_crc, rate, cpu, raw_rate, raw_cpu, rate / raw_rate, cpu / raw_cpu)
