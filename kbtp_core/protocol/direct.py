"""The initiator's side of the direct modes: blocks read and taken by one-sided operations alone (draft section 6.6).

Each machine below works on n blocks at once, in rounds: it names operations, its driver carries them all out, and `advance` looks at
what came and names the next ones, until there are none. No operation of a block is issued before the block's previous one has completed.

DIRECT_LOAD    entry -> block -> entry again: good if both reads show the same 16 octets, VALID and SEALED
DIRECT_ALLOC   FetchAdd on Head -> slot, again and again until it holds the ticket, and once more -> write the block -> BIND

1. A read of 16 octets is not atomic: nothing is believed that was not read twice, and no length or offset leaves the pool.
2. The quota is counted here too: no ticket is taken beyond it.
3. A ticket whose BIND failed is still ours; it is used by the next allocation, before a new one is taken.
4. A ticket that may have timed out at the target is not used any more, and the mode is over for this session: the target invalidates
   the STags then, and an operation that names one would end the connection. ALLOC_STORE still works.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import IntEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import EMPTY_SLOT, ENTRY_BYTES, NO_STATUS, SLOT_BYTES, Capability, EntryFlag, Status
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.ring import MASKED_ADD, SLOT, UNMASKED_ADD, add_mask
from kbtp_core.protocol.table import ENTRY

_WRAP: Final = 1 << 64


class DirectKind(IntEnum):
    READ = 0
    WRITE = 1
    FETCH_ADD = 2


OPERATION: Final = np.dtype(
    [
        ("kind", "u1"),  # DirectKind
        ("in_data", "?"),  # local_offset is one of the caller's data region, else of the machine's scratch
        ("index", "u4"),  # which of the n blocks it is for
        ("stag", "u4"),
        ("length", "u4"),
        ("offset", "u8"),
        ("local_offset", "u8"),
    ]
)
"""One operation that a driver is to carry out."""


def _operations(kind: DirectKind, indexes: NDArray[np.intp], **fields: Any) -> NDArray[Any]:
    operations = np.zeros(len(indexes), OPERATION)
    operations["kind"], operations["index"] = kind, indexes
    for name, values in fields.items():
        operations[name] = values
    return operations


def _shifted(base: int, offsets: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shifted: NDArray[np.uint64] = offsets + np.uint64(base % _WRAP)  # modulo 2^64, as a base may stand for a negative shift
    return shifted


class DirectBatch(ABC):
    """n blocks and their results, arrays of shape (n,). `scratch` is memory that the driver registers for entries and slots."""

    def __init__(self, count: int, scratch_bytes: int) -> None:
        self.count = count
        self.scratch: NDArray[np.uint8] = np.zeros(max(scratch_bytes, 1), np.uint8)
        self.status: NDArray[np.uint16] = np.full(count, NO_STATUS, np.uint16)
        self.generation: NDArray[np.uint16] = np.zeros(count, np.uint16)
        self.data_length: NDArray[np.uint32] = np.zeros(count, np.uint32)
        self.block_offset: NDArray[np.uint64] = np.zeros(count, np.uint64)

    @abstractmethod
    def start(self, now: float) -> NDArray[Any]:
        """The first round of operations."""

    @abstractmethod
    def advance(self, values: NDArray[np.uint64], now: float) -> NDArray[Any]:
        """The round's operations have completed, atomics with `values`; the next round, empty when there is no more."""


class DirectLoad(DirectBatch):
    """Read the blocks of `handles` into (offset, length) slices of the data region. Generation 0 accepts any."""

    def __init__(
        self,
        ack: HelloAck,
        handles: NDArray[np.uint64],
        generations: NDArray[np.uint16],
        offsets: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
    ) -> None:
        super().__init__(len(handles), 2 * ENTRY_BYTES * len(handles))
        self._ack = ack
        self._generations, self._offsets, self._lengths = generations, offsets, lengths
        self._entries = handles - np.uint64(ack.table_base)
        self._first = self.scratch[: ENTRY_BYTES * self.count].view(ENTRY)
        self._second = self.scratch[ENTRY_BYTES * self.count : 2 * ENTRY_BYTES * self.count].view(ENTRY)
        self._active: NDArray[np.intp] = np.arange(self.count)
        self._phase = 0  # 0: first entry, 1: block, 2: entry again

    def start(self, now: float) -> NDArray[Any]:
        del now
        outside = self._entries >= np.uint64(self._ack.table_count)
        self.status[outside] = Status.NOT_PERMITTED
        self._active = np.flatnonzero(~outside)
        return self._read_entries(0)

    def advance(self, values: NDArray[np.uint64], now: float) -> NDArray[Any]:
        del values, now
        self._phase = (self._phase + 1) % 3
        if self._phase == 1:
            return self._read_blocks()
        if self._phase == 2:
            return self._read_entries(ENTRY_BYTES * self.count)
        # The second look is compared whole: an entry that was torn, or bound anew, differs somewhere.
        active = self._active
        is_same = self._first[active] == self._second[active]
        is_inside = self._is_inside(self._first[active])
        self.status[active[is_same & ~is_inside]] = Status.DATA_CORRUPT
        good = active[is_same & is_inside]
        self.status[good] = Status.OK
        self.data_length[good] = self._first["data_length"][good]
        self.block_offset[good] = self._first["block_offset"][good]
        self._active = active[~is_same]
        self._first[self._active] = self._second[self._active]
        self._phase = 1
        return self._read_blocks()

    def _read_entries(self, scratch_at: int) -> NDArray[Any]:
        active = self._active
        at = self._entries[active] * np.uint64(ENTRY_BYTES)
        local = active * ENTRY_BYTES + scratch_at
        offsets = _shifted(self._ack.direct.table_offset, at)
        return _operations(
            DirectKind.READ, active, stag=self._ack.direct.table_stag, length=ENTRY_BYTES, offset=offsets, local_offset=local
        )

    def _is_inside(self, entries: NDArray[Any]) -> NDArray[np.bool_]:
        """Which entries name octets of the pool; one that doesn't was torn, or is nonsense if it stays so."""
        ack = self._ack
        length, at = entries["data_length"].astype(np.uint64), _shifted(ack.direct.pool_offset, entries["block_offset"].astype(np.uint64))
        end = np.uint64(ack.block_count * ack.block_bytes)
        is_inside: NDArray[np.bool_] = (length > 0) & (length <= ack.block_bytes) & (at <= end) & (at + length <= end)
        return is_inside

    def _read_blocks(self) -> NDArray[Any]:
        """Judge the first look at the entries still in question; reads of the blocks that pass, or else the second look at once."""
        active, ack = self._active, self._ack
        entries = self._first[active]
        flags, length = entries["flags"].astype(np.uint16), entries["data_length"].astype(np.uint32)
        generation = entries["generation"].astype(np.uint16)
        wanted = self._generations[active]
        is_inside = self._is_inside(entries)
        status = np.select(
            [
                flags & np.uint16(EntryFlag.VALID) == 0,
                (wanted != 0) & (wanted != generation),
                flags & np.uint16(EntryFlag.SEALED) == 0,
                is_inside & (length > self._lengths[active]),
            ],
            [Status.NOT_BOUND, Status.STALE_GENERATION, Status.NOT_SEALED, Status.LENGTH],
            Status.OK,
        )
        self.generation[active] = generation
        is_good = status == Status.OK
        self.status[active[~is_good]] = status[~is_good]
        self._active = active[is_good]
        is_read = is_good & is_inside
        if not np.count_nonzero(is_read):
            self._phase = 2
            return self._read_entries(ENTRY_BYTES * self.count)
        at = _shifted(ack.direct.pool_offset, entries["block_offset"].astype(np.uint64))
        return _operations(
            DirectKind.READ,
            active[is_read],
            in_data=True,
            stag=ack.direct.pool_stag,
            length=length[is_read],
            offset=at[is_read],
            local_offset=self._offsets[active[is_read]],
        )


class DirectAllocator:
    """What a session knows of its partition: tickets that it holds and has not bound."""

    def __init__(self, ack: HelloAck) -> None:
        if not ack.capabilities & Capability.DIRECT_ALLOC:
            raise ValueError("the target did not grant DIRECT_ALLOC")
        self.ack: Final = ack
        masked = bool(ack.capabilities & Capability.MASKED_ATOMICS)
        self.add: Final = MASKED_ADD if masked else UNMASKED_ADD
        self.add_mask: Final = add_mask(ack.direct.ring_log2_slots) if masked else 0
        self.is_masked: Final = masked
        self.spare: list[tuple[int, float]] = []
        """Tickets that are ours and whose slot was not consumed, as counter values, and when each runs out."""
        self.is_over = False
        """A ticket may have timed out (rule 4)."""
        self.held_count = 0
        """Tickets taken and not bound, the spare ones too."""

    def slot_offset(self, counter: int) -> int:
        slots = 1 << self.ack.direct.ring_log2_slots
        return counter & (slots * SLOT_BYTES - 1) if self.is_masked else SLOT_BYTES * ((counter >> 32) % slots)


class DirectStore(DirectBatch):
    """Take blocks and write `lengths` octets at `offsets` of the data region into them; then they are to be bound (`bindable`).

    `bound_count` is how many handles the session has bound. Blocks beyond the quota get NO_SPACE and take no ticket.
    """

    def __init__(self, allocator: DirectAllocator, bound_count: int, offsets: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> None:
        super().__init__(len(offsets), SLOT_BYTES * len(offsets))
        self._allocator = allocator
        self._offsets, self._lengths = offsets, lengths
        self._slots = self.scratch[: SLOT_BYTES * self.count].view(SLOT)
        self._counters: NDArray[np.uint64] = np.zeros(self.count, np.uint64)
        self._last = np.zeros(self.count, SLOT)  # the previous look at a slot, all ones where it was not ready
        self._last["block_offset"] = EMPTY_SLOT
        self._has_ticket: NDArray[np.bool_] = np.zeros(self.count, np.bool_)
        self._bound_count = bound_count
        self._runs_out_at = np.full(self.count, np.inf)
        self._is_confirmed: NDArray[np.bool_] = np.zeros(self.count, np.bool_)
        self._is_written = False
        self._taking: NDArray[np.intp] = np.arange(0)

    @property
    def bindable(self) -> NDArray[np.intp]:
        """Indexes of the blocks whose data is written, in order."""
        return np.flatnonzero(self._is_confirmed) if self._is_written else np.arange(0)

    @property
    def tickets(self) -> NDArray[np.uint32]:
        tickets: NDArray[np.uint32] = (self._counters >> np.uint64(32)).astype(np.uint32)
        return tickets

    def start(self, now: float) -> NDArray[Any]:
        ack, allocator = self._allocator.ack, self._allocator
        allocator.is_over |= any(runs_out_at <= now for _, runs_out_at in allocator.spare)
        if allocator.is_over:
            self.status[:] = Status.UNSUPPORTED
            return _operations(DirectKind.READ, np.arange(0))
        size = (self._lengths == 0) | (self._lengths > ack.block_bytes)
        self.status[size] = Status.LENGTH
        wanted = np.flatnonzero(~size)
        reused = min(len(wanted), len(allocator.spare))
        room = max(0, ack.quota - self._bound_count - allocator.held_count)
        self.status[wanted[reused + room :]] = Status.NO_SPACE
        for index in wanted[:reused]:
            self._counters[index], self._runs_out_at[index] = allocator.spare.pop(0)
            self._has_ticket[index] = True
        self._taking = wanted[reused : reused + room]
        self._runs_out_at[self._taking] = now + ack.direct.ticket_timeout_ms / 1000
        allocator.held_count += len(self._taking)
        if not len(self._taking):
            return self._read_slots()
        return _operations(DirectKind.FETCH_ADD, self._taking, stag=ack.direct.head_stag, offset=ack.direct.head_offset)

    def advance(self, values: NDArray[np.uint64], now: float) -> NDArray[Any]:
        if not self._is_written and (self._runs_out_at <= now).any():
            self._allocator.is_over = True
            self.status[self.status == NO_STATUS] = Status.TICKET_ABANDONED
            return _operations(DirectKind.READ, np.arange(0))
        if len(self._taking):
            self._counters[self._taking] = values
            self._has_ticket[self._taking] = True
            self._taking = np.arange(0)
            return self._read_slots()
        if self._is_written:
            return _operations(DirectKind.READ, np.arange(0))
        self._look_at_slots()
        return self._read_slots()

    def _look_at_slots(self) -> None:
        open_slots = np.flatnonzero(self._has_ticket & ~self._is_confirmed)
        slots = self._slots[open_slots]
        is_ready = (slots["sequence"] == self.tickets[open_slots]) & (slots["block_offset"] != EMPTY_SLOT)
        is_confirmed = is_ready & (slots == self._last[open_slots])
        self._is_confirmed[open_slots[is_confirmed]] = True
        self._last[open_slots] = slots
        self._last["block_offset"][open_slots[~is_ready]] = EMPTY_SLOT
        self.block_offset[open_slots[is_confirmed]] = slots["block_offset"][is_confirmed]

    def _read_slots(self) -> NDArray[Any]:
        """Reads of the slots that are not confirmed; once all are, writes of all blocks."""
        direct = self._allocator.ack.direct
        open_slots = np.flatnonzero(self._has_ticket & ~self._is_confirmed)
        if len(open_slots):
            at = np.array([self._allocator.slot_offset(int(counter)) for counter in self._counters[open_slots]], np.uint64)
            offsets = _shifted(direct.ring_offset, at)
            local = open_slots * SLOT_BYTES
            return _operations(DirectKind.READ, open_slots, stag=direct.ring_stag, length=SLOT_BYTES, offset=offsets, local_offset=local)
        self._is_written = True
        ready = np.flatnonzero(self._is_confirmed)
        return _operations(
            DirectKind.WRITE,
            ready,
            in_data=True,
            stag=direct.partition_stag,
            length=self._lengths[ready],
            offset=_shifted(direct.pool_offset, self.block_offset[ready]),
            local_offset=self._offsets[ready],
        )

    def settle(self, statuses: NDArray[np.uint16], generations: NDArray[np.uint16]) -> None:
        """The BINDs of `bindable` were answered so; NO_STATUS where not."""
        bound = self.bindable
        self.status[bound], self.generation[bound] = statuses, generations
        is_ok = statuses == Status.OK
        self.data_length[bound[is_ok]] = self._lengths[bound[is_ok]]
        self.block_offset[bound[~is_ok]] = 0
        for index, status in zip(bound.tolist(), statuses.tolist(), strict=True):
            if status in _TICKET_IS_OURS:
                self._allocator.spare.append((int(self._counters[index]), float(self._runs_out_at[index])))
            elif status == Status.TICKET_ABANDONED:
                self._allocator.is_over = True
            elif status != NO_STATUS:
                self._allocator.held_count -= 1

    def give_up(self) -> None:
        """Before BIND: the tickets that came stay ours; one whose FetchAdd was not answered is lost, and so is the mode."""
        self._allocator.is_over |= bool(len(self._taking))
        for index in np.flatnonzero(self._has_ticket).tolist():
            self._allocator.spare.append((int(self._counters[index]), float(self._runs_out_at[index])))


_TICKET_IS_OURS: Final = frozenset(
    {
        Status.MALFORMED,
        Status.NOT_PERMITTED,
        Status.ALREADY_BOUND,
        Status.STALE_GENERATION,
        Status.LENGTH,
        Status.BUSY,
        Status.SHUTTING_DOWN,
    }
)
"""After these a BIND may be tried again with the same ticket."""
