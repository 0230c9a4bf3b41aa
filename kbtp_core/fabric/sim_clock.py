"""Virtual time and chance: what everything in a simulated world shares.

1. Nothing happens but in an event, and events happen in the order of (time, order of scheduling).
2. All chance comes from one `random.Random`, drawn from inside of events in a fixed order: a seed gives the same run, octet for octet.
   Posting draws nothing; pairs that were posted on are started after the event, by number, so that the order in which a driver walks
   over a set of its connections changes nothing.
3. Time moves from event to event. No wall clock is read anywhere.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbtp_core.fabric.sim_pair import SimQp
    from kbtp_core.fabric.sim_queues import SimListener


@dataclass(frozen=True)
class Conditions:
    """How rough the simulated fabric is. Probabilities are per burst of messages, times in seconds of virtual time."""

    delay_s: tuple[float, float] = (2e-6, 60e-6)  # from the start of a burst to its arrival
    wake_s: tuple[float, float] = (0.0, 20e-6)  # from a completion to the driver that polls it
    end_s: tuple[float, float] = (0.0, 2e-3)  # from the end of a queue pair to its DISCONNECTED
    stall: float = 0.03  # a burst or a driver is held up ...
    stall_s: tuple[float, float] = (1e-4, 8e-3)  # ... for so long
    late_read: float = 0.5  # a source is read as late as may be, and its request completes only then
    reorder: float = 0.5  # Writes are placed before what was sent before them is delivered
    garbage: float = 0.1  # a sink holds 0xDD from the start of the operation on
    small_burst: float = 0.3  # only a few messages leave at once


QUIET = Conditions((1e-6, 1e-6), (0.0, 0.0), (0.0, 0.0), 0.0, (0.0, 0.0), 0.0, 0.0, 0.0, 0.0)
"""In order, at once, and nothing goes wrong."""


class Simulation:
    """One world's clock, chance, addresses and trace. `trace`, a list, receives a line for everything that happens."""

    def __init__(self, seed: int, conditions: Conditions = Conditions(), trace: list[str] | None = None) -> None:
        self.random = random.Random(seed)
        self.conditions = conditions
        self.trace = trace
        self.now = 0.0
        self.listeners: dict[tuple[str, int], SimListener] = {}
        self.rung: dict[int, SimQp] = {}  # pairs that have something to start, by number
        self.terminated: dict[int, int] = {}
        """How often a peer was told of each error, by Terminate code."""
        self.event_count = 0
        self.message_count = 0
        """Messages that have left: Sends, Writes, Read Requests and their answers, atomics."""
        self.executed_count = 0
        """Requests that executors have run, but for LOADs."""
        self._events: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._scheduled = 0
        self._numbers = 0
        self._is_running = False

    def next_number(self) -> int:
        """Numbers for queue pairs, ports and regions; each once in a world."""
        self._numbers += 1
        return self._numbers

    def chance(self, probability: float) -> bool:
        return probability > 0.0 and self.random.random() < probability

    def between(self, bounds: tuple[float, float]) -> float:
        low, high = bounds
        return low + (high - low) * self.random.random()

    def log(self, what: str) -> None:
        if self.trace is not None:
            self.trace.append(f"{self.now * 1e6:14.3f} {what}")

    def at(self, when: float, call: Callable[..., object], *arguments: Any) -> None:
        """Call `call` at virtual time `when`, or now if that has passed."""
        self._scheduled += 1
        heapq.heappush(self._events, (max(when, self.now), self._scheduled, call, arguments))

    def after(self, delay_s: float, call: Callable[..., object], *arguments: Any) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def run(self, until: float, is_done: Callable[[], bool] | None = None) -> bool:
        """Let events happen up to virtual time `until`, or until `is_done`; returns whether it was done (False if nothing was asked)."""
        if self._is_running:
            raise RuntimeError("a simulated driver can't wait inside an event: let `on_ready` call it again")
        self._is_running = True
        try:
            return self._run(until, is_done)
        finally:
            self._is_running = False

    def _run(self, until: float, is_done: Callable[[], bool] | None) -> bool:
        events = self._events
        while True:
            if self.rung:
                self._start_rung()
            if is_done is not None and is_done():
                return True
            if not events or events[0][0] > until:
                self.now = max(self.now, until)
                return False
            self.now, _, call, arguments = heapq.heappop(events)
            self.event_count += 1
            call(*arguments)

    def _start_rung(self) -> None:
        rung, self.rung = self.rung, {}
        for number in sorted(rung):
            rung[number].transmit()
