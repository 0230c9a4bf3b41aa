"""A peer that leaves with stores under way: its blocks go back to the ring without an octet of it, and without clearing what is clear."""

from __future__ import annotations

import numpy as np

from kbtp_core import _native
from kbtp_core.fabric.executor import NativeExecutor
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.wire import AllocStore, DataDescriptor
from tests.executor.twins import BASE, BLOCK, Connection, Side, make_side

LENGTH = 24
MARK = 0xEE


def connect(side: Side) -> Connection:
    return side.connect(4, 8, np.arange(1024, dtype=np.uint16).astype(np.uint8))


def take(connection: Connection, request_id: int, handle: int) -> _native.Work:
    """An ALLOC_STORE whose data the target has to read; its Read is left to the test."""
    assert connection.native is not None
    message = AllocStore(request_id, handle, 0, DataDescriptor(0x77, 0, LENGTH), Flag.SEAL).encode()
    work = connection.native.take(message, False, True)
    assert work is not None
    return work


def test_only_what_a_read_may_have_brought_is_cleared() -> None:
    side = make_side(4, 8, has_executor=True)
    peer = connect(side)
    assert peer.native is not None
    asked, waiting = take(peer, 1, BASE), take(peer, 2, BASE + 1)
    peer.native.store_asked(asked.entry)
    side.memory[:] = MARK  # shows who writes where; in a real pool a block that is taken is clear
    side.memory[asked.block_offset : asked.block_offset + 7] = np.arange(7) + 1  # as much of the data as came
    peer.disconnect()
    block = side.memory[asked.block_offset : asked.block_offset + BLOCK]
    assert not block[:LENGTH].any()
    assert (block[LENGTH:] == MARK).all()
    assert (side.memory[waiting.block_offset : waiting.block_offset + BLOCK] == MARK).all()


def test_no_octet_of_a_peer_that_left_is_in_a_block_that_is_taken_again() -> None:
    side = make_side(4, 8, has_executor=True)
    for turn in range(6):
        peer = connect(side)
        assert peer.native is not None
        works = [take(peer, 1 + at, int(peer.session.handle_base) + at) for at in range(4)]
        for work in works[: turn % 5]:
            peer.native.store_asked(work.entry)
            side.memory[work.block_offset : work.block_offset + LENGTH - turn] = MARK
        peer.disconnect()
        assert not side.memory.any()
        pool = side.target.pool
        assert isinstance(pool, BlockPool)
        assert not pool.states.any()
        side.target.check_integrity()


def test_a_pool_of_one_trust_domain_is_not_cleared_for_it() -> None:
    side = make_side(4, 8, has_executor=True, trust_domains=frozenset({"a"}))
    peer = side.connect(4, 8, np.zeros(1024, np.uint8), trust_domain="a")
    assert peer.native is not None
    assert isinstance(side.executor, NativeExecutor)
    work = take(peer, 1, BASE)
    peer.native.store_asked(work.entry)
    side.memory[:] = MARK
    peer.disconnect()
    assert (side.memory == MARK).all()
