"""The requester: LOADs sent octet for octet within their credit, answers matched, and what is no answer goes up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kbtp_core.fabric.api import LoadRequests, Op, QueuePairClosed, Requester
from tests.fabric.peer import Peer, closing, listening
from tests.fabric.wire import Untagged
from tests.fabric.world import End, node

STAG, SEQUENCE, BLOCK = 0x1234_5678, 9, 4096


def answer(index: int, status: int = 0, sequence: int = SEQUENCE, generation: int = 2) -> bytes:
    head = bytes([1, 8, 0, 0]) + sequence.to_bytes(4, "big") + index.to_bytes(4, "big") + bytes(8)
    return head + generation.to_bytes(2, "big") + status.to_bytes(2, "big") + BLOCK.to_bytes(4, "big") + bytes(4) + (77).to_bytes(8, "big")


def send(payload: bytes, msn: int) -> Untagged:
    return Untagged(3, msn, payload)


@contextmanager
def requester(credit: int) -> Iterator[tuple[Requester, End, Peer]]:
    with node() as device, listening() as listener:
        end = device.create_qp()
        memory = device.memory(bytes(256))
        end.receive_into(memory, 64, count=4)
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
        with closing(peer):
            peer.answer()
            end.expect(Op.CONNECTED)
            yield end.qp.create_requester(credit), end, peer


def post(requests: Requester, count: int, sequence: int = SEQUENCE) -> LoadRequests:
    indexes = np.arange(count)
    return requests.post(
        sequence,
        (indexes + 100).astype(np.uint64),
        (indexes + 2).astype(np.uint16),
        STAG,
        (indexes * BLOCK).astype(np.uint64),
        np.full(count, BLOCK, np.uint32),
        0x10,
    )


def test_a_load_has_the_octets_of_the_draft() -> None:
    with requester(8) as (requests, _, peer):
        post(requests, 2)
        peer.receive()
        assert peer.receive().payload == bytes.fromhex("01030010000000090000000100000000000000650003000012345678000000000000100000001000")


def test_no_more_loads_are_outstanding_than_the_credit_and_the_rest_follows_the_answers() -> None:
    with requester(2) as (requests, end, peer):
        batch = post(requests, 3)
        assert [peer.receive().msn for _ in range(2)] == [1, 2]
        assert requests.unsent_count == 1
        peer.send(send(answer(1, generation=3), 1))
        assert peer.receive().payload[8:12] == (2).to_bytes(4, "big")
        peer.send(send(answer(2, status=8, generation=9), 2), send(answer(0), 3))
        done = end.expect(Op.LOADS)
        assert done.wr_id == SEQUENCE
        results = batch.results()
        assert results["status"].tolist() == [0, 0, 8]
        assert results["generation"].tolist() == [2, 3, 9]
        assert results["data_length"].tolist() == [BLOCK] * 3
        assert results["block_offset"].tolist() == [77] * 3


@pytest.mark.parametrize(
    "message",
    [
        pytest.param(answer(0), id="twice"),
        pytest.param(answer(5), id="beyond the batch"),
        pytest.param(answer(1, sequence=SEQUENCE + 1), id="of no batch"),
        pytest.param(bytes([2]) + answer(1)[1:], id="another version"),
        pytest.param(bytes([1, 9]) + answer(1)[2:], id="another opcode"),
        pytest.param(answer(1)[:24], id="short"),
    ],
)
def test_what_answers_no_outstanding_load_goes_up(message: bytes) -> None:
    with requester(8) as (requests, end, peer):
        post(requests, 2)
        peer.send(send(answer(0), 1), send(message, 2))
        assert end.expect(Op.RECEIVE).length == len(message)
        peer.send(send(answer(1), 3))
        end.expect(Op.LOADS)


def test_an_abandoned_batch_reports_nothing_and_keeps_its_credit_until_it_is_answered() -> None:
    with requester(2) as (requests, end, peer):
        batch = post(requests, 5)
        for _ in range(2):
            peer.receive()
        batch.abandon()
        assert requests.unsent_count == 0
        post(requests, 1, SEQUENCE + 1)
        assert requests.unsent_count == 1
        peer.send(send(answer(1), 1))
        assert peer.receive().payload[4:8] == (SEQUENCE + 1).to_bytes(4, "big")
        peer.send(send(answer(0), 2), send(answer(0, sequence=SEQUENCE + 1), 3))
        assert end.expect(Op.LOADS).wr_id == SEQUENCE + 1
        assert batch.results()["status"].tolist() == [0xFFFF] * 5


def test_the_end_of_the_connection_flushes_every_batch_once() -> None:
    with requester(2) as (requests, end, peer):
        batch = post(requests, 3)
        peer.receive()
        peer.reset()
        ended = [(done.op, done.wr_id) for done in end.drain() if done.op in (Op.LOADS, Op.DISCONNECTED)]
        assert ended == [(Op.LOADS, SEQUENCE), (Op.DISCONNECTED, 0)]
        assert batch.results()["status"].tolist() == [0xFFFF] * 3
        with pytest.raises(QueuePairClosed):
            post(requests, 1)


def test_lists_of_unequal_length_are_refused() -> None:
    with requester(2) as (requests, _, _), pytest.raises(ValueError, match="as many handles"):
        requests.post(1, np.zeros(2, np.uint64), np.zeros(1, np.uint16), 0, np.zeros(2, np.uint64), np.zeros(2, np.uint32), 0)
