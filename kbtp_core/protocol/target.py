"""The target: what all sessions of one pool share (draft sections 3 and 6, completion page "Session rules").

Each table entry is in one state, and it moves only here:

    IDLE --bind--> BOUND --clear--> DRAINING --no reader left--> IDLE            (RING: the block goes back to the ring)
                                                            --> DRAINED --take_drained--> IDLE   (LENT: its owner is told)

1. The generation advances before anybody else can have the block: clearing comes first, then the wait for readers.
2. Readers are counted per entry: the RDMA operations of the sessions' own requests, plus what `readers` reports of an
   executor. Once an entry is cleared the count only falls, and an entry is not bound again before it reached zero.
3. A session keeps its quota and its handle range until every block that it bound is back.
4. The writer of a partition can still write to a block that it bound by BIND, so such an entry is *confined*: it is served only
   inside that writer's trust domain, as a snapshot. Where there may be such entries nothing is handed to an executor, which can't tell.
5. An executor that shares the pool (`share`) serves a session while none of its messages is here. The states of entries in that
   session's handle range, and of its blocks, are the executor's then. Reads of any entry are counted with it, and checked again.

One caller at a time: whoever drives a target from several threads holds a lock around it. An executor runs beside it by rule 5.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.protocol.constants import Capability, Status
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.pool import BlockPool, BlockState, LentPool
from kbtp_core.protocol.ring import RingDriver
from kbtp_core.protocol.table import BlockTable

if TYPE_CHECKING:
    from kbtp_core.protocol.keyed_backend import KeyedBackend
    from kbtp_core.protocol.target_grant import Expose
    from kbtp_core.protocol.target_keyed import KeyedTargetSession
    from kbtp_core.protocol.target_session import TargetSession

Readers = Callable[[NDArray[np.uint64]], NDArray[np.uint32]]
"""How many native readers each of these table entries (indexes) has now."""


class Companion(RingDriver, Protocol):
    """An executor that shares the pool (rule 5)."""

    def hold(self, entries: NDArray[np.uint64]) -> None: ...
    def let_go(self, entries: NDArray[np.uint64]) -> None: ...


class EntryState(IntEnum):
    IDLE = 0
    BOUND = 1
    DRAINING = 2
    DRAINED = 3
    RESERVED = 4  # an ALLOC_STORE is fetching the data that this entry will name
    KEPT = 5  # of the keyed store: it names nothing, and a block is read from disk for it, or still read by others


@dataclass(frozen=True)
class TargetLimits:
    """The most that one session is granted."""

    outstanding: int = 1024
    inline_bytes: int = 4096
    handle_count: int = 1 << 20
    quota: int = 1 << 32
    shares_fairly: bool = False
    """Many sessions come and go: one gets an eighth of the blocks that are left to promise at most, and two handles for each."""


@dataclass
class HandleRanges:
    """Disjoint ranges of handles, first fit."""

    base: int
    count: int
    _free: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self._free = [(self.base, self.count)] if self.count else []

    def take(self, wanted: int) -> tuple[int, int]:
        """(base, count) of at most `wanted` handles: the first run that is long enough, else the longest."""
        best = max(self._free, key=lambda run: min(run[1], wanted), default=(self.base, 0))
        count = min(wanted, best[1])
        if count:
            at = self._free.index(best)
            self._free[at : at + 1] = [(best[0] + count, best[1] - count)] if best[1] > count else []
        return best[0], count

    def give_back(self, base: int, count: int) -> None:
        if not count:
            return
        merged: list[tuple[int, int]] = []
        for run in sorted([*self._free, (base, count)]):
            if merged and merged[-1][0] + merged[-1][1] == run[0]:
                merged[-1] = (merged[-1][0], merged[-1][1] + run[1])
            else:
                merged.append(run)
        self._free = merged


class Target:
    """A pool, its table, and the sessions that use them.

    `secrets` maps trust domains to keys: with it every HELLO needs a proof, and only those domains are served. `trust_domains`
    limits the domains without keys; with exactly one domain, freed blocks need no clearing. `reserved_handles` at the start of a
    lent pool's table are never freed by a peer. `incarnation` must be drawn anew at every start. `direct` says whom the direct modes
    are granted to, and `crc32c` (CRC-32C of octets) lets CHECKSUM be granted; both only where the pool belongs to its ring.
    """

    def __init__(
        self,
        pool: BlockPool | LentPool,
        table: BlockTable,
        *,
        name: str,
        incarnation: int,
        limits: TargetLimits = TargetLimits(),
        secrets: Mapping[str, bytes] | None = None,
        trust_domains: frozenset[str] | None = None,
        reserved_handles: int = 0,
        readers: Readers | None = None,
        direct: DirectPolicy | None = None,
        crc32c: Callable[[bytes], int] | None = None,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        if incarnation == 0:
            raise ValueError("a target's incarnation must not be zero")
        self.pool: Final = pool
        self.table: Final = table
        self.name: Final = name
        self.incarnation: Final = incarnation
        self.limits: Final = limits
        self.secrets: Final = dict(secrets or {})
        self.trust_domains: Final = frozenset(self.secrets) if self.secrets else trust_domains
        self.reserved_handles: Final = reserved_handles
        self.readers = readers
        self.direct: Final = direct
        self.crc32c: Final = crc32c
        self.confined: Final[dict[int, str]] = {}
        """Entries that were bound by BIND, with the trust domain that may load them."""
        self._checksums: Final[dict[int, tuple[int, int]]] = {}  # sealed entry -> (generation, CRC-32C)
        self.draw: Final = draw
        self.is_shutting_down = False
        self.clears_blocks: Final = self.trust_domains is None or len(self.trust_domains) != 1
        self.ranges: Final = HandleRanges(table.base_handle, table.entry_count)
        self.sessions: Final[dict[int, TargetSession]] = {}
        """By session number; a session stays until its last block is back."""
        self.reading: Final[NDArray[np.int32]] = np.zeros(table.entry_count, np.int32)
        self.entry_state: Final[NDArray[np.uint8]] = np.zeros(table.entry_count, np.uint8)
        self.owners: Final[NDArray[np.uint64]] = np.zeros(table.entry_count, np.uint64)
        """By entry: the number of the session that bound it, or 0."""
        self.keyed: KeyedBackend | None = None
        """The store whose values this pool's blocks are, if any; set before the first session."""
        self.keyed_waiting: Final[set[KeyedTargetSession]] = set()
        """Sessions that wait for something of the store."""
        self.picker: Callable[[int], Target | None] | None = None
        """Which target serves blocks of another size, if any; see `pick`."""
        self._companion: Companion | None = None
        self._draining_count = 0
        self._next_number = 1

    # Pools behind one address ----------------------------------------------------------------------------------------

    def pick(self, block_bytes: int) -> Target | None:
        """The target for a session that wants blocks of this size, zero for any: this one, or one that `picker` knows or makes.

        All of them have this one's secrets, trust domains, name and incarnation, and sessions begin here: their numbers are unique.
        """
        if block_bytes in (0, self.pool.block_bytes):
            return self
        return self.picker(block_bytes) if self.picker is not None else None

    def hand_over(self, session: TargetSession, target: Target) -> Target:
        """A session that began here was granted `target`'s pool, which may be this one's; returns `target`."""
        del self.sessions[session.number]
        target.sessions[session.number] = session
        return target

    # Sessions --------------------------------------------------------------------------------------------------------

    def open_session(self, peer: str, *, offers: Capability = Capability.NONE, expose: Expose | None = None) -> TargetSession:
        """A session for a connection that was just accepted; `peer` names it in reasons.

        `offers` are the capabilities that depend on its binding (RECORD_COMPLETION); `expose` registers memory for the direct modes.
        """
        from kbtp_core.protocol.target_keyed import KeyedTargetSession
        from kbtp_core.protocol.target_session import TargetSession

        kind = TargetSession if self.keyed is None else KeyedTargetSession
        session = kind(self, self._next_number, peer, offers, expose)
        self.sessions[session.number] = session
        self._next_number += 1
        return session

    def tick(self, now: float) -> list[TargetSession]:
        """Move on the blocks whose readers have ended and the tickets whose time is over.

        Returns the sessions that have effects to take (`TargetSession.take_effects`).
        """
        if self.direct is not None:
            for session in self.sessions.values():
                session.poll_tickets(now)
        if self.keyed is not None:
            settled = self.keyed.tick()
            for waiting in tuple(self.keyed_waiting):
                waiting.poll_keyed(settled, now)
        if self._draining_count:
            drained = self._drained_indexes()
            if isinstance(self.pool, LentPool):
                self._settle_lent(drained)
            else:
                for index in drained.tolist():
                    self._finish_drain(index)
        return [session for session in self.sessions.values() if session.has_effects]

    def shut_down(self) -> list[TargetSession]:
        """Answer new requests SHUTTING_DOWN and say goodbye; returns the sessions that have effects to take."""
        self.is_shutting_down = True
        for session in list(self.sessions.values()):
            session.say_goodbye(Status.SHUTTING_DOWN)
        return [session for session in self.sessions.values() if session.has_effects]

    # Local calls on a lent pool --------------------------------------------------------------------------------------

    def bind(self, handles: ArrayLike, block_offsets: ArrayLike, lengths: ArrayLike, *, sealed: bool = True) -> NDArray[np.uint16]:
        """Bind handles of a lent pool to its blocks; returns the new generations.

        Raises ValueError, with nothing changed, for a handle that is not idle, or a block outside the region.
        """
        pool = self._lent()
        indexes = self.table.indexes_of(handles)
        busy = self.entry_state[indexes] != EntryState.IDLE
        if busy.any():
            index = int(indexes[busy][0])
            raise ValueError(f"handle {index + self.table.base_handle} is {EntryState(self.entry_state[index]).name}")
        offsets, sizes = np.asarray(block_offsets, np.uint64), np.asarray(lengths, np.uint64)
        if (sizes == 0).any() or (sizes > pool.block_bytes).any():
            raise ValueError(f"a block holds 1 to {pool.block_bytes} octets")
        if (offsets > pool.region_bytes).any() or (offsets + sizes > pool.region_bytes).any():
            raise ValueError(f"a block ends outside the region of {pool.region_bytes} octets")
        generations = self.table.bind(handles, offsets, sizes, sealed)
        self.entry_state[indexes] = EntryState.BOUND
        return generations

    def reclaim(self, handles: ArrayLike) -> NDArray[np.bool_]:
        """Take handles of a lent pool back: the generation advances at once, readers may still go on until `take_drained` has the handle.

        Returns which of them were bound; the others were cleared before, by a peer's FREE or an earlier reclaim.
        """
        self._lent()
        indexes = self.table.indexes_of(handles)
        was_bound = self.entry_state[indexes] == EntryState.BOUND
        self.clear_lent(np.unique(indexes[was_bound]))
        return np.asarray(was_bound, np.bool_)

    def take_drained(self) -> NDArray[np.uint64]:
        """Handles of a lent pool that were cleared, by a peer or by `reclaim`, and that nothing reads any more; each once."""
        self._lent()
        if self._draining_count:
            self._settle_lent(self._drained_indexes())
        indexes = np.flatnonzero(self.entry_state == EntryState.DRAINED)
        self.entry_state[indexes] = EntryState.IDLE
        handles: NDArray[np.uint64] = indexes.astype(np.uint64) + np.uint64(self.table.base_handle)
        return handles

    @property
    def draining_count(self) -> int:
        """Cleared entries whose block still has readers."""
        return self._draining_count

    @property
    def draining_indexes(self) -> NDArray[np.intp]:
        """Which entries those are."""
        return np.flatnonzero(self.entry_state == EntryState.DRAINING)

    @property
    def leaving_count(self) -> int:
        """As `draining_count`, with the store's."""
        return self._draining_count + (0 if self.keyed is None else self.keyed.kept_counts()[0])

    @property
    def leaving_indexes(self) -> NDArray[np.intp]:
        """Entries that are cleared and whose block may still have readers, the store's among them."""
        return np.flatnonzero((self.entry_state == EntryState.DRAINING) | (self.entry_state == EntryState.KEPT))

    # Beside an executor ----------------------------------------------------------------------------------------------

    def share(self, companion: Companion) -> None:
        """From now on the pool, which belongs to its ring, is shared with an executor."""
        self._companion = companion
        self._ring().ring.driver = companion

    def hold(self, indexes: NDArray[np.intp]) -> None:
        """Count a reader of each entry. What is seen of an entry from now on stays: an executor frees none that has readers."""
        np.add.at(self.reading, indexes, 1)
        if self._companion is not None:
            self._companion.hold(indexes.astype(np.uint64))

    def begin_reading(self, indexes: NDArray[np.intp], seen: NDArray[Any]) -> bool:
        """`hold` these entries; False, with nothing counted, if one of them is not as `seen` (dtype ENTRY) any more."""
        self.hold(indexes)
        if self._companion is None:
            return True
        now = self.table.entries[indexes]
        if all((now[name] == seen[name]).all() for name in ("flags", "generation", "block_offset")):
            return True
        self.end_reading(indexes)
        return False

    def end_reading(self, indexes: NDArray[np.intp]) -> None:
        """Undo `hold`."""
        np.subtract.at(self.reading, indexes, 1)
        if self._companion is not None:
            self._companion.let_go(indexes.astype(np.uint64))

    # For sessions ----------------------------------------------------------------------------------------------------

    def reserve(self, index: int) -> None:
        """IDLE -> RESERVED."""
        self._move(index, EntryState.IDLE, EntryState.RESERVED)

    def unreserve(self, index: int) -> None:
        """RESERVED -> IDLE."""
        self._move(index, EntryState.RESERVED, EntryState.IDLE)

    @property
    def has_open_partitions(self) -> bool:
        """Whether somebody may take tickets, which only `tick` notices."""
        return any(session.has_tickets for session in self.sessions.values())

    @property
    def allows_executor(self) -> bool:
        """Whether no entry needs what an executor does not know (rule 4)."""
        return self.direct is None or not self.direct.alloc_domains

    def checksum(self, index: int) -> int:
        """CRC-32C of the block of a bound entry; of a sealed one it is computed once."""
        entry = self.table.entry(index)
        generation, checksum = self._checksums.get(index, (0, 0))
        if generation != entry.generation:
            assert self.crc32c is not None
            checksum = self.crc32c(self._ring().octets(entry.block_offset, entry.data_length))
            if entry.is_sealed and self._companion is None:  # which frees, and so advances generations, unseen
                self._checksums[index] = entry.generation, checksum
        return checksum

    def bind_taken(self, index: int, owner: int, offset: int, length: int, sealed: bool) -> int:
        """RESERVED -> BOUND, with a block that was taken from the ring and now holds its data; returns the generation."""
        self._move(index, EntryState.RESERVED, EntryState.BOUND)
        generation = self.table.bind_one(index, offset, length, sealed)
        self._ring().bound(offset)
        self.owners[index] = owner
        return generation

    def clear(self, index: int) -> None:
        """BOUND -> DRAINING, and on at once if nothing reads the block."""
        self._move(index, EntryState.BOUND, EntryState.DRAINING)
        self.table.clear_one(index)
        self.confined.pop(index, None)
        self._checksums.pop(index, None)
        self._draining_count += 1
        if isinstance(self.pool, BlockPool):
            self.pool.drain(self.table.entry(index).block_offset)
        if self.reading.item(index) == 0 and self._is_unread(np.array([index])).item(0):
            self._finish_drain(index)

    def clear_lent(self, indexes: NDArray[np.intp]) -> None:
        """BOUND -> DRAINING for distinct entries of a lent pool; `take_drained` moves them on."""
        if indexes.size:
            self.table.clear_indexes(indexes)
            self.entry_state[indexes] = EntryState.DRAINING
            self._draining_count += indexes.size

    def is_draining(self, index: int) -> bool:
        return bool(self.entry_state[index] == EntryState.DRAINING)

    def release(self, session: TargetSession) -> None:
        """Forget a session whose connection is gone and whose blocks are all back."""
        if isinstance(self.pool, BlockPool) and session.is_granted:
            self.pool.revoke(session.number)
            self.ranges.give_back(session.handle_base, session.handle_count)
        del self.sessions[session.number]

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        self.table.check_integrity()
        valid = set(self.table.valid_indexes(0, self.table.entry_count).tolist())
        assert valid == set(np.flatnonzero(self.entry_state == EntryState.BOUND).tolist()), "valid entries and entry states differ"
        draining = np.flatnonzero(self.entry_state == EntryState.DRAINING)
        assert len(draining) == self._draining_count, "draining entries miscounted"
        assert (self.reading >= 0).all(), "more reads ended than started"
        if isinstance(self.pool, BlockPool):
            self.pool.check_integrity()
            leaving, promoting = (0, 0) if self.keyed is None else self.keyed.kept_counts()
            assert len(valid) == self.pool.count(BlockState.BOUND), "bound blocks and bound entries differ"
            assert len(draining) + leaving == self.pool.count(BlockState.DRAINING), "draining blocks and draining entries differ"
            taken = np.count_nonzero(self.entry_state == EntryState.RESERVED) + promoting
            taken += self.pool.ticket_count()
            assert taken == self.pool.count(BlockState.TAKEN), "taken blocks differ from reserved entries and tickets"
            offsets = self.table.entries["block_offset"][sorted(valid) + draining.tolist()]
            assert np.unique(offsets).size == offsets.size, "two handles name one block"

    # Inside ----------------------------------------------------------------------------------------------------------

    def _is_unread(self, indexes: NDArray[np.intp]) -> NDArray[np.bool_]:
        unread = self.reading[indexes] == 0
        if self.readers is not None and unread.any():
            candidates = np.flatnonzero(unread)
            unread[candidates] = self.readers(indexes[candidates].astype(np.uint64)) == 0
        return np.asarray(unread, np.bool_)

    def _drained_indexes(self) -> NDArray[np.intp]:
        draining = self.draining_indexes
        return draining[self._is_unread(draining)]

    def _settle_lent(self, indexes: NDArray[np.intp]) -> None:
        self.entry_state[indexes] = EntryState.DRAINED
        self._draining_count -= len(indexes)

    def _finish_drain(self, index: int) -> None:
        if isinstance(self.pool, LentPool):
            self._settle_lent(np.array([index]))
            return
        owner = self.sessions[int(self.owners[index])]
        self.pool.give_back(owner.number, self.table.entry(index).block_offset, clear=self.clears_blocks)
        self.entry_state[index] = EntryState.IDLE
        self._draining_count -= 1
        self.owners[index] = 0
        owner.drained(index)

    def _move(self, index: int, before: EntryState, after: EntryState) -> None:
        assert self.entry_state.item(index) == before, f"entry {index} is {EntryState(self.entry_state[index]).name}, not {before.name}"
        self.entry_state[index] = after

    def _lent(self) -> LentPool:
        if not isinstance(self.pool, LentPool):
            raise ValueError("only a lent pool is bound and reclaimed by local calls; this pool belongs to its ring")
        return self.pool

    def _ring(self) -> BlockPool:
        assert isinstance(self.pool, BlockPool)
        return self.pool
