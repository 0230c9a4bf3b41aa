"""Several pools, one for each block size, behind one address."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.errors import SessionRefused
from kbtp_core.fabric.api import Access
from kbtp_core.protocol import BlockPool, BlockTable, Status, Target
from kbtp_core.session.target import PoolRegion
from tests.session.conftest import BLOCK, World, soon, wait_until

SIZES = (64, 8 * BLOCK)


class Pools:
    """Makes pools of the two sizes above, four blocks each, and remembers what was asked for."""

    def __init__(self, **options: object) -> None:
        self.options = options
        self.asked: list[int] = []
        self.made: dict[int, Target] = {}

    def __call__(self, block_bytes: int) -> tuple[Target, PoolRegion] | None:
        self.asked.append(block_bytes)
        if block_bytes not in SIZES:
            return None
        memory = np.zeros(4 * block_bytes, np.uint8)
        target = Target(BlockPool(block_bytes, memory), BlockTable(16, 1000), name="ring", incarnation=77, **self.options)  # type: ignore[arg-type]
        self.made[block_bytes] = target
        return target, lambda pd: pd.register(memory, Access.LOCAL_WRITE)


def test_each_session_gets_the_pool_whose_blocks_have_the_size_that_it_wants(world: World) -> None:
    pools = Pools()
    server = world.ring(make_pool=pools)
    kept = {}
    for size in (0, *SIZES, SIZES[0]):
        session = world.connect(server, block_bytes=size, quota=1, handle_count=4)
        assert session.target.block_bytes == (size or BLOCK)
        data = np.full(session.target.block_bytes, len(kept) + 1, np.uint8)
        region = session.register(data)
        handle = session.target.handle_base
        assert session.alloc_store([handle], 0, region, 0, data.size, deadline=soon()).wait().ok
        kept[session] = handle, data.copy(), region, data
    for session, (handle, wanted, region, data) in kept.items():
        data[:] = 0
        assert session.load([handle], 0, region, 0, data.size, deadline=soon()).wait().ok
        assert (data == wanted).all()
    assert pools.asked == list(SIZES)  # once each
    assert sorted(target.pool.block_bytes for target in server.targets) == sorted((BLOCK, *SIZES))
    server.check_integrity()


def test_a_size_that_nobody_serves_is_refused(world: World) -> None:
    with pytest.raises(SessionRefused, match=Status.UNSUPPORTED.name):
        world.connect(world.ring(make_pool=Pools()), block_bytes=123)


def test_a_session_that_ends_gives_its_blocks_back_to_its_own_pool(world: World) -> None:
    pools = Pools()
    server = world.ring(make_pool=pools)
    session = world.connect(server, block_bytes=64, quota=4)
    assert session.alloc_store_inline(session.target.handle_base + np.arange(4), 0, [b"x"] * 4, deadline=soon()).wait().ok
    pool = pools.made[64].pool
    assert isinstance(pool, BlockPool)
    assert pool.quota_left == 0
    session.close()
    wait_until(lambda: pool.quota_left == 4)
    server.check_integrity()


def test_a_pool_that_another_made_is_served_beside_it_while_both_are_busy(world: World) -> None:
    server = world.ring(make_pool=Pools())
    sessions = [world.connect(server, block_bytes=size, quota=4) for size in (BLOCK, *SIZES)]
    for turn in range(1, 20):
        batches = []
        for session in sessions:
            handles = session.target.handle_base + np.arange(4)
            batches.append(session.alloc_store_inline(handles, 0, [bytes([turn])] * 4, deadline=soon()))
        assert all(batch.wait().ok for batch in batches)
        frees = [session.free(session.target.handle_base + np.arange(4), 0, deadline=soon()) for session in sessions]
        assert all(batch.wait().ok for batch in frees)


def test_a_free_waits_for_the_readers_of_its_own_pool(world: World) -> None:
    pools = Pools()
    server = world.ring(make_pool=pools)
    session = world.connect(server, block_bytes=SIZES[1], quota=2)
    data = np.zeros(SIZES[1], np.uint8)
    region = session.register(data)
    handle = session.target.handle_base
    assert session.alloc_store([handle], 0, region, 0, data.size, deadline=soon()).wait().ok
    target = pools.made[SIZES[1]]
    target.hold(np.zeros(1, np.intp))  # as a read that never ends
    freed = session.free([handle], 0, deadline=soon(2))
    wait_until(lambda: target.draining_count == 1)
    target.end_reading(np.zeros(1, np.intp))
    assert freed.wait().ok
