"""The other process of the bench: the target and the servers of the baselines.

Services run on threads of their own, so that the child answers while they work.
"""

from __future__ import annotations

import time

from kbtp_core.cli.bench.baseline import BaselineServer, Service
from kbtp_core.cli.bench.child import ChildProcess
from kbtp_core.cli.bench.ends import EchoEnd
from kbtp_core.cli.bench.kbtp import BenchTarget, TargetAddress, octets
from kbtp_core.cli.bench.plan import Case


class Peer(ChildProcess):
    """The child process, as the parent sees it. A context manager: leaving it ends the child."""

    def __init__(self, pool_bytes: int, congestion_control: str) -> None:
        super().__init__("target", _Child, pool_bytes, congestion_control)

    def open_baseline(self, service: Service) -> int:
        """Start a baseline; returns its port."""
        return int(self.ask("open_baseline", service))

    def open_echo(self, size: int) -> int:
        """Start an echo over plain TCP; returns its port."""
        return int(self.ask("open_echo", size))

    def open_end(self) -> int:
        """Start an echo over a queue pair; returns its port."""
        return int(self.ask("open_end"))

    def open_target(
        self, case: Case, *, is_native: bool = True, has_crc: bool = True, pool_bytes: int | None = None, stripes: int = 1
    ) -> TargetAddress:
        """Start one more target with a pool of the case's blocks, bound and sealed for loads, free for stores.

        `is_native`: with the executor; else the target in Python answers everything. `has_crc`: unless both sides do without.
        """
        address: TargetAddress = self.ask("open_target", case, is_native, has_crc, pool_bytes, stripes)
        return address

    def close_targets(self) -> None:
        self.ask("close_targets")

    def cpu_s(self) -> float:
        """CPU time of the child so far, all threads, user and system."""
        return float(self.ask("cpu_s"))


class _Child:
    """The questions that the child answers, one method each."""

    def __init__(self, pool_bytes: int, congestion_control: str) -> None:
        self._pool = octets(pool_bytes, seed=1)
        self._congestion_control = congestion_control
        self._baselines = BaselineServer(self._pool, congestion_control)
        self._targets: list[BenchTarget] = []
        self._ends: list[EchoEnd] = []

    def open_baseline(self, service: Service) -> int:
        return self._baselines.open(service)

    def open_echo(self, size: int) -> int:
        return self._baselines.open("echo", size)

    def open_end(self) -> int:
        self._ends.append(EchoEnd(self._congestion_control))
        return self._ends[-1].port

    def open_target(self, case: Case, is_native: bool, has_crc: bool, pool_bytes: int | None, stripes: int) -> TargetAddress:
        size = self._pool.size if pool_bytes is None else pool_bytes
        self._targets.append(BenchTarget(size, case, self._congestion_control, is_native=is_native, has_crc=has_crc, stripes=stripes))
        return self._targets[-1].address

    def close_targets(self) -> None:
        while self._targets:
            self._targets.pop().close()

    def cpu_s(self) -> float:
        return time.process_time()

    def end(self) -> None:
        self.close_targets()
        for end in self._ends:
            end.join()
