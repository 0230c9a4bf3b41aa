"""A device with several progress threads: each connection is served by one of them, and what they share stays whole."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.fabric.api import WORK_REQUEST, Access, CompletionStatus, FabricError, Op, QueueLimits, WrFlag
from kbtp_core.fabric.softrnic import SoftRnic
from tests.fabric.world import ALL_REMOTE, End, Memory, Node, connect, node, pattern, request, wait_until

THREADS = 3
LENGTH = 100_000


def count(folder: str) -> int:
    return len(list(Path("/proc/self", folder).iterdir()))


@pytest.mark.parametrize("progress_threads", [0, 65, -1])
def test_a_number_of_threads_that_makes_no_sense_is_refused_by_name(progress_threads: int) -> None:
    with pytest.raises(FabricError, match=f"progress_threads is {progress_threads}"):
        SoftRnic(progress_threads=progress_threads)


def test_a_device_runs_that_many_threads_and_leaves_nothing_behind() -> None:
    threads, descriptors = count("task"), count("fd")
    with node(progress_threads=1) as left, node(progress_threads=THREADS) as right:
        assert count("task") == threads + 1 + THREADS
        ends = [connect(left, right) for _ in range(7)]
        ends[0][0].qp.close()
        ends[1][1].qp.abort()
    del left, right, ends
    assert (count("task"), count("fd")) == (threads, descriptors)


class Traffic(threading.Thread):
    """Writes, reads back and sends over one connection, `rounds` times, and keeps what went wrong."""

    def __init__(self, end: End, place: Memory, rounds: int, seed: int) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._end, self._place, self._rounds, self._seed = end, place, rounds, seed
        self.start()

    def run(self) -> None:
        try:
            for at in range(self._rounds):
                self._round(pattern(LENGTH, 1000 * self._seed + at))
        except BaseException as error:  # noqa: BLE001 - for the test to raise
            self.error = error

    def _round(self, content: np.ndarray) -> None:
        end, far = self._end, (self._place.stag, 0)
        source, sink = end.node.memory(content), end.node.memory(LENGTH)
        end.post(
            request(Op.WRITE, source, LENGTH, to=far, flags=WrFlag.NONE),
            request(Op.READ, sink, LENGTH, to=far),
            request(Op.SEND, source, 8, flags=WrFlag.FENCE | WrFlag.SIGNALED),
        )
        end.expect(Op.READ, timeout_s=30.0)
        end.expect(Op.SEND, timeout_s=30.0)
        assert sink.read() == content.tobytes()
        source.region.close()
        sink.region.close()


def test_sixteen_connections_from_as_many_devices_keep_their_own_data() -> None:
    rounds = 5
    with node(progress_threads=THREADS) as target, node() as a, node() as b, node(progress_threads=THREADS) as c, node() as d:
        # A node's completions are collected by one thread: each connection has a completion queue, and so a node, to itself.
        initiators = [Node(progress_threads=1 + at % 2) for at in range(12)]
        try:
            pairs = [connect(device, target) for device in (a, b, c, d, *initiators)]
            places = [target.memory(LENGTH, ALL_REMOTE) for _ in pairs]
            inbox = target.memory(8 * rounds * len(pairs))
            for at, (_, far) in enumerate(pairs):
                far.receive_into(inbox, 8, count=rounds, offset=8 * rounds * at)
            traffic = [Traffic(near, place, rounds, at) for at, ((near, _), place) in enumerate(zip(pairs, places, strict=True))]
            for thread in traffic:
                thread.join(60.0)
            assert [thread.error for thread in traffic] == [None] * len(pairs)
            for at, (_, far) in enumerate(pairs):
                for turn in range(rounds):
                    far.expect(Op.RECEIVE)
                    assert inbox.read(8 * (rounds * at + turn), 8) == pattern(LENGTH, 1000 * at + turn)[:8].tobytes()
                assert places[at].read() == pattern(LENGTH, 1000 * at + rounds - 1).tobytes()
        finally:
            for device in initiators:
                device.close()
                device.check_guards()


def flood(end: End, source: Memory, place: Memory, count: int = 64) -> None:
    rows = np.zeros(count, WORK_REQUEST)
    rows["op"], rows["length"], rows["local_stag"], rows["remote_stag"] = Op.WRITE, LENGTH, source.stag, place.stag
    end.qp.post_send(rows)


@pytest.mark.parametrize("side", ["target", "initiators"])
def test_a_device_closes_while_all_its_threads_are_busy(side: str) -> None:
    for _ in range(10):
        with node(progress_threads=THREADS) as target, node(progress_threads=THREADS) as near:
            source = near.memory(pattern(LENGTH))
            pairs = [connect(near, target, QueueLimits(send_depth=64)) for _ in range(6)]
            places = [target.memory(LENGTH, ALL_REMOTE) for _ in pairs]
            for (end, _), place in zip(pairs, places, strict=True):
                flood(end, source, place)
            began = time.monotonic()
            (target if side == "target" else near).fabric.close()
            assert time.monotonic() - began < 10.0
            kept = [place.read() for place in places] if side == "target" else []
            for pair in pairs:
                for end in pair:
                    *_, last = end.drain()
                    assert last.status == CompletionStatus.OK
            assert [place.read() for place in places][: len(kept)] == kept


def test_connections_come_and_go_while_others_are_busy() -> None:
    with node(progress_threads=THREADS) as target, node() as steady, node(progress_threads=THREADS) as fleeting:
        near, _ = connect(steady, target)
        place, source = target.memory(LENGTH, Access.REMOTE_WRITE), steady.memory(pattern(LENGTH))
        for turn in range(60):
            near.post(request(Op.WRITE, source, LENGTH, to=(place.stag, 0)))
            a, b = connect(fleeting, target)
            (a.qp.close, b.qp.close, a.qp.abort, b.qp.abort)[turn % 4]()
            a.drain()
            b.drain()
            near.expect(Op.WRITE)
        wait_until(lambda: target.fabric.stats()["queue_pairs"] == 1)
        assert target.fabric.stats()["queue_pairs_ended"] == 60
