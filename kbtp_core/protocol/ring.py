"""The free-block ring (draft section 3.3; its unmasked form, section 9.2).

A ring of N = 2^n slots lists the blocks that nobody owns. Two counters move over it, Head when a block is taken and Tail when
one is given back; each counter packs a 32-bit ticket and, in the masked form, the byte offset of a slot.

Two rules carry everything else:
1. A slot is written only after its previous content was consumed.
2. An allocation reads exactly the slot that was written for its ticket.

So no block is lost and none is handed out twice, whatever the interleaving: a free whose slot is still unread waits in line for
that slot (`deferred_count`), and an allocation whose slot is not written yet reads again (`read` returns None).

Slots are big-endian in memory, counters native, as RFC 7306 has atomics. Tickets run modulo 2^32.
`check_integrity` states the rules as code.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import EMPTY_SLOT, SLOT_BYTES
from kbtp_core.protocol.table import memory_fence

SLOT: Final = np.dtype([("sequence", ">u4"), ("reserved", ">u4"), ("block_offset", ">u8")])
"""One ring slot as it lies in memory."""

MASKED_ADD: Final = 0x0000_0001_0000_0010
UNMASKED_ADD: Final = 0x0000_0001_0000_0000
_TICKETS: Final = 1 << 32
_ALL: Final = (1 << 64) - 1


def fetch_add(old: int, add: int, mask: int) -> int:
    """The new value of a masked FetchAdd (RFC 7306, section 5.1.1): each set bit of `mask` ends a field whose carry is dropped."""
    return (((old & ~mask & _ALL) + (add & ~mask & _ALL)) & _ALL) ^ ((old ^ add) & mask)


def add_mask(log2_slots: int) -> int:
    """The Add Mask of a ring of 2^log2_slots slots."""
    return 1 << 63 | 1 << 31 | 1 << (log2_slots + 3)


class RingDriver(Protocol):
    """Moves a ring that several parties allocate from, each call whole; over the same slots and counters."""

    def allocate(self) -> int | None: ...
    def give_back(self, block_offset: int) -> None: ...


@runtime_checkable
class MovesMany(Protocol):
    """A driver that moves many blocks in one call."""

    def allocate_many(self, count: int) -> NDArray[np.uint64]: ...
    def give_back_many(self, block_offsets: NDArray[np.uint64]) -> None: ...


class Ticket(NamedTuple):
    """A place in the order of allocations, or of frees: `sequence` is what its slot carries, `slot` which slot that is."""

    sequence: int
    slot: int


class FreeRing:
    """A ring that starts with the blocks at `block_offsets` free.

    `log2_slots` defaults to the smallest that fits. `slots` (dtype SLOT) and `counters` (two native u64: Head, Tail) may be given,
    to lie in registered memory. `first_sequence` starts the tickets elsewhere than at zero, to reach their wrap soon.
    """

    def __init__(
        self,
        block_offsets: Sequence[int] | NDArray[np.uint64],
        *,
        log2_slots: int | None = None,
        masked: bool = True,
        slots: NDArray[Any] | None = None,
        counters: NDArray[np.uint64] | None = None,
        first_sequence: int = 0,
    ) -> None:
        count = len(block_offsets)
        n = max(1, (count - 1).bit_length()) if log2_slots is None else log2_slots
        if not 1 <= n <= 28 or count > 1 << n:
            raise ValueError(f"{count} blocks in 2^{n} slots: n must be 1 ... 28 and hold all blocks")
        if first_sequence % (1 << n):
            raise ValueError(f"first_sequence {first_sequence} must be a multiple of the {1 << n} slots")
        self.slot_count = 1 << n
        self.block_count = count
        self.slots = np.zeros(self.slot_count, SLOT) if slots is None else slots
        self.counters = np.zeros(2, np.uint64) if counters is None else counters
        if self.slots.dtype != SLOT or self.slots.shape != (self.slot_count,) or self.counters.shape != (2,):
            raise ValueError(f"ring memory must be {self.slot_count} entries of dtype SLOT and two counters")
        self._offset_limit = self.slot_count * SLOT_BYTES
        self._add, self._mask = (MASKED_ADD, add_mask(n)) if masked else (UNMASKED_ADD, 0)
        self._is_masked = masked
        self._sequences: NDArray[np.uint32] = self.slots.view(np.uint32).reshape(-1, 4)[:, 0]
        self._offsets: NDArray[np.uint64] = self.slots.view(np.uint64).reshape(-1, 2)[:, 1]
        self._deferred: dict[int, deque[tuple[int, int]]] = {}  # slot -> (sequence, block offset), oldest first
        self.deferred_count = 0
        self.driver: RingDriver | None = None
        """Who allocates and gives back instead, once an executor shares this ring. Then nobody else moves Head, and no free waits."""
        self._initialize(block_offsets, first_sequence)

    def _initialize(self, block_offsets: Sequence[int] | NDArray[np.uint64], first: int) -> None:
        sequences = first + np.arange(self.slot_count, dtype=np.int64)
        sequences[self.block_count :] -= self.slot_count
        self.slots["sequence"] = sequences % _TICKETS
        self.slots["block_offset"][: self.block_count] = block_offsets
        self.slots["block_offset"][self.block_count :] = EMPTY_SLOT
        self.counters[0] = self._counter(first)
        self.counters[1] = self._counter(first + self.block_count)

    def _counter(self, ticket: int) -> int:
        slot_offset = ticket % self.slot_count * SLOT_BYTES if self._is_masked else 0
        return (ticket % _TICKETS) << 32 | slot_offset

    def ticket_of(self, counter: int) -> Ticket:
        """What a counter value that FetchAdd returned means."""
        sequence = counter >> 32
        slot = (counter & (self._offset_limit - 1)) // SLOT_BYTES if self._is_masked else sequence % self.slot_count
        return Ticket(sequence, slot)

    def ticket_at(self, sequence: int) -> Ticket:
        """The ticket with this Sequence; slots follow tickets, for N divides 2^32."""
        return Ticket(sequence, sequence % self.slot_count)

    def is_in_step(self, counter: int) -> bool:
        """Whether a counter has the form that FetchAdds of this ring leave: its fields agree and the bits between them are zero."""
        return counter == self._counter(counter >> 32)

    @property
    def is_masked(self) -> bool:
        return self._is_masked

    @property
    def log2_slots(self) -> int:
        return self.slot_count.bit_length() - 1

    @property
    def free_count(self) -> int:
        """Blocks without a ticket: given back (written or deferred) and not taken. Negative if more tickets were taken than that."""
        distance = ((int(self.counters[1]) >> 32) - (int(self.counters[0]) >> 32)) % _TICKETS
        return distance - _TICKETS if distance >= _TICKETS // 2 else distance

    def take_ticket(self) -> Ticket:
        """FetchAdd on Head. Whoever holds the ticket owns what its slot will hold, now or later."""
        return self._advance(0)

    def read(self, ticket: Ticket) -> int | None:
        """The Block Offset for `ticket`, or None while its slot is not written yet. Reading does not consume."""
        if self._sequence(ticket.slot) != ticket.sequence:
            return None
        offset = self._offset(ticket.slot)
        return None if offset == EMPTY_SLOT else offset

    def block_for(self, ticket: Ticket) -> int:
        """The block that `ticket` will yield, from its slot or from the line for it. Raises ValueError if no free was for it yet."""
        written = self.read(ticket)
        if written is not None:
            return written
        for sequence, offset in self._deferred.get(ticket.slot, ()):
            if sequence == ticket.sequence:
                return offset
        raise ValueError(f"no block was given back for ticket {ticket.sequence}")

    def consume(self, ticket: Ticket) -> None:
        """Mark the slot of `ticket` consumed, after its block was read. The next free in line for the slot is written now."""
        if self.read(ticket) is None:
            raise ValueError(f"slot {ticket.slot} does not hold a block for ticket {ticket.sequence}")
        self._set_offset(ticket.slot, EMPTY_SLOT)
        waiting = self._deferred.get(ticket.slot)
        if waiting:
            sequence, offset = waiting.popleft()
            self.deferred_count -= 1
            if not waiting:
                del self._deferred[ticket.slot]
            self._write_slot(ticket.slot, sequence, offset)

    def allocate(self) -> int | None:
        """Take a block: its Block Offset, or None, with no ticket taken, if none can be had at once."""
        if self.driver is not None:
            return self.driver.allocate()
        head = self.ticket_of(int(self.counters[0]))
        if self.free_count <= 0 or self.read(head) is None:
            return None
        ticket = self.take_ticket()
        offset = self.read(ticket)
        self.consume(ticket)
        return offset

    def give_back(self, block_offset: int) -> bool:
        """FetchAdd on Tail, and write the slot (True), or wait in line until its last content is consumed (False)."""
        if self.driver is not None:
            self.driver.give_back(block_offset)
            return True
        ticket = self._advance(1)
        if ticket.slot in self._deferred or self._offset(ticket.slot) != EMPTY_SLOT:
            self._deferred.setdefault(ticket.slot, deque()).append((ticket.sequence, block_offset))
            self.deferred_count += 1
            return False
        self._write_slot(ticket.slot, ticket.sequence, block_offset)
        return True

    def allocate_many(self, count: int) -> NDArray[np.uint64]:
        """As `allocate`, up to `count` blocks."""
        driver: object = self.driver
        if isinstance(driver, MovesMany):
            return driver.allocate_many(count)
        offsets: list[int] = []
        while len(offsets) < count and (offset := self.allocate()) is not None:
            offsets.append(offset)
        return np.array(offsets, np.uint64)

    def give_back_many(self, block_offsets: NDArray[np.uint64]) -> None:
        """As `give_back` for each."""
        driver: object = self.driver
        if isinstance(driver, MovesMany):
            driver.give_back_many(block_offsets)
            return
        for offset in block_offsets.tolist():
            self.give_back(offset)

    def listed_offsets(self) -> list[int]:
        """All Block Offsets in slots and in line for one, whether ticketed or not."""
        written = [self._offset(slot) for slot in range(self.slot_count)]
        return [o for o in written if o != EMPTY_SLOT] + [o for line in self._deferred.values() for _, o in line]

    def check_integrity(self, *, remote_head: bool = False) -> None:
        """Assert what must hold between any two calls; with `remote_head` nothing about Head, which a peer moves."""
        for counter in [int(value) for value in self.counters][remote_head:]:
            assert self.is_in_step(counter), f"counter {counter:#018x} has lost step"
        listed = self.listed_offsets()
        assert len(listed) == len(set(listed)), "a block is listed twice"
        assert len(listed) <= self.block_count, "more blocks are listed than there are"
        assert remote_head or len(listed) >= self.free_count, "a block was lost"
        assert self.deferred_count == sum(map(len, self._deferred.values())), "deferred frees miscounted"
        tail = int(self.counters[1]) >> 32
        for slot in range(self.slot_count):
            sequence = self._sequence(slot)
            assert sequence % self.slot_count == slot, f"slot {slot} carries foreign sequence {sequence}"
            assert 0 < (tail - sequence) % _TICKETS < _TICKETS // 2, f"slot {slot} was written for a ticket not given out"
        for slot, line in self._deferred.items():
            assert self._offset(slot) != EMPTY_SLOT, f"slot {slot} is consumed, yet a free waits for it"
            sequences = [self._sequence(slot), *(sequence for sequence, _ in line)]
            assert all((b - a) % _TICKETS == self.slot_count for a, b in pairwise(sequences)), "frees out of order"

    def _advance(self, which: int) -> Ticket:
        old = int(self.counters[which])
        self.counters[which] = fetch_add(old, self._add, self._mask)
        return self.ticket_of(old)

    def _write_slot(self, slot: int, sequence: int, offset: int) -> None:
        """Block Offset first: who sees the new Sequence sees the new Block Offset."""
        self._set_offset(slot, offset)
        memory_fence()
        self._sequences[slot] = int.from_bytes(sequence.to_bytes(4, "big"), sys.byteorder)

    def _sequence(self, slot: int) -> int:
        return int.from_bytes(int(self._sequences[slot]).to_bytes(4, sys.byteorder), "big")

    def _offset(self, slot: int) -> int:
        return int.from_bytes(int(self._offsets[slot]).to_bytes(8, sys.byteorder), "big")

    def _set_offset(self, slot: int, offset: int) -> None:
        self._offsets[slot] = int.from_bytes(offset.to_bytes(8, "big"), sys.byteorder)
