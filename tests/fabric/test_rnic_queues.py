"""Depths of queues and the ways to wait for completions."""

from __future__ import annotations

import select
import threading
import time

import pytest

from kbtp_core.fabric.api import (
    Op,
    QueueFull,
    QueueLimits,
)
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
