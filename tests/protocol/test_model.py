"""Pool, ring and sessions against their promises: every state of small worlds, and long random lives of bigger ones."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from numpy.typing import NDArray

from kbtp_core.protocol.effects import Effect
from kbtp_core.protocol.partition import PartitionState
from kbtp_core.protocol.pool import BlockPool, BlockState
from kbtp_core.protocol.ring import FreeRing, Ticket
from kbtp_core.protocol.target import Target
from kbtp_core.protocol.target_session import TargetSession
from tests.protocol.model import Model, Step
from tests.protocol.snapshot import Snapshot

PLAIN, DIRECT = (False, False), (True, False)


def explore(model: Model, *, limit: int = 50_000) -> tuple[int, int]:
    """Visit every state that `model` can reach, breadth first; returns how many states there are and how many steps between them.

    A broken promise raises AssertionError with the shortest way there; so does a world of more than `limit` states.
    """
    seen = {model.key()}
    waiting: deque[tuple[Snapshot, list[Step], tuple[Step, ...]]] = deque([(Snapshot(model), model.steps(), ())])
    step_count = 0
    while waiting:
        here, steps, way = waiting.popleft()
        for step in steps:
            here.restore()
            step_count += 1
            try:
                model.take(step)
                key = model.key()
                if key in seen:
                    continue
                model.check()
            except (AssertionError, ValueError) as broken:
                raise AssertionError(f"{broken}; the way there: {(*way, step)}") from broken
            seen.add(key)
            assert len(seen) <= limit, f"more than {limit} states"
            waiting.append((Snapshot(model), model.steps(), (*way, step)))
    return len(seen), step_count


WORLDS: dict[str, dict[str, Any]] = {
    "two plain initiators, two requests each": {"blocks": 2, "quotas": (1, 1), "direct": PLAIN, "in_flight": 2},
    "two plain initiators beside an executor": {"blocks": 2, "quotas": (1, 1), "direct": PLAIN, "in_flight": 1, "native": True},
    "two plain initiators, one with two blocks": {"blocks": 3, "quotas": (2, 1), "direct": PLAIN, "in_flight": 1, "handles": 2},
    "a direct and a plain initiator": {"blocks": 2, "quotas": (1, 1), "direct": DIRECT, "in_flight": 1},
    "a direct initiator with two blocks and one that only loads": {"blocks": 2, "quotas": (2, 0), "direct": DIRECT, "in_flight": 1},
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_state_of_a_small_world_breaks_a_promise(name: str, record_property: Any, capsys: pytest.CaptureFixture[str]) -> None:
    states, steps = explore(Model(**WORLDS[name]))
    record_property("states", states)
    with capsys.disabled():
        print(f"\n{name}: {states} states, {steps} steps, all visited")
    assert states > 400


# What the search would say if a rule were broken ---------------------------------------------------------------------


def overwrite(ring: FreeRing, block_offset: int) -> bool:
    """give_back without rule 1 of the ring: the slot is written although nobody has consumed it."""
    ticket = ring._advance(1)
    ring._write_slot(ticket.slot, ticket.sequence, block_offset)
    return True


def read_any(ring: FreeRing, ticket: Ticket) -> int | None:
    """read without rule 2 of the ring: whatever the slot holds."""
    offset = ring._offset(ticket.slot)
    return None if offset == (1 << 64) - 1 else offset


def take_over_quota(pool: BlockPool, owner: int) -> int | None:
    offset = pool.ring.allocate()
    if offset is not None:
        pool._allowances[owner].usage += 1
        pool._move(offset, BlockState.FREE, BlockState.TAKEN)
    return offset


def never_read(target: Target, indexes: NDArray[np.intp]) -> NDArray[np.bool_]:
    """A target that waits for no reader."""
    target.reading[indexes] = 0
    return np.ones(len(indexes), np.bool_)


def reclaim_at_once(session: TargetSession, now: float) -> None:
    """poll_tickets that leaves the STags valid."""
    partition = session.partition
    if partition is not None and session._is_connected:
        session._observe_tickets(partition, now)
        if partition.is_overdue(now):
            partition.state = PartitionState.REVOKED
            for offset in partition.abandon_overdue(now):
                session._pool().unticketed(session.number, offset)


def lose_reads(session: TargetSession, token: int, ok: bool, now: float) -> list[Effect]:
    """read_done that keeps the block of a store that failed."""
    if ok:
        return REAL_READ_DONE(session, token, ok, now)
    operation = session._operations.pop(token)
    session._target.unreserve(operation.index)
    session._outstanding.discard(operation.request.request_id)  # type: ignore[union-attr]
    session._lines.pop(operation.index, None)
    return []


REAL_READ_DONE = TargetSession.read_done
LAST = list(WORLDS)[-1]


@pytest.mark.parametrize(
    ("world", "owner", "method", "broken"),
    [
        (LAST, FreeRing, "give_back", overwrite),
        (LAST, FreeRing, "read", read_any),
        (LAST, TargetSession, "poll_tickets", reclaim_at_once),
        ("two plain initiators, one with two blocks", BlockPool, "take", take_over_quota),
        ("two plain initiators, two requests each", Target, "_is_unread", never_read),
        ("two plain initiators, two requests each", TargetSession, "read_done", lose_reads),
    ],
    ids=["overwritten slots", "foreign slots", "writable reclaim", "no quota", "unseen readers", "lost blocks"],
)
def test_a_broken_rule_is_found(monkeypatch: pytest.MonkeyPatch, world: str, owner: type, method: str, broken: Any) -> None:
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises(AssertionError, match="the way there"):
        explore(Model(**WORLDS[world]))


# Longer lives of bigger worlds ---------------------------------------------------------------------------------------


class Lives(RuleBasedStateMachine):
    """Three initiators, of which any may allocate by itself."""

    @initialize(direct=st.tuples(st.booleans(), st.booleans(), st.booleans()), spare=st.integers(0, 2), native=st.booleans())
    def begin(self, direct: tuple[bool, ...], spare: int, native: bool) -> None:
        self.model = Model(blocks=6 + spare, quotas=(3, 2, 1), direct=direct, handles=3, in_flight=4, native=native)

    @rule(choice=st.integers(0, 1 << 16), is_quiet=st.booleans())
    def anything(self, choice: int, is_quiet: bool) -> None:
        steps = self.model.steps()
        if is_quiet:  # ends come often enough by themselves
            steps = [step for step in steps if step[0] not in ("crash", "time passes", "fail")]
        self.model.take(steps[choice % len(steps)])
        self.model.check()

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        world = self.model.world
        world.native_readers.clear()
        for link in list(world.links):
            if link.is_connected:
                link.disconnect()
        world.tick()
        self.model.check()
        assert not world.target.sessions
        assert world.target.pool.count(BlockState.FREE) == self.model.blocks  # type: ignore[union-attr]


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=60, stateful_step_count=60)
