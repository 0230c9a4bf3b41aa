"""The block pool: owner states, quotas, and refused moves."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.pool import BlockPool, BlockState, LentPool


def pool_of(blocks: int = 4) -> BlockPool:
    return BlockPool(16, np.zeros(16 * blocks, np.uint8), base_offset=0x1000)


def test_a_block_goes_round_its_states_and_counts_as_usage_until_it_is_free() -> None:
    pool = pool_of()
    assert pool.grant(1, 2) == 2
    offset = pool.take(1)
    assert offset == 0x1000
    pool.bound(offset)
    pool.drain(offset)
    assert (pool.usage(1), pool.count(BlockState.DRAINING), pool.count(BlockState.FREE)) == (1, 1, 3)
    pool.check_integrity()
    pool.give_back(1, offset, clear=False)
    assert (pool.usage(1), pool.count(BlockState.FREE)) == (0, 4)
    pool.check_integrity()


def test_the_sum_of_quotas_never_passes_the_number_of_blocks() -> None:
    pool = pool_of(4)
    assert [pool.grant(1, 3), pool.grant(2, 3), pool.grant(3, 3)] == [3, 1, 0]
    pool.revoke(1)
    assert pool.grant(4, 100) == 3


def test_an_owner_gets_no_more_than_its_quota_even_while_blocks_are_free() -> None:
    pool = pool_of(4)
    pool.grant(1, 1)
    assert pool.take(1) is not None
    assert pool.take(1) is None
    assert pool.count(BlockState.FREE) == 3


def test_a_cleared_block_is_zero_before_anybody_else_has_it() -> None:
    memory = np.zeros(32, np.uint8)
    pool = BlockPool(16, memory)
    pool.grant(1, 2)
    offset = pool.take(1)
    assert offset == 0
    pool.write(offset, b"secret")
    assert memory[:6].tobytes() == b"secret"
    pool.give_back(1, offset, clear=True)
    assert not memory.any()


def test_illegal_moves_are_refused_by_name() -> None:
    pool = pool_of()
    pool.grant(1, 4)
    offset = pool.take(1)
    assert offset is not None
    with pytest.raises(ValueError, match="is TAKEN, not BOUND"):
        pool.drain(offset)
    pool.bound(offset)
    with pytest.raises(ValueError, match="is BOUND and can't be given back"):
        pool.give_back(1, offset, clear=False)
    with pytest.raises(ValueError, match="0x1001 is no Block Offset"):
        pool.bound(0x1001)
    pool.check_integrity()


def test_a_lent_pool_says_how_many_blocks_its_region_has() -> None:
    assert LentPool(4096, 10 * 4096 + 100).block_count == 10
    with pytest.raises(ValueError, match="blocks of 0 octets"):
        LentPool(0, 100)
