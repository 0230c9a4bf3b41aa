"""Worlds: targets and initiators on a simulated fabric, and what may befall them, from one seed.

`run_world(seed)` lets a world live until its initiators have sent `requests` requests, under faults; then everything ends, and the targets
must be whole. Wrong octets, a lost block, an answer that makes no sense or a wait past its deadline raise an AssertionError at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kbtp_core.fabric.api import terminate_code
from kbtp_core.fabric.sim import Conditions, Simulation
from kbtp_core.fabric.sim_memory import Fault
from kbtp_core.protocol import DirectPolicy
from tests.sim.initiator import GRACE_S, LONGEST_DEADLINE_S, SimInitiator
from tests.sim.model import Life
from tests.sim.target import SimTarget

REQUESTS = 1000
LONGEST_S = 60.0


MAY_HAPPEN = {fault.tagged for fault in Fault} | {fault.request for fault in Fault} | {terminate_code(0, 1, 9)}
"""Terminate codes that a fenced region can cause. Any other is somebody's mistake: a receive that was not posted, or was too short."""


@dataclass(frozen=True)
class Shape:
    """What a seed has drawn for its world."""

    targets: int
    initiators: int
    blocks: int
    handles: int
    block_bytes: int
    outstanding: int
    poll_limit: int
    pace_s: float  # between two batches of an initiator, at most
    hurry: float  # share of batches with a deadline that can hardly be kept
    misfortune_s: float  # between two faults, on average
    is_restless: bool  # faults are rare, but sessions come and go all the time
    tidiness: float  # share of batches whose region is closed as soon as they are done
    has_executor: bool
    has_pages: bool
    is_one_domain: bool
    direct: DirectPolicy | None
    conditions: Conditions


@dataclass(frozen=True)
class Outcome:
    """What a run has come to."""

    requests: int
    answers: int
    loads: int
    faults: int
    messages: int
    executed: int
    virtual_s: float


class World:
    def __init__(self, seed: int, *, trace: list[str] | None = None, requests: int = REQUESTS, shape: Shape | None = None) -> None:
        self.sim = Simulation(seed, trace=trace)
        self.shape = _draw_shape(self.sim) if shape is None else shape
        self.sim.conditions = self.shape.conditions
        self.request_limit = requests
        self.request_count = 0
        self.answer_count = 0
        self.fault_count = 0
        self.is_ending = False
        self.lives: dict[int, Life] = {}
        self.addresses = [("10.0.0.1", 7400 + i) for i in range(self.shape.targets)]
        self._lent = [self.sim.random.random() < 0.35 for _ in self.addresses]
        self.targets: dict[int, SimTarget | None] = {}
        for i in range(self.shape.targets):
            self._start_target(i)
        self.initiators = [SimInitiator(self, f"initiator{i}") for i in range(self.shape.initiators)]
        self.sim.after(self.shape.misfortune_s, self._misfortune)

    def draw(self, count: int) -> bytes:
        return self.sim.random.getrandbits(8 * count).to_bytes(count, "big")

    def draw_incarnation(self) -> int:
        return self.sim.random.getrandbits(63) + 1

    def run(self) -> Outcome:
        sim = self.sim
        assert sim.run(LONGEST_S, lambda: self.request_count >= self.request_limit), f"only {self.request_count} requests in {sim.now} s"
        self.is_ending = True
        self._end_initiators()
        assert sim.terminated.keys() <= MAY_HAPPEN, f"a connection ended by {[hex(code) for code in sim.terminated]}"
        for target in self.targets.values():
            if target is not None:
                target.check_whole()
        loads = sum(life.load_count for life in self.lives.values())
        return Outcome(self.request_count, self.answer_count, loads, self.fault_count, sim.message_count, sim.executed_count, sim.now)

    def _end_initiators(self) -> None:
        sim = self.sim
        sim.run(sim.now + LONGEST_DEADLINE_S + GRACE_S + 1e-3)
        for initiator in self.initiators:
            initiator.leave()
        over = sim.run(sim.now + 5.0, lambda: all(i.core is None for i in self.initiators) and not any(self._connections()))
        assert over, f"sessions did not end: {self._connections()} connections are left"
        sim.run(sim.now + 0.02)

    def _connections(self) -> list[int]:
        return [target.core.connection_count + len(target.target.sessions) for target in self.targets.values() if target is not None]

    # Faults ----------------------------------------------------------------------------------------------------------

    def _misfortune(self) -> None:
        if self.is_ending:
            return
        random = self.sim.random
        self.fault_count += 1
        dice = 1.0 if self.shape.is_restless and random.random() < 0.9 else random.random()
        if dice < 0.35:
            self._lose_connection()
        elif dice < 0.5:
            self._hold_connection()
        elif dice < 0.6:
            self._crash_initiator()
        elif dice < 0.7:
            self._crash_target()
        else:
            random.choice(self.initiators).leave()
        self.sim.after(random.expovariate(1 / self.shape.misfortune_s), self._misfortune)

    def _lose_connection(self) -> None:
        core = self.sim.random.choice(self.initiators).core
        if core is not None:
            core.qp.lose()  # type: ignore[attr-defined]

    def _hold_connection(self) -> None:
        core = self.sim.random.choice(self.initiators).core
        if core is not None:
            longest = self.sim.random.choice((0.02, 0.5))
            core.qp.hold(self.sim.now + self.sim.random.random() * longest)  # type: ignore[attr-defined]

    def _crash_initiator(self) -> None:
        at = self.sim.random.randrange(len(self.initiators))
        self.initiators[at].crash()
        self.initiators[at] = SimInitiator(self, f"initiator{at}")

    def _crash_target(self) -> None:
        at = self.sim.random.randrange(len(self.addresses))
        target = self.targets[at]
        if target is not None:
            target.crash()
            self.targets[at] = None
            self.sim.after(self.sim.random.random() * 5e-3, self._start_target, at)

    def _start_target(self, at: int) -> None:
        target = SimTarget(self, self.addresses[at], is_lent=self._lent[at])
        self.targets[at] = target
        self.lives[target.life.incarnation] = target.life


def run_world(seed: int, *, requests: int = REQUESTS, trace: list[str] | None = None) -> Outcome:
    """One seed from start to end."""
    return World(seed, trace=trace, requests=requests).run()


def _draw_shape(sim: Simulation) -> Shape:
    random = sim.random
    blocks = random.choice((3, 8, 16, 31, 64))
    initiators = random.randint(1, 4)
    is_rough = random.random() < 0.8
    is_restless = random.random() < 0.15
    has_executor = random.random() < 0.6
    return Shape(
        targets=random.randint(1, 3),
        initiators=initiators,
        blocks=blocks,
        handles=random.choice((32, 64, 128)),
        block_bytes=random.choice((64, 128, 512)),
        outstanding=random.choice((6, 32, 64)),
        poll_limit=random.choice((1, 7, *(1024,) * 10)),
        pace_s=random.choice((2e-4, 5e-4, 1e-3)),
        hurry=random.choice((0.0, 0.01, 0.05)),
        misfortune_s=4e-3 if is_restless else random.choice((10e-3, 40e-3, 200e-3)),
        is_restless=is_restless,
        tidiness=random.choice((0.0, 0.4, 0.8)),
        has_executor=has_executor,
        has_pages=random.random() < 0.25,
        is_one_domain=random.random() < 0.5,
        direct=DirectPolicy(
            load_domains=frozenset({""}),
            alloc_domains=frozenset() if has_executor and random.random() < 0.8 else frozenset({""}),  # nothing runs natively there
            ticket_timeout_s=random.choice((10e-3, 0.1, 1.0)),
            masked=random.random() < 0.7,
        )
        if random.random() < 0.5
        else None,
        conditions=Conditions(
            wake_s=(0.0, random.choice((20e-6, 400e-6, 400e-6))),
            stall=random.choice((0.01, 0.05, 0.2)),
            late_read=random.choice((0.1, 0.5, 0.9)),
            garbage=random.choice((0.02, 0.1, 0.3)),
            reorder=random.choice((0.1, 0.5, 0.9)),
            small_burst=random.choice((0.02, 0.1, 0.3)),
        )
        if is_rough
        else Conditions(stall=0.0, garbage=0.02),
    )
