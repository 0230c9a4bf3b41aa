"""One budget of RAM for several pools."""

from __future__ import annotations

import pytest

from kbtp_core.store.budget import RamBudget
from kbtp_core.store.ram import RamStore

TOTAL = 1 << 20


class Fake:
    """A pool whose blocks can all be parked, but for those that are `held`."""

    def __init__(self, block_bytes: int, total_bytes: int = TOTAL) -> None:
        self.block_bytes = block_bytes
        self.live = self.count = total_bytes // block_bytes
        self.missed_count = 0
        self.held = 0
        self.idle_bytes = 0

    @property
    def live_bytes(self) -> int:
        return self.live * self.block_bytes

    def park(self, count: int) -> int:
        count = max(0, min(count, self.live - self.held))
        self.live -= count
        return count

    def unpark(self, count: int) -> int:
        count = min(count, self.count - self.live)
        self.live += count
        return count


def shares(*pools: Fake) -> list[float]:
    return [round(pool.live_bytes / TOTAL, 3) for pool in pools]


def test_the_first_pool_has_all_and_later_ones_a_floor_of_the_largest() -> None:
    budget = RamBudget(TOTAL)
    first, second, third = Fake(4096), Fake(1024), Fake(16384)
    budget.add(first)
    assert shares(first) == [1.0]
    budget.add(second)
    assert shares(first, second) == [0.938, 0.062]
    budget.add(third)
    assert shares(first, second, third) == [0.875, 0.062, 0.062]
    budget.check_integrity()


def test_a_new_pool_gets_what_the_others_do_not_use() -> None:
    budget = RamBudget(TOTAL)
    empty, used = Fake(4096), Fake(1024)
    budget.add(empty)
    empty.idle_bytes = TOTAL
    budget.add(used)
    assert shares(empty, used) == [0.062, 0.938]
    used.idle_bytes = TOTAL // 2
    budget.add(Fake(2048))
    assert shares(empty, used) == [0.062, 0.438]
    budget.check_integrity()


def test_pools_share_evenly_when_they_are_told_to_and_keep_what_they_hold() -> None:
    budget = RamBudget(TOTAL)
    pools = first, second, third = Fake(4096), Fake(1024), Fake(16384)
    for pool in pools:
        budget.add(pool)
    budget.share_evenly()
    assert shares(*pools) == [0.332, 0.333, 0.328]
    first.live, first.held = TOTAL // 2 // 4096, TOTAL // 2 // 4096
    second.live = third.live = 0
    budget.share_evenly()
    assert first.live_bytes == TOTAL // 2
    assert second.live_bytes + third.live_bytes <= TOTAL // 2
    budget.check_integrity()


def test_memory_goes_to_the_pool_that_misses_it_until_the_other_is_at_its_floor() -> None:
    budget = RamBudget(TOTAL)
    idle, busy = Fake(4096), Fake(1024)
    budget.add(idle)
    budget.add(busy)
    for turn in range(100):
        busy.missed_count += 10
        budget.rebalance(float(turn))
        budget.check_integrity()
    assert shares(idle, busy) == [0.062, 0.938]


def test_pools_that_miss_as_much_leave_each_other_alone() -> None:
    budget = RamBudget(TOTAL)
    one, other = Fake(4096), Fake(2048)
    budget.add(one)
    budget.add(other)
    before = shares(one, other)
    for turn in range(50):
        one.missed_count += 10
        other.missed_count += 20
        budget.rebalance(float(turn))
    assert shares(one, other) == before


def test_what_a_pool_can_not_let_go_of_is_never_counted_twice() -> None:
    budget = RamBudget(TOTAL)
    first, second = Fake(4096), Fake(1024)
    budget.add(first)
    first.held = first.live
    budget.add(second)
    assert second.live == 0
    budget.check_integrity()
    first.held = 0
    second.missed_count += 1
    budget.rebalance(0.0)
    assert second.live > 0
    budget.check_integrity()


def test_a_block_size_that_leaves_no_room_for_the_others_is_refused() -> None:
    budget = RamBudget(TOTAL)
    budget.add(Fake(4096))
    assert not budget.fits(TOTAL // 4)
    with pytest.raises(ValueError, match="does not fit"):
        budget.add(Fake(TOTAL // 4))


def test_real_pools_park_blocks_and_use_them_again() -> None:
    budget = RamBudget(TOTAL)
    pages, small = RamStore(16384, TOTAL), RamStore(4096, TOTAL)
    budget.add(pages)
    budget.add(small)
    assert pages.pool.live_count == 4
    assert small.pool.live_count == 240
    for turn in range(4):
        small.native.set_now(1)
        budget.rebalance(float(turn))
        for store in (pages, small):
            store.target.check_integrity()
            store.check_integrity()
    assert small.unpark(3) == 3
    assert small.pool.grant(7, 1000) == 121  # half of what is live is for sessions
    assert small.park(1000) == 243 - 121
    small.target.check_integrity()
    small.pool.revoke(7)
    assert small.park(1000) == 121
    assert small.live_bytes == 0
    small.target.check_integrity()


def test_memory_of_parked_blocks_goes_back_to_the_system() -> None:
    store = RamStore(4096, TOTAL)
    store.memory[:] = 0xAA
    parked = store.park(100)
    assert parked == 100
    assert sum(not block.any() for block in store.memory.reshape(-1, 4096)) == 100
