"""Round trips of 64 octets: plain TCP, two queue pairs that send to each other, and a LOAD.

Plain TCP is a native loop on blocking sockets at both ends. The queue pairs are driven from Python at both ends: each message is
one `post_send`, one wait and one `poll`, and the buffer is posted again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cli.bench.baseline import Echo
from kbtp_core.cli.bench.ends import MESSAGE_BYTES, End
from kbtp_core.cli.bench.kbtp import BenchInitiator
from kbtp_core.cli.bench.peer import Peer
from kbtp_core.cli.bench.plan import WARM_UP_S, BenchOp, Case, Plan

POOL_BYTES = 4 << 20


@dataclass(frozen=True)
class RoundTripRow:
    """Medians over all round trips of `size` octets, in µs."""

    size: int
    raw_tcp_us: float
    send_us: float  # over a queue pair and back over it
    load_us: float  # a LOAD of one block, from `load` to its result
    ratio_send: float
    ratio_load: float


def run_round_trip(plan: Plan, peer: Peer, rounds: int) -> RoundTripRow:
    """Measure; sides alternate as in `measure`."""
    slice_s = plan.seconds / rounds
    case = Case(BenchOp.LOAD, MESSAGE_BYTES, 1)
    with ExitStack() as stack:
        echo = Echo(peer.open_echo(MESSAGE_BYTES), MESSAGE_BYTES, plan.congestion_control)
        stack.callback(echo.close)
        end = End(plan.congestion_control)
        stack.callback(end.close)
        end.connect(peer.open_end())
        stack.callback(peer.close_targets)
        initiator = BenchInitiator(
            peer.open_target(case, pool_bytes=POOL_BYTES), case, np.ones(POOL_BYTES, np.uint8), plan.congestion_control
        )
        stack.callback(initiator.close)
        sides: tuple[Callable[[float], NDArray[np.uint64]], ...] = (
            echo.run,
            lambda seconds: np.array(end.run(seconds), np.uint64),
            lambda seconds: np.array(initiator.run(int(seconds * 1e9)), np.uint64),
        )
        times: list[list[NDArray[np.uint64]]] = [[], [], []]
        for side in sides:
            side(WARM_UP_S)
        for turn in range(rounds):
            for number in (0, 1, 2)[:: 1 if turn % 2 == 0 else -1]:
                times[number].append(sides[number](slice_s))
    raw, send, load = (float(np.median(np.concatenate(slices))) / 1e3 for slices in times)
    return RoundTripRow(MESSAGE_BYTES, raw, send, load, send / raw, load / raw)
