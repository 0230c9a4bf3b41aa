"""Two initiators, a handful of blocks, and everything that may happen to them, one step at a time.

The target is the real one. `Model.steps` lists what can happen now, `Model.take` makes it happen and checks the promises, and `key` says
which states are the same for all that may follow: absolute tickets and generations don't matter, only how they relate.

The promises, after every step:
1. free + taken + bound + draining = F, and each block has exactly one owner.
2. A load that was answered OK holds the octets of the handle and generation that it was answered for.
3. No usage over its quota, and the sum of quotas is at most F.
4. No one-sided write lands in a block that is not its writer's ticket's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kbtp_core.protocol.constants import EMPTY_SLOT, Capability, Flag, Status
from kbtp_core.protocol.effects import Read, Write
from kbtp_core.protocol.partition import DirectPolicy, Partition
from kbtp_core.protocol.pool import BlockPool, BlockState
from kbtp_core.protocol.ring import FreeRing
from kbtp_core.protocol.target import EntryState
from kbtp_core.protocol.wire import AllocStore, Bind, Completion, DataDescriptor, Free, Load, parse
from tests.protocol.world import STAG, Link, World, ring_world

BLOCK = 64
TIMEOUT_S = 1.0
DIRECT = Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS

Step = tuple[str, int, int]
"""What happens, to which initiator, and to which handle, operation or ticket."""


def mark(handle: int, generation: int) -> int:
    """The octet that fills a block in one life of a handle."""
    return (handle * 31 + generation * 7) % 251 + 1


@dataclass(eq=False)
class Held:
    """A ticket that an initiator took itself."""

    counter: int
    block_offset: int | None = None
    is_written: bool = False


@dataclass
class Side:
    """An initiator: its link, and what it knows."""

    link: Link
    is_direct: bool
    handles: range
    tickets: list[Held] = field(default_factory=list)
    loads: dict[int, tuple[int, int]] = field(default_factory=dict)  # token of a Write -> (handle, generation) that it was answered for
    bound: set[int] = field(default_factory=set)
    binding: dict[int, Held] = field(default_factory=dict)  # BIND under way -> its ticket


class Model:
    """`direct[i]`: whether initiator i allocates by itself. Each has `handles` handles and a quota of `quotas[i]`.

    An initiator has at most `in_flight` requests and loads under way; `native`: an executor's readers come and go.
    """

    def __init__(
        self,
        *,
        blocks: int,
        quotas: tuple[int, ...],
        direct: tuple[bool, ...],
        handles: int = 1,
        in_flight: int = 2,
        native: bool = False,
    ) -> None:
        policy = DirectPolicy(alloc_domains=frozenset({""}), ticket_timeout_s=TIMEOUT_S)
        self.world: World = ring_world(blocks=blocks, block_bytes=BLOCK, handles=handles * len(quotas), direct=policy)
        self.world.hold_operations = True
        self.blocks, self.quotas, self.direct, self.handle_count = blocks, quotas, direct, handles
        self.in_flight, self.has_executor = in_flight, native
        self.sides: list[Side | None] = [None] * len(quotas)
        for i in range(len(quotas)):
            self._join(i)

    # What can happen -------------------------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        found: list[Step] = [("tick", 0, 0)]
        if any(side is not None and side.is_direct and side.tickets for side in self.sides):
            found.append(("time passes", 0, 0))
        for i, side in enumerate(self.sides):
            if side is None:
                found.append(("join", i, 0))
            elif side.link.closed_because is not None:
                found.append(("crash", i, 0))
            else:
                found += self._steps_of(i, side)
        for index in range(self.world.target.table.entry_count if self.has_executor else 0):
            if self.world.native_readers.get(index):
                found.append(("native reader leaves", 0, index))
            elif self.world.target.table.entry(index).is_valid:
                found.append(("native reader comes", 0, index))
        return found

    def _steps_of(self, i: int, side: Side) -> list[Step]:
        found: list[Step] = [("crash", i, 0)]
        outstanding = side.link.session._outstanding
        is_busy = len(outstanding) + len(side.loads) >= self.in_flight
        for number, handle in enumerate(side.handles):
            if 10 + number not in outstanding and not is_busy:
                found.append(("store", i, handle))
            if 20 + number not in outstanding and not is_busy:
                found.append(("free", i, handle))
        for other in self.sides:
            for number, handle in enumerate(other.handles if other is not None else ()):
                if not is_busy and not any(loaded == handle for loaded, _ in side.loads.values()):
                    found += [("load", i, handle), ("stale load", i, handle)] if number == 0 else [("load", i, handle)]
        for place, operation in enumerate(side.link.held):
            found.append(("complete", i, place))
            if isinstance(operation, Read):
                found.append(("fail", i, place))
        if side.is_direct:
            found += self._direct_steps(i, side)
        return found

    def _direct_steps(self, i: int, side: Side) -> list[Step]:
        found: list[Step] = []
        if len(side.tickets) + len(side.bound) < self.quotas[i] and not side.link.is_revoked:
            found.append(("take ticket", i, 0))
        for place, ticket in enumerate(side.tickets):
            if not ticket.is_written:
                found += [("write", i, place)] if not side.link.is_revoked else []
            elif len(side.link.session._outstanding) + len(side.loads) < self.in_flight and ticket not in side.binding.values():
                found += [("bind", i, place * 16 + number) for number in range(len(side.handles)) if 40 + number not in side.binding]
        return found

    # Making it happen ------------------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Do `step`; what an initiator sees by it is checked at once, the rest by `check`."""
        what, i, which = step
        side = self.sides[i]
        match what:
            case "tick":
                self.world.tick()
            case "time passes":
                self.world.tick()
                self.world.now += TIMEOUT_S + 0.001
            case "join":
                self._join(i)
            case "native reader comes":
                self.world.native_readers[which] = 1
            case "native reader leaves":
                self.world.native_readers[which] = 0
            case _:
                assert side is not None
                self._act(what, i, side, which)

    def _act(self, what: str, i: int, side: Side, which: int) -> None:
        link, number = side.link, which - side.handles.start
        match what:
            case "crash":
                link.disconnect()
                self.world.links.remove(link)
                self.sides[i] = None
            case "store":
                self._send(side, AllocStore(10 + number, which, 0, DataDescriptor(STAG, 0, BLOCK), Flag.SEAL))
            case "free":
                self._send(side, Free(20 + number, which, 0))
            case "load" | "stale load":
                self._load(side, which, is_stale=what == "stale load")
            case "complete" | "fail":
                self._complete(side, which, ok=what == "complete")
            case "take ticket":
                counter = link.fetch_add_head()
                ring = self._partition(side).ring
                side.tickets.append(Held(counter, ring.read(ring.ticket_of(counter))))
            case "write":
                self._write(side, side.tickets[which])
            case "bind":
                self._bind(side, which // 16, which % 16)

    def _join(self, i: int) -> None:
        capabilities = DIRECT if self.direct[i] else Capability.NONE
        link = self.world.link(quota=self.quotas[i], handles=self.handle_count, capabilities=capabilities, memory_bytes=4 * BLOCK).greet()
        ack = link.initiator.ack
        assert ack is not None
        # A session that is gone keeps its quota and its handles until its blocks have drained.
        is_whole = ack.quota == self.quotas[i] and ack.handle_count == self.handle_count
        is_direct = bool(ack.capabilities & Capability.DIRECT_ALLOC)
        self.sides[i] = Side(link, is_direct, range(ack.handle_base, ack.handle_base + ack.handle_count))
        if not is_whole:
            link.disconnect()
            self.world.links.remove(link)
            self.sides[i] = None

    def _send(self, side: Side, request: AllocStore | Free | Load | Bind) -> None:
        """A request, and what the session does about it at once."""
        self._apply(side, side.link.session.receive(request.encode(), self.world.now))

    def _apply(self, side: Side, effects: list[Any]) -> None:
        started: list[Write] = []
        for effect in effects:
            if isinstance(effect, Write):
                started.append(effect)
            answer = parse(effect.data) if hasattr(effect, "data") else None
            if isinstance(answer, Completion) and started:
                side.loads[started.pop().token] = answer.handle, answer.generation
            if isinstance(answer, Completion):
                self._note(side, answer)
            if not isinstance(effect, (Write, Read)) and hasattr(effect, "data"):
                continue  # the initiator's own machine has no part in this
            side.link.apply([effect])

    def _note(self, side: Side, answer: Completion) -> None:
        """What an initiator learns from an answer."""
        is_ok = answer.status == Status.OK
        ticket = side.binding.pop(answer.request_id, None)
        if ticket is not None and is_ok:
            assert ticket.block_offset == answer.block_offset
            # As if the Write had known which life of the handle it would be.
            self.world.pool_memory[answer.block_offset : answer.block_offset + BLOCK] = mark(answer.handle, answer.generation)
        if ticket is not None and answer.status in (Status.OK, Status.TICKET_ABANDONED):
            side.tickets.remove(ticket)
        if is_ok and answer.request_id // 10 in (1, 4):
            side.bound.add(answer.handle)
        elif is_ok and answer.request_id // 10 == 2:
            side.bound.discard(answer.handle)

    def _load(self, side: Side, handle: int, *, is_stale: bool) -> None:
        entry = self.world.target.table.entry(handle - self.world.target.table.base_handle)
        wanted = (entry.generation + 65533) % 65535 + 1 if is_stale else entry.generation
        effects = side.link.session.receive(
            Load(1000 + handle, handle, wanted, DataDescriptor(STAG, BLOCK, BLOCK)).encode(), self.world.now
        )
        for effect in effects:
            if hasattr(effect, "data"):
                answer = parse(effect.data)
                assert isinstance(answer, Completion)
                if answer.status == Status.OK:
                    assert answer.generation == wanted, "a generation was read that was not asked for"
        self._apply(side, effects)

    def _complete(self, side: Side, place: int, *, ok: bool) -> None:
        """An operation in flight ends; whenever that is, its data must be the right one."""
        link, world = side.link, self.world
        operation = link.held.pop(place)
        there = slice(operation.block_offset, operation.block_offset + operation.length)
        if isinstance(operation, Write):
            handle, generation = side.loads.pop(operation.token)
            assert (world.pool_memory[there] == mark(handle, generation)).all(), f"handle {handle} was loaded with foreign octets"
            self._apply(side, link.session.write_done(operation.token, True, world.now))
            return
        handle = self._handle_of(operation.block_offset, side, operation.token)
        entry = world.target.table.entry(handle - world.target.table.base_handle)
        world.pool_memory[there] = mark(handle, entry.generation % 65535 + 1) if ok else 0xDD
        self._apply(side, link.session.read_done(operation.token, ok, world.now))

    def _handle_of(self, block_offset: int, side: Side, token: int) -> int:
        operation = side.link.session._operations[token]
        assert operation.block_offset == block_offset  # type: ignore[union-attr]
        return operation.index + self.world.target.table.base_handle

    def _write(self, side: Side, ticket: Held) -> None:
        """Write the block of a ticket, once its slot was ready: 0xDD until BIND says which life of which handle it is.

        The slot was looked at long ago if it was ready then, and now if not.
        """
        ring = self._partition(side).ring
        offset = ring.read(ring.ticket_of(ticket.counter)) if ticket.block_offset is None else ticket.block_offset
        if offset is None:
            return
        owned = {t.block_offset for t in self._partition(side)._taken.values() if t.ticket.sequence != ticket.counter >> 32}
        bound = set(self.world.target.table.entries["block_offset"][self.world.target.entry_state == EntryState.BOUND].tolist())
        assert offset not in owned | bound, "a write landed in a block of somebody else"
        self.world.pool_memory[offset : offset + BLOCK] = 0xDD
        ticket.block_offset, ticket.is_written = offset, True

    def _bind(self, side: Side, place: int, number: int) -> None:
        ticket, handle = side.tickets[place], side.handles[number]
        assert ticket.block_offset is not None
        side.binding[40 + number] = ticket
        effects = side.link.session.receive(
            Bind(40 + number, handle, 0, ticket.counter >> 32, BLOCK, ticket.block_offset, Flag.SEAL).encode(), self.world.now
        )
        self._apply(side, effects)

    def _partition(self, side: Side) -> Partition:
        assert side.link.session.partition is not None
        return side.link.session.partition

    # Promises --------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        target, pool = self.world.target, self.world.target.pool
        assert isinstance(pool, BlockPool)
        target.check_integrity()
        owners: list[int] = []  # every block, once for each owner
        for index in range(target.table.entry_count):
            if target.entry_state[index] in (EntryState.BOUND, EntryState.DRAINING):
                owners.append(target.table.entry(index).block_offset)
        taken = [o.block_offset for s in target.sessions.values() for o in s._operations.values() if hasattr(o, "block_offset")]
        partitions = [s.partition for s in target.sessions.values() if s.partition is not None and s._is_connected]
        owners += taken + pool.ring.listed_offsets() + [offset for p in partitions for offset in p.ring.listed_offsets()]
        assert sorted(owners) == [BLOCK * i for i in range(self.blocks)], f"blocks and owners differ: {sorted(owners)}"
        assert sum(pool.count(state) for state in BlockState) == self.blocks
        for session in target.sessions.values():
            if session.ack is not None:
                assert pool.usage(session.number) <= session.ack.quota, "usage is over the quota"
        assert pool.quota_left >= 0, "more was promised than there is"

    # Which states are the same ---------------------------------------------------------------------------------------

    def key(self) -> tuple[Any, ...]:
        target, pool = self.world.target, self.world.target.pool
        assert isinstance(pool, BlockPool)
        names = _Names()
        states = target.entry_state.tolist()
        entries = tuple(
            (
                state,
                names[target.table.entry(index).block_offset] if state in (EntryState.BOUND, EntryState.DRAINING) else 0,
                self.world.native_readers.get(index, 0),
                index in target.confined,
            )
            for index, state in enumerate(states)
        )
        alive = tuple(None if side is None else self._side_key(side, names) for side in self.sides)
        gone = sorted(
            (s.handle_base, tuple(sorted(s._undrained)))
            for s in target.sessions.values()
            if all(side is None or side.link.session is not s for side in self.sides)
        )
        return entries, alive, tuple(gone), _ring_key(pool.ring, names)

    def _side_key(self, side: Side, names: _Names) -> tuple[Any, ...]:
        session, now = side.link.session, self.world.now
        operations = tuple(
            (type(o).__name__, names[o.block_offset], side.loads.get(o.token, (0, 0))[0], session._operations[o.token].index)
            for o in side.link.held
        )
        partition = session.partition
        direct: tuple[Any, ...] = ()
        if partition is not None:
            tail = int(partition.ring.counters[1]) >> 32
            timers = tuple((sequence - tail, t.deadline <= now) for sequence, t in partition._taken.items())
            held = tuple(
                (
                    None if t.counter >> 32 in partition._abandoned else (t.counter >> 32) - tail,
                    t.block_offset is None,
                    t.is_written,
                    t in side.binding.values(),
                )
                for t in side.tickets
            )
            direct = (_ring_key(partition.ring, names), partition.state.value, timers, held)
        lines = tuple(sorted((index, tuple(r.request_id for r in line)) for index, line in session._lines.items()))
        return (
            side.handles.start,
            side.link.closed_because is not None,
            session.state.value,
            tuple(sorted(session._outstanding)),
            lines,
            operations,
            tuple(sorted(side.bound)),
            direct,
        )


class _Names:
    """Blocks are all alike, so a state is the same whichever block is where: they are named in the order in which they are met."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def __getitem__(self, block_offset: int) -> int:
        return self._known.setdefault(block_offset, len(self._known))


def _ring_key(ring: FreeRing, names: _Names) -> tuple[Any, ...]:
    """The ring's content relative to Tail, so that a state looks the same after a round of tickets."""
    tail, head = int(ring.counters[1]) >> 32, int(ring.counters[0]) >> 32
    slots = sorted((sequence - tail, offset) for sequence, _, offset in ring.slots.tolist())
    named = tuple((age, -1 if offset == EMPTY_SLOT else names[offset]) for age, offset in slots)
    line = tuple((sequence - tail, names[offset]) for waiting in ring._deferred.values() for sequence, offset in waiting)
    return head - tail, named, line
