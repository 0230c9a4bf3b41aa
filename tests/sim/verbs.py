"""Two simulated devices and one connection between them, for tests that look at single operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import RECEIVE_REQUEST, WORK_REQUEST, Access, Array, CompletionQueue, Fabric, Op, QueueLimits, QueuePair, WrFlag
from kbtp_core.fabric.sim import QUIET, Conditions, SimFabric, Simulation

ALL_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC | Access.LOCAL_WRITE


@dataclass(frozen=True)
class Done:
    """A completion."""

    wr_id: int
    op: Op
    status: int
    flags: int
    length: int
    stag: int
    value: int


class End:
    """One side: a device, a domain, a queue pair."""

    def __init__(self, sim: Simulation, fabric: Fabric) -> None:
        self.sim = sim
        self.fabric = fabric
        self.pd = fabric.alloc_pd()
        self.cq: CompletionQueue = fabric.create_cq()
        self.qp: QueuePair

    def memory(self, content: bytes | int, access: Access = Access.LOCAL_WRITE) -> tuple[NDArray[np.uint8], Any]:
        octets = np.zeros(content, np.uint8) if isinstance(content, int) else np.frombuffer(content, np.uint8).copy()
        return octets, self.pd.register(octets, access)

    def receive_into(self, region: Any, length: int, count: int = 1) -> None:
        rows = np.zeros(count, RECEIVE_REQUEST)
        rows["wr_id"], rows["offset"] = np.arange(count), np.arange(count) * length
        rows["stag"], rows["length"] = region.stag, length
        self.qp.post_receive(rows)

    def post(self, *requests: Array) -> None:
        self.qp.post_send(np.concatenate(requests))

    def done(self) -> list[Done]:
        """What has completed."""
        rows = self.cq.poll().tolist()
        return [Done(w, Op(op), status, flags, length, stag, value) for w, _, op, status, flags, length, stag, value in rows]


def request(op: Op, region: Any = None, length: int = 0, *, offset: int = 0, to: tuple[int, int] = (0, 0), **words: int) -> Array:
    row = np.zeros(1, WORK_REQUEST)
    row["op"], row["flags"], row["length"] = op, WrFlag.SIGNALED, length
    row["local_stag"], row["local_offset"] = 0 if region is None else region.stag, offset
    row["remote_stag"], row["remote_offset"] = to
    for name, value in words.items():
        row[name] = value
    return row


class Pair:
    """A connection from `left` to `right`, up."""

    def __init__(
        self, seed: int = 0, conditions: Conditions = QUIET, limits: QueueLimits = QueueLimits(), left: Any = None, trace: Any = None
    ) -> None:
        self.sim = Simulation(seed, conditions, trace)
        inner: Fabric = SimFabric(self.sim, "left")
        self.left = End(self.sim, inner if left is None else left(self.sim, inner))
        self.right = End(self.sim, SimFabric(self.sim, "right"))
        listener = self.right.fabric.listen("right", 1, self.right.cq)
        self.left.qp = self.left.fabric.create_qp(self.left.pd, self.left.cq, limits)
        self.left.qp.connect("right", 1, b"hello")
        self.run()
        (incoming,) = listener.poll()
        assert incoming.private_data == b"hello"
        self.right.qp = incoming.create_qp(self.right.pd, self.right.cq, limits)
        self.right.qp.accept(b"welcome")
        self.run()
        assert self.left.qp.peer_private_data == b"welcome"
        self.left.post(request(Op.WRITE))
        self.run()
        assert [done.op for done in self.right.done()] == [Op.CONNECTED]
        self.left.done()

    def run(self, seconds: float = 0.05) -> None:
        self.sim.run(self.sim.now + seconds)
