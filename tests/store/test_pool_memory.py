"""A pool's memory comes ahead of its use, goes back to the system, and is never more than the blocks in use."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np

from kbtp_core.protocol.pool import BlockState
from kbtp_core.store.pool_memory import PIECE_BYTES, PoolMemory
from kbtp_core.store.ram import RamStore


def present_bytes(memory: PoolMemory) -> int:
    """Octets of it that the system has given, as it says itself."""
    page = mmap.PAGESIZE
    with Path("/proc/self/pagemap").open("rb") as pages:
        pages.seek(memory.array.ctypes.data // page * 8)
        entries = np.frombuffer(pages.read(memory.array.size // page * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * page


def commit_all(memory: PoolMemory) -> int:
    count = 0
    while memory.commit(lambda _begin, _end: True):
        count += 1
        assert count < 1000
    return count


def test_memory_is_there_once_it_is_committed_and_gone_once_it_is_given_back() -> None:
    memory = PoolMemory(8 * PIECE_BYTES + mmap.PAGESIZE)
    assert present_bytes(memory) < PIECE_BYTES
    assert commit_all(memory) == 9
    assert present_bytes(memory) >= 8 * PIECE_BYTES
    memory.array[:] = 7
    memory.give_back(PIECE_BYTES, 5 * PIECE_BYTES)
    assert present_bytes(memory) <= 5 * PIECE_BYTES
    assert not memory.array[PIECE_BYTES : 5 * PIECE_BYTES].any()
    assert memory.array[PIECE_BYTES - 1] == memory.array[5 * PIECE_BYTES] == 7
    assert commit_all(memory) == 4
    assert memory.array[0] == memory.array[-1] == 7, "what was there stays as it was"


def test_only_pieces_whose_blocks_are_all_in_use_are_committed() -> None:
    store = RamStore(PIECE_BYTES // 4, 8 * PIECE_BYTES)
    assert store.park(17) == 17
    count = 0
    while store.commit():
        count += 1
        assert count < 100
    pieces = (store.pool.states.reshape(8, 4) != BlockState.PARKED).all(axis=1)
    assert 0 < count == pieces.sum() < 8
    assert store.unpark(17) == 17
    while store.commit():
        count += 1
        assert count < 100
    assert count == 8
    store.check_integrity()


def test_a_few_blocks_among_parked_ones_take_no_more_than_their_pages() -> None:
    memory = PoolMemory(64 * PIECE_BYTES)
    memory.give_back(0, memory.array.size)
    for at in range(0, memory.array.size, PIECE_BYTES):
        memory.array[at + 12345] = 1
    assert present_bytes(memory) <= 64 * 2 * mmap.PAGESIZE
