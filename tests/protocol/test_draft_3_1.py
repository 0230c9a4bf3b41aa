"""Draft section 3.1, Block Pool. Each test quotes the sentence that it checks."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.pool import BlockPool
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import ring_world


def test_a_pool_is_f_equal_blocks() -> None:
    """The target allocates F blocks of Block Size octets each within a memory region named by the Pool STag."""
    pool = BlockPool(64, np.zeros(5 * 64, np.uint8))
    assert (pool.block_count, pool.block_bytes) == (5, 64)
    with pytest.raises(ValueError, match="no whole number of blocks"):
        BlockPool(64, np.zeros(5 * 64 + 1, np.uint8))


def test_completions_name_a_block_by_its_offset() -> None:
    """Each block is identified by its Block Offset."""
    world = ring_world(blocks=3)
    link = ready(world)
    stored = link.initiator.alloc_store_inline([100, 101, 102], 0, [b"a", b"b", b"c"])
    link.run(stored)
    assert [world.pool_memory[offset] for offset in stored.block_offset.tolist()] == [*b"abc"]
    assert (stored.block_offset % 64 == 0).all()


def test_tables_and_slots_hold_offsets_that_are_addresses() -> None:
    """Tables and ring slots store Block Offsets rather than block numbers, so that a value read from them can be used directly as the
    address of an RDMA operation without arithmetic."""
    world = ring_world(blocks=3)
    assert world.target.pool.ring.slots["block_offset"][:3].tolist() == [0, 64, 128]  # type: ignore[union-attr]
    link = ready(world)
    put(link, 100, b"x")
    put(link, 101, b"y")
    assert world.target.table.entries["block_offset"][:2].tolist() == [0, 64]
