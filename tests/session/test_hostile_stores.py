"""Peers that break the customs of stores cost themselves their session, and nobody else anything."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kbtp_core.fabric.softrnic import QueuePair, SoftRnic
from kbtp_core.protocol import BlockPool, BlockState, Flag, Status
from kbtp_core.protocol.hello import Hello
from kbtp_core.protocol.wire import AllocStore, DataDescriptor, Store
from kbtp_core.session import TargetServer
from tests.fabric.peer import Peer, dial
from tests.fabric.wire import Enhanced, ReadRequest, StartUp, read_response, send
from tests.session.conftest import BLOCK, World, wait_until

SINK = 7  # an STag of the scripted peer


@pytest.fixture(params=[True, False], ids=["executor", "without-executor"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    fabric = SoftRnic()
    world = World(fabric, use_executor=request.param)
    yield world
    world.close()
    fabric.close()


class ScriptedInitiator:
    """A peer past its HELLO, unless told not to wait for the answer."""

    def __init__(self, server: TargetServer, *, ird: int = 16, waits: bool = True) -> None:
        self.peer: Peer = dial(server.address[1])
        self.peer.request(StartUp(enhanced=Enhanced(ird, 16)))
        self._msn = 0
        self.send(Hello(0, incarnation=5, quota=8, handle_count=16, outstanding=16, inline_bytes=256).encode())
        if waits:
            self.peer.receive()

    def send(self, message: bytes) -> None:
        self._msn += 1
        self.peer.send(send(message, self._msn))

    def status(self) -> int:
        """Of the next answer."""
        return int.from_bytes(self.peer.receive_untagged().payload[22:24], "big")

    def asked(self) -> ReadRequest:
        """The RDMA Read that comes next."""
        segment = self.peer.receive_untagged()
        assert segment.opcode == 1
        return ReadRequest.decode(segment.payload)


def fetched(request_id: int, handle: int = 1000, length: int = BLOCK) -> bytes:
    """An ALLOC_STORE whose data has to be read."""
    return AllocStore(request_id, handle, 0, DataDescriptor(SINK, 0, length)).encode()


def inlined(request_id: int, handle: int = 1000) -> bytes:
    return AllocStore(request_id, handle, 0, DataDescriptor(0, 0, 1), Flag.INLINE, None, b"x").encode()


def has_no_block_taken(server: TargetServer) -> bool:
    pool = server.target.pool
    assert isinstance(pool, BlockPool)
    return pool.count(BlockState.FREE) == pool.block_count and not server.target.sessions


def test_a_peer_that_serves_no_reads_stores_inline_and_is_told_that_its_other_stores_fail(world: World) -> None:
    server = world.ring()
    it = ScriptedInitiator(server, ird=0)
    it.send(fetched(1))
    assert it.status() == Status.ACCESS
    it.send(inlined(2))
    assert it.status() == Status.OK
    it.send(Store(3, 1000, 0, DataDescriptor(SINK, 0, BLOCK)).encode())
    assert it.status() == Status.ACCESS
    it.peer.read_to_end()  # half of the data might be in a bound block
    it.peer.close()
    wait_until(lambda: has_no_block_taken(server))


def test_a_peer_that_does_not_wait_for_the_answer_to_its_hello_is_served_in_order_or_not_at_all(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    attach = QueuePair.attach_executor

    def attach_slowly(self: QueuePair, *arguments: Any) -> None:
        time.sleep(0.2)
        attach(self, *arguments)
        time.sleep(0.2)

    monkeypatch.setattr(QueuePair, "attach_executor", attach_slowly)
    server = world.ring()
    it = ScriptedInitiator(server, waits=False)
    for request_id, msn in ((1, 2), (2, 3)):  # one before the executor is there, one after
        time.sleep(0.1 if msn == 2 else 0.2)
        it.peer.send_while_it_lasts(send(fetched(request_id), msn))
    time.sleep(0.3)
    server.check()
    it.peer.close()
    wait_until(lambda: has_no_block_taken(server))


def test_a_session_with_a_store_under_way_is_not_idle(world: World) -> None:
    server = world.ring(session_limit=1)
    it = ScriptedInitiator(server)
    it.send(fetched(1))
    request = it.asked()
    time.sleep(1.1)  # longer than a session must have been idle to make room
    with pytest.raises((EOFError, ConnectionError)):
        ScriptedInitiator(server)
    it.peer.send(read_response(request.sink_stag, request.sink_offset, b"z" * BLOCK))
    assert it.status() == Status.OK
    it.peer.close()
    wait_until(lambda: has_no_block_taken(server))


def test_a_peer_that_does_not_answer_the_reads_of_its_stores_is_dropped_and_its_blocks_are_free_again(world: World) -> None:
    server = world.ring(store_limit_s=0.8)
    it = ScriptedInitiator(server)
    for request_id in range(3):  # slow, but never silent for that long
        it.send(fetched(request_id, 1000 + request_id))
        request = it.asked()
        time.sleep(0.5)
        it.peer.send(read_response(request.sink_stag, request.sink_offset, b"z" * BLOCK))
        assert it.status() == Status.OK
    it.send(fetched(3, 1003))
    it.asked()
    start = time.monotonic()
    it.peer.read_to_end()
    assert 0.6 < time.monotonic() - start < 3.0
    wait_until(lambda: has_no_block_taken(server))
    it.peer.close()


def test_a_server_that_is_closed_leaves_its_memory_alone_whatever_a_peer_still_sends(world: World) -> None:
    server = world.ring()
    it = ScriptedInitiator(server)
    it.send(fetched(1))
    request = it.asked()
    server.close(0.2)
    before = world.memory.copy()
    it.peer.send_while_it_lasts(read_response(request.sink_stag, request.sink_offset, b"z" * BLOCK))
    time.sleep(0.1)
    assert np.array_equal(world.memory, before)
    assert not server.session_count
    it.peer.close()
