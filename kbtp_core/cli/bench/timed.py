"""Work of the bench with the time and the CPU time that it took, in both processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cli.bench.kbtp import BenchInitiator
from kbtp_core.cli.bench.peer import Peer

Cpu = tuple[float, float]
"""Seconds of CPU time of this process, and of the target's."""

T = TypeVar("T")


def with_cpu(peer: Peer, work: Callable[[], T]) -> tuple[T, Cpu]:
    """What `work` returns, and the CPU time meanwhile."""
    there, here = peer.cpu_s(), time.process_time()
    result = work()
    here = time.process_time() - here
    return result, (here, peer.cpu_s() - there)


def run_kbtp(peer: Peer, initiator: BenchInitiator, seconds: float) -> tuple[NDArray[np.uint64], Cpu]:
    """Batches for about `seconds` of measured time: nanoseconds of each, and the CPU time that they took."""
    times: list[int] = []
    cpu: Cpu = (0.0, 0.0)
    left_ns = int(seconds * 1e9)
    while left_ns > 0:
        initiator.prepare()
        stretch, more = with_cpu(peer, partial(initiator.run, left_ns))
        cpu = (cpu[0] + more[0], cpu[1] + more[1])
        times += stretch
        left_ns -= sum(stretch)
    return np.array(times, np.uint64), cpu
