"""Depths of queues, bad receives, posting from many threads, and the ways to wait for completions."""

from __future__ import annotations

import select
import threading
import time

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op, QueueFull, QueueLimits, WrFlag, terminate_code
from tests.fabric.world import connect, node, request


def test_a_batch_beyond_the_send_depth_is_refused_whole() -> None:
    with node() as left, node() as right:
        inbox = right.memory(64)
        a, b = connect(left, right, QueueLimits(send_depth=4))
        b.receive_into(inbox, 4, count=8)
        with pytest.raises(QueueFull):
            a.post(*(request(Op.SEND, wr_id=at) for at in range(5)))
        assert b.is_idle(0.05)
        a.post(*(request(Op.SEND, wr_id=at) for at in range(4)))
        assert [a.expect(Op.SEND).wr_id for _ in range(4)] == [0, 1, 2, 3]
        a.post(*(request(Op.SEND, wr_id=at) for at in range(4)))
        assert [b.expect(Op.RECEIVE).wr_id for _ in range(8)] == list(range(8))


def test_a_batch_beyond_the_receive_depth_is_refused_whole() -> None:
    with node() as left, node() as right:
        inbox = right.memory(64)
        a, b = connect(left, right, QueueLimits(receive_depth=3))
        with pytest.raises(QueueFull):
            b.receive_into(inbox, 4, count=4)
        b.receive_into(inbox, 4, count=3)
        with pytest.raises(QueueFull):
            b.receive_into(inbox, 4)
        a.post(request(Op.SEND))
        b.expect(Op.RECEIVE)
        b.receive_into(inbox, 4)


def test_a_wait_ends_early_by_wake_and_late_by_its_timeout() -> None:
    with node() as device:
        began = time.monotonic()
        assert not device.cq.wait(0.05)
        assert 0.04 < time.monotonic() - began < 0.5
        timer = threading.Timer(0.05, device.cq.wake)
        timer.start()
        began = time.monotonic()
        device.cq.wait(5.0)
        assert time.monotonic() - began < 1.0
        timer.join()
        assert len(device.cq.poll()) == 0
        device.cq.wake()
        began = time.monotonic()
        device.cq.wait(5.0)
        assert time.monotonic() - began < 1.0


def test_the_descriptor_is_readable_while_completions_wait() -> None:
    with node() as left, node() as right:
        a, b = connect(left, right)
        b.receive_into(right.memory(8), 8)
        a.post(request(Op.SEND))
        assert select.select([right.cq.fileno()], [], [], 5.0)[0]
        b.expect(Op.RECEIVE)


def test_a_poll_gives_no_more_than_its_limit() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right)
        a.post(*(request(Op.WRITE, wr_id=at) for at in range(10)))
        seen: list[int] = []
        deadline = time.monotonic() + 5
        while len(seen) < 10 and time.monotonic() < deadline:
            left.cq.wait(0.1)
            rows = left.cq.poll(3)
            assert len(rows) <= 3
            seen += [int(value) for value in rows["wr_id"]]
        assert seen == list(range(10))


def test_a_receive_into_memory_that_is_not_its_own_fails_at_both_ends() -> None:
    with node() as left, node() as right:
        other_domain = right.fabric.alloc_pd()
        closed = right.memory(64)
        bad_places = [
            (right.memory(64, pd=other_domain), 64),
            (right.memory(64, Access.REMOTE_WRITE), 64),
            (right.memory(64), 65),
            (closed, 64),
        ]
        for memory, length in bad_places:
            a, b = connect(left, right)
            b.receive_into(memory, length)
            if memory is closed:
                closed.region.close()
            a.post(request(Op.SEND, left.memory(b"secret"), 6))
            b.expect(Op.RECEIVE, CompletionStatus.LOCAL_PROTECTION)
            assert b.expect(Op.DISCONNECTED).value == terminate_code(0, 0, 0)
            assert memory.read() == bytes(64)


def test_threads_that_post_at_once_keep_each_its_own_order() -> None:
    with node() as left, node() as right:
        threads, rounds = 4, 300
        inbox = right.memory(8 * threads * rounds)
        a, b = connect(left, right, QueueLimits(receive_depth=threads * rounds))
        b.receive_into(inbox, 8, count=threads * rounds)
        sources = [left.memory(b"".join(b"%04d%04d" % (number, at) for at in range(rounds))) for number in range(threads)]

        def post_all(number: int) -> None:
            for at in range(rounds):
                a.post(request(Op.SEND, sources[number], 8, offset=8 * at, flags=WrFlag.NONE))

        workers = [threading.Thread(target=post_all, args=(number,)) for number in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        for _ in range(threads * rounds):
            b.expect(Op.RECEIVE)
        words = [inbox.read(at, 8) for at in range(0, 8 * threads * rounds, 8)]
        for number in range(threads):
            assert [word for word in words if word[:4] == b"%04d" % number] == [b"%04d%04d" % (number, at) for at in range(rounds)]


def test_the_counters_of_a_queue_pair_count_what_went_through_it() -> None:
    with node() as left, node() as right:
        a, b = connect(left, right)
        before = a.qp.stats()
        b.receive_into(right.memory(100), 100)
        a.post(request(Op.SEND, left.memory(100), 100))
        b.expect(Op.RECEIVE)
        after = a.qp.stats()
        assert after["messages_sent"] - before["messages_sent"] == 1
        assert after["bytes_sent"] - before["bytes_sent"] == 2 + 18 + 100 + 4
        assert after["crc_errors"] == 0
