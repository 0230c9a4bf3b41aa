"""Carries the rounds of the direct modes (`protocol.direct`) over a session's queue pair.

1. Operations of all batches go out in order, at most `DIRECT_DEPTH` at once; each is signaled, and they complete in the order posted.
2. The next round of a batch starts when its last one has completed whole; a BIND is sent after its block's Write.
3. A batch with operations under way is fenced before it fails, be it overdue or its session at the end: its data region and its
   scratch are closed, so that no Read lands in memory that was reported done.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import DeadlineExceeded, KbtpError, SessionClosed
from kbtp_core.fabric.api import WORK_REQUEST, Access, CompletionStatus, Op, ProtectionDomain, QueuePair, QueuePairClosed, Region, WrFlag
from kbtp_core.protocol.constants import NO_STATUS, Status
from kbtp_core.protocol.direct import DirectAllocator, DirectBatch, DirectKind, DirectLoad, DirectStore

DIRECT_DEPTH: Final = 128
DIRECT_ID: Final = 1 << 62  # wr_id of every operation here
_OPS: Final = {DirectKind.READ: Op.READ, DirectKind.WRITE: Op.WRITE, DirectKind.FETCH_ADD: Op.FETCH_ADD}


class PendingDirect:
    """A direct batch under way; reads like `PendingBatch`."""

    def __init__(self, machine: DirectBatch, region: Region, scratch: Region, deadline: float) -> None:
        self.machine = machine
        self.count = machine.count
        self.region, self.scratch = region, scratch
        self.deadline = deadline
        self.error: KbtpError | None = None
        self.done = False
        self.binding: Any = None  # the PendingBatch of its BINDs
        self.bind: Callable[[NDArray[np.intp]], Any] | None = None
        self.unfinished_count = 0  # operations of the round
        self.values: list[int] = []

    @property
    def status(self) -> NDArray[np.uint16]:
        return self.machine.status

    @property
    def generation(self) -> NDArray[np.uint16]:
        return self.machine.generation

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return self.machine.data_length

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return self.machine.block_offset

    @property
    def checksum(self) -> NDArray[np.uint32]:
        """None: nobody computed one."""
        return np.zeros(self.count, np.uint32)

    @property
    def ok(self) -> bool:
        """Done, and every block is OK."""
        return self.done and self.error is None and bool((self.status == Status.OK).all())


class DirectOperations:
    """The direct batches of one session on `qp`."""

    def __init__(self, qp: QueuePair, pd: ProtectionDomain, peer: str) -> None:
        self._qp, self._pd, self._peer = qp, pd, peer
        self.allocator: DirectAllocator | None = None
        self._batches: list[PendingDirect] = []
        self._unposted: deque[tuple[PendingDirect, NDArray[Any]]] = deque()
        self._posted: deque[PendingDirect] = deque()  # whose operation each is, oldest first
        self._finished: list[PendingDirect] = []  # rounds that have completed

    @property
    def is_busy(self) -> bool:
        """`step` may have something to do."""
        return bool(self._batches or self._finished or self._unposted)

    def load(self, machine: DirectLoad, region: Region, deadline: float, now: float) -> PendingDirect:
        return self._submit(machine, region, deadline, now)

    def store(
        self, machine: DirectStore, region: Region, deadline: float, now: float, bind: Callable[[NDArray[np.intp]], Any]
    ) -> PendingDirect:
        """`bind` queues the BINDs of the blocks at these indexes, and returns their PendingBatch."""
        return self._submit(machine, region, deadline, now, bind)

    def on_completion(self, status: int, value: int) -> None:
        """An operation has completed, in the order posted; one that failed is followed by the connection's end."""
        pending = self._posted.popleft()
        if status != CompletionStatus.OK or pending.done:
            return
        pending.values.append(value)
        pending.unfinished_count -= 1
        if pending.unfinished_count == 0:
            self._finished.append(pending)

    def step(self, now: float) -> None:
        """Start the rounds that may start, settle what was bound, fail what is overdue, post what there is room for."""
        finished, self._finished = self._finished, []
        for pending in finished:
            if not pending.done:
                self._next_round(pending, pending.machine.advance(np.array(pending.values, np.uint64), now))
        for pending in [pending for pending in self._batches if pending.binding is not None and pending.binding.done]:
            machine = pending.machine
            assert isinstance(machine, DirectStore)
            machine.settle(pending.binding.status, pending.binding.generation)
            self._finish(pending, pending.binding.error)
        for pending in [pending for pending in self._batches if pending.deadline <= now and pending.binding is None]:
            self.give_up(pending)
        self._post()

    def give_up(self, pending: PendingDirect) -> None:
        """Fence a batch now, as if its deadline had passed."""
        if pending.done:
            return
        pending.region.close()
        if isinstance(pending.machine, DirectStore) and pending.binding is None:
            pending.machine.give_up()
        unanswered = int(np.count_nonzero(pending.status == NO_STATUS))
        self._finish(
            pending,
            DeadlineExceeded(
                f"{unanswered} of {pending.count} blocks were not reached directly at {self._peer} in time; their memory is fenced. "
                f"Allow more time, or use requests"
            ),
        )

    def fail_all(self, error: KbtpError) -> None:
        """The session has ended, though the connection may not have yet: fence every batch, then fail it."""
        self._unposted.clear()
        for pending in list(self._batches):
            pending.region.close()
            self._finish(pending, error)

    def _submit(
        self, machine: DirectBatch, region: Region, deadline: float, now: float, bind: Callable[[NDArray[np.intp]], Any] | None = None
    ) -> PendingDirect:
        scratch = self._pd.register(machine.scratch, Access.LOCAL_WRITE)
        pending = PendingDirect(machine, region, scratch, deadline)
        pending.bind = bind
        self._batches.append(pending)
        self._next_round(pending, machine.start(now))
        self._post()
        return pending

    def _next_round(self, pending: PendingDirect, operations: NDArray[Any]) -> None:
        machine = pending.machine
        pending.values = []
        pending.unfinished_count = len(operations)
        if len(operations):
            self._unposted.append((pending, operations))
        elif isinstance(machine, DirectStore) and pending.bind is not None and len(machine.bindable):
            self._bind(pending, machine, pending.bind)
        else:
            self._finish(pending, None)

    def _bind(self, pending: PendingDirect, machine: DirectStore, bind: Callable[[NDArray[np.intp]], Any]) -> None:
        try:
            pending.binding = bind(machine.bindable)
        except SessionClosed as error:  # somebody has said goodbye meanwhile: no new request is sent
            machine.give_up()
            self._finish(pending, error.with_traceback(None))

    def _finish(self, pending: PendingDirect, error: KbtpError | None) -> None:
        pending.scratch.close()
        pending.error, pending.done = error, True
        self._batches.remove(pending)

    def _post(self) -> None:
        while self._unposted and len(self._posted) < DIRECT_DEPTH:
            pending, operations = self._unposted.popleft()
            if pending.done:
                continue
            count = min(DIRECT_DEPTH - len(self._posted), len(operations))
            if count < len(operations):
                self._unposted.appendleft((pending, operations[count:]))
            try:
                self._qp.post_send(self._requests(pending, operations[:count]))
            except QueuePairClosed:
                return  # DISCONNECTED is on its way, and fails all
            self._posted.extend([pending] * count)

    def _requests(self, pending: PendingDirect, operations: NDArray[Any]) -> NDArray[Any]:
        requests = np.zeros(len(operations), WORK_REQUEST)
        requests["wr_id"], requests["flags"] = DIRECT_ID, WrFlag.SIGNALED
        requests["op"] = np.array([_OPS[kind] for kind in DirectKind], np.uint8)[operations["kind"]]
        requests["length"], requests["remote_stag"] = operations["length"], operations["stag"]
        requests["remote_offset"], requests["local_offset"] = operations["offset"], operations["local_offset"]
        requests["local_stag"] = np.where(operations["in_data"], pending.region.stag, pending.scratch.stag)
        if self.allocator is not None:
            atomic = operations["kind"] == DirectKind.FETCH_ADD
            requests["operand"][atomic], requests["mask"][atomic] = self.allocator.add, self.allocator.add_mask
            requests["local_stag"][atomic] = 0
        return requests
