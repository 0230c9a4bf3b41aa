"""A simulated fabric: any number of devices in one process, in virtual time, with everything that can go wrong going wrong by a seed.

It keeps the four rules of `fabric.api` to the letter and no more: whatever they, or RFC 5040 section 5.5, leave open is left to chance.
So what works here for thousands of seeds relies on nothing that a NIC doesn't promise. `Simulation` is the world; a `SimFabric` is one
device of it, or one process: `crash` ends it without a word.

    world = Simulation(seed=7)
    left, right = SimFabric(world, "left"), SimFabric(world, "right")
    ... queue pairs, as on any fabric; `SimCq.on_ready` is called when completions are there ...
    world.run(until=1.0)
"""

from __future__ import annotations

from typing import Final

from kbtp_core.fabric.api import Array, FabricError, PoolState, ProtectionDomain, QueueLimits
from kbtp_core.fabric.api import CompletionQueue as CompletionQueueLike
from kbtp_core.fabric.executor import NativeExecutor, create_executor
from kbtp_core.fabric.sim_clock import QUIET, Conditions, Simulation
from kbtp_core.fabric.sim_memory import GARBAGE, SimDomain, SimRegion
from kbtp_core.fabric.sim_pair import SimQp
from kbtp_core.fabric.sim_queues import SimCq, SimListener, SimRequest
from kbtp_core.fabric.sim_receive import LOST

__all__ = [
    "GARBAGE",
    "LOST",
    "QUIET",
    "Conditions",
    "SimCq",
    "SimDomain",
    "SimFabric",
    "SimListener",
    "SimQp",
    "SimRegion",
    "SimRequest",
    "Simulation",
]

_STAG_STEP: Final = 0x9E37_79B1  # odd, so that STags of a world run through all numbers and look like no sequence


class SimFabric:
    """One device, or one process of the world `sim`; see `fabric.api.Fabric`. Without `has_executor` it has none to give."""

    def __init__(self, sim: Simulation, name: str = "sim", *, has_executor: bool = True) -> None:
        self.sim = sim
        self.name = name
        self.has_executor = has_executor
        self.regions: dict[int, SimRegion] = {}
        self.pairs: dict[int, SimQp] = {}
        self.is_crashed = False

    def next_stag(self) -> int:
        return self.sim.next_number() * _STAG_STEP & 0xFFFF_FFFF

    def alloc_pd(self) -> SimDomain:
        return SimDomain(self)

    def create_cq(self) -> SimCq:
        return SimCq(self.sim)

    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueueLike, limits: QueueLimits = QueueLimits()) -> SimQp:
        if not isinstance(pd, SimDomain) or pd.device is not self or not isinstance(cq, SimCq):
            raise FabricError(f"device {self.name} makes queue pairs of its own domains and completion queues only")
        pair = SimQp(self, pd, cq, limits)
        self.pairs[pair.number] = pair
        return pair

    def listen(self, host: str, port: int, cq: CompletionQueueLike, *, startup_timeout_s: float = 5.0, backlog: int = 128) -> SimListener:
        """As `fabric.api.Fabric.listen`; a connection's own limits bound its start-up, and the backlog is endless."""
        del startup_timeout_s, backlog
        address = (host, port or 40_000 + self.sim.next_number())
        if address in self.sim.listeners:
            raise FabricError(f"{address[0]}:{address[1]} is in use")
        if not isinstance(cq, SimCq):
            raise FabricError(f"device {self.name} listens with its own completion queues only")
        listener = self.sim.listeners[address] = SimListener(self, address, cq)
        return listener

    def create_executor(self, table: Array, base_handle: int, block_bytes: int, pool: PoolState | None = None) -> NativeExecutor | None:
        return create_executor(table, base_handle, block_bytes, pool) if self.has_executor else None

    def close(self) -> None:
        """End every connection and stop listening."""
        self._stop_listening()
        for pair in list(self.pairs.values()):
            pair.abort()

    def crash(self) -> None:
        """The process is gone: its memory, its queues, its listeners. Peers hear of it as of a lost connection."""
        self.is_crashed = True
        self.sim.log(f"{self.name} crashes")
        self._stop_listening(says_so=False)
        for pair in self.pairs.values():
            pair.crash()
            pair.cq.close()
        for region in list(self.regions.values()):
            region.close()

    def _stop_listening(self, *, says_so: bool = True) -> None:
        for address, listener in list(self.sim.listeners.items()):
            if listener.device is self:
                if says_so:
                    listener.close()
                else:
                    del self.sim.listeners[address]
