"""A peer that reads slowly, or not at all, holds nobody's block for longer than the limit."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, Op
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import BlockTable, Flag, LentPool, Status, Target
from kbtp_core.protocol.hello import Hello
from kbtp_core.protocol.wire import DataDescriptor, Load
from kbtp_core.session import BUFFER_ACCESS, TargetServer
from tests.fabric.peer import dial
from tests.fabric.wire import StartUp, send
from tests.session.conftest import BLOCK, buffer, wait_until
from tests.session.test_fairness import FAR, Desk

BIG = 16 << 20  # more than the buffers of two sockets hold


@pytest.fixture(params=[True, False], ids=["executor", "without-executor"])
def server(request: pytest.FixtureRequest) -> Iterator[TargetServer]:
    fabric = SoftRnic()
    memory = np.zeros(BIG, np.uint8)
    target = Target(LentPool(BIG, memory.size), BlockTable(4, 1000), name="big", incarnation=77)
    server = TargetServer(fabric, target, lambda pd: pd.register(memory, Access.LOCAL_WRITE), use_executor=request.param, drain_limit_s=0.4)
    yield server
    server.close(2.0)
    server.check_integrity()
    server.check()
    fabric.close()


def test_a_peer_that_stops_reading_does_not_keep_a_block(server: TargetServer) -> None:
    server.bind([1000], [0], BIG)
    peer = dial(server.address[1], receive_buffer_bytes=65536)
    peer.request(StartUp())
    peer.send(send(Hello(0, incarnation=5, outstanding=16, inline_bytes=64).encode(), 1))
    peer.receive()
    peer.send(send(Load(1, 1000, 0, DataDescriptor(77, 0, BIG)).encode(), 2))
    peer.receive_octets(1000)  # the answer is under way
    server.reclaim([1000])
    assert server.take_drained().tolist() == []
    drained: list[int] = []

    def is_drained() -> bool:
        drained.extend(server.take_drained().tolist())
        return bool(drained)

    wait_until(is_drained)
    assert drained == [1000]
    wait_until(lambda: server.session_count == 0)
    peer.close()


def test_a_write_that_does_not_complete_ends_its_connection_and_the_block_drains() -> None:
    desk = Desk()
    owner, reader, bystander = desk.join(), desk.join(), desk.join()
    region = reader.pd.register(buffer(1), BUFFER_ACCESS)
    base = owner.protocol.ack.handle_base if owner.protocol.ack is not None else 0
    stored = owner.submit(owner.protocol.alloc_store_inline([base], 0, [b"data"], Flag.SEAL), None, FAR)
    desk.turn()
    desk.listen_all()
    assert stored.ok
    reader.submit(reader.protocol.load([base], 0, region.stag, 0, BLOCK), region, FAR)

    def turn_without_writes(now: float) -> None:
        completions = desk.cq.poll()
        desk.core.process(completions[completions["op"] != Op.WRITE], now)

    turn_without_writes(0.0)
    freed = owner.submit(owner.protocol.free([base], 0), None, FAR)
    turn_without_writes(1.0)
    assert desk.target.draining_count == 1
    turn_without_writes(9.0)
    assert desk.core.connection_count == 3
    for _ in range(20):  # so many turns have the receives of a connection that ends
        turn_without_writes(11.5)
    assert desk.core.connection_count == 2
    assert desk.target.draining_count == 0
    desk.listen_all()
    assert freed.status.tolist() == [Status.OK]
    assert bystander.is_ready
    assert not reader.is_ready
    desk.target.check_integrity()
