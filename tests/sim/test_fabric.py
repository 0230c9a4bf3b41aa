"""The simulated fabric itself: it does what `fabric.api` says, refuses what it refuses, and leaves open what RFC 5040 leaves open."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.fabric.api import (
    Access,
    CompletionFlag,
    CompletionStatus,
    FabricError,
    Op,
    QueueFull,
    QueueLimits,
    QueuePairClosed,
    terminate_code,
)
from kbtp_core.fabric.sim import GARBAGE, LOST, QUIET, Conditions, SimFabric, Simulation
from tests.sim.verbs import ALL_REMOTE, Pair, request

OK = CompletionStatus.OK
ROUGH = Conditions(stall=0.2, late_read=0.5, reorder=0.9, garbage=0.5, small_burst=0.5)


def test_every_operation_moves_what_it_should() -> None:
    pair = Pair()
    source, local = pair.left.memory(b"abcdefgh")
    sink, target = pair.right.memory(16, ALL_REMOTE)
    inbox, inbox_region = pair.right.memory(32)
    pair.right.receive_into(inbox_region, 8, 3)
    pair.left.post(
        request(Op.WRITE, local, 8, to=(target.stag, 8)),
        request(Op.READ, local, 4, offset=4, to=(target.stag, 8)),
        request(Op.SEND, local, 3),
        request(Op.SEND_SE, local, 2),
        request(Op.IMMEDIATE, operand=7),
        request(Op.FETCH_ADD, to=(target.stag, 0), operand=5),
        request(Op.CMP_SWAP, to=(target.stag, 0), operand=9, mask=0xFF, compare=5, compare_mask=0xFF),
    )
    pair.run()
    assert sink[8:].tobytes() == b"abcdefgh"
    assert source.tobytes() == b"abcdabcd"
    assert inbox[:3].tobytes() == b"abc"
    assert sink[:8].view(np.uint64)[0] == 9
    done = pair.left.done()
    assert [d.status for d in done] == [OK] * 7
    assert [d.value for d in done[-2:]] == [0, 5]
    first, second, third = pair.right.done()
    assert (first.op, first.length, first.flags) == (Op.RECEIVE, 3, 0)
    assert (second.length, second.flags) == (2, CompletionFlag.SOLICITED)
    assert (third.op, third.value) == (Op.RECEIVE_IMMEDIATE, 7)


def test_a_send_with_invalidate_takes_the_stag_away_before_it_is_told() -> None:
    pair = Pair()
    _, target = pair.right.memory(8, Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE)
    _, inbox = pair.right.memory(8)
    pair.right.receive_into(inbox, 8)
    pair.left.post(request(Op.SEND_INVALIDATE, to=(target.stag, 0)))
    pair.run()
    (done,) = pair.right.done()
    assert (done.flags, done.stag) == (CompletionFlag.INVALIDATED, target.stag)
    assert not target.is_valid


@pytest.mark.parametrize(
    ("op", "access", "to", "code"),
    [
        (Op.WRITE, Access.REMOTE_READ, 0, (1, 1, 0)),
        (Op.WRITE, Access.REMOTE_WRITE, 4, (1, 1, 1)),
        (Op.WRITE, Access.REMOTE_WRITE, (1 << 64) - 4, (1, 1, 3)),
        (Op.READ, Access.REMOTE_WRITE, 0, (0, 1, 2)),
        (Op.READ, Access.REMOTE_READ, 4, (0, 1, 1)),
        (Op.FETCH_ADD, Access.REMOTE_READ, 0, (0, 1, 2)),
        (Op.FETCH_ADD, Access.REMOTE_ATOMIC, 4, (0, 1, 1)),
    ],
)
def test_a_forbidden_access_ends_the_connection_with_its_code(op: Op, access: Access, to: int, code: tuple[int, int, int]) -> None:
    pair = Pair()
    _, local = pair.left.memory(8)
    memory, target = pair.right.memory(8, access)
    pair.left.post(request(op, local, 8, to=(target.stag, to), operand=1))
    pair.run()
    assert pair.right.done()[-1].value == terminate_code(*code)
    last = pair.left.done()[-1]
    assert (last.op, last.value, last.flags) == (Op.DISCONNECTED, terminate_code(*code), CompletionFlag.REMOTE)
    assert not memory.any()


def test_memory_of_another_domain_is_no_memory_of_this_stream() -> None:
    for op, code in ((Op.WRITE, (1, 1, 2)), (Op.READ, (0, 1, 3))):
        pair = Pair()
        _, local = pair.left.memory(8)
        foreign = pair.right.fabric.alloc_pd().register(bytearray(8), ALL_REMOTE)
        pair.left.post(request(op, local, 8, to=(foreign.stag, 0)))
        pair.run()
        assert pair.right.done()[-1].value == terminate_code(*code)


def test_a_send_needs_a_receive_that_is_long_enough() -> None:
    for count, length, code in ((0, 8, (1, 2, 2)), (1, 7, (1, 2, 5))):
        pair = Pair()
        _, local = pair.left.memory(8)
        _, inbox = pair.right.memory(8)
        if count:
            pair.right.receive_into(inbox, length)
        pair.left.post(request(Op.SEND, local, 8))
        pair.run()
        assert pair.right.done()[-1].value == terminate_code(*code)


def test_depths_are_enforced_and_a_batch_is_posted_whole_or_not_at_all() -> None:
    pair = Pair(limits=QueueLimits(send_depth=2, receive_depth=2))
    _, inbox = pair.right.memory(24)
    with pytest.raises(QueueFull):
        pair.right.receive_into(inbox, 8, 3)
    with pytest.raises(QueueFull):
        pair.left.post(*[request(Op.WRITE)] * 3)
    pair.run()
    assert pair.left.done() == []
    with pytest.raises(FabricError):
        pair.left.post(request(Op.RECEIVE))


def test_local_memory_that_may_not_be_used_fails_its_request() -> None:
    pair = Pair()
    _, read_only = pair.left.memory(8, Access.NONE)
    _, target = pair.right.memory(8, ALL_REMOTE)
    pair.left.post(request(Op.READ, read_only, 8, to=(target.stag, 0)))
    pair.run()
    assert [(d.op, d.status) for d in pair.left.done()] == [(Op.READ, CompletionStatus.LOCAL_PROTECTION), (Op.DISCONNECTED, OK)]
    with pytest.raises(FabricError):
        pair.left.pd.register(bytes(8), Access.LOCAL_WRITE)


def test_after_the_end_everything_is_flushed_once_and_nothing_can_be_posted() -> None:
    pair = Pair()
    _, local = pair.left.memory(16)
    pair.left.receive_into(local, 8, 2)
    pair.left.post(request(Op.READ, local, 8, to=(1, 0)))
    pair.left.qp.abort()
    pair.run()
    flushed = CompletionStatus.FLUSHED
    assert [(d.op, d.status) for d in pair.left.done()] == [
        (Op.READ, flushed),
        (Op.RECEIVE, flushed),
        (Op.RECEIVE, flushed),
        (Op.DISCONNECTED, OK),
    ]
    assert pair.right.done()[-1].value == LOST
    with pytest.raises(QueuePairClosed):
        pair.left.post(request(Op.WRITE))


def test_a_close_sends_what_was_posted_and_ends_both_sides_in_order() -> None:
    for seed in range(50):
        pair = Pair(seed, ROUGH)
        _, local = pair.left.memory(b"x" * 64)
        memory, target = pair.right.memory(64, ALL_REMOTE)
        pair.left.post(request(Op.WRITE, local, 64, to=(target.stag, 0)))
        pair.left.qp.close()
        pair.run(1.0)
        assert pair.left.done()[-1].value == 0
        assert pair.right.done()[-1].value == 0
        assert memory.tobytes() == b"x" * 64


def test_a_crash_takes_the_process_and_its_memory_and_the_peer_hears_of_it() -> None:
    pair = Pair()
    crashed = pair.right.fabric
    assert isinstance(crashed, SimFabric)
    crashed.crash()
    pair.run()
    assert pair.left.done()[-1].value == LOST
    again = pair.left.fabric.create_qp(pair.left.pd, pair.left.cq)
    again.connect("right", 1)
    pair.run()
    assert pair.left.done()[-1].status == CompletionStatus.CONNECT_FAILED


def test_a_write_is_in_place_when_the_send_behind_it_is_delivered() -> None:
    for seed in range(100):
        pair = Pair(seed, ROUGH)
        source, local = pair.left.memory(bytes(range(1, 65)))
        memory, target = pair.right.memory(64, ALL_REMOTE)
        _, inbox = pair.right.memory(8)
        pair.right.receive_into(inbox, 8)
        pair.left.post(request(Op.WRITE, local, 64, to=(target.stag, 0)), request(Op.SEND))
        while not pair.right.done():
            pair.run(1e-5)
        assert (memory == source).all()


def test_a_sink_is_undefined_until_it_is_delivered() -> None:
    seen = set()
    for seed in range(200):
        pair = Pair(seed, ROUGH)
        _, local = pair.left.memory(b"new!" * 16)
        memory, target = pair.right.memory(64, ALL_REMOTE)
        _, inbox = pair.right.memory(8)
        pair.right.receive_into(inbox, 8)
        pair.left.post(request(Op.WRITE, local, 64, to=(target.stag, 0)), request(Op.SEND))
        while not pair.right.done():
            seen.add(memory[:1].tobytes())
            pair.run(1e-5)
    assert seen == {b"\0", b"n", bytes([GARBAGE])}


def test_a_source_is_read_as_late_as_its_completion() -> None:
    seen = set()
    for seed in range(100):
        pair = Pair(seed, ROUGH)
        source, local = pair.left.memory(b"old!")
        memory, target = pair.right.memory(4, ALL_REMOTE)
        pair.left.post(request(Op.WRITE, local, 4, to=(target.stag, 0)))
        pair.run(1e-6)
        is_complete = bool(pair.left.done())
        source[:] = np.frombuffer(b"new!", np.uint8)
        pair.run()
        assert not is_complete or memory.tobytes() == b"old!"
        seen.add(memory.tobytes())
    assert seen == {b"old!", b"new!"}


def test_memory_in_use_changes_until_disconnected_is_polled_and_never_again() -> None:
    pair = Pair(3, ROUGH)
    inbox, region = pair.right.memory(8)
    pair.right.receive_into(region, 8)
    pair.left.qp.abort()
    pair.run()
    inbox[:] = 1
    assert pair.right.done()[-1].op == Op.DISCONNECTED
    assert (inbox == GARBAGE).all()
    inbox[:] = 2
    pair.run()
    assert (inbox == 2).all()


def test_a_region_that_is_closed_is_a_fence() -> None:
    pair = Pair(3, ROUGH)
    inbox, region = pair.right.memory(8)
    pair.right.receive_into(region, 8)
    region.close()
    region.close()
    pair.left.post(request(Op.SEND))
    pair.left.qp.abort()
    pair.run()
    pair.right.done()
    assert not inbox.any()


def test_scattered_pages_are_one_run_of_tagged_offsets() -> None:
    pair = Pair()
    arena = np.zeros(64, np.uint8)
    pages = arena.ctypes.data + np.array([48, 0, 24], np.uint64)
    target = pair.right.pd.register_pages(pages, 8, ALL_REMOTE, arena)
    _, local = pair.left.memory(bytes(range(1, 21)))
    pair.left.post(request(Op.WRITE, local, 20, to=(target.stag, 4)))
    pair.run()
    assert arena[52:56].tolist() == [1, 2, 3, 4]
    assert arena[:8].tolist() == list(range(5, 13))
    assert arena[24:32].tolist() == list(range(13, 21))


def test_a_lost_connection_ends_both_sides_and_delivers_nothing_more() -> None:
    pair = Pair()
    _, local = pair.left.memory(b"late")
    memory, target = pair.right.memory(4, ALL_REMOTE)
    pair.left.qp.lose()  # type: ignore[attr-defined]
    pair.left.post(request(Op.WRITE, local, 4, to=(target.stag, 0)))
    pair.run()
    assert (pair.left.done()[-1].value, pair.right.done()[-1].value) == (LOST, LOST)
    assert not memory.any()


def test_a_wait_lets_virtual_time_pass_and_no_other() -> None:
    sim = Simulation(0, QUIET)
    cq = SimFabric(sim).create_cq()
    assert not cq.wait(3600.0)
    assert sim.now == 3600.0
    cq.wake()
    assert not cq.wait(3600.0)
    assert sim.now == 3600.0


def test_a_read_may_see_a_later_write_whole_or_under_way() -> None:
    seen = set()
    for seed in range(200):
        pair = Pair(seed, ROUGH)
        sink, local = pair.left.memory(b"old!new!")
        _, target = pair.right.memory(4, ALL_REMOTE)
        at = (target.stag, 0)
        pair.left.post(request(Op.WRITE, local, 4, to=at))
        pair.run()
        pair.left.post(request(Op.READ, local, 4, to=at), request(Op.WRITE, local, 4, offset=4, to=at))
        pair.run()
        seen.add(sink[:4].tobytes())
    assert seen == {b"old!", b"new!", bytes([GARBAGE] * 4)}
