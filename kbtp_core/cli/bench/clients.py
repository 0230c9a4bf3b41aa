"""Several clients of one target at once, each a process of its own, and as many native loops between the same processes.

Clients run at the same time; sides alternate as in `measure`. Of a slice the clients' rates are added up.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from kbtp_core.cli.bench.baseline import NativeLoop
from kbtp_core.cli.bench.child import ChildProcess
from kbtp_core.cli.bench.kbtp import BenchInitiator, TargetAddress
from kbtp_core.cli.bench.peer import Peer
from kbtp_core.cli.bench.plan import WARM_UP_S, Case, Plan


@dataclass(frozen=True)
class ClientsRow:
    """Rates of all clients together, LOAD with `size` and `batch`; `count` clients, and one of them alone in the same processes."""

    count: int
    size: int
    batch: int
    blocks_per_s: float
    alone_blocks_per_s: float
    native_loop_blocks_per_s: float
    native_loop_alone_blocks_per_s: float


def run_clients(plan: Plan, peer: Peer, case: Case, count: int, rounds: int) -> ClientsRow:
    """Measure; `case` is a LOAD."""
    slice_s = plan.seconds / rounds
    rates: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        clients = [stack.enter_context(_Client(plan, case)) for _ in range(count)]
        stack.callback(peer.close_targets)
        address = peer.open_target(case)
        for client in clients:
            client.ask("open", peer.open_baseline("load"), address)
        sides = [(side, active) for side in ("run_loop", "run_kbtp") for active in (1, count)]
        for side, active in sides:
            _together(clients[:active], side, WARM_UP_S)
        for turn in range(rounds):
            for side, active in sides[:: 1 if turn % 2 == 0 else -1]:
                rates.setdefault((side, active), []).append(_together(clients[:active], side, slice_s))
        for client in clients:
            client.ask("close")
    middle = {key: float(np.median(values)) for key, values in rates.items()}
    return ClientsRow(
        count=count,
        size=case.block_bytes,
        batch=case.batch,
        blocks_per_s=middle["run_kbtp", count],
        alone_blocks_per_s=middle["run_kbtp", 1],
        native_loop_blocks_per_s=middle["run_loop", count],
        native_loop_alone_blocks_per_s=middle["run_loop", 1],
    )


def _together(clients: list[_Client], side: str, seconds: float) -> float:
    """Blocks a second of all of them."""
    for client in clients:
        client.begin(side, seconds)
    return sum(float(client.answer(side)) for client in clients)


class _Client(ChildProcess):
    def __init__(self, plan: Plan, case: Case) -> None:
        super().__init__("client", _Child, plan.pool_bytes, plan.congestion_control, case)


class _Child:
    """The questions that a client answers, one method each."""

    def __init__(self, pool_bytes: int, congestion_control: str, case: Case) -> None:
        self._case, self._congestion_control = case, congestion_control
        self._loop_sink, self._kbtp_sink = np.ones(pool_bytes, np.uint8), np.ones(pool_bytes, np.uint8)
        self._loop: NativeLoop | None = None
        self._initiator: BenchInitiator | None = None

    def open(self, loop_port: int, address: TargetAddress) -> None:
        self._loop = NativeLoop(loop_port, self._case, self._loop_sink, self._congestion_control)
        self._initiator = BenchInitiator(address, self._case, self._kbtp_sink, self._congestion_control)

    def run_loop(self, seconds: float) -> float:
        assert self._loop is not None
        times = self._loop.run(seconds)
        return times.size * self._case.batch / (float(times.sum()) / 1e9)

    def run_kbtp(self, seconds: float) -> float:
        assert self._initiator is not None
        times = self._initiator.run(int(seconds * 1e9))
        return len(times) * self._case.batch / (sum(times) / 1e9)

    def close(self) -> None:
        assert self._loop is not None
        assert self._initiator is not None
        self._loop.close()
        self._initiator.close()

    def end(self) -> None:
        self._loop = self._initiator = None
