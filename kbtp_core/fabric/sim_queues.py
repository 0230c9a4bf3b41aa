"""Completion queues and listeners of a simulated device.

A driver gives its completion queue an `on_ready` and is called, some virtual time after a completion, in an event of its own; it polls
there. A caller outside of events may `wait`, which lets the simulation run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from kbtp_core.fabric.api import COMPLETION, Array, ConnectionRequest, FabricError, Op, ProtectionDomain, QueueLimits, QueuePairClosed
from kbtp_core.fabric.api import CompletionQueue as CompletionQueueLike
from kbtp_core.fabric.sim_clock import Simulation

if TYPE_CHECKING:
    from kbtp_core.fabric.sim import SimFabric
    from kbtp_core.fabric.sim_pair import SimQp

Item = tuple[int, int, int, int, int, int, int, int]
"""A completion, in the order of COMPLETION's fields."""


class SimCq:
    """See `fabric.api.CompletionQueue`."""

    def __init__(self, sim: Simulation) -> None:
        self.on_ready: Callable[[], None] | None = None
        """Called in an event when completions or connection requests may be there, or after `wake`."""
        self._sim = sim
        self._items: deque[Item] = deque()
        self._ending: dict[int, SimQp] = {}
        self._is_woken = False
        self._is_told = False

    def push(self, item: Item) -> None:
        self._items.append(item)
        self._tell()

    def push_end(self, pair: SimQp, item: Item) -> None:
        """The last word of a pair: memory that was in use may change up to the moment it is polled."""
        self._ending[pair.number] = pair
        self.push(item)

    def poll(self, limit: int = 1024) -> Array:
        items = self._items
        if len(items) <= limit:
            taken = list(items)
            items.clear()
        else:
            taken = [items.popleft() for _ in range(limit)]
            self._tell()
        if self._ending:
            for item in taken:
                if item[2] == Op.DISCONNECTED:
                    self._ending.pop(item[1]).last_gasp()
        return np.array(taken, COMPLETION)

    def wait(self, timeout_s: float) -> bool:
        """Let the simulation run until a completion is there or `timeout_s` of virtual time are over. Not inside an event."""
        self._sim.run(self._sim.now + timeout_s, lambda: bool(self._items) or self._is_woken)
        self._is_woken = False
        return bool(self._items)

    def wake(self) -> None:
        self._is_woken = True
        self._tell()

    def fileno(self) -> int:
        """Raises FabricError: nothing outside of the simulation may wait for it."""
        raise FabricError("a simulated completion queue has no descriptor: virtual time stands still while a thread waits")

    def close(self) -> None:
        self.on_ready = None
        self._items.clear()

    def _tell(self) -> None:
        if not self._is_told and self.on_ready is not None:
            self._is_told = True
            sim = self._sim
            delay = sim.between(sim.conditions.wake_s)
            if sim.chance(sim.conditions.stall):
                delay += sim.between(sim.conditions.stall_s) / 8
            sim.after(delay, self._call)

    def _call(self) -> None:
        self._is_told = False
        if self.on_ready is not None:
            self.on_ready()


class SimRequest:
    """See `fabric.api.ConnectionRequest`."""

    def __init__(self, device: SimFabric, active: SimQp, private_data: bytes) -> None:
        self.private_data = private_data
        self._device = device
        self._active = active

    @property
    def peer(self) -> str:
        return f"{self._active.device.name}:{self._active.number}"

    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueueLike, limits: QueueLimits = QueueLimits()) -> SimQp:
        if self._active.is_dead:
            raise QueuePairClosed(f"{self.peer} has given up")
        pair = self._device.create_qp(pd, cq, limits)
        pair.adopt(self._active, self.peer, self.private_data)
        return pair

    def reject(self, private_data: bytes = b"") -> None:
        self._active.rejected(private_data)


class SimListener:
    """See `fabric.api.Listener`."""

    def __init__(self, device: SimFabric, address: tuple[str, int], cq: SimCq) -> None:
        self.device = device
        self.address = address
        self._cq = cq
        self._requests: list[ConnectionRequest] = []

    def add(self, active: SimQp, private_data: bytes) -> None:
        self._requests.append(SimRequest(self.device, active, private_data))
        self._cq.wake()

    def poll(self) -> list[ConnectionRequest]:
        requests, self._requests = self._requests, []
        return requests

    def close(self) -> None:
        """Refuse what waits and what comes. Idempotent."""
        listeners: dict[tuple[str, int], Any] = self.device.sim.listeners
        if listeners.get(self.address) is self:
            del listeners[self.address]
        for request in self.poll():
            request.reject()
