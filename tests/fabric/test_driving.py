"""A thread that waits for a completion queue makes the progress of its queue pair itself, and gives it back when it leaves."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from kbtp_core.fabric.api import Access, FabricError, Op, QueuePairClosed, WrFlag
from kbtp_core.fabric.softrnic import QueuePair, SoftRnic
from tests.fabric.peer import closing, listening
from tests.fabric.wire import write
from tests.fabric.world import PATIENCE, End, Memory, Node, connect, node, pattern, request


class Waiter(threading.Thread):
    """Waits for a node's completion queue, once."""

    def __init__(self, waiting: Node, seconds: float) -> None:
        super().__init__(daemon=True)
        self.has_news: bool | None = None
        self._node, self._seconds = waiting, seconds
        self.start()
        time.sleep(0.05)  # it waits by now

    def run(self) -> None:
        self.has_news = self._node.cq.wait(self._seconds)

    def result(self, seconds: float = 5.0) -> bool | None:
        self.join(seconds)
        return self.has_news


@pytest.fixture(params=[0.0, 50e-6], ids=["asleep", "spinning"])
def spin_s(request: pytest.FixtureRequest) -> float:
    return float(request.param)


def send_from(end: End, octets: bytes) -> None:
    end.post(request(Op.SEND, end.node.memory(octets), len(octets)))


def test_a_waiting_thread_sees_what_arrives(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        a, b = connect(left, right)
        sink = left.memory(bytes(64))
        a.receive_into(sink, 64)
        waiter = Waiter(left, 10.0)
        send_from(b, bytes(pattern(64)))
        assert waiter.result() is True
        a.expect(Op.RECEIVE)
        assert sink.read() == bytes(pattern(64))


def test_a_wait_without_news_ends_in_time_and_the_device_makes_progress_again(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        _, b = connect(left, right)
        begun = time.monotonic()
        assert left.cq.wait(0.1) is False
        assert 0.09 < time.monotonic() - begun < 1.0
        source, sink = left.memory(b"progress", Access.REMOTE_READ), right.memory(bytes(8))
        b.post(request(Op.READ, sink, 8, to=(source.stag, 0)))
        b.expect(Op.READ)  # though nobody waits for the left queue
        assert sink.read() == b"progress"


def test_a_waiting_thread_serves_the_peers_reads(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        _, b = connect(left, right)
        source = left.memory(bytes(pattern(5000)), Access.REMOTE_READ)
        waiter = Waiter(left, 0.5)
        sink = right.memory(bytes(5000), Access.LOCAL_WRITE)
        b.post(request(Op.READ, sink, 5000, to=(source.stag, 0)))
        b.expect(Op.READ)
        assert sink.read() == bytes(pattern(5000))
        assert waiter.result() is False


@pytest.mark.parametrize("how", ["close", "abort", "peer", "device"])
def test_the_end_of_the_pair_wakes_the_thread_that_drives_it(how: str, spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        a, b = connect(left, right)
        waiter = Waiter(left, 10.0)
        if how == "close":
            a.qp.close(0.2)
        elif how == "abort":
            a.qp.abort()
        elif how == "peer":
            b.qp.abort()
        else:
            left.fabric.close()
        assert waiter.result() is True
        a.expect(Op.DISCONNECTED)


def test_waking_the_queue_ends_the_wait_without_news(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        connect(left, right)
        waiter = Waiter(left, 10.0)
        left.cq.wake()
        assert waiter.result() is False


def test_of_two_threads_that_wait_both_see_the_news(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        a, b = connect(left, right)
        a.receive_into(left.memory(bytes(8)), 8)
        waiters = [Waiter(left, 10.0), Waiter(left, 10.0)]
        send_from(b, b"for both")
        assert [waiter.result() for waiter in waiters] == [True, True]


def test_regions_close_while_a_thread_drives(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        a, b = connect(left, right)
        sink = left.memory(bytes(1 << 16), Access.REMOTE_WRITE)
        waiter = Waiter(left, 10.0)
        source = right.memory(bytes(pattern(1 << 16)))
        one = request(Op.WRITE, source, 1 << 16, to=(sink.stag, 0), flags=WrFlag.NONE)
        b.post(*[one] * 50)
        sink.region.close()
        kept = sink.read()
        with contextlib.suppress(QueuePairClosed):  # by then, unless all fifty were placed before
            b.post(one)
        time.sleep(0.05)
        assert sink.read() == kept
        assert waiter.result() is True  # a Write without a place ends the connection
        a.expect(Op.DISCONNECTED)


@pytest.mark.parametrize("spin_s", [-1e-6, 0.02, float("nan")])
def test_a_spin_that_is_no_short_time_is_refused(spin_s: float) -> None:
    with pytest.raises(FabricError, match="spin_s"):
        SoftRnic(spin_s=spin_s)


def test_messages_arrive_in_order_whoever_makes_progress(spin_s: float) -> None:
    with node(spin_s=spin_s) as left, node() as right:
        a, b = connect(left, right)
        count = 400
        sink = left.memory(bytes(8 * count))
        a.receive_into(sink, 8, count=count)
        numbers = np.arange(count, dtype=np.uint64)
        source = right.memory(numbers.tobytes())
        for n in range(count):
            b.post(request(Op.SEND, source, 8, offset=8 * n))
            if n % 3 == 0:
                left.cq.wait(0.0005)
        for _ in range(count):
            a.expect(Op.RECEIVE)
        assert sink.read() == numbers.tobytes()


@contextmanager
def flood_of_writes(end: End, place: Memory) -> Iterator[None]:
    """The peer's socket is never empty: frames that are made already are sent again and again, faster than anybody can check them."""
    with listening() as listener:
        end.qp.connect("127.0.0.1", listener.port)
        peer = listener.accept()
    peer.answer()
    end.expect(Op.CONNECTED)
    stream = write(place.stag, 0, bytes(32768)).frame() * 64

    def send() -> None:
        while peer.send_while_it_lasts(stream):
            pass

    with closing(peer):
        sender = threading.Thread(target=send)
        sender.start()
        try:
            yield
        finally:
            end.qp.abort()
            sender.join()


@pytest.mark.parametrize("how", ["abort", "end"])
def test_a_thread_that_drives_under_a_flood_lets_others_have_the_pair_at_once(how: str) -> None:
    with node() as device:
        for _ in range(10):
            end = device.create_qp()
            with flood_of_writes(end, device.memory(bytes(32768), Access.REMOTE_WRITE)):
                waiter = Waiter(device, 20.0)
                began = time.monotonic()
                if how == "abort":
                    end.qp.abort()  # a task of the progress thread, which waits for the pair's lock
                else:
                    assert isinstance(end.qp, QueuePair)
                    end.qp.native.end()
                assert waiter.result() is True
                took = time.monotonic() - began
                end.expect(Op.DISCONNECTED)
                assert took < PATIENCE, f"it took {took:.2f} s"
            device.cq = device.fabric.create_cq()  # a thread drives the one pair of its queue
