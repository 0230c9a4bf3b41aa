"""The executor beside a simulated queue pair (draft section 8): what the native one decides, done in virtual time.

The software RNIC and this module ask the same native `ExecutorSession` what to do with a message, so what the simulator proves of it
holds there too. Loads read their block when they start or as late as they arrive; reads of stores take their turn within the peer's
credit.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from kbtp_core import _native
from kbtp_core.fabric.api import Access, Op, StoreGrant
from kbtp_core.fabric.executor import NativeExecutor
from kbtp_core.fabric.sim_memory import SimRegion
from kbtp_core.fabric.sim_message import Message, Work

if TYPE_CHECKING:
    from kbtp_core.fabric.sim_pair import SimQp
    from kbtp_core.fabric.sim_queues import Item

_LOAD, _READ_IT, _PARKED = 0, 1, 3  # kinds of native work
_READ, _LOCAL_WRITE = int(Op.READ), int(Access.LOCAL_WRITE)


class SimRun:
    """What an executor has in progress for one pair."""

    def __init__(self, pair: SimQp, executor: NativeExecutor, pool: SimRegion, grant: StoreGrant | None) -> None:
        self._pair = pair
        self._pool = pool
        self._keep: Final = (executor, grant)
        self._session = _native.create_executor_session(executor.native, grant, pool.length)
        self._loads: dict[Message, tuple[int, bool]] = {}  # Writes whose source is not read yet -> table entry, snapshot
        self._waiting: deque[_native.Work] = deque()  # stores that wait for their turn to read
        self._reading: dict[Work, int] = {}  # Reads under way -> table entry
        self._withheld: list[Item] = []
        self._parked_count = 0  # messages that are answered when something has settled
        self.counts: Final = {"executed_loads": 0, "executed_stores": 0, "executed_frees": 0, "executed_keyed": 0}

    @property
    def is_busy(self) -> bool:
        """Whether something of it is still to be sent."""
        return bool(self._loads or self._waiting)

    @property
    def store_count(self) -> int:
        """Stores whose data has not come yet."""
        return len(self._waiting) + len(self._reading)

    def take(self, data: bytes, is_up: bool, receive_count: int) -> bool:
        """Whether a message is run here. Each one that is needs one of the receives that are posted until it is answered."""
        if receive_count <= len(self._loads) + self.store_count + self._parked_count:
            return False
        work = self._session.take(data, is_up, self._pair.read_limit > 0)
        if work is None:
            return False
        self._do(work)
        return True

    def withhold(self, item: Item) -> bool:
        """Whether the completion of a message that goes up has to wait; then it is kept."""
        if not self._session.has_unsettled:
            return False
        self._withheld.append(item)
        return True

    def start_reads(self) -> list[Message]:
        """Reads of stores that may start now."""
        pair = self._pair
        started = []
        while self._waiting and pair.reads_outstanding < pair.read_limit:
            native = self._waiting.popleft()
            work = Work(0, _READ, 0, native.length, sink_stag=self._pool.stag, sink_offset=native.block_offset)
            self._reading[work] = native.entry
            self._session.store_asked(native.entry)
            pair.reads_outstanding += 1
            if pair.sim.chance(pair.sim.conditions.garbage):
                self._pool.fill_with_garbage(native.block_offset, native.length)
            started.append(Message(_READ, work, self._pool, native.block_offset, native.length, None, native.stag, native.offset))
        return started

    def left(self, message: Message) -> None:
        """The source of a message was read, and may be reused."""
        load = self._loads.pop(message, None)
        if load is not None:
            self._session.load_sent(*load)
            self._settled()

    def arrived(self, work: Work) -> bool:
        """The data of a Read is there; whether it was one of these."""
        entry = self._reading.pop(work, None)
        if entry is None:
            return False
        self._do(self._session.store_arrived(entry))
        self._settled()
        return True

    def end(self) -> tuple[list[Item], list[tuple[int, int, int, int]]]:
        """The connection is gone: what was withheld, and the memory that its Reads may still write to until `give_up`."""
        for load in self._loads.values():
            self._session.load_sent(*load)
        self._loads.clear()
        sinks = [(work.sink_stag, work.sink_offset, work.length, _LOCAL_WRITE) for work in self._reading]
        return self._withheld, sinks

    def give_up(self) -> None:
        """Nothing touches memory any more."""
        self._session.give_up()

    def _do(self, work: _native.Work) -> None:
        pair = self._pair
        if work.kind == _READ_IT:
            self._waiting.append(work)
            pair.ring()
            return
        if work.kind == _PARKED:
            self._parked_count += 1
            return
        for name, is_one in zip(self.counts, (work.opcode == 3, work.opcode in (4, 5), work.opcode == 6, work.opcode >= 0x80), strict=True):
            self.counts[name] += is_one
        pair.sim.executed_count += work.opcode > 3
        messages = []
        if work.kind == _LOAD:
            write = Message(int(Op.WRITE), None, self._pool, work.block_offset, work.length, None, work.stag, work.offset)
            self._loads[write] = work.entry, work.snapshot
            if not pair.sim.chance(pair.sim.conditions.late_read) and not pair.gather(write):
                return
            messages.append(write)
        op, stag = (Op.SEND_INVALIDATE, work.stag) if work.invalidate else (Op.SEND, 0)
        messages.append(Message(int(op), None, None, 0, len(work.answer), work.answer, stag))
        pair.launch(messages)

    def _settled(self) -> None:
        while (work := self._session.unpark()) is not None:
            self._parked_count -= 1
            self._do(work)
        if self._withheld and not self._session.has_unsettled:
            for item in self._withheld:
                self._pair.cq.push(item)
            self._withheld = []
