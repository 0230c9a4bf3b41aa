"""Where the data of LOADs lands: the Writes that a requester foretells are copied and checked in one pass, all others as ever."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, LoadRequests, Op, Requester, terminate_code
from tests.fabric.peer import Peer, closing, listening
from tests.fabric.test_requester import answer, send
from tests.fabric.wire import Tagged
from tests.fabric.world import End, Memory, node, pattern

SEQUENCE, BLOCK, COUNT = 9, 4096, 6
WRITE = 0


@dataclass
class World:
    requests: Requester
    end: End
    peer: Peer
    sink: Memory
    batch: LoadRequests

    def write(self, index: int, length: int = BLOCK) -> Tagged:
        return Tagged(WRITE, self.sink.stag, index * BLOCK, block(index)[:length])

    def landed(self) -> list[bool]:
        return [self.sink.read(index * BLOCK, BLOCK) == block(index) for index in range(COUNT)]


def block(index: int) -> bytes:
    return bytes(pattern(BLOCK, index + 1))


@contextmanager
def loading(page_bytes: int = 0) -> Iterator[World]:
    """LOADs of COUNT blocks are outstanding; block `index` is wanted at `index` * BLOCK of `sink`."""
    with node() as device, listening() as listener:
        end = device.create_qp()
        empty = np.zeros(COUNT * BLOCK, np.uint8)
        sink = device.scattered(empty, page_bytes, Access.REMOTE_WRITE) if page_bytes else device.memory(empty, Access.REMOTE_WRITE)
        end.receive_into(device.memory(bytes(256)), 64, count=4)
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
        with closing(peer):
            peer.answer()
            end.expect(Op.CONNECTED)
            requests = end.qp.create_requester(COUNT)
            batch = requests.post(SEQUENCE, np.arange(COUNT, dtype=np.uint64), 2, sink.stag, np.arange(COUNT) * BLOCK, BLOCK, 0)
            for _ in range(COUNT):
                peer.receive()
            yield World(requests, end, peer, sink, batch)


@pytest.mark.parametrize("page_bytes", [0, 1024, 4096], ids=["one piece", "small pages", "pages"])
@pytest.mark.parametrize("order", [range(COUNT), range(COUNT - 1, -1, -1), [2, 0, 1, 5, 3, 4]], ids=["in order", "backwards", "mixed"])
def test_blocks_land_where_they_were_wanted_in_whatever_order_they_are_answered(order: list[int], page_bytes: int) -> None:
    with loading(page_bytes) as world:
        world.peer.send(*[part for n, index in enumerate(order) for part in (world.write(index), send(answer(index), n + 1))])
        world.end.expect(Op.LOADS)
        assert world.landed() == [True] * COUNT
        assert world.batch.failed_count == 0


def test_data_in_small_frames_and_in_several_lands_too() -> None:
    with loading() as world:
        frames = []
        for index in range(COUNT):
            data, at = block(index), 0
            for length in (1500, 700, BLOCK - 2200):
                frames.append(Tagged(WRITE, world.sink.stag, index * BLOCK + at, data[at : at + length], is_last=at + length == BLOCK))
                at += length
            frames.append(send(answer(index), index + 1))
        world.peer.send(*frames)
        world.end.expect(Op.LOADS)
        assert world.landed() == [True] * COUNT


def test_refused_loads_between_leave_their_memory_alone() -> None:
    with loading() as world:
        parts = [
            part
            for i in range(COUNT)
            for part in ([send(answer(i, status=8), i + 1)] if i % 2 else [world.write(i), send(answer(i), i + 1)])
        ]
        world.peer.send(*parts)
        world.end.expect(Op.LOADS)
        assert world.landed() == [True, False] * (COUNT // 2)
        assert world.sink.read(BLOCK, BLOCK) == bytes(BLOCK)
        assert world.batch.failed_count == COUNT // 2


@pytest.mark.parametrize("at", [13, 2000, -1], ids=["header", "payload", "checksum"])
def test_a_foretold_write_with_a_wrong_crc_ends_the_connection_after_the_answers_before_it(at: int) -> None:
    with loading() as world:
        spoiled = bytearray(world.write(1).frame())
        spoiled[at] ^= 0x10
        world.peer.send(world.write(0), send(answer(0), 1), bytes(spoiled))
        assert world.end.drain()[-1].value == terminate_code(2, 0, 2)
        status = world.batch.results()["status"].tolist()
        assert status == [0] + [0xFFFF] * (COUNT - 1)


def test_what_answers_nothing_goes_up_in_its_place_between_answers() -> None:
    with loading() as world:
        stranger = answer(0, sequence=SEQUENCE + 1)
        world.peer.send(world.write(0), send(answer(0), 1), send(stranger, 2), world.write(1), send(answer(1), 3), send(answer(1), 4))
        received = [world.end.expect(Op.RECEIVE) for _ in range(2)]
        assert [done.length for done in received] == [40, 40]
        world.peer.send(*[part for i in range(2, COUNT) for part in (world.write(i), send(answer(i), i + 3))])
        world.end.expect(Op.LOADS)
        assert world.landed() == [True] * COUNT


def test_a_write_elsewhere_while_loads_are_outstanding_is_judged_by_its_own_rights() -> None:
    with loading() as world:
        other = world.end.node.memory(bytes(BLOCK), Access.REMOTE_WRITE)
        closed = world.end.node.memory(bytes(BLOCK), Access.REMOTE_READ)
        world.peer.send(Tagged(WRITE, other.stag, 0, block(7)), world.write(0), send(answer(0), 1))
        world.peer.send(Tagged(WRITE, closed.stag, 0, block(8)))
        assert world.end.drain()[-1].value == terminate_code(1, 1, 0)
        assert other.read() == block(7)
        assert closed.read() == bytes(BLOCK)
        assert world.landed()[0]


def test_a_write_that_is_longer_than_the_load_allows_and_than_the_region_is_refused() -> None:
    with loading() as world:
        tail = Tagged(WRITE, world.sink.stag, (COUNT - 1) * BLOCK, bytes(pattern(BLOCK + 4)))
        world.peer.send(tail)
        assert world.end.drain()[-1].value == terminate_code(1, 1, 1)
        assert world.sink.read() == bytes(COUNT * BLOCK)


def test_a_closed_region_takes_no_data_of_its_loads() -> None:
    with loading() as world:
        world.sink.region.close()
        world.peer.send(world.write(0), send(answer(0), 1))
        assert world.end.drain()[-1].value == terminate_code(1, 1, 0)
        assert world.sink.read() == bytes(COUNT * BLOCK)
