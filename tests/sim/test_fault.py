"""The fabric with faults keeps the rules of the interface: what is delayed comes in order, and what is swallowed still completes once."""

from __future__ import annotations

from typing import Any

import pytest

from kbtp_core.fabric.api import CompletionStatus, Fabric, FabricError, Op, QueuePairClosed
from kbtp_core.fabric.fault import Fault, FaultKind, FaultyFabric
from kbtp_core.fabric.sim import Simulation
from tests.sim.verbs import ALL_REMOTE, Pair, request

FLUSHED = CompletionStatus.FLUSHED


def pair_with(*faults: Fault, seed: int = 1) -> Pair:
    def wrap(sim: Simulation, inner: Fabric) -> Any:
        return FaultyFabric(inner, faults, seed, clock=lambda: sim.now)

    return Pair(left=wrap)


def test_without_a_rule_nothing_changes() -> None:
    pair = pair_with()
    memory, target = pair.right.memory(4, ALL_REMOTE)
    _, local = pair.left.memory(b"abcd")
    pair.left.post(request(Op.WRITE, local, 4, to=(target.stag, 0)))
    pair.run()
    assert memory.tobytes() == b"abcd"
    assert [done.status for done in pair.left.done()] == [CompletionStatus.OK]


def test_completions_are_held_back_and_come_in_order() -> None:
    pair = pair_with(Fault(FaultKind.DELAY, after=1, delay_s=(0.5, 0.5)))
    pair.left.post(*[request(Op.WRITE, wr_id=i) for i in range(5)])
    pair.run()
    assert pair.left.done() == []
    pair.run(0.4)
    assert pair.left.done() == []
    assert not pair.left.cq.wait(0.01)


def test_a_delay_that_struck_once_ends() -> None:
    pair = pair_with(Fault(FaultKind.DELAY, probability=0.5, after=2, delay_s=(0.1, 0.2)), seed=4)
    pair.left.post(*[request(Op.WRITE, wr_id=i) for i in range(5)])
    seen: list[int] = []
    for _ in range(100):
        pair.run(0.05)
        seen += [done.wr_id for done in pair.left.done()]
    assert seen == list(range(5))


def test_what_is_swallowed_never_arrives_and_is_flushed_when_the_pair_ends() -> None:
    pair = pair_with(Fault(FaultKind.SWALLOW, after=1))
    memory, target = pair.right.memory(4, ALL_REMOTE)
    _, local = pair.left.memory(b"abcd")
    pair.left.post(request(Op.WRITE, local, 4, to=(target.stag, 0), wr_id=1), request(Op.SEND, wr_id=2))
    pair.left.post(request(Op.READ, wr_id=3))
    pair.run(1.0)
    assert not memory.any()
    assert pair.left.done() == []
    pair.left.qp.close()
    pair.run()
    *flushed, last = pair.left.done()
    assert [(done.wr_id, done.op, done.status) for done in flushed] == [
        (1, Op.WRITE, FLUSHED),
        (2, Op.SEND, FLUSHED),
        (3, Op.READ, FLUSHED),
    ]
    assert last.op == Op.DISCONNECTED
    with pytest.raises(QueuePairClosed):
        pair.left.post(request(Op.WRITE))


def test_a_kill_sends_a_part_of_the_batch_and_every_request_completes_once() -> None:
    arrived = set()
    for seed in range(20):
        pair = pair_with(Fault(FaultKind.KILL, ops=frozenset({Op.READ})), seed=seed)
        pair.left.post(request(Op.WRITE))
        pair.run()
        assert len(pair.left.done()) == 1
        pair.left.post(*[request(Op.READ, wr_id=i) for i in range(8)])
        pair.run()
        *done, last = pair.left.done()
        assert [d.wr_id for d in done] == list(range(8))
        assert last.op == Op.DISCONNECTED
        arrived.add(sum(d.status == CompletionStatus.OK for d in done))
        assert pair.right.done()[-1].op == Op.DISCONNECTED
    assert arrived == {0}


def test_a_message_that_is_cut_short_arrives_without_its_end() -> None:
    lengths = set()
    for seed in range(30):
        pair = pair_with(Fault(FaultKind.TRUNCATE, ops=frozenset({Op.SEND})), seed=seed)
        _, local = pair.left.memory(b"abcd")
        inbox, receive = pair.right.memory(8)
        pair.right.receive_into(receive, 8)
        pair.left.post(request(Op.SEND, local, 4))
        pair.run()
        (done,) = [done for done in pair.right.done() if done.op == Op.RECEIVE]
        assert inbox[: done.length].tobytes() == b"abcd"[: done.length]
        lengths.add(done.length)
    assert lengths == {0, 1, 2, 3}


def test_corruption_changes_one_octet_of_what_arrives_and_nothing_at_home() -> None:
    for seed in range(10):
        pair = pair_with(Fault(FaultKind.CORRUPT, ops=frozenset({Op.WRITE})), seed=seed)
        memory, target = pair.right.memory(8, ALL_REMOTE)
        source, local = pair.left.memory(b"abcdefgh")
        pair.left.post(request(Op.WRITE, local, 8, to=(target.stag, 0)))
        pair.run()
        assert sum(a != b for a, b in zip(memory.tobytes(), b"abcdefgh", strict=True)) == 1
        assert source.tobytes() == b"abcdefgh"


def test_what_a_rule_does_not_name_is_left_alone() -> None:
    pair = pair_with(Fault(FaultKind.CORRUPT, ops=frozenset({Op.SEND})), Fault(FaultKind.TRUNCATE, ops=frozenset({Op.SEND})))
    memory, target = pair.right.memory(4, ALL_REMOTE)
    _, local = pair.left.memory(b"abcd")
    pair.left.post(request(Op.WRITE, local, 4, to=(target.stag, 0)), request(Op.READ, local, 2, to=(target.stag, 0)))
    pair.run()
    assert memory.tobytes() == b"abcd"


def test_the_same_seed_strikes_at_the_same_place() -> None:
    def strike(seed: int) -> int:
        pair = pair_with(Fault(FaultKind.KILL, probability=0.1), seed=seed)
        posted = 0
        try:
            while True:
                pair.left.post(request(Op.WRITE))
                pair.run(1e-3)
                posted += 1
        except QueuePairClosed:
            return posted

    assert [strike(seed) for seed in (5, 6, 7, 8)] == [strike(seed) for seed in (5, 6, 7, 8)]


def test_a_queue_of_another_fabric_is_refused() -> None:
    pair = pair_with()
    with pytest.raises(FabricError):
        pair.left.fabric.create_qp(pair.left.pd, pair.right.cq)
