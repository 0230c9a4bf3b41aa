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
    for offset in (0x1001, 0xFF0, 0x1040):
        with pytest.raises(ValueError, match=rf"^{offset:#x} is no Block Offset of this pool$"):
            pool.bound(offset)
    pool.check_integrity()


def test_a_lent_pool_says_how_many_blocks_its_region_has() -> None:
    assert LentPool(4096, 10 * 4096 + 100).block_count == 10
    assert LentPool(64, 64).block_count == 1
    assert LentPool(1, 1 << 33).block_count == 0xFFFF_FFFF  # as many as HELLO_ACK can say
    assert LentPool(0xFFFF_FFFF, 0xFFFF_FFFF).block_count == 1


@pytest.mark.parametrize(("block_bytes", "region_bytes"), [(0, 100), (-1, 100), (1 << 32, 1 << 33), (64, 63)])
def test_a_lent_pool_of_no_block_or_of_blocks_that_no_message_can_name_is_refused(block_bytes: int, region_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"^blocks of {block_bytes} octets in a region of {region_bytes}$"):
        LentPool(block_bytes, region_bytes)


@pytest.mark.parametrize(("block_bytes", "pool_bytes"), [(0, 64), (-16, 64), (1 << 32, 64), (64, 48), (16, 65)])
def test_a_pool_of_no_whole_number_of_blocks_is_refused(block_bytes: int, pool_bytes: int) -> None:
    with pytest.raises(ValueError, match=rf"^{pool_bytes} octets are no whole number of blocks of {block_bytes}$"):
        BlockPool(block_bytes, np.zeros(pool_bytes, np.uint8))


def test_blocks_are_as_small_as_an_octet_and_as_large_as_a_length_can_say() -> None:
    assert BlockPool(1, np.zeros(3, np.uint8)).block_count == 3
    octets = np.zeros(1, np.uint8)
    largest = BlockPool(0xFFFF_FFFF, np.broadcast_to(octets, 0xFFFF_FFFF))
    assert (largest.block_count, largest.take(1) if largest.grant(1, 9) == 1 else None) == (1, 0)
    with pytest.raises(ValueError, match=r"^4294967296 octets are no whole number of blocks of 4294967296$"):
        BlockPool(1 << 32, np.broadcast_to(octets, 1 << 32))


def test_a_pool_keeps_its_memory_and_has_a_ring_of_the_form_that_was_asked_for() -> None:
    memory = np.zeros(48, np.uint8)
    assert BlockPool(16, memory).memory is memory
    tails = [int(BlockPool(16, memory, **form).ring.counters[1]) for form in ({}, {"masked": True}, {"masked": False})]
    assert tails == [3 << 32 | 48, 3 << 32 | 48, 3 << 32]


def test_a_partition_is_carved_out_of_what_nobody_was_promised() -> None:
    pool = pool_of(4)
    pool.grant(1, 2)
    assert pool.carve(2, 0, masked=True, timeout_s=1.0) is None
    first = pool.carve(3, 1, masked=True, timeout_s=1.0)
    last = pool.carve(4, 9, masked=False, timeout_s=2.0)
    assert first is not None
    assert last is not None
    assert (first.block_offsets, last.block_offsets) == ((0x1000,), (0x1010,))
    assert [int(partition.ring.counters[1]) for partition in (first, last)] == [1 << 32 | 16, 1 << 32]  # masked, and not
    assert (first.timeout_s, last.timeout_s, pool.quota_left) == (1.0, 2.0, 0)
    assert pool.carve(5, 1, masked=True, timeout_s=1.0) is None
    with pytest.raises(ValueError, match=r"^owner 4 has a quota already$"):
        pool.grant(4, 1)
    pool.check_integrity()


def test_an_executor_finds_states_and_usage_where_they_are() -> None:
    pool = pool_of(3)
    pool.grant(1, 2)
    pool.take(1)
    cell, states = pool.usage_cell(1), pool.states
    assert (cell.dtype, cell.tolist(), states.dtype, states.tolist()) == (np.uint64, [1], np.uint8, [BlockState.TAKEN, 0, 0])
    cell[0], states[0] = 2, BlockState.BOUND
    assert (pool.usage(1), pool.count(BlockState.BOUND)) == (2, 1)


def test_an_owner_of_blocks_keeps_its_promise() -> None:
    pool = pool_of(4)
    pool.grant(1, 3)
    pool.take(1)
    pool.take(1)
    with pytest.raises(AssertionError, match=r"^owner 1 still owns 2 blocks$"):
        pool.revoke(1)


def test_the_octets_of_a_block_are_read_from_its_start() -> None:
    pool = pool_of(4)
    pool.grant(1, 2)
    first, second = pool.take(1), pool.take(1)
    assert (first, second) == (0x1000, 0x1010)
    pool.write(0x1000, b"first")
    pool.write(0x1010, b"second")
    assert (pool.octets(0x1010, 6), pool.octets(0x1000, 3), pool.octets(0x1000, 0)) == (b"second", b"fir", b"")
