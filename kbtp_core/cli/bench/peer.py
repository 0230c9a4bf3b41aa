"""The other process of the bench: the target and the servers of the baselines, steered over a pipe.

The parent asks, the child answers, one question at a time; a child that does not answer in time ends the run. Services run
on threads of their own, so that the child answers while they work.
"""

from __future__ import annotations

import multiprocessing
import time
import traceback
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any

from kbtp_core.cli.bench.baseline import BaselineServer, Service
from kbtp_core.cli.bench.kbtp import BenchTarget, TargetAddress, octets
from kbtp_core.cli.bench.plan import Case
from kbtp_core.errors import KbtpError

ANSWER_TIMEOUT_S = 60


class Peer:
    """The child process, as the parent sees it. A context manager: leaving it ends the child."""

    def __init__(self, pool_bytes: int, congestion_control: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(theirs, pool_bytes, congestion_control), name="kbtp-bench-target", daemon=True)
        self._process.start()
        theirs.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pipe.close()  # the child's main loop ends
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def open_baseline(self, service: Service) -> int:
        """Start a baseline; returns its port."""
        return int(self._ask("open_baseline", service))

    def open_target(self, case: Case) -> TargetAddress:
        """Start a target with a pool of the case's blocks, bound and sealed for loads, free for stores."""
        address: TargetAddress = self._ask("open_target", case)
        return address

    def close_target(self) -> None:
        self._ask("close_target")

    def cpu_s(self) -> float:
        """CPU time of the child so far, all threads, user and system."""
        return float(self._ask("cpu_s"))

    def _ask(self, name: str, *arguments: Any) -> Any:
        try:
            self._pipe.send((name, arguments))
            if not self._pipe.poll(ANSWER_TIMEOUT_S):
                raise KbtpError(f"the bench's target process did not answer {name!r} within {ANSWER_TIMEOUT_S} s")
            is_good, answer = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            raise KbtpError("the bench's target process ended; its last words are above") from error
        if not is_good:
            raise KbtpError(f"the bench's target process failed at {name!r}:\n{answer}")
        return answer


class _Child:
    """The questions that the child answers, one method each."""

    def __init__(self, pool_bytes: int, congestion_control: str) -> None:
        self._pool = octets(pool_bytes, seed=1)
        self._congestion_control = congestion_control
        self._baselines = BaselineServer(self._pool, congestion_control)
        self._target: BenchTarget | None = None

    def open_baseline(self, service: Service) -> int:
        return self._baselines.open(service)

    def open_target(self, case: Case) -> TargetAddress:
        self.close_target()
        self._target = BenchTarget(self._pool.size, case, self._congestion_control)
        return self._target.address

    def close_target(self) -> None:
        if self._target is not None:
            self._target.close()
            self._target = None

    def cpu_s(self) -> float:
        return time.process_time()


def _main(pipe: Connection, pool_bytes: int, congestion_control: str) -> None:
    child = _Child(pool_bytes, congestion_control)
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, getattr(child, name)(*arguments))
        except Exception:  # noqa: BLE001 - the parent shows it
            answer = (False, traceback.format_exc())
        pipe.send(answer)
    child.close_target()
