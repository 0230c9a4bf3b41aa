"""Many requests at once through a prefill and a decode engine, as a router sends them, from one thread that never waits for an engine.

A request goes to prefill and, with what that answers, to decode; or to one engine alone. Some are aborted at a moment of their own, and
some clients go away between the two. An engine that is said to be lost gets nothing more, and what it had goes to the other one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from tests.engines.vllm.harness import Engine, Finished, Prompt

LOOK_S = 0.05  # how often it is asked whether it is enough


@dataclass(frozen=True)
class Job:
    prompt: Prompt
    max_tokens: int
    route: str = "both"  # or the name of the engine that it goes to
    abort_s: float | None = None  # how long after its start it is aborted
    leaves: bool = False  # its client is gone when prefill has answered


@dataclass
class Flight:
    """A job that is under way: which engine has it, and as which request."""

    job: Job
    number: int
    started_at: float
    engine: Engine | None = None
    request_id: str = ""
    tries: int = 0


@dataclass(frozen=True)
class Outcome:
    job: Job
    tokens: list[int] | None  # None: aborted
    seconds: float


class Traffic:
    """Keeps up to `concurrency` of the jobs under way."""

    def __init__(self, prefill: Engine, decode: Engine, jobs: Iterable[Job], concurrency: int = 16) -> None:
        self.prefill: Engine | None = prefill
        self.decode: Engine | None = decode
        self.outcomes: list[Outcome] = []
        self._jobs = enumerate(jobs)
        self._concurrency = concurrency
        self._flights: dict[str, Flight] = {}
        self._homeless: deque[Flight] = deque()
        self._is_open = True

    @property
    def under_way(self) -> int:
        return len(self._flights) + len(self._homeless)

    def run(self, is_enough: Callable[[], bool], limit_s: float) -> bool:
        """Go on until it is enough, or nothing is left, for `limit_s` at most; whether it is enough."""
        deadline = time.monotonic() + limit_s
        while not is_enough():
            next_look = time.monotonic() + LOOK_S
            if next_look > deadline or not (self.under_way or self._is_open):
                return False
            while time.monotonic() < next_look:
                self.step()
                time.sleep(0.002)
        return True

    def finish(self, limit_s: float) -> None:
        """Start nothing more, and end what is under way."""
        self._is_open = False
        assert self.run(lambda: not self.under_way, limit_s), f"{self.under_way} requests have no answer after {limit_s:g} s"

    def step(self) -> None:
        for engine in (self.prefill, self.decode):
            for request_id, finished in engine.take_finished().items() if engine is not None else ():
                flight = self._flights.pop(request_id, None)
                if flight is not None:  # else its abort and its end have crossed
                    self._landed(flight, finished)
        now = time.monotonic()
        for flight in [*self._flights.values()]:
            if flight.job.abort_s is not None and now - flight.started_at > flight.job.abort_s:
                self._abort(flight)
        for _ in range(len(self._homeless)):
            self._start(self._homeless.popleft())
        while self._is_open and self.under_way < self._concurrency:
            number, job = next(self._jobs, (-1, None))
            if job is None:
                self._is_open = False
                return
            self._start(Flight(job, number, time.monotonic()))

    def lost(self, engine: Engine) -> None:
        """Before the engine is killed: what has ended there has ended, the rest is started again elsewhere."""
        if self.prefill is engine:
            self.prefill = None
        if self.decode is engine:
            self.decode = None
        for flight in [flight for flight in self._flights.values() if flight.engine is engine]:
            del self._flights[flight.request_id]
            self._start(flight)

    def _start(self, flight: Flight) -> None:
        wanted = self.prefill if flight.job.route in ("both", "prefill") else self.decode
        engine = wanted or self.prefill or self.decode
        if engine is None:
            self._homeless.append(flight)
            return
        is_first_half = flight.job.route == "both" and engine is self.prefill and self.decode is not None
        self._send(flight, engine, 1 if is_first_half else flight.job.max_tokens, {"do_remote_decode": True} if is_first_half else None)

    def _send(self, flight: Flight, engine: Engine, max_tokens: int, params: dict[str, Any] | None) -> None:
        flight.tries += 1
        flight.engine = engine
        flight.request_id = f"r{flight.number}.{flight.tries}"
        self._flights[flight.request_id] = flight
        engine.post("add", flight.request_id, flight.job.prompt, max_tokens, params)

    def _landed(self, flight: Flight, finished: Finished) -> None:
        job = flight.job
        if flight.engine is self.prefill and finished.params is not None and job.leaves:
            self._end(flight, None)
        elif flight.engine is self.prefill and job.route == "both" and len(finished.tokens) < job.max_tokens:
            if self.decode is None:
                self._start(flight)
            else:
                self._send(flight, self.decode, job.max_tokens, finished.params)
        else:
            self._end(flight, finished.tokens)

    def _abort(self, flight: Flight) -> None:
        assert flight.engine is not None
        flight.engine.post("abort", flight.request_id)
        del self._flights[flight.request_id]
        self._end(flight, None)

    def _end(self, flight: Flight, tokens: list[int] | None) -> None:
        self.outcomes.append(Outcome(flight.job, tokens, time.monotonic() - flight.started_at))
