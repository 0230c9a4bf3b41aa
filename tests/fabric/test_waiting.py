"""Several threads that wait, and several pairs of a device: nothing is lost when they come, leave or are cut short.

A waiting thread may do the work of its queue pair (test_driving.py). What these tests ask is that nobody else can tell.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from kbtp_core.fabric.api import Access, Array, CompletionQueue, CompletionStatus, Op, QueuePair
from tests.fabric.world import End, Node, node, pattern, request

LONG_S = 10.0  # a wait that something must end
SOON_S = 2.0  # in which it must
ASLEEP_S = 0.05  # by then a waiting thread has stopped looking around


@dataclass(frozen=True)
class Link:
    """A queue pair with a completion queue of its own, and the peer's end of it."""

    qp: QueuePair
    cq: CompletionQueue
    peer: End

    def wait(self, threads: ThreadPoolExecutor, seconds: float = LONG_S) -> Future[bool]:
        """Have a thread wait; it sleeps when this returns."""
        waiting = threads.submit(self.cq.wait, seconds)
        time.sleep(ASLEEP_S)
        assert not waiting.done()
        return waiting

    def poll(self, count: int = 1) -> Array:
        """Wait for that many completions."""
        rows = self.cq.poll()
        deadline = time.monotonic() + SOON_S
        while len(rows) < count:
            assert time.monotonic() < deadline, f"{len(rows)} of {count} completions came in time"
            self.cq.wait(0.1)
            rows = np.concatenate([rows, self.cq.poll()])
        return rows


@contextmanager
def linked(count: int = 1) -> Iterator[tuple[Node, Node, list[Link], ThreadPoolExecutor]]:
    """Two devices with `count` connections between them, and threads to wait on."""
    with node() as near, node() as far, ThreadPoolExecutor(4) as threads:
        links = []
        for _ in range(count):
            cq = near.fabric.create_cq()
            qp = near.fabric.create_qp(near.pd, cq)
            qp.connect("127.0.0.1", far.listen())
            peer = far.serve()
            peer.qp.accept()
            links.append(Link(qp, cq, peer))
            assert links[-1].poll()["op"] == Op.CONNECTED
            qp.post_send(request(Op.WRITE))
            assert links[-1].poll()["op"] == Op.WRITE
            peer.expect(Op.CONNECTED)
        yield near, far, links, threads


def test_a_wait_ends_when_another_thread_closes_the_pair() -> None:
    with linked() as (_, _, [link], threads):
        waiting = link.wait(threads)
        link.qp.close(SOON_S)
        link.peer.expect(Op.DISCONNECTED)
        assert waiting.result(SOON_S)
        assert link.poll()["op"].tolist() == [Op.DISCONNECTED]


def test_a_wait_on_a_pair_that_has_ended_sleeps_until_its_time() -> None:
    with linked() as (_, _, [link], _):
        link.qp.abort()
        assert link.poll()["op"].tolist() == [Op.DISCONNECTED]
        begun = time.monotonic()
        assert not link.cq.wait(0.1)
        assert time.monotonic() - begun >= 0.1


def test_a_wake_ends_a_wait_and_takes_nothing() -> None:
    with linked() as (near, far, [link], threads):
        End(near, link.qp).receive_into(near.memory(64), 64)
        waiting = link.wait(threads)
        link.cq.wake()
        assert not waiting.result(SOON_S)
        link.peer.post(request(Op.SEND, far.memory(b"later"), 5))
        assert link.cq.wait(SOON_S)
        assert link.poll()["length"].tolist() == [5]


def test_all_threads_that_wait_on_one_queue_learn_of_a_completion() -> None:
    with linked() as (near, far, [link], threads):
        End(near, link.qp).receive_into(near.memory(64), 64)
        waiting = [link.wait(threads) for _ in range(3)]
        link.peer.post(request(Op.SEND, far.memory(b"hello"), 5))
        assert [each.result(SOON_S) for each in waiting] == [True] * 3


def test_a_thread_that_waits_on_takes_over_from_one_that_leaves() -> None:
    with linked() as (near, far, [link], threads):
        End(near, link.qp).receive_into(near.memory(64), 64)
        first, second = link.wait(threads, 3 * ASLEEP_S), link.wait(threads)
        assert not first.result(SOON_S)
        link.peer.post(request(Op.SEND, far.memory(b"hello"), 5))
        assert second.result(SOON_S)


def test_threads_that_wait_for_two_pairs_of_one_device_do_not_see_each_other() -> None:
    with linked(2) as (near, far, links, threads):
        for link in links:
            End(near, link.qp).receive_into(near.memory(64), 64)
        waiting = [link.wait(threads) for link in links]
        links[1].peer.post(request(Op.SEND, far.memory(b"second"), 6))
        assert waiting[1].result(SOON_S)
        assert not waiting[0].done()
        links[0].peer.post(request(Op.SEND, far.memory(b"first"), 5))
        assert waiting[0].result(SOON_S)
        assert [link.poll()["length"].tolist() for link in links] == [[5], [6]]


def test_a_write_larger_than_the_socket_takes_leaves_while_its_thread_waits() -> None:
    with linked() as (near, far, [link], threads):
        octets = pattern(24 << 20)
        sink, first = far.memory(octets.size, Access.REMOTE_READ | Access.REMOTE_WRITE), near.memory(8)
        waiting = threads.submit(link.cq.wait, LONG_S)
        link.qp.post_send(request(Op.WRITE, near.memory(octets), octets.size, to=(sink.stag, 0)))
        assert waiting.result(LONG_S)
        assert link.poll()["op"].tolist() == [Op.WRITE]
        link.qp.post_send(request(Op.READ, first, 8, to=(sink.stag, 0)))  # its answer says that what was sent before is there
        done = link.poll()
        assert (done["op"].tolist(), done["status"].tolist()) == ([Op.READ], [CompletionStatus.OK])
        assert first.read() == octets[:8].tobytes()
        assert sink.read() == octets.tobytes()


def test_a_busy_pair_leaves_the_others_of_its_device_their_turn() -> None:
    with linked(2) as (near, far, [busy, quiet], threads):
        size = 8 << 20
        source, sink = far.memory(pattern(size), Access.REMOTE_READ), near.memory(size)
        held, copy = near.memory(pattern(4096), Access.REMOTE_READ), far.memory(4096)
        stop = threading.Event()

        def read_on() -> int:
            count = 0
            while not stop.is_set():
                busy.qp.post_send(request(Op.READ, sink, size, to=(source.stag, 0)))
                busy.poll()
                count += 1
            return count

        reading = threads.submit(read_on)
        delays = []
        for _ in range(50):
            begun = time.monotonic()
            quiet.peer.post(request(Op.READ, copy, 4096, to=(held.stag, 0)))
            quiet.peer.expect(Op.READ)
            delays.append(time.monotonic() - begun)
        stop.set()
        assert reading.result(LONG_S) > 0
        assert np.median(delays) < 0.1
        assert copy.read() == held.read()


def test_pairs_that_come_and_go_beside_waiting_threads_lose_nothing() -> None:
    with linked() as (near, far, [link], threads):
        End(near, link.qp).receive_into(near.memory(64 * 200), 64, count=200)
        letter = far.memory(b"hello")
        lengths: list[int] = []

        def collect() -> None:
            while len(lengths) < 200:
                lengths.extend(link.poll()["length"].tolist())

        collecting = threads.submit(collect)
        for number in range(200):
            link.peer.post(request(Op.SEND, letter, 5, wr_id=number))
            if number % 20 == 0:
                cq = near.fabric.create_cq()
                other = near.fabric.create_qp(near.pd, cq)
                other.connect("127.0.0.1", far.listen())
                far.serve().qp.accept()
                assert cq.wait(SOON_S)
                gone = threads.submit(cq.wait, LONG_S) if len(cq.poll()) else None
                other.abort()
                assert gone is not None
                assert gone.result(SOON_S)
        collecting.result(LONG_S)
        assert lengths == [5] * 200
