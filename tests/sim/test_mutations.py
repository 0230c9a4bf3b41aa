"""What the simulator is worth: each rule is broken on purpose, and some seed must notice.

A rule that can be broken unnoticed is not tested by the seeds, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.protocol import BlockPool, BlockTable, EntryFlag, FreeRing, Status, Target, TargetSession, target_session
from kbtp_core.protocol.direct import DirectLoad
from kbtp_core.protocol.effects import Effect, Read, Send
from kbtp_core.session import InitiatorCore
from kbtp_core.session.slots import SendRows
from tests.sim.ring import Partition, RingInitiator, RingWorld
from tests.sim.world import run_world

Patch = Callable[..., None]
REQUESTS = 600


def seeds_until_caught(run: Callable[[int], object], limit: int) -> int:
    """How many seeds it takes until one fails; fails itself if none of `limit` does."""
    for seed in range(limit):
        try:
            run(seed)
        except (AssertionError, ValueError):
            return seed + 1
    pytest.fail(f"a broken rule went unnoticed in {limit} seeds")


def caught_by_worlds(limit: int = 60) -> int:
    return seeds_until_caught(lambda seed: run_world(seed, requests=REQUESTS), limit)


def caught_by_rings(limit: int = 60) -> int:
    return seeds_until_caught(lambda seed: RingWorld(seed, steps=100).run(), limit)


# The ring ---------------------------------------------------------------------------------------------------------------


def test_a_slot_that_is_written_before_it_was_consumed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def give_back(self: FreeRing, block_offset: int) -> bool:
        ticket = self._advance(1)
        self._write_slot(ticket.slot, ticket.sequence, block_offset)
        return True

    monkeypatch.setattr(FreeRing, "give_back", give_back)
    caught_by_rings()


def test_an_allocation_that_takes_what_its_slot_holds_for_another_ticket_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingInitiator, "checks_sequence", False)
    caught_by_rings()


def test_a_deferred_free_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def consume(self: FreeRing, ticket: Any) -> None:
        self._set_offset(ticket.slot, (1 << 64) - 1)
        self.deferred_count -= len(self._deferred.pop(ticket.slot, ()))

    monkeypatch.setattr(FreeRing, "consume", consume)
    caught_by_rings()


def test_a_slot_that_is_not_marked_consumed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FreeRing, "consume", lambda self, ticket: None)
    caught_by_rings()


def test_a_counter_whose_carry_is_not_masked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kbtp_core.protocol.ring.fetch_add", lambda old, add, mask: old + add & (1 << 64) - 1)
    caught_by_rings()


def test_a_ticket_that_is_reclaimed_before_the_partition_is_invalid_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Partition, "invalidate", lambda self, region: None)
    caught_by_rings(200)


# Blocks and entries -----------------------------------------------------------------------------------------------------


def test_an_entry_that_is_cleared_only_when_its_block_is_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_one, finish = BlockTable.clear_one, Target._finish_drain

    def finish_drain(self: Target, index: int) -> None:
        finish(self, index)
        if self.table.entry(index).is_valid:
            clear_one(self.table, index)

    monkeypatch.setattr(BlockTable, "clear_one", lambda self, index: self.entry(index).generation)
    monkeypatch.setattr(Target, "_finish_drain", finish_drain)
    caught_by_worlds()


def test_a_generation_that_does_not_advance_when_a_handle_is_cleared_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def clear_one(self: BlockTable, index: int) -> int:
        generation = self.entry(index).generation
        self._publish_one(index, 0, generation)
        return generation

    monkeypatch.setattr(BlockTable, "clear_one", clear_one)
    caught_by_worlds()


def test_a_generation_that_does_not_advance_when_a_handle_is_bound_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def bind_one(self: BlockTable, index: int, offset: int, length: int, sealed: bool) -> int:
        generation = self.entry(index).generation
        self._store_word(index, 1, length)
        self.entries["block_offset"][index] = offset
        self._publish_one(index, EntryFlag.VALID | (EntryFlag.SEALED if sealed else 0), generation)
        return generation

    monkeypatch.setattr(BlockTable, "bind_one", bind_one)
    monkeypatch.setattr(BlockTable, "clear_one", lambda self, index: self._publish_one(index, 0, self.entry(index).generation))
    caught_by_worlds()


def test_a_block_that_returns_while_it_is_read_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "_is_unread", lambda self, indexes: indexes == indexes)
    caught_by_worlds()


def test_an_entry_that_is_written_before_its_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    fetch, read_done = TargetSession._fetch, TargetSession.read_done
    early: set[int] = set()

    def fetch_late(self: TargetSession, operation: Any) -> None:
        if not operation.request.__class__.__name__.startswith("Alloc"):
            fetch(self, operation)
            return
        data, token = operation.request.data, -1 - len(early)
        early.add(token)
        self._emit(Read(operation.block_offset, data.length, data.stag, data.offset, token & (1 << 63) - 1))
        self._finish_alloc_store(operation, True)

    def read_done_late(self: TargetSession, token: int, ok: bool, now: float) -> list[Effect]:
        return [] if token > 1 << 40 else read_done(self, token, ok, now)

    monkeypatch.setattr(TargetSession, "_fetch", fetch_late)
    monkeypatch.setattr(TargetSession, "read_done", read_done_late)
    caught_by_worlds()


def test_a_completion_that_is_sent_before_its_data_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take_effects = TargetSession.take_effects
    monkeypatch.setattr(
        TargetSession, "take_effects", lambda self: sorted(take_effects(self), key=lambda effect: not isinstance(effect, Send))
    )
    caught_by_worlds()


def test_a_generation_that_is_not_compared_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    check: Callable[[Any, Any], Status] = vars(target_session)["_check_bound"]

    def check_bound(request: Any, entry: Any) -> Status:
        status = check(request, entry)
        return Status.OK if status is Status.STALE_GENERATION else status

    monkeypatch.setattr(target_session, "_check_bound", check_bound)
    caught_by_worlds()


def test_a_failed_store_that_keeps_its_block_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetSession, "_give_up", lambda self, operation: self._target.unreserve(operation.index))
    caught_by_worlds()


def test_a_quota_that_is_not_kept_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    take = BlockPool.take

    def take_more(self: BlockPool, owner: int) -> int | None:
        quota = self._allowances[owner].quota
        self._allowances[owner].quota = self.block_count
        try:
            return take(self, owner)
        finally:
            self._allowances[owner].quota = quota

    monkeypatch.setattr(BlockPool, "take", take_more)
    caught_by_worlds()


# Fences -----------------------------------------------------------------------------------------------------------------


def test_a_deadline_that_passes_without_a_fence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expire = InitiatorCore._expire

    def expire_unfenced(self: InitiatorCore, pending: Any) -> None:
        pending.region = None
        expire(self, pending)

    monkeypatch.setattr(InitiatorCore, "_expire", expire_unfenced)
    caught_by_worlds()


def test_a_deadline_that_nobody_watches_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InitiatorCore, "expire", lambda self, now: None)
    caught_by_worlds()


def test_a_send_buffer_that_is_used_again_before_its_completion_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(self: SendRows, count: int) -> tuple[NDArray[np.int64], int]:
        self._taken += count
        return np.arange(count, dtype=np.int64), self._taken

    monkeypatch.setattr(SendRows, "take", take)
    caught_by_worlds()


def test_a_session_whose_blocks_stay_bound_when_it_is_gone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def disconnected(self: TargetSession, now: float) -> None:
        self._is_connected = False
        self._release_if_drained()

    monkeypatch.setattr(TargetSession, "disconnected", disconnected)
    caught_by_worlds()


# Direct modes -----------------------------------------------------------------------------------------------------------


def test_a_direct_load_that_does_not_look_at_the_entry_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = DirectLoad.advance

    def advance_at_once(self: DirectLoad, values: NDArray[np.uint64], now: float) -> NDArray[Any]:
        if self._phase == 1:
            self._second[self._active] = self._first[self._active]
            self._phase = 2
        return advance(self, values, now)

    monkeypatch.setattr(DirectLoad, "advance", advance_at_once)
    caught_by_worlds(150)
