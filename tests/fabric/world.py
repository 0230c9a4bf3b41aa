"""Builders for the software RNIC's tests: devices, memory between guards, queue pairs, and their completions.

Two rules:
1. No wait without a deadline, and no completion is dropped: what a test does not name fails it.
2. Memory lies between guard octets, and a node that is closed checks that all of them still hold.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import (
    COMPLETION,
    RECEIVE_REQUEST,
    WORK_REQUEST,
    Access,
    Array,
    CompletionFlag,
    CompletionStatus,
    ConnectionRequest,
    Fabric,
    Listener,
    Op,
    ProtectionDomain,
    QueueLimits,
    QueuePair,
    Region,
    WrFlag,
)
from kbtp_core.fabric.softrnic import SoftRnic
from tests.fabric.wire import Segment, Untagged

PATIENCE = float(os.environ.get("KBTP_TEST_PATIENCE", "1"))
"""How much longer things may take than on a plain build: scripts/sanitize.py says so."""
GUARD_BYTES = 4096
GUARD_OCTET = 0xA5
ALL_REMOTE = Access.REMOTE_READ | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC
Octets = NDArray[np.uint8]


def pattern(length: int, seed: int = 1) -> Octets:
    """Reproducible octets that repeat nowhere."""
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@dataclass(frozen=True)
class Done:
    """One completion, with its words as enums."""

    op: Op
    status: CompletionStatus
    flags: CompletionFlag
    wr_id: int
    length: int
    stag: int
    value: int

    @classmethod
    def of(cls, row: Any) -> Done:
        words = (Op(int(row["op"])), CompletionStatus(int(row["status"])), CompletionFlag(int(row["flags"])))
        return cls(*words, int(row["wr_id"]), int(row["length"]), int(row["stag"]), int(row["value"]))


class Memory:
    """Registered octets: one run between two guards, or pages scattered among guards."""

    def __init__(self, arena: Octets, pages: NDArray[np.int64], page_bytes: int) -> None:
        self.arena = arena
        self.pages = pages  # where each page of the region starts in the arena
        self.page_bytes = page_bytes
        self.region: Region

    @property
    def stag(self) -> int:
        return self.region.stag

    @property
    def length(self) -> int:
        return len(self.pages) * self.page_bytes

    def read(self, offset: int = 0, length: int | None = None) -> bytes:
        """What tagged offsets [offset, offset + length) hold now."""
        end = self.length if length is None else offset + length
        return b"".join(self.arena[piece].tobytes() for piece in self._pieces(offset, end))

    def fill(self, octets: bytes | Octets, offset: int = 0) -> None:
        data = np.frombuffer(octets, np.uint8) if isinstance(octets, bytes) else octets
        done = 0
        for piece in self._pieces(offset, offset + len(data)):
            count = piece.stop - piece.start
            self.arena[piece] = data[done : done + count]
            done += count

    def check_guards(self) -> None:
        at = 0
        for start in [*np.sort(self.pages), len(self.arena)]:
            assert (self.arena[at:start] == GUARD_OCTET).all(), "octets outside of a region were changed"
            at = start + self.page_bytes

    def _pieces(self, offset: int, end: int) -> Iterator[slice]:
        while offset < end:
            page, within = divmod(offset, self.page_bytes)
            count = min(end - offset, self.page_bytes - within)
            start = int(self.pages[page]) + within
            yield slice(start, start + count)
            offset += count


class Node:
    """One device with a protection domain and a completion queue."""

    progress_threads = 1
    """Of devices that a test makes without saying how many; conftest runs many tests with several, too."""

    def __init__(self, **aids: Any) -> None:
        self.fabric: Fabric = SoftRnic(**{"progress_threads": self.progress_threads, **aids})
        self.pd = self.fabric.alloc_pd()
        self.cq = self.fabric.create_cq()
        self.listener: Listener | None = None
        self._memories: list[Memory] = []
        self._waiting: dict[int, deque[Done]] = {}
        self._requests: deque[ConnectionRequest] = deque()

    # Memory

    def memory(
        self,
        content: int | bytes | Octets,
        access: Access = Access.LOCAL_WRITE,
        *,
        pd: ProtectionDomain | None = None,
    ) -> Memory:
        """Register that many zeros, or a copy of `content`, between two guards."""
        length = content if isinstance(content, int) else len(content)
        arena = np.full(length + 2 * GUARD_BYTES, GUARD_OCTET, np.uint8)
        memory = Memory(arena, np.array([GUARD_BYTES]), length)
        memory.fill(bytes(length) if isinstance(content, int) else content)
        memory.region = (pd or self.pd).register(arena[GUARD_BYTES : GUARD_BYTES + length], access)
        self._memories.append(memory)
        return memory

    def scattered(self, content: Octets, page_bytes: int, access: Access) -> Memory:
        """Register `content` in pages that lie in random order with gaps of guard octets between them."""
        count = len(content) // page_bytes
        stride = page_bytes + 64
        arena = np.full((count + 1) * stride, GUARD_OCTET, np.uint8)
        pages = np.random.default_rng(7).permutation(count) * stride + 64
        memory = Memory(arena, pages, page_bytes)
        memory.fill(content)
        addresses = (arena.ctypes.data + pages).astype(np.uint64)
        memory.region = self.pd.register_pages(addresses, page_bytes, access, arena)
        self._memories.append(memory)
        return memory

    # Connections

    def create_qp(self, limits: QueueLimits = QueueLimits(), pd: ProtectionDomain | None = None) -> End:
        return End(self, self.fabric.create_qp(pd or self.pd, self.cq, limits))

    def listen(self, startup_timeout_s: float = 5.0) -> int:
        """The port; one listener a node."""
        if self.listener is None:
            self.listener = self.fabric.listen("127.0.0.1", 0, self.cq, startup_timeout_s=startup_timeout_s)
        return self.listener.address[1]

    def next_request(self, timeout_s: float = 5.0) -> ConnectionRequest:
        request = self.poll_request(timeout_s)
        assert request is not None, "no connection request came in time"
        return request

    def poll_request(self, timeout_s: float) -> ConnectionRequest | None:
        assert self.listener is not None
        deadline = time.monotonic() + timeout_s
        while not self._requests:
            self._requests.extend(self.listener.poll())
            remaining = deadline - time.monotonic()
            if not self._requests:
                if remaining <= 0:
                    return None
                self.cq.wait(min(remaining, 0.05))
                self._collect()
        return self._requests.popleft()

    def serve(self, limits: QueueLimits = QueueLimits(), pd: ProtectionDomain | None = None) -> End:
        """A queue pair for the next connection request; `accept` is left to the caller."""
        return End(self, self.next_request().create_qp(pd or self.pd, self.cq, limits))

    # Completions

    def next_done(self, number: int, timeout_s: float = 5.0) -> Done:
        """The oldest completion of that queue pair that was not taken yet."""
        deadline = time.monotonic() + timeout_s
        while not self._waiting.setdefault(number, deque()):
            remaining = deadline - time.monotonic()
            assert remaining > 0, f"queue pair {number}: no completion within {timeout_s} s"
            self.cq.wait(remaining)
            self._collect()
        return self._waiting[number].popleft()

    def is_idle(self, number: int, seconds: float) -> bool:
        """Whether no completion of that queue pair comes for so long."""
        deadline = time.monotonic() + seconds
        self._collect()
        while not self._waiting.get(number) and (remaining := deadline - time.monotonic()) > 0:
            self.cq.wait(remaining)
            self._collect()
        return not self._waiting.get(number)

    def _collect(self) -> None:
        rows = self.cq.poll()
        assert rows.dtype == COMPLETION
        for row in rows:
            self._waiting.setdefault(int(row["qp"]), deque()).append(Done.of(row))

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        self.fabric.close()

    def check_guards(self) -> None:
        for memory in self._memories:
            memory.check_guards()


class End:
    """One queue pair of a node."""

    def __init__(self, node: Node, qp: QueuePair) -> None:
        self.node = node
        self.qp = qp

    def post(self, *requests: Array) -> None:
        self.qp.post_send(np.concatenate(requests))

    def receive_into(self, memory: Memory, length: int, *, count: int = 1, offset: int = 0) -> None:
        """Post `count` buffers of `length` octets, one behind the other; wr_ids count from zero."""
        rows = np.zeros(count, RECEIVE_REQUEST)
        rows["wr_id"] = np.arange(count)
        rows["offset"] = offset + length * np.arange(count)
        rows["stag"] = memory.stag
        rows["length"] = length
        self.qp.post_receive(rows)

    def expect(self, op: Op, status: CompletionStatus = CompletionStatus.OK, timeout_s: float = 5.0) -> Done:
        """The next completion, which must be this one."""
        done = self.node.next_done(self.qp.number, timeout_s)
        assert (done.op, done.status) == (op, status), done
        return done

    def drain(self, timeout_s: float = 5.0) -> list[Done]:
        """Everything up to DISCONNECTED, which is the last."""
        events = [self.node.next_done(self.qp.number, timeout_s)]
        while events[-1].op != Op.DISCONNECTED:
            events.append(self.node.next_done(self.qp.number, timeout_s))
        return events

    def is_idle(self, seconds: float = 0.1) -> bool:
        return self.node.is_idle(self.qp.number, seconds)


def request(
    op: Op,
    memory: Memory | None = None,
    length: int = 0,
    *,
    offset: int = 0,
    to: tuple[int, int] = (0, 0),
    wr_id: int = 0,
    flags: WrFlag = WrFlag.SIGNALED,
    **words: int,
) -> Array:
    """One work request; `to` is the peer's (STag, tagged offset), `words` are operand, mask, compare, compare_mask."""
    row = np.zeros(1, WORK_REQUEST)
    row["op"], row["flags"], row["wr_id"], row["length"] = op, flags, wr_id, length
    row["local_stag"], row["local_offset"] = (memory.stag if memory else 0), offset
    row["remote_stag"], row["remote_offset"] = to
    for name, value in words.items():
        row[name] = value
    return row


def wait_until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


def wait_for_octets(memory: Memory, timeout_s: float = 5.0) -> None:
    """Until a peer has begun to change a memory that was all zeros."""
    deadline = time.monotonic() + timeout_s
    while not any(memory.read(0, 64)):
        assert time.monotonic() < deadline, f"no octet came within {timeout_s} s"
        time.sleep(0.0005)


@contextmanager
def node(**aids: Any) -> Iterator[Node]:
    """A device for the length of a test; its guards are checked at the end."""
    device = Node(**aids)
    try:
        yield device
    finally:
        device.close()
    device.check_guards()


def connect(
    active: Node,
    passive: Node,
    limits: QueueLimits = QueueLimits(),
    passive_limits: QueueLimits | None = None,
) -> tuple[End, End]:
    """Two connected queue pairs; an empty RDMA Write is the first frame, so that both sides may send."""
    port = passive.listen()
    left = active.create_qp(limits)
    left.qp.connect("127.0.0.1", port)
    right = passive.serve(passive_limits or limits)
    right.qp.accept()
    left.expect(Op.CONNECTED)
    left.post(request(Op.WRITE))
    left.expect(Op.WRITE)
    right.expect(Op.CONNECTED)
    return left, right


def untagged_stream(message: bytes, segment_bytes: int, opcode: int, msn: int = 1) -> Sequence[Segment]:
    """A message cut into segments of `segment_bytes` payload."""
    starts = range(0, max(len(message), 1), segment_bytes)
    return [Untagged(opcode, msn, message[at : at + segment_bytes], at, is_last=at + segment_bytes >= len(message)) for at in starts]
