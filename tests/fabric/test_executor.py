"""The executor against a scripted initiator: plain LOADs are answered octet for octet, all else goes up untouched.

The table is written by the test as the draft lays it out (section 3.2); requests and completions are built here.
"""

from __future__ import annotations

import gc
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.fabric.api import Access, Executor, FabricError, Op, PoolState, QueueLimits, ReportsReaders, StoreGrant, WrFlag
from tests.fabric.peer import Peer, closing, dial
from tests.fabric.wire import Opcode, StartUp, Tagged, Terminate, Untagged, send, write
from tests.fabric.world import End, Memory, Node, node, pattern, request, wait_until

VALID, SEALED = 1, 2
INLINE, SEAL, RECORD, INVALIDATE, ALLOW_UNSEALED = 1, 2, 4, 8, 16
LOAD, COMPLETION = 3, 8
BASE, ENTRIES, BLOCK_BYTES = 1000, 8, 4096
SINK = 0x51A6
REQUEST_ID = 0x1122334455667788


def load(handle: int, *, generation: int = 0, flags: int = 0, room: int = BLOCK_BYTES, status: int = 0, version: int = 1) -> bytes:
    """A LOAD of 40 octets whose Data Descriptor names SINK at offset 64."""
    head = struct.pack(">BBHQQHH", version, LOAD, flags, REQUEST_ID, handle, generation, status)
    return head + struct.pack(">IQI", SINK, 64, room)


def completion(handle: int, generation: int, length: int, block_offset: int) -> bytes:
    head = struct.pack(">BBHQQHH", 1, COMPLETION, 0, REQUEST_ID, handle, generation, 0)
    return head + struct.pack(">IIQ", length, 0, block_offset)


class Target:
    """A pool of ENTRIES blocks, its table, and one connection whose pair has the executor."""

    def __init__(self, device: Node, block_bytes: int = BLOCK_BYTES) -> None:
        self.device = device
        self.block_bytes = block_bytes
        self.table = np.zeros(16 * ENTRIES, np.uint8)
        self.pool: Memory = device.memory(pattern(ENTRIES * block_bytes), Access.NONE)
        self.inbox = device.memory(16 * 64)
        executor = device.fabric.create_executor(self.table, BASE, block_bytes)
        assert executor is not None
        self.executor: Executor = executor

    def bind(self, index: int, *, flags: int = VALID | SEALED, generation: int = 7, length: int = 100, offset: int | None = None) -> None:
        at = index * self.block_bytes if offset is None else offset
        entry = struct.pack(">HHIQ", flags, generation, length, at)
        octets = np.frombuffer(entry, np.uint8)
        self.table[16 * index + 4 : 16 * index + 16] = octets[4:]
        self.table[16 * index : 16 * index + 4].view(np.uint32)[0] = octets[:4].view(np.uint32)[0]

    def block(self, index: int, length: int) -> bytes:
        return self.pool.read(index * self.block_bytes, length)

    def readers(self, index: int) -> int:
        return int(self.executor.readers(np.array([index], np.uint64))[0])

    def connect(self, *, receives: int = 4, buffer_bytes: int | None = None) -> tuple[Peer, End]:
        peer = dial(self.device.listen(), receive_buffer_bytes=buffer_bytes)
        peer.send(StartUp().encode())
        end = self.device.serve(QueueLimits())
        end.qp.attach_executor(self.executor, self.pool.region)
        if receives:
            end.receive_into(self.inbox, 64, count=receives)
        end.qp.accept()
        peer.receive_start()
        peer.send(write(0, 0, b""))
        end.expect(Op.CONNECTED)
        return peer, end


@contextmanager
def target(block_bytes: int = BLOCK_BYTES) -> Iterator[Target]:
    with node() as device:
        yield Target(device, block_bytes)


def expect_block(peer: Peer, it: Target, index: int, length: int, msn: int, *, generation: int = 7) -> None:
    assert peer.receive() == write(SINK, 64, it.block(index, length))
    assert peer.receive() == send(completion(BASE + index, generation, length, index * it.block_bytes), msn)


def test_a_plain_load_is_answered_by_a_write_and_a_completion() -> None:
    with target() as it:
        it.bind(2)
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(load(BASE + 2, generation=7), 1))
            expect_block(peer, it, 2, 100, 1)
            assert end.is_idle()
            assert end.qp.stats()["executed_loads"] == 1


def test_loads_in_a_row_are_answered_in_order() -> None:
    with target() as it:
        for index in range(ENTRIES):
            it.bind(index, length=BLOCK_BYTES - index)
        peer, end = it.connect()
        with closing(peer):
            order = [at % ENTRIES for at in range(0, 300, 3)]
            for start in range(0, 100, 4):
                peer.send(*(send(load(BASE + order[at]), at + 1) for at in range(start, start + 4)))
                for at in range(start, start + 4):
                    expect_block(peer, it, order[at], BLOCK_BYTES - order[at], at + 1)
            assert end.is_idle(0.05)
            assert [it.readers(index) for index in range(ENTRIES)] == [0] * ENTRIES


def in_segments(message: bytes, msn: int, size: int) -> list[Untagged]:
    starts = range(0, len(message), size)
    return [Untagged(Opcode.SEND, msn, message[at : at + size], at, is_last=at + size >= len(message)) for at in starts]


@pytest.mark.parametrize("size", [1, 17, 39])
def test_a_request_in_several_segments_is_run_like_one_in_one_and_its_buffer_stays_posted(size: int) -> None:
    with target() as it:
        it.bind(2)
        peer, end = it.connect(receives=1)
        with closing(peer):
            for msn in range(1, 7):
                peer.send(*in_segments(load(BASE + 2), msn, size))
                expect_block(peer, it, 2, 100, msn)
            assert end.is_idle()
            assert end.qp.stats()["executed_loads"] == 6
            assert end.qp.stats()["messages_received"] == 7
            peer.send(*in_segments(load(BASE + 2)[:-1], 7, size))
            assert end.expect(Op.RECEIVE).length == 39
            assert it.inbox.read(0, 39) == load(BASE + 2)[:-1]


def test_an_unsealed_block_is_loaded_where_the_request_allows_it() -> None:
    with target() as it:
        it.bind(0, flags=VALID)
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(load(BASE, flags=ALLOW_UNSEALED), 1))
            expect_block(peer, it, 0, 100, 1)
            assert end.is_idle(0.05)


def test_invalidate_makes_the_completion_a_send_with_invalidate() -> None:
    with target() as it:
        it.bind(1)
        peer, _ = it.connect()
        with closing(peer):
            peer.send(send(load(BASE + 1, flags=INVALIDATE), 1))
            assert peer.receive() == write(SINK, 64, it.block(1, 100))
            expected = completion(BASE + 1, 7, 100, BLOCK_BYTES)
            assert peer.receive() == Untagged(Opcode.SEND_INVALIDATE, 1, expected, invalidate_stag=SINK)


NOT_PLAIN: dict[str, Callable[[Target], bytes]] = {
    "a handle that is not bound": lambda it: load(BASE + 1),
    "a handle below the table": lambda it: load(BASE - 1),
    "a handle behind the table": lambda it: load(BASE + ENTRIES),
    "the largest handle": lambda it: load((1 << 64) - 1),
    "another generation": lambda it: load(BASE, generation=8),
    "a block that is not sealed": lambda it: load(BASE + 2),
    "too little room": lambda it: load(BASE, room=99),
    "an empty block": lambda it: load(BASE + 3),
    "a block that is longer than a block": lambda it: load(BASE + 4, room=1 << 30),
    "a block over the end of the pool": lambda it: load(BASE + 5),
    "a block offset that wraps": lambda it: load(BASE + 6),
    "INLINE": lambda it: load(BASE, flags=INLINE),
    "SEAL": lambda it: load(BASE, flags=SEAL),
    "RECORD": lambda it: load(BASE, flags=RECORD),
    "an unknown flag": lambda it: load(BASE, flags=0x8000),
    "a status": lambda it: load(BASE, status=1),
    "another version": lambda it: load(BASE, version=2),
    "another opcode": lambda it: b"\x01\x04" + load(BASE)[2:],
    "one octet less": lambda it: load(BASE)[:-1],
    "one octet more": lambda it: load(BASE) + b"\0",
    "nothing": lambda it: b"",
}


@pytest.mark.parametrize("build", NOT_PLAIN.values(), ids=NOT_PLAIN.keys())
def test_what_is_not_plain_goes_up_as_it_came(build: Callable[[Target], bytes]) -> None:
    with target() as it:
        it.bind(0)
        it.bind(2, flags=VALID)
        it.bind(3, length=0)
        it.bind(4, length=BLOCK_BYTES + 1)
        it.bind(5, offset=ENTRIES * BLOCK_BYTES - 99)
        it.bind(6, offset=(1 << 64) - 50)
        peer, end = it.connect()
        with closing(peer):
            message = build(it)
            peer.send(send(message, 1))
            assert end.expect(Op.RECEIVE).length == len(message)
            assert it.inbox.read(0, len(message)) == message
            peer.expect_silence(0.02)
            assert [it.readers(index) for index in range(ENTRIES)] == [0] * ENTRIES


def test_loads_behind_a_message_that_went_up_wait_their_turn_there() -> None:
    with target() as it:
        it.bind(0)
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(b"for the target", 1), send(load(BASE), 2))
            assert end.expect(Op.RECEIVE).length == 14
            assert end.expect(Op.RECEIVE).length == 40
            end.receive_into(it.inbox, 64)
            peer.send(send(load(BASE), 3))
            assert end.expect(Op.RECEIVE).length == 40
            end.receive_into(it.inbox, 64, count=2)
            peer.send(send(load(BASE), 4))
            expect_block(peer, it, 0, 100, 1)


def test_answers_and_own_messages_share_one_sequence() -> None:
    with target() as it:
        it.bind(0)
        peer, end = it.connect()
        with closing(peer):
            for step in range(10):
                peer.send(send(load(BASE), step + 1))
                expect_block(peer, it, 0, 100, 2 * step + 1)
                end.post(request(Op.SEND, it.inbox, 3))
                assert peer.receive_untagged().msn == 2 * step + 2


def test_a_load_needs_a_posted_receive_like_any_send() -> None:
    with target() as it:
        it.bind(0)
        peer, _ = it.connect(receives=0)
        with closing(peer):
            culprit = send(load(BASE), 1)
            peer.send(culprit)
            assert peer.receive_terminate() == Terminate.about(culprit, 1, 2, 2)


def test_more_loads_in_flight_than_receives_are_refused() -> None:
    with target(block_bytes=8 << 20) as it:
        it.bind(0, length=8 << 20)
        peer, _ = it.connect(receives=2, buffer_bytes=1 << 16)
        with closing(peer):
            big = [send(load(BASE, room=8 << 20), msn) for msn in range(1, 6)]
            peer.send(*big)
            terminate = peer.receive_terminate(skip=True)
            assert (terminate.layer, terminate.kind, terminate.code) == (1, 2, 2)


def test_a_block_has_a_reader_until_its_octets_are_out() -> None:
    with target(block_bytes=16 << 20) as it:
        it.bind(1, length=16 << 20)
        peer, end = it.connect(buffer_bytes=1 << 16)
        with closing(peer):
            peer.send(send(load(BASE + 1, room=16 << 20), 1))
            segment = peer.receive(verify=False)
            assert isinstance(segment, Tagged)
            assert it.readers(1) == 1
            it.table[:] = 0
            while not segment.is_last or segment.opcode != Opcode.SEND:
                segment = peer.receive(verify=False)
            assert segment.payload == completion(BASE + 1, 7, 16 << 20, 16 << 20)
            wait_until(lambda: it.readers(1) == 0)
            assert end.is_idle(0.02)


@pytest.mark.parametrize("how", ["reset", "abort", "nonsense"])
def test_readers_are_gone_once_the_connection_is(how: str) -> None:
    with target(block_bytes=16 << 20) as it:
        it.bind(0, length=16 << 20)
        it.bind(1, length=16 << 20)
        peer, end = it.connect(buffer_bytes=1 << 16)
        with closing(peer):
            peer.send(*(send(load(BASE + at, room=16 << 20), at + 1) for at in range(2)))
            peer.receive(verify=False)
            wait_until(lambda: it.readers(0) + it.readers(1) == 2)
            if how == "reset":
                peer.reset()
            elif how == "abort":
                end.qp.abort()
            else:
                peer.send(Untagged(0xC, 1, b""))
            assert end.drain()[-1].op == Op.DISCONNECTED
            assert it.readers(0) + it.readers(1) == 0


def test_a_block_is_not_given_up_while_its_octets_wait_in_a_burst_behind_an_error() -> None:
    """The reader count falls only when the socket has the octets, also when a Terminate cuts the message short."""
    with target(block_bytes=16 << 20) as it:
        it.bind(0, length=16 << 20)
        peer, end = it.connect(buffer_bytes=1 << 16)
        with closing(peer):
            peer.send(send(load(BASE, room=16 << 20), 1))
            peer.receive(verify=False)
            wait_until(lambda: it.readers(0) == 1)
            assert isinstance(end.qp, ReportsReaders)
            assert end.qp.reading().tolist() == [0]
            peer.send(Untagged(0xC, 2, b""))  # no such opcode
            time.sleep(0.2)
            assert it.readers(0) == 1  # the socket still has to take octets of the block
            peer.read_to_end()
            end.drain()
            assert it.readers(0) == 0
            assert end.qp.reading().tolist() == []


def test_a_pool_that_is_closed_is_read_no_more() -> None:
    with target(block_bytes=16 << 20) as it:
        it.bind(0, length=16 << 20)
        peer, end = it.connect(buffer_bytes=1 << 16)
        with closing(peer):
            peer.send(send(load(BASE, room=16 << 20), 1))
            peer.receive(verify=False)
            it.pool.region.close()
            it.pool.fill(np.full(16 << 20, 0xDD, np.uint8))
            assert b"\xdd" * 64 not in peer.read_to_end()
            peer.close()
            end.drain()
            assert it.readers(0) == 0


def test_no_load_mixes_a_block_with_its_successor() -> None:
    """The owner gives the block away again and again, by the rule: clear the entry, wait for its readers, then write."""
    length, rounds = 256 * 1024, 150
    with target(block_bytes=length) as it:
        peer, end = it.connect()
        is_over = threading.Event()
        answers: list[int] = []
        wrong: list[str] = []

        def keep_loading() -> None:
            msn = 1
            while not is_over.is_set():
                peer.send(send(load(BASE, room=length), msn))
                msn += 1
                octets = b""
                while isinstance(segment := peer.receive(verify=False), Tagged):
                    octets += segment.payload
                generation = int.from_bytes(segment.payload[20:22], "big")
                answers.append(len(octets))
                if octets != bytes([generation % 256]) * len(octets):
                    wrong.append(f"generation {generation}: {sorted(set(octets))}")

        it.pool.fill(bytes([1]) * length)
        it.bind(0, generation=1, length=length)
        initiator = threading.Thread(target=keep_loading)
        with closing(peer):
            initiator.start()
            try:
                for generation in range(2, rounds):
                    time.sleep(0.001)
                    it.table[0:4].view(np.uint32)[0] = 0
                    wait_until(lambda: it.readers(0) == 0)
                    it.pool.fill(bytes([generation % 256]) * length)
                    it.bind(0, generation=generation, length=length)
                    answer_what_went_up(end, it)
            finally:
                is_over.set()
                while initiator.is_alive():
                    answer_what_went_up(end, it)
                    initiator.join(0.01)
        assert not wrong
        assert answers.count(length) > 10


def answer_what_went_up(end: End, it: Target) -> None:
    """The target's part, in short: whatever the executor left gets an empty completion and its buffer back."""
    while not end.is_idle(0):
        done = end.node.next_done(end.qp.number)
        if done.op == Op.RECEIVE:
            end.receive_into(it.inbox, 64)
            end.post(request(Op.SEND, it.device.memory(completion(BASE, 0, 0, 0)), 40, flags=WrFlag.SNAPSHOT))


def test_a_pair_ends_with_its_object_for_nobody_keeps_alive_what_its_executor_works_on() -> None:
    with target() as it:
        it.bind(0)
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(load(BASE), 1))
            expect_block(peer, it, 0, 100, 1)
            number = end.qp.number
            del end
            gc.collect()
            assert not it.device.is_idle(number, 0.0), "what was posted was flushed by now"
            with pytest.raises(EOFError):
                peer.receive()


def pool_of(memory: NDArray[np.uint8]) -> PoolState:
    return PoolState(
        memory=memory,
        base_offset=0,
        block_states=np.zeros(ENTRIES, np.uint8),
        entry_states=np.zeros(ENTRIES, np.uint8),
        owners=np.zeros(ENTRIES, np.uint64),
        generations=np.ones(ENTRIES, np.uint16),
        slots=np.zeros(4 * ENTRIES, np.uint32),
        counters=np.zeros(2, np.uint64),
        log2_slots=3,
        is_masked=True,
        clears_blocks=True,
    )


@pytest.mark.parametrize(
    ("length", "access"), [(ENTRIES * BLOCK_BYTES - 1, Access.LOCAL_WRITE), (ENTRIES * BLOCK_BYTES, Access.REMOTE_READ)]
)
def test_a_pool_region_that_can_not_take_every_store_is_refused(length: int, access: Access) -> None:
    with node() as device:
        memory = np.zeros(ENTRIES * BLOCK_BYTES, np.uint8)
        executor = device.fabric.create_executor(np.zeros(16 * ENTRIES, np.uint8), BASE, BLOCK_BYTES, pool_of(memory))
        assert executor is not None
        region = device.pd.register(memory[:length], access)
        grant = StoreGrant(1, BASE, ENTRIES, 64, ENTRIES, np.zeros(1, np.uint64))
        pair = device.create_qp().qp
        with pytest.raises(FabricError, match="LOCAL_WRITE"):
            pair.attach_executor(executor, region, grant)
        pair.attach_executor(executor, region)
