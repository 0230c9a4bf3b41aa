"""The target's side of DIRECT_ALLOC: one session's own ring over a partition of the pool (draft sections 3.4 and 6.6).

The initiator takes tickets by FetchAdd on Head, of which the target hears nothing: it looks at Head now and then (`observe`) and
starts each new ticket's timer. A ticket ends in one of two ways:

    taken --BIND--> consumed        (its block is bound)
    taken --timeout--> abandoned    (its block returns to the ring with a new ticket)

Three rules:
1. No block is reclaimed while the initiator can still write to it: the partition goes OPEN -> REVOKING -> REVOKED, and tickets are
   abandoned in REVOKED only, which the driver announces once the Partition STag is invalid. It never opens again.
2. Head belongs to the initiator until then, so nothing that it holds is believed: a Head that moved other than by section 3.3's
   FetchAdd, or past Tail (over the quota), is reported and ends the session.
3. A ticket is served only from the slot that was written for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple

from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.ring import FreeRing, Ticket

_TICKETS: Final = 1 << 32


class PartitionState(Enum):
    OPEN = "open"
    REVOKING = "revoking"
    REVOKED = "revoked"


class _Taken(NamedTuple):
    ticket: Ticket
    block_offset: int
    deadline: float


@dataclass(frozen=True)
class DirectPolicy:
    """Whom the operator lets use the direct modes, by trust domain.

    `masked`: whether the provider does masked atomics, so that counters may have the form of section 3.3.
    """

    load_domains: frozenset[str] = frozenset()
    alloc_domains: frozenset[str] = frozenset()
    ticket_timeout_s: float = 1.0
    masked: bool = True

    def __post_init__(self) -> None:
        if not 0.001 <= self.ticket_timeout_s <= 0xFFFF_FFFF / 1000:
            raise ValueError(f"a ticket timeout of {self.ticket_timeout_s} s does not fit HELLO_ACK: 1 ms to 2^32 ms")
        foreign = {(reader, writer) for reader in self.load_domains for writer in self.alloc_domains if reader != writer}
        if foreign:
            reader, writer = min(foreign)
            raise ValueError(
                f"DIRECT_LOAD of trust domain {reader!r} would read blocks that {writer!r} can still write by DIRECT_ALLOC: "
                f"grant both modes to the same single domain, or only one of them"
            )


class Partition:
    """The blocks at `block_offsets`, allocated by the initiator itself. `check` says whether a BIND's ticket is good."""

    def __init__(self, block_offsets: list[int], *, masked: bool, timeout_s: float) -> None:
        self.ring: Final = FreeRing(block_offsets, masked=masked)
        self.block_offsets: Final = tuple(block_offsets)
        self.timeout_s: Final = timeout_s
        self.state = PartitionState.OPEN
        self.fault: str | None = None
        """Why the session must end: what Head shows can't be a well-behaved initiator's doing."""
        self._seen = 0  # the next ticket that was not yet observed as taken
        self._taken: dict[int, _Taken] = {}  # by sequence, oldest first
        self._abandoned: set[int] = set()

    @property
    def taken_offsets(self) -> list[int]:
        """Blocks of the tickets that are taken and neither bound nor abandoned."""
        return [taken.block_offset for taken in self._taken.values()]

    def observe(self, now: float) -> list[int]:
        """Look at Head: the Block Offsets of tickets that were taken since the last look. Sets `fault` if Head is impossible."""
        head, tail = int(self.ring.counters[0]), int(self.ring.counters[1]) >> 32
        if self.fault is not None or head >> 32 == self._seen and self.ring.is_in_step(head):
            return []
        room = (tail - self._seen) % _TICKETS
        count = ((head >> 32) - self._seen) % _TICKETS
        if not self.ring.is_in_step(head) or count > max(room, self.ring.slot_count) + self.ring.slot_count:
            self.fault = f"its Head {head:#018x} was not advanced by the FetchAdd of section 3.3"
            return []
        if count > room:
            self.fault = f"it took {count - room} tickets more than its quota of {len(self.block_offsets)} allows"
        fresh = []
        for _ in range(min(count, room)):
            ticket = self.ring.ticket_at(self._seen)
            taken = _Taken(ticket, self.ring.block_for(ticket), now + self.timeout_s)
            self._taken[ticket.sequence] = taken
            fresh.append(taken.block_offset)
            self._seen = (self._seen + 1) % _TICKETS
        return fresh

    def check(self, sequence: int, block_offset: int) -> Status:
        """Whether a BIND may have the block of ticket `sequence`; call `observe` before."""
        if sequence in self._abandoned:
            return Status.TICKET_ABANDONED
        taken = self._taken.get(sequence)
        if taken is None:
            excess = ((int(self.ring.counters[0]) >> 32) - self._seen) % _TICKETS
            is_excess = self.fault is not None and (sequence - self._seen) % _TICKETS < excess
            return Status.NO_SPACE if is_excess else Status.TICKET_INVALID
        return Status.OK if self.ring.read(taken.ticket) == block_offset else Status.TICKET_INVALID

    def consume(self, sequence: int) -> None:
        """BIND has the block of a ticket for which `check` said OK."""
        self.ring.consume(self._taken.pop(sequence).ticket)

    def is_overdue(self, now: float) -> bool:
        """Whether a ticket's time is over."""
        return any(taken.deadline <= now for taken in self._taken.values())

    def abandon_overdue(self, now: float) -> list[int]:
        """Return the blocks of overdue tickets to the ring, each with a new ticket; only once REVOKED. Their Block Offsets."""
        assert self.state is PartitionState.REVOKED, "a block was reclaimed while its initiator could still write to it"
        overdue = [sequence for sequence, taken in self._taken.items() if taken.deadline <= now]
        offsets = []
        for sequence in overdue:
            taken = self._taken[sequence]
            if self.ring.read(taken.ticket) is None:
                continue  # its slot is still held by an older ticket, whose time comes first
            del self._taken[sequence]
            self._abandoned.add(sequence)
            self.ring.consume(taken.ticket)
            self.ring.give_back(taken.block_offset)
            offsets.append(taken.block_offset)
        return offsets

    def allocate(self) -> int | None:
        """A block for a target-executed allocation, once the initiator has lost Head; None before, or if there is none."""
        if self.state is not PartitionState.REVOKED:
            return None
        offset = self.ring.allocate()
        if offset is not None:
            self._seen = int(self.ring.counters[0]) >> 32
        return offset

    def check_integrity(self) -> None:
        """Assert rules 2 and 3."""
        if self.fault is None:
            self.ring.check_integrity(remote_head=self.state is not PartitionState.REVOKED)
        for taken in self._taken.values():
            assert self.ring.block_for(taken.ticket) == taken.block_offset, "a ticket's slot was written for somebody else"
