"""A million masked FetchAdds from many connections, as initiators take tickets of one ring (draft section 3.3; RFC 7306 section 5.1)."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from numpy.typing import NDArray

from kbtp_core.fabric.api import WORK_REQUEST, Access, Op, QueueLimits, WrFlag
from kbtp_core.protocol.ring import MASKED_ADD, add_mask
from tests.fabric.world import PATIENCE, Node, node

CONNECTIONS, BATCH = 8, 500
LOG2_SLOTS = 10
FIRST_TICKET = (1 << 32) - 40_000  # the ticket wraps on the way, and so does the slot's offset
LIMITS = QueueLimits(send_depth=4 * BATCH, ird=64, ord=64)


def take_tickets(port: int, stag: int, count: int, seen: list[NDArray[np.uint64]]) -> None:
    """One initiator with a device, and so a progress thread, of its own."""
    with node() as initiator:
        end = initiator.create_qp(LIMITS)
        end.qp.connect("127.0.0.1", port)
        end.expect(Op.CONNECTED)
        batch = np.zeros(BATCH, WORK_REQUEST)
        batch["op"], batch["flags"], batch["length"] = Op.FETCH_ADD, WrFlag.SIGNALED, 8
        batch["remote_stag"], batch["operand"], batch["mask"] = stag, MASKED_ADD, add_mask(LOG2_SLOTS)
        values: list[NDArray[np.uint64]] = []
        posted = done = 0
        deadline = time.monotonic() + 120.0
        while done < count:
            while posted < count and posted - done <= 2 * BATCH:
                end.qp.post_send(batch)
                posted += BATCH
            assert initiator.cq.wait(deadline - time.monotonic()), "an atomic is not answered"
            rows = initiator.cq.poll()
            assert (rows["op"] == Op.FETCH_ADD).all()
            assert (rows["status"] == 0).all()
            values.append(rows["value"].astype(np.uint64))
            done += len(rows)
        seen.append(np.concatenate(values))


def serve(target: Node, stop: threading.Event) -> None:
    while not stop.is_set():
        connection = target.poll_request(0.05)
        if connection is not None:
            connection.create_qp(target.pd, target.cq, LIMITS).accept()


@pytest.mark.parametrize(("progress_threads", "each"), [(1, 125_000), (3, 12_500)])
def test_tickets_from_many_connections_are_each_given_once(progress_threads: int, each: int) -> None:
    with node(progress_threads=progress_threads) as target:
        head = (FIRST_TICKET << 32) | FIRST_TICKET % (1 << LOG2_SLOTS) * 16
        memory = target.memory(np.array([head], np.uint64).view(np.uint8), Access.REMOTE_ATOMIC)
        port = target.listen()
        stop, seen = threading.Event(), []  # type: tuple[threading.Event, list[NDArray[np.uint64]]]
        server = threading.Thread(target=serve, args=(target, stop))
        initiators = [threading.Thread(target=take_tickets, args=(port, memory.stag, each, seen)) for _ in range(CONNECTIONS)]
        for thread in (server, *initiators):
            thread.start()
        for thread in initiators:
            thread.join(150.0 * PATIENCE)
        stop.set()
        server.join(5.0)
        assert len(seen) == CONNECTIONS

        values = np.concatenate(seen)
        tickets, low = values >> np.uint64(32), values & np.uint64(0xFFFF_FFFF)
        order = np.sort((tickets - np.uint64(FIRST_TICKET)) % np.uint64(1 << 32))
        assert (order == np.arange(CONNECTIONS * each, dtype=np.uint64)).all(), "a ticket was given twice, or never"
        assert (low == tickets % np.uint64(1 << LOG2_SLOTS) * np.uint64(16)).all(), "a slot offset has lost step with its ticket"
        last = (FIRST_TICKET + CONNECTIONS * each) % (1 << 32)
        assert int(np.frombuffer(memory.read(), np.uint64)[0]) == last << 32 | last % (1 << LOG2_SLOTS) * 16
