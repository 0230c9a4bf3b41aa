"""Worlds of direct allocation: initiators take blocks from a free ring by FetchAdd and Read, over the simulated fabric (draft, sections 3.3
and 6.6), with a target that knows nothing but the ring's rules.

One ring and one partition a connection. An initiator takes tickets, reads slots until its ticket's block is there, writes the block, and
says BIND; later it says FREE. Slow initiators lose their tickets: the target invalidates the partition first, then reclaims. Every block's
owner and every octet of a bound block are checked, and in the end each ring must list all of its blocks.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from kbtp_core.fabric.api import RECEIVE_REQUEST, WORK_REQUEST, Access, Array, CompletionStatus, Op, QueuePairClosed, WrFlag
from kbtp_core.fabric.sim import Conditions, SimCq, SimFabric, SimRegion, Simulation
from kbtp_core.protocol import FreeRing
from kbtp_core.protocol.constants import EMPTY_SLOT, SLOT_BYTES
from kbtp_core.protocol.ring import MASKED_ADD, SLOT, Ticket, add_mask

BLOCK: Final = 64
TICKET_TIMEOUT_S: Final = 0.04
PATIENCE_S: Final = 0.25
"""An initiator that keeps to its quota finds a block within this time."""

_message = struct.Struct("<BQQ")
_slot = struct.Struct(">IIQ")
_BIND, _FREE = 1, 2
_DEPTH: Final = 64


class RingBroken(AssertionError):
    """A block was lost, handed out twice, or changed under its owner."""


def one(op: Op, wr_id: int, local: SimRegion | None, offset: int, length: int, stag: int = 0, to: int = 0, **words: int) -> Array:
    row = np.zeros(1, WORK_REQUEST)
    row["wr_id"], row["op"], row["flags"], row["length"] = wr_id, op, WrFlag.SIGNALED, length
    row["local_stag"], row["local_offset"] = 0 if local is None else local.stag, offset
    row["remote_stag"], row["remote_offset"] = stag, to
    for name, value in words.items():
        row[name] = value
    return row


class Inbox:
    """Receives of 32 octets each."""

    def __init__(self, device: SimFabric, pd: Any, qp: Any) -> None:
        self._memory = bytearray(32 * _DEPTH)
        self._region = pd.register(self._memory, Access.LOCAL_WRITE)
        self._qp = qp
        for row in range(_DEPTH):
            self.post(row)

    def post(self, row: int) -> None:
        request = np.zeros(1, RECEIVE_REQUEST)
        request["wr_id"], request["offset"], request["stag"], request["length"] = row, 32 * row, self._region.stag, 32
        self._qp.post_receive(request)

    def message(self, row: int) -> tuple[int, int, int]:
        kind, first, second = _message.unpack_from(self._memory, 32 * row)
        return kind, first, second


class Outbox:
    """Messages to send, each in a row of its own until it has left."""

    def __init__(self, pd: Any, qp: Any) -> None:
        self._memory = bytearray(32 * _DEPTH)
        self._region = pd.register(self._memory, Access.NONE)
        self._qp = qp
        self._next = 0

    def send(self, kind: int, first: int, second: int) -> None:
        at = self._next % _DEPTH * 32
        self._next += 1
        _message.pack_into(self._memory, at, kind, first, second)
        self._qp.post_send(one(Op.SEND, 0, self._region, at, _message.size))


@dataclass
class Partition:
    """The target's half: a ring, its blocks, and who owns them."""

    sim: Simulation
    device: SimFabric
    blocks: int
    first_sequence: int
    owned: dict[int, int] = field(default_factory=dict)  # Block Offset -> ticket that bound it
    begun: dict[int, float] = field(default_factory=dict)  # ticket -> when it was first seen
    seen: int = 0
    abandoned: set[int] = field(default_factory=set)
    reclaim_count: int = 0
    deferred_count: int = 0

    def __post_init__(self) -> None:
        log2 = max(1, (self.blocks - 1).bit_length())
        self.log2_slots = log2
        self.slots: Array = np.zeros(1 << log2, SLOT)
        self.counters = np.zeros(2, np.uint64)
        self.memory = np.zeros(self.blocks * BLOCK, np.uint8)
        self.ring = FreeRing(
            [i * BLOCK for i in range(self.blocks)], slots=self.slots, counters=self.counters, first_sequence=self.first_sequence
        )
        self.seen = self.first_sequence
        self.is_fenced = False
        self.is_over = False

    def accept(self, request: Any, cq: SimCq) -> None:
        self.pd = self.device.alloc_pd()
        self.qp = request.create_qp(self.pd, cq)
        self.ring_region = self.pd.register(self.slots, Access.REMOTE_READ)
        self.head_region = self.pd.register(self.counters, Access.REMOTE_ATOMIC)
        self.partition = self.pd.register(self.memory, Access.REMOTE_WRITE)
        self.inbox = Inbox(self.device, self.pd, self.qp)
        self.outbox = Outbox(self.pd, self.qp)
        self.qp.accept()
        self._watch()

    def on_completion(self, op: int, status: int, wr_id: int) -> None:
        if op == Op.DISCONNECTED:
            self.is_fenced = self.is_over = True
            self.pd.close()
            self._see_tickets()
            for offset in list(self.owned):
                self._check_block(offset)
                self._free(offset)
            self._reclaim(0.0)
        elif op == Op.RECEIVE and status == CompletionStatus.OK:
            message = self.inbox.message(wr_id)
            try:
                self.inbox.post(wr_id)
                self._answer(*message)
            except QueuePairClosed:
                return  # DISCONNECTED is on its way
        self.ring.check_integrity()

    def _answer(self, kind: int, first: int, offset: int) -> None:
        if kind == _BIND:
            self.outbox.send(_BIND, self._bind(self.ring.ticket_of(first), offset), first)
        else:
            self._check_block(offset)
            self._free(offset)
            self.outbox.send(_FREE, 0, offset)

    def _bind(self, ticket: Ticket, offset: int) -> int:
        self._see_tickets()
        if ticket.sequence in self.abandoned:
            return 1
        if self.ring.read(ticket) != offset:
            raise RingBroken(f"ticket {ticket.sequence} was used for block {offset:#x}, its slot holds {self.ring.read(ticket)}")
        self.ring.consume(ticket)
        self._own(offset, ticket.sequence)
        self._check_block(offset)
        self.begun.pop(ticket.sequence, None)
        return 0

    def _own(self, offset: int, sequence: int) -> None:
        if offset in self.owned:
            raise RingBroken(f"block {offset:#x} of ticket {self.owned[offset]} was handed out again, to ticket {sequence}")
        self.owned[offset] = sequence

    def _check_block(self, offset: int) -> None:
        held = self.memory[offset : offset + BLOCK].tobytes()
        if held != content(self.owned[offset]):
            raise RingBroken(f"block {offset:#x} of ticket {self.owned[offset]} holds {held[:12].hex()}")

    def _free(self, offset: int) -> None:
        del self.owned[offset]
        self.memory[offset : offset + BLOCK] = 0
        self.ring.give_back(offset)
        self.deferred_count += self.ring.deferred_count

    # Tickets that are not bound in time

    def _see_tickets(self) -> None:
        head = int(self.counters[0]) >> 32
        while self.seen != head:
            self.begun[self.seen] = self.sim.now
            self.seen = (self.seen + 1) % (1 << 32)

    def _watch(self) -> None:
        if self.is_over:
            return
        self._see_tickets()
        late = [ticket for ticket, begun in self.begun.items() if self.sim.now - begun > TICKET_TIMEOUT_S]
        if late:
            self.fence()
            self._reclaim(TICKET_TIMEOUT_S)
            self._see_tickets()
            self._use_reclaimed()
        self.sim.after(TICKET_TIMEOUT_S / 4, self._watch)

    def fence(self) -> None:
        """No Write of the initiator reaches a block from now on, and no FetchAdd the Head."""
        self.is_fenced = True
        for region in (self.partition, self.head_region):
            self.invalidate(region)

    def invalidate(self, region: SimRegion) -> None:
        region.close()

    def _use_reclaimed(self) -> None:
        """Blocks that were reclaimed go to somebody else at once, who would notice a late Write."""
        while (head := self.ring.ticket_of(int(self.counters[0]))) and (offset := self.ring.allocate()) is not None:
            self._own(offset, head.sequence)
            self.memory[offset : offset + BLOCK] = np.frombuffer(content(head.sequence), np.uint8)
        self.seen = int(self.counters[0]) >> 32

    def _reclaim(self, age_s: float) -> None:
        """Abandon the tickets that are older: consume their slots, and give the blocks back with new tickets."""
        for sequence, begun in list(self.begun.items()):
            ticket = Ticket(sequence, sequence % self.ring.slot_count)
            offset = self.ring.read(ticket)
            if self.sim.now - begun >= age_s and offset is not None:
                self.ring.consume(ticket)
                self.abandoned.add(sequence)
                del self.begun[sequence]
                self.reclaim_count += 1
                self.memory[offset : offset + BLOCK] = 0
                self.ring.give_back(offset)

    def check_whole(self) -> None:
        self.ring.check_integrity()
        if self.owned or self.begun or self.ring.free_count != self.blocks or self.ring.deferred_count:
            raise RingBroken(f"{len(self.owned)} owned, {len(self.begun)} taken, {self.ring.free_count} free of {self.blocks}")


def content(sequence: int) -> bytes:
    return (sequence * 0x9E37_79B9_7F4A_7C15 + 1 & 0xFFFF_FFFF_FFFF_FFFF).to_bytes(8, "little") * (BLOCK // 8)


@dataclass(eq=False)
class Allocation:
    """One block that an initiator takes, and what comes next."""

    counter: int = 0
    offset: int = 0
    is_confirmed: bool = False


class RingInitiator:
    """The initiator's half: `steps` allocations, with several under way, never more than there are blocks."""

    checks_sequence = True

    def __init__(self, sim: Simulation, partition: Partition, address: tuple[str, int], number: int, steps: int) -> None:
        self.sim, self.steps, self.partition = sim, steps, partition
        self.device = SimFabric(sim, "initiator")
        self.pd = self.device.alloc_pd()
        self.cq = self.device.create_cq()
        self.qp = self.device.create_qp(self.pd, self.cq)
        self.memory = bytearray(2 * BLOCK * _DEPTH)
        self.region = self.pd.register(self.memory, Access.LOCAL_WRITE)
        self.inbox, self.outbox = Inbox(self.device, self.pd, self.qp), Outbox(self.pd, self.qp)
        self.usage = 0
        self.is_over = False
        self.done_count = 0
        self.held: list[int] = []
        self._by_row: dict[int, Allocation] = {}
        self._rows = list(range(_DEPTH - 1))
        self.cq.on_ready = self.step
        self.qp.connect(*address, bytes([number]))

    def step(self) -> None:
        for wr_id, _, op, status, _, _, _, value in self.cq.poll().tolist():
            try:
                self._on_completion(op, status, wr_id, value)
            except QueuePairClosed:
                continue  # DISCONNECTED is on its way

    def _on_completion(self, op: int, status: int, wr_id: int, value: int) -> None:
        if op == Op.CONNECTED:
            self._act()
        elif op == Op.DISCONNECTED:
            self.is_over = True
        elif status != CompletionStatus.OK:
            return
        elif op == Op.FETCH_ADD:
            allocation = self._by_row[wr_id]
            allocation.counter = value
            self.sim.after(PATIENCE_S, self._check_patience, wr_id, allocation)
            self._read(wr_id, allocation)
        elif op == Op.READ:
            self._on_slot(wr_id, self._by_row[wr_id])
        elif op == Op.RECEIVE:
            kind, first, second = self.inbox.message(wr_id)
            self.inbox.post(wr_id)
            self._on_answer(kind, first, second)

    def _act(self) -> None:
        if self.is_over:
            return
        random = self.sim.random
        try:
            if self.held and random.random() < 0.5:
                self.outbox.send(_FREE, 0, self.held.pop(random.randrange(len(self.held))))
            elif self.usage < self.partition.blocks and self.steps > 0 and self._rows:
                self._allocate()
        except QueuePairClosed:
            return
        if self.steps > 0 or self.held:
            self.sim.after(random.random() * 5e-5, self._act)
        elif not self.usage:
            self.qp.close()
        else:
            self.sim.after(2e-4, self._act)

    def _allocate(self) -> None:
        self.usage += 1
        self.steps -= 1
        row = self._rows.pop()
        self._by_row[row] = Allocation()
        mask = add_mask(self.partition.log2_slots)
        self.qp.post_send(one(Op.FETCH_ADD, row, None, 0, 0, self.partition.head_region.stag, 0, operand=MASKED_ADD, mask=mask))

    def _read(self, row: int, allocation: Allocation) -> None:
        slot = allocation.counter & (1 << self.partition.log2_slots + 4) - 1
        self.qp.post_send(one(Op.READ, row, self.region, row * BLOCK, SLOT_BYTES, self.partition.ring_region.stag, slot))

    def _on_slot(self, row: int, allocation: Allocation) -> None:
        sequence, _, offset = _slot.unpack_from(self.memory, row * BLOCK)
        if self.checks_sequence and sequence != allocation.counter >> 32 or offset == EMPTY_SLOT:
            self.sim.after(5e-5, self._read_again, row, allocation)
        elif not allocation.is_confirmed:
            allocation.is_confirmed, allocation.offset = True, offset
            self._read(row, allocation)
        elif offset != allocation.offset:
            raise RingBroken(f"slot of ticket {sequence} held {allocation.offset:#x} and then {offset:#x}")
        else:
            self._slow_down(row, allocation)

    def _read_again(self, row: int, allocation: Allocation) -> None:
        if not self.is_over:
            try:
                self._read(row, allocation)
            except QueuePairClosed:
                return

    def _slow_down(self, row: int, allocation: Allocation) -> None:
        """Now and then an initiator takes its time between reading its slot and writing the block."""
        random = self.sim.random
        self.sim.after(random.random() * (0.1 if random.random() < 0.002 else 1e-4), self._store, row, allocation)

    def _store(self, row: int, allocation: Allocation) -> None:
        if self.is_over:
            return
        at = (_DEPTH + row) * BLOCK
        self.memory[at : at + BLOCK] = content(allocation.counter >> 32)
        try:
            self.qp.post_send(one(Op.WRITE, row, self.region, at, BLOCK, self.partition.partition.stag, allocation.offset))
            self.outbox.send(_BIND, allocation.counter, allocation.offset)
        except QueuePairClosed:
            return

    def _on_answer(self, kind: int, first: int, second: int) -> None:
        if kind == _FREE:
            self.usage -= 1
            self.done_count += 1
            return
        row, allocation = next((r, a) for r, a in self._by_row.items() if a.counter == second and a.is_confirmed)
        del self._by_row[row]
        self._rows.append(row)
        if first:
            self.usage -= 1
        else:
            self.held.append(allocation.offset)

    def _check_patience(self, row: int, allocation: Allocation) -> None:
        if self.partition.is_fenced:
            self.qp.abort()  # its ticket may have been reclaimed, and nobody tells it
        elif self._by_row.get(row) is allocation and not self.is_over:
            raise RingBroken(f"ticket {allocation.counter >> 32} has found no block in {PATIENCE_S} s")


@dataclass
class RingOutcome:
    allocations: int
    reclaims: int
    deferred: int


class RingWorld:
    """One target process, `pairs` connections."""

    def __init__(self, seed: int, *, steps: int = 200) -> None:
        sim = self.sim = Simulation(seed, Conditions(stall=0.05))
        random = sim.random
        self.device = SimFabric(sim, "target")
        self.cq = self.device.create_cq()
        self.cq.on_ready = self._step
        self.listener = self.device.listen("10.0.0.9", 7400, self.cq)
        self.partitions: list[Partition] = []
        self.initiators: list[RingInitiator] = []
        for _ in range(random.randint(1, 2)):
            blocks = random.choice((1, 2, 3, 4, 7))
            slots = 1 << max(1, (blocks - 1).bit_length())
            first = random.choice((0, (1 << 32) - slots, (1 << 32) - 8 * slots))
            self.partitions.append(Partition(sim, self.device, blocks, first))
        self._by_number: dict[int, Partition] = {}
        for number, partition in enumerate(self.partitions):
            self.initiators.append(RingInitiator(sim, partition, self.listener.address, number, steps))
        if random.random() < 0.3:
            sim.after(2e-3 + random.random() * 0.02, self.initiators[0].qp.lose)
        if random.random() < 0.2:
            sim.after(2e-3 + random.random() * 0.02, self._crash_initiator)

    def _step(self) -> None:
        for request in self.listener.poll():
            partition = self.partitions[request.private_data[0]]
            partition.accept(request, self.cq)
            self._by_number[partition.qp.number] = partition
        for wr_id, number, op, status, *_ in self.cq.poll().tolist():
            self._by_number[number].on_completion(op, status, wr_id)

    def _crash_initiator(self) -> None:
        self.initiators[0].device.crash()
        self.initiators[0].is_over = True

    def run(self) -> RingOutcome:
        accepted = self.sim.run(20.0, lambda: all(p.is_over for p in self.partitions))
        if not accepted:
            raise RingBroken("not all is over in time")
        for partition in self.partitions:
            partition.check_whole()
        return RingOutcome(
            sum(i.done_count for i in self.initiators),
            sum(p.reclaim_count for p in self.partitions),
            sum(p.deferred_count for p in self.partitions),
        )
