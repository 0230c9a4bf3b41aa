"""An initiator process of a simulated world: one session after the other, random requests, and a check of every answer.

It reuses memory as early as it may: when a batch is done, failed or given up, its slab is filled with a mark at once, and the mark must
be there when the slab is used again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Access, Region
from kbtp_core.fabric.sim import SimFabric
from kbtp_core.protocol import NO_STATUS, Batch, Capability, Flag, HelloParameters, Status
from kbtp_core.session import BUFFER_ACCESS, InitiatorCore
from kbtp_core.session.direct import PendingDirect
from kbtp_core.session.pending import PendingBatch
from tests.sim.model import SMALLEST, Life, Stored, check_freed

if TYPE_CHECKING:
    from tests.sim.world import World

GRACE_S: Final = 0.1
"""How much later than its deadline a wait may end."""

LONGEST_DEADLINE_S: Final = 0.06
MARK: Final = 0xE5
BATCH: Final = 32  # requests in a batch, at most
SLABS: Final = 4  # batches under way, at most
HELLO_S: Final = 0.02


class HandleState(Enum):
    EMPTY = "empty"
    BUSY = "busy"
    OPEN = "open"  # bound, not sealed
    SEALED = "sealed"
    UNKNOWN = "unknown"  # a batch was given up: nobody knows


@dataclass(eq=False)
class Own:
    """A handle of this session's range."""

    handle: int
    state: HandleState = HandleState.EMPTY
    generation: int = 0
    chain: list[Stored] = field(default_factory=list)  # the stores of the present binding, in the order sent


@dataclass(eq=False)
class Job:
    """A batch under way, and what its answers mean."""

    kind: str
    pending: PendingBatch | PendingDirect
    handles: list[int]
    slab: int
    region: Region | None
    order: int
    flags: int = 0
    owns: list[Own] = field(default_factory=list)
    stores: list[Stored] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)


class SimInitiator:
    """One life of an initiator process."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.sim = world.sim
        self.name = name
        self.device = SimFabric(self.sim, name)
        self.incarnation = world.draw_incarnation()
        self.core: InitiatorCore | None = None
        self.life: Life | None = None
        self.has_given_up = False
        self._jobs: list[Job] = []
        self._owns: list[Own] = []
        self._order = 0
        self._stride = world.shape.block_bytes
        self._slab_bytes = BATCH * self._stride
        self._mark = bytes([MARK]) * self._slab_bytes
        self._begin_session()
        self._act()

    # Session ---------------------------------------------------------------------------------------------------------

    def _begin_session(self) -> None:
        world = self.world
        random = self.sim.random
        self.cq = self.device.create_cq()
        self.life, self._jobs, self._owns, self.has_given_up = None, [], [], False
        self._memory = bytearray(self._mark * SLABS)
        self._view = memoryview(self._memory)
        self._free_slabs = list(range(SLABS))
        shape = world.shape
        modes = Capability.DIRECT_LOAD | Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS
        parameters = HelloParameters(
            capabilities=int(modes) & random.choice((0, 7, -1)),
            quota=random.randint(shape.blocks // 4, shape.blocks),
            handle_count=random.randint(4, shape.handles),
            outstanding=random.randint(1, shape.outstanding),
            inline_bytes=random.choice((0, 64, 1 << 16)),
            client_name=self.name,
            trust_domain="" if shape.is_one_domain else random.choice(("", "a", "b")),
        )
        host, port = random.choice(world.addresses)
        self.core = core = InitiatorCore(
            self.device, self.cq, host, port, parameters, incarnation=self.incarnation, startup_timeout_s=HELLO_S
        )
        self.cq.on_ready = self.step
        core.start()
        self.sim.after(HELLO_S, self._check_greeting, core)

    def _check_greeting(self, core: InitiatorCore) -> None:
        """Whoever waited for HELLO stops now."""
        if core is self.core and not core.is_ready and not core.is_disconnected and not self.device.is_crashed:
            core.qp.abort()

    def step(self) -> None:
        core = self.core
        if core is None or self.device.is_crashed:
            return
        core.process(self.cq.poll(self.world.shape.poll_limit), self.sim.now)
        if core.is_ready and self.life is None:
            self._greeted(core)
        if self._jobs:
            self._collect()
        if core.is_disconnected:
            self._check_over(core)

    def _greeted(self, core: InitiatorCore) -> None:
        ack = core.protocol.ack
        assert ack is not None
        self.life = self.world.lives[ack.incarnation]
        if not self.life.is_lent:
            self._owns = [Own(ack.handle_base + i) for i in range(min(ack.handle_count, 48))]
        self.inline_bytes = ack.inline_bytes
        self.can_load_directly = bool(ack.capabilities & Capability.DIRECT_LOAD)
        self.can_allocate = bool(ack.capabilities & Capability.DIRECT_ALLOC)

    def _check_over(self, core: InitiatorCore) -> None:
        assert not self._jobs, f"{self.name}: {len(self._jobs)} batches are not done, but the session is over"
        assert "broke the protocol" not in str(core.error), f"{self.name}: {core.error}"
        self._check_slabs(range(SLABS))
        core.pd.close()
        self.cq.close()
        self.core = None
        if not self.world.is_ending:
            self.sim.after(self.sim.random.random() * 1e-3, self._reconnect)

    def _reconnect(self) -> None:
        if not self.device.is_crashed and self.core is None and not self.world.is_ending:
            self._begin_session()

    def crash(self) -> None:
        self.device.crash()
        self.core = None

    def leave(self) -> None:
        """End the session, one way or the other."""
        core = self.core
        if core is None or core.is_disconnected:
            return
        if core.is_ready and self.sim.random.random() < 0.8:
            core.goodbye()
            self.step()
            self.sim.after(1.0, self._leave_by_force, core)
        elif self.sim.random.random() < 0.5:
            core.qp.close(0.5)
        else:
            core.qp.abort()

    def _leave_by_force(self, core: InitiatorCore) -> None:
        if core is self.core and not core.is_disconnected:
            core.qp.abort()

    # Doing -----------------------------------------------------------------------------------------------------------

    def _act(self) -> None:
        """One random request now, and again later."""
        world = self.world
        if self.device.is_crashed or world.is_ending:
            return
        core = self.core
        if core is not None and core.is_ready and self.life is not None and self._free_slabs:
            self._request(core, self.life)
        self.sim.after(self.sim.random.random() * world.shape.pace_s, self._act)

    def _request(self, core: InitiatorCore, life: Life) -> None:
        random = self.sim.random
        dice = random.random()
        if life.is_lent:
            self._free_lent(core, life) if dice < 0.15 else self._load(core, life)
        elif dice < 0.32:
            self._alloc(core, life)
        elif dice < 0.42:
            self._store(core, life)
        elif dice < 0.53:
            self._free(core)
        elif dice < 0.54:
            self._nonsense(core, life)
        elif dice < 0.98:
            self._load(core, life)
        elif self._jobs:
            self._cancel(core)

    def _cancel(self, core: InitiatorCore) -> None:
        core.give_up(self.sim.random.choice(self._jobs).pending)
        self.step()

    def _some(self, *states: HandleState) -> list[Own]:
        random = self.sim.random
        fitting = [own for own in self._owns if own.state in states]
        count = min(len(fitting), random.randint(1, BATCH))
        return random.sample(fitting, count) if count else []

    def _slab(self) -> int:
        """A slab whose last use is over; nothing may have changed it since."""
        slab = self._free_slabs.pop()
        self._check_slabs((slab,))
        return slab

    def _check_slabs(self, slabs: range | tuple[int, ...]) -> None:
        size = self._slab_bytes
        for slab in slabs:
            assert self._view[slab * size : (slab + 1) * size] == self._mark, f"{self.name}: memory that was fenced has changed"

    def _register(self, core: InitiatorCore, slab: int, flags: int) -> Region:
        access = BUFFER_ACCESS | Access.REMOTE_INVALIDATE if flags & Flag.INVALIDATE else BUFFER_ACCESS
        return core.pd.register(self._view[slab * self._slab_bytes : (slab + 1) * self._slab_bytes], access)

    def _deadline(self) -> float:
        random = self.sim.random
        in_hurry = random.random() < self.world.shape.hurry
        return self.sim.now + (random.random() * 4e-3 if in_hurry else random.uniform(LONGEST_DEADLINE_S / 3, LONGEST_DEADLINE_S))

    def _submit(self, core: InitiatorCore, job_kind: str, batch: Batch, slab: int, region: Region | None, order: int) -> Job:
        deadline = self._deadline()
        return self._follow(job_kind, core.submit(batch, region, deadline), deadline, slab, region, order)

    def _follow(
        self, job_kind: str, pending: PendingBatch | PendingDirect, deadline: float, slab: int, region: Region | None, order: int
    ) -> Job:
        job = Job(job_kind, pending, [], slab, region, order)
        self._jobs.append(job)
        self.sim.at(deadline, self._expire, job)
        self.sim.at(deadline + GRACE_S, self._check_deadline, job)
        self.world.request_count += pending.count
        return job

    def _expire(self, job: Job) -> None:
        if not job.pending.done:
            self.step()

    def _check_deadline(self, job: Job) -> None:
        assert job.pending.done or self.device.is_crashed, f"{self.name}: a {job.kind} is not done {GRACE_S} s past its deadline"

    def _next_order(self) -> int:
        self._order += 1
        return self._order

    # Requests --------------------------------------------------------------------------------------------------------

    def _load(self, core: InitiatorCore, life: Life) -> None:
        random = self.sim.random
        order = self._next_order()
        flags = 0
        owns: list[Own] = []
        if self._owns and random.random() < 0.2:
            owns = self._some(HandleState.OPEN, HandleState.SEALED, HandleState.BUSY)
            pairs = [(own.handle, own.generation if random.random() < 0.7 else 0) for own in owns]
            flags = Flag.ALLOW_UNSEALED
        else:
            known = len(life.published)
            pairs = [life.published[random.randrange(known)] for _ in range(random.randint(1, BATCH))] if known else []
            if random.random() < 0.2:
                pairs = [(handle, 0) for handle, _ in pairs]
        if not pairs:
            return
        is_direct = not flags and self.can_load_directly and random.random() < 0.5
        if len(pairs) == 1 and not is_direct and random.random() < 0.3:
            flags |= Flag.INVALIDATE
        slab = self._slab()
        region = self._register(core, slab, flags)
        handles, generations = map(list, zip(*pairs, strict=True))
        room = self._stride if random.random() < 0.97 else random.randint(0, self._stride)
        offsets = np.arange(len(pairs)) * self._stride
        if is_direct:
            deadline = self._deadline()
            pending = core.load_direct(handles, generations, region, offsets, room, deadline, self.sim.now)
            job = self._follow("load", pending, deadline, slab, region, order)
        else:
            batch = core.protocol.load(handles, generations, region.stag, offsets, room, flags)
            job = self._submit(core, "load", batch, slab, region, order)
        job.handles, job.generations, job.owns, job.flags = handles, generations, owns, flags

    def _alloc(self, core: InitiatorCore, life: Life) -> None:
        owns = self._some(HandleState.EMPTY)
        if owns:
            seal = Flag.SEAL if self.sim.random.random() < 0.75 else Flag.NONE
            self._write(core, life, owns, int(seal), is_alloc=True)

    def _store(self, core: InitiatorCore, life: Life) -> None:
        owns = self._some(HandleState.OPEN)
        if owns:
            seal = Flag.SEAL if self.sim.random.random() < 0.5 else Flag.NONE
            self._write(core, life, owns, int(seal), is_alloc=False)

    def _write(self, core: InitiatorCore, life: Life, owns: list[Own], flags: int, *, is_alloc: bool) -> None:
        random = self.sim.random
        order = self._next_order()
        is_direct = is_alloc and self.can_allocate and random.random() < 0.6
        is_inline = not is_direct and self.inline_bytes >= SMALLEST and random.random() < 0.4
        longest = min(self._stride, self.inline_bytes) if is_inline else self._stride
        stores = []
        for own in owns:
            length = longest if random.random() < 0.6 else random.randint(SMALLEST, longest)
            stored = Stored(own.handle, life.content(length), order, bool(flags & Flag.SEAL), is_alloc, 0 if is_alloc else own.generation)
            stores.append(life.add(stored))
            own.chain = [stored] if is_alloc else [*own.chain, stored]
            own.state = HandleState.BUSY
        handles = [own.handle for own in owns]
        generations = [0 if is_alloc or random.random() < 0.3 else own.generation for own in owns]
        slab, region = self._slab(), None
        if is_inline:
            inline = core.protocol.alloc_store_inline if is_alloc else core.protocol.store_inline
            batch = inline(handles, generations, [stored.data for stored in stores], flags)
        else:
            if len(owns) == 1 and not is_direct and random.random() < 0.3:
                flags |= Flag.INVALIDATE
            region = self._register(core, slab, flags)
            at = slab * self._slab_bytes
            for i, stored in enumerate(stores):
                self._view[at + i * self._stride : at + i * self._stride + len(stored.data)] = stored.data
            write = core.protocol.alloc_store if is_alloc else core.protocol.store
            offsets, lengths = np.arange(len(owns)) * self._stride, [len(stored.data) for stored in stores]
        if is_direct:
            assert region is not None
            deadline = self._deadline()
            pending = core.store_direct(handles, generations, region, offsets, lengths, deadline, self.sim.now, flags)
            job = self._follow("direct alloc", pending, deadline, slab, region, order)
        else:
            if region is not None:
                batch = write(handles, generations, region.stag, offsets, lengths, flags)
            job = self._submit(core, "alloc" if is_alloc else "store", batch, slab, region, order)
        job.handles, job.owns, job.stores, job.flags = handles, owns, stores, flags

    def _free(self, core: InitiatorCore) -> None:
        owns = self._some(HandleState.SEALED, HandleState.OPEN, HandleState.UNKNOWN)
        if not owns:
            return
        generations = [0 if own.state is HandleState.UNKNOWN else own.generation for own in owns]
        order = self._next_order()
        for own in owns:
            own.state = HandleState.BUSY
        handles = [own.handle for own in owns]
        job = self._submit(core, "free", core.protocol.free(handles, generations), self._slab(), None, order)
        job.handles, job.owns, job.generations = handles, owns, generations

    def _free_lent(self, core: InitiatorCore, life: Life) -> None:
        random = self.sim.random
        if life.published:
            pairs = list(dict([random.choice(life.published) for _ in range(random.randint(1, BATCH))]).items())
            handles, generations = map(list, zip(*pairs, strict=True))
            if random.random() < 0.1:
                generations[0] = 0  # never permitted on a lent pool
            job = self._submit(core, "free", core.protocol.free(handles, generations), self._slab(), None, self._next_order())
            job.handles, job.generations = handles, generations

    def _nonsense(self, core: InitiatorCore, life: Life) -> None:
        """Requests that must be refused, and change nothing."""
        random = self.sim.random
        slab = self._slab()
        region = self._register(core, slab, 0)
        handle = random.choice((0, 1 << 63, 1000 + self.world.shape.handles))
        protocol = core.protocol
        batch = random.choice(
            (
                lambda: protocol.load([handle], 0, region.stag, 0, self._stride),
                lambda: protocol.alloc_store([handle], 0, region.stag, 0, self._stride),
                lambda: protocol.free([handle], 0),
                lambda: protocol.store([handle], 7, region.stag, 0, self._stride, Flag.SEAL),
            )
        )()
        self._submit(core, "nonsense", batch, slab, region, self._next_order()).handles = [handle]

    # Answers ---------------------------------------------------------------------------------------------------------

    def _collect(self) -> None:
        done = [job for job in self._jobs if job.pending.done]
        if not done:
            return
        self._jobs = [job for job in self._jobs if not job.pending.done]
        for job in done:
            self._check(job)
            at = job.slab * self._slab_bytes
            self._view[at : at + self._slab_bytes] = self._mark
            if job.region is not None and self.sim.random.random() < self.world.shape.tidiness:
                job.region.close()
            self._free_slabs.append(job.slab)

    def _check(self, job: Job) -> None:
        pending, life = job.pending, self.life
        assert life is not None
        status, generation, length = pending.status.tolist(), pending.generation.tolist(), pending.data_length.tolist()
        assert pending.error is None or isinstance(pending.error, KbtpError)
        assert pending.error is not None or NO_STATUS not in status, "a batch without an error has an unanswered request"
        assert {Status.MALFORMED, Status.BUSY}.isdisjoint(status), f"{job.kind} was answered {status}"
        self.world.answer_count += len(status) - status.count(NO_STATUS)
        if job.kind == "load":
            self._check_loads(job, life, status, generation, length)
        elif job.kind == "nonsense":
            assert set(status) <= {NO_STATUS, Status.NOT_PERMITTED}, f"nonsense was answered {status}"
        elif job.kind == "free":
            self._check_frees(job, life, status, generation)
        else:
            for own, stored, code, current in zip(job.owns, job.stores, status, generation, strict=True):
                self._check_store(life, own, stored, code, current, is_direct=job.kind == "direct alloc")

    def _check_loads(self, job: Job, life: Life, status: list[int], generation: list[int], length: list[int]) -> None:
        at = job.slab * self._slab_bytes
        for i, handle in enumerate(job.handles):
            if status[i] == Status.OK:
                octets = bytes(self._view[at + i * self._stride : at + i * self._stride + length[i]])
                assert job.generations[i] in (0, generation[i]), "another generation than the one that was asked for"
                if life.is_lent:
                    life.loaded_lent(handle, generation[i], octets)
                    continue
                stored = life.loaded(handle, generation[i], octets, is_sealed=not job.flags & Flag.ALLOW_UNSEALED)
                if job.owns:
                    self._check_latest(job, job.owns[i], stored)

    def _check_latest(self, job: Job, own: Own, stored: Stored) -> None:
        """Requests for one handle take effect in the order sent: an own load sees the last store before it and no later one."""
        assert stored.order < job.order, f"handle {own.handle}: a load returned what was stored after it"
        if stored in own.chain:
            earlier = [s for s in own.chain if s.is_confirmed and s.order < job.order]
            assert not earlier or earlier[-1].order <= stored.order, f"handle {own.handle}: a load returned what was overwritten before it"

    def _check_store(self, life: Life, own: Own, stored: Stored, code: int, generation: int, *, is_direct: bool) -> None:
        if code == NO_STATUS:
            own.state = HandleState.UNKNOWN
        elif code == Status.OK:
            if stored.is_alloc:
                life.bound(stored, generation)
            else:
                assert generation == stored.generation, (
                    f"handle {own.handle}: a store changed generation {stored.generation} to {generation}"
                )
            stored.is_confirmed = True
            own.generation = generation
            own.state = HandleState.SEALED if stored.seals else HandleState.OPEN
            if stored.seals:
                life.sealed.setdefault((own.handle, generation), stored)
                life.publish(own.handle, generation)
        else:
            stored.has_failed = True
            expected = {Status.NO_SPACE, Status.ACCESS} if stored.is_alloc else {Status.ACCESS}
            if is_direct:
                expected = {Status.NO_SPACE, Status.UNSUPPORTED, Status.TICKET_ABANDONED}
            assert code in expected, f"handle {own.handle}: a store was answered {code}"
            own.state = HandleState.EMPTY if stored.is_alloc else HandleState.UNKNOWN

    def _check_frees(self, job: Job, life: Life, status: list[int], generation: list[int]) -> None:
        for i, code in enumerate(status):
            own = job.owns[i] if job.owns else None
            if code == Status.OK:
                check_freed(job.generations[i], generation[i])
                if self.sim.random.random() < 0.95:
                    life.withdraw(job.handles[i], job.generations[i])
            elif own is not None and code != NO_STATUS:
                assert job.generations[i] == 0, f"handle {own.handle}: a FREE of a bound handle was answered {code}"
                assert code == Status.NOT_BOUND, f"handle {own.handle}: a FREE was answered {code}"
            elif life.is_lent and code != NO_STATUS:
                allowed = {Status.NOT_BOUND, Status.STALE_GENERATION} if job.generations[i] else {Status.NOT_PERMITTED}
                assert code in allowed, f"lent handle {job.handles[i]}: a FREE was answered {code}"
            if own is not None:
                own.state = HandleState.UNKNOWN if code == NO_STATUS else HandleState.EMPTY
