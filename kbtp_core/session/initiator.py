"""A session with a target for callers that wait: the clock and the lock around `InitiatorCore`, without a thread of its own.

Whoever waits drives: one of the waiting threads waits for completions and processes them for all; the others sleep until it has
news, and one of them takes over when it leaves. A caller that must not wait calls `poll` now and then, or when `fileno` is readable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import DeadlineExceeded, KbtpError, SessionClosed
from kbtp_core.fabric.api import Access, Fabric, FabricError, Op, PollsLoads, QueuePair, Region
from kbtp_core.fabric.client_calls import CallResult, ClientCalls, LoadCall
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.initiator import HelloParameters, InitiatorState
from kbtp_core.protocol.keyed import Ids, PublishFlag
from kbtp_core.protocol.keyed_batch import Encode
from kbtp_core.session.direct import PendingDirect
from kbtp_core.session.incarnation import process_incarnation
from kbtp_core.session.initiator_core import InitiatorCore
from kbtp_core.session.keyed import Asked, KeyedCalls, Lookups, PutBatch
from kbtp_core.session.loads import PendingLoads
from kbtp_core.session.messages import PendingMessages
from kbtp_core.session.pending import PendingBatch
from kbtp_core.session.puts import SplitPut, make_puts

BUFFER_ACCESS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
"""What a target needs of an initiator's buffer: to write loads into it and to read stores from it."""

_LONGEST_WAIT_S = 0.25  # so that an interrupt is seen soon
_DISCARD_TIMEOUT_S = 1.0
_REFUSED, _DONE, _INTERRUPTED = int(CallResult.REFUSED), int(CallResult.DONE), int(CallResult.INTERRUPTED)
_LOAD_CALL_FLAGS = int(Flag.ALLOW_UNSEALED)  # the others change how a LOAD is answered
_CLOSE_SHARE = 0.5  # of the time to close, how much outstanding requests may take


AnyPending: TypeAlias = PendingBatch | PendingLoads | PendingMessages | PendingDirect | SplitPut


class LoadBatch:
    """n requests under way. `status`, `generation`, `data_length` and `block_offset` are arrays of shape (n,).

    A request's failure is in `status`, never an exception; NO_STATUS where no answer came. `error` is set if the batch as a whole
    has failed (SessionClosed, DeadlineExceeded).
    """

    __slots__ = ("_pending", "_session")

    def __init__(self, session: InitiatorSession, pending: PendingBatch | PendingLoads | PendingDirect) -> None:
        self._session = session
        self._pending = pending

    @property
    def count(self) -> int:
        return self._pending.count

    @property
    def done(self) -> bool:
        """Whether all is answered or will never be. Never waits; see `InitiatorSession.poll`."""
        return self._pending.done

    @property
    def ok(self) -> bool:
        """Done, and every request was answered OK."""
        return self._pending.ok

    @property
    def error(self) -> Exception | None:
        return self._pending.error

    @property
    def status(self) -> NDArray[np.uint16]:
        return self._pending.status

    @property
    def generation(self) -> NDArray[np.uint16]:
        return self._pending.generation

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return self._pending.data_length

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return self._pending.block_offset

    @property
    def checksum(self) -> NDArray[np.uint32]:
        """CRC-32C of each block's data as the target computed it, if CHECKSUM was granted; else zero."""
        return self._pending.checksum

    def await_done(self) -> bool:
        """Wait until done, at most until the batch's deadline; whether it is done. Nothing is fenced yet."""
        return self._session.await_batch(self._pending)

    def wait(self) -> LoadBatch:
        """Wait until done, at most until the batch's deadline.

        Raises DeadlineExceeded, after the batch's region was closed, so that nothing lands in its memory any more; and SessionClosed.
        """
        pending = self._pending
        if not self.await_done():
            self.cancel()
        if pending.error is not None:
            raise pending.error.with_traceback(None)
        return self

    def cancel(self) -> None:
        """Fence the batch now: its region is closed, and what is not answered stays NO_STATUS. Nothing if it is done."""
        self._session.cancel(self._pending)


class InitiatorSession(KeyedCalls):
    """A ready session; made by `connect`. Deadlines are times of `time.monotonic()`."""

    def __init__(self, core: InitiatorCore, cq: Any) -> None:
        self._core = core
        self._cq = cq
        self._loads_queue: PollsLoads | None = cq if isinstance(cq, PollsLoads) else None
        self._lock = threading.RLock()  # of all below, and of the core
        self._changed = threading.Condition(self._lock)
        self._sleeper_count = 0  # threads in `_changed`
        self._is_driven = False
        self._is_calling = False  # in `call`
        self._load_calls = 0
        self._is_closed = False

    @classmethod
    def connect(
        cls,
        fabric: Fabric,
        host: str,
        port: int,
        parameters: HelloParameters = HelloParameters(),
        *,
        deadline_s: float = 5.0,
        secret: bytes | None = None,
        incarnation: int | None = None,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> InitiatorSession:
        """Connect and say HELLO, within `deadline_s` seconds from now, and as long as it `is_wanted`, which is asked now and then.

        Raises SessionRefused naming the target and its status, SessionClosed if it can't be reached, DeadlineExceeded.
        """
        deadline = time.monotonic() + deadline_s
        cq = fabric.create_cq()
        core = InitiatorCore(
            fabric,
            cq,
            host,
            port,
            parameters,
            incarnation=process_incarnation() if incarnation is None else incarnation,
            secret=secret,
            startup_timeout_s=deadline_s,
        )
        session = cls(core, cq)
        try:
            core.start()
        except FabricError as cause:
            core.pd.close()
            cq.close()
            raise SessionClosed(f"the session with {host}:{port} could not begin: {cause}") from cause
        try:
            session.drive(lambda: core.is_ready or core.is_over or not is_wanted(), deadline)
        except BaseException:
            session._discard()
            raise
        if core.is_ready:
            return session
        error = core.error or DeadlineExceeded(f"{host}:{port} did not answer within {deadline_s} s. Is it a KBTP target?")
        session.close(max(0.0, min(deadline - time.monotonic(), 0.5 if is_wanted() else 0.0)))
        raise error

    @property
    def peer(self) -> str:
        return self._core.peer

    @property
    def target(self) -> HelloAck:
        """What the target granted: block size, handle range, table range, quota, its name and incarnation."""
        ack = self._core.protocol.ack
        assert ack is not None
        return ack

    @property
    def own_handles(self) -> list[tuple[int, int]]:
        """Base and count of the handles that may be bound at once: as many as there is quota for."""
        return [(self.target.handle_base, min(self.target.handle_count, self.target.quota))]

    @property
    def is_open(self) -> bool:
        return self._core.is_ready

    @property
    def is_over(self) -> bool:
        """Nothing is answered any more; a session that is neither open nor over still waits for answers."""
        return self._core.is_over

    @property
    def error(self) -> Exception | None:
        """Why the session has ended or is ending."""
        return self._core.error

    @property
    def qp(self) -> QueuePair:
        return self._core.qp

    def register(self, memory: Any, access: Access = BUFFER_ACCESS) -> Region:
        """Register a buffer for this session's requests; tagged offsets start at 0."""
        return self._core.pd.register(memory, access)

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, owner: object, access: Access = BUFFER_ACCESS) -> Region:
        """Register equal pages scattered in memory as one run of tagged offsets."""
        return self._core.pd.register_pages(addresses, page_bytes, access, owner)

    def load(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.NONE,
    ) -> LoadBatch:
        """Ask for blocks; their bytes land at `offsets` of `region` (draft section 6.1). Returns at once.

        `handles` has shape (n,); generation 0 accepts any; each slice has room for `lengths` octets, at least the block's. Scalars
        stand for all n. `region` is closed if the deadline passes, so use one whose loss hurts nothing else.

        Raises SessionClosed if the session has ended; per-block failures are in `LoadBatch.status`, never exceptions.
        """
        with self._lock:
            return LoadBatch(self, self._core.load(handles, generations, region, offsets, lengths, deadline, flags))

    def load_now(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.NONE,
    ) -> LoadBatch:
        """`load` and `wait` in one, which costs less: for callers that have nothing else to do meanwhile.

        Raises DeadlineExceeded, SessionClosed.
        """
        caller = self._core.load_caller
        if caller is not None and not int(flags) & ~_LOAD_CALL_FLAGS:
            self._load_calls += 1
            call = caller.create_load_call(self._load_calls)
            try:
                result, error = self.call(
                    call, lambda left: call.begin(handles, generations, region.stag, offsets, lengths, int(flags), left), deadline
                )
            except TypeError:  # what `load` makes arrays of
                result, error = _REFUSED, None
            if error is not None:
                region.close()
                raise error
            if result == _DONE:
                pending = PendingLoads(0, call.requests, region, deadline)
                pending.finish(None)
                return LoadBatch(self, pending)
        return self.load(handles, generations, region, offsets, lengths, deadline=deadline, flags=flags).wait()

    def store(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.NONE,
    ) -> LoadBatch:
        """Write into bound blocks; the target reads the data from `region` (draft section 6.2). Returns at once."""
        with self._lock:
            batch = self._core.protocol.store(handles, generations, region.stag, offsets, lengths, flags)
            return LoadBatch(self, self._core.submit(batch, region, deadline))

    def alloc_store(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.SEAL,
    ) -> LoadBatch:
        """Write into fresh blocks and bind them; the target reads the data from `region` (draft section 6.3). Returns at once."""
        with self._lock:
            batch = self._core.protocol.alloc_store(handles, generations, region.stag, offsets, lengths, flags)
            return LoadBatch(self, self._core.submit(batch, region, deadline))

    def store_inline(
        self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], *, deadline: float, flags: int = Flag.NONE
    ) -> LoadBatch:
        """As `store`, with the data in the request; each item at most the granted inline length."""
        with self._lock:
            return LoadBatch(self, self._core.submit(self._core.protocol.store_inline(handles, generations, data, flags), None, deadline))

    def alloc_store_inline(
        self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], *, deadline: float, flags: int = Flag.SEAL
    ) -> LoadBatch:
        """As `alloc_store`, with the data in the request; each item at most the granted inline length."""
        with self._lock:
            batch = self._core.protocol.alloc_store_inline(handles, generations, data, flags)
            return LoadBatch(self, self._core.submit(batch, None, deadline))

    def free(self, handles: ArrayLike, generations: ArrayLike, *, deadline: float) -> LoadBatch:
        """Unbind handles and give their blocks back (draft section 6.4). Returns at once."""
        with self._lock:
            return LoadBatch(self, self._core.submit(self._core.protocol.free(handles, generations), None, deadline))

    def load_range(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        starts: ArrayLike,
        counts: ArrayLike = 0,
        *,
        deadline: float,
    ) -> LoadBatch:
        """As `load`, of `counts` octets from `starts` on of each value; zero is the rest, and what is over is cut. Needs STORE.

        `LoadBatch.data_length` is the whole value's length.
        """
        with self._lock:
            batch = self._core.protocol.load_range(handles, generations, region.stag, offsets, lengths, starts, counts)
            return LoadBatch(self, self._core.submit(batch, region, deadline))

    def ask(self, encode: Encode, deadline: float) -> Asked:
        """Send keyed messages (`protocol.keyed_batch`); the calls of `KeyedCalls` make them."""
        with self._lock:
            return Asked(self, self._core.ask(encode, deadline))

    def lookup(self, ids: Ids, tenant: int, *, deadline: float, flags: int = 0) -> Lookups:
        """See `KeyedCalls.lookup`."""
        with self._lock:
            pending = self._core.lookup(np.ascontiguousarray(ids, np.uint8), tenant, int(flags), deadline)
        if pending is None:
            return super().lookup(ids, tenant, deadline=deadline, flags=flags)
        return Lookups(Asked(self, pending), pending.results)

    def put(
        self,
        ids: Ids,
        tenant: int,
        handles: NDArray[np.uint64],
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        *,
        deadline: float,
        region: Region | None = None,
        offsets: ArrayLike = 0,
        flags: int = PublishFlag.NONE,
    ) -> PutBatch:
        """See `KeyedCalls.put`."""
        puts = make_puts(ids, tenant, handles, addresses, lengths, region, offsets, flags, self.target.inline_bytes, self.put_inline_bytes)
        with self._lock:
            pending = self._core.put(puts, region, deadline)
            if pending is not None:
                return PutBatch(Asked(self, pending), pending.results)
            split = SplitPut(self._core, puts, region, deadline)
        return PutBatch(Asked(self, split), split.results)

    def call(self, calls: ClientCalls | LoadCall, begin: Callable[[float], int], deadline: float) -> tuple[int, KbtpError | None]:
        """Let `calls` make a call, driving the session meanwhile; `begin` begins it, for so many seconds at most. A CallResult.

        REFUSED, too, where another thread drives. With an error (DeadlineExceeded, SessionClosed) the call was given up.
        """
        left = deadline - time.monotonic()
        with self._lock:
            if self._is_driven or left <= 0 or not self._core.may_call:
                return _REFUSED, None
            self._is_driven = self._is_calling = True
        error: KbtpError | None = None
        try:
            result = begin(min(left, _LONGEST_WAIT_S))
            while result == _INTERRUPTED:
                with self._lock:
                    self._process()
                    error = self._why_no_further(deadline)
                if error is not None:
                    calls.give_up()
                    break
                result = calls.resume(min(max(deadline - time.monotonic(), 0.0), _LONGEST_WAIT_S))
            return result, error
        except BaseException:
            calls.give_up()
            raise
        finally:
            with self._lock:
                self._is_driven = self._is_calling = False
                if self._loads_queue is None or not self._loads_queue.is_empty:
                    self._process()
                self._notify()

    def _why_no_further(self, deadline: float) -> KbtpError | None:
        if self._core.is_over:
            return self._core.error or SessionClosed(f"the session with {self.peer} has ended")
        if time.monotonic() >= deadline:
            return DeadlineExceeded(f"{self.peer} did not answer in time. Allow more time, or look at what the target does")
        return None

    def load_direct(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
    ) -> LoadBatch:
        """As `load`, by one-sided reads alone (DIRECT_LOAD, draft section 6.6): the target's processor has no part in it.

        Raises ValueError if the target did not grant it.
        """
        with self._lock:
            pending = self._core.load_direct(handles, generations, region, offsets, lengths, deadline, time.monotonic())
            return LoadBatch(self, pending)

    def store_direct(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: Region,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.SEAL,
    ) -> LoadBatch:
        """As `alloc_store`, with blocks that this side takes and writes itself; the target only binds them (DIRECT_ALLOC).

        NO_SPACE for what is over the quota; UNSUPPORTED once a ticket has timed out: use `alloc_store` for the rest of the session.

        Raises ValueError if the target did not grant it.
        """
        with self._lock:
            pending = self._core.store_direct(handles, generations, region, offsets, lengths, deadline, time.monotonic(), flags)
            return LoadBatch(self, pending)

    def poll(self) -> None:
        """Process what has come, without waiting; for callers that look at `LoadBatch.done`. Fences overdue batches."""
        with self._lock:
            if self._process() and self._is_driven:
                self._cq.wake()  # what that thread waits for may be among it

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return int(self._cq.fileno())

    def drive(self, is_done: Callable[[], bool], deadline: float) -> bool:
        """Process until `is_done`, or until `deadline`; returns what `is_done` says in the end."""
        with self._lock:
            while not is_done():
                if not self._drive_once(deadline):
                    return False
            return True

    def await_batch(self, pending: AnyPending) -> bool:
        """Process until `pending` is done, or until its deadline; returns whether it is done."""
        with self._lock:
            while not pending.done:
                if not self._drive_once(pending.deadline):
                    return False
            return True

    def _drive_once(self, deadline: float) -> bool:
        """With the lock, which is let go while this thread waits: until something has happened. False if `deadline` has passed."""
        left = deadline - time.monotonic()
        if left <= 0:
            return False
        if self._is_driven:
            self._sleeper_count += 1
            try:
                self._changed.wait(left)
            finally:
                self._sleeper_count -= 1
            return True
        self._is_driven = True
        self._lock.release()
        try:
            self._cq.wait(left if left < _LONGEST_WAIT_S else _LONGEST_WAIT_S)
        finally:
            self._lock.acquire()
            self._is_driven = False
            self._process()
        return True

    def cancel(self, pending: AnyPending) -> None:
        """See `LoadBatch.cancel`."""
        with self._lock:
            for part in pending.parts if isinstance(pending, SplitPut) else (pending,):
                self._core.give_up(part)
            self._notify()

    def close(self, timeout_s: float = 2.0) -> None:
        """Say goodbye, let what is outstanding finish for half of `timeout_s`, end the connection. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        start = time.monotonic()
        self.drive(lambda: self._core.is_over or not (self._core.has_loads or self._is_calling), start + timeout_s * _CLOSE_SHARE)
        with self._lock:
            self._core.goodbye()
        self.drive(lambda: self._core.is_over, start + timeout_s * _CLOSE_SHARE)
        with self._lock:
            if self._core.protocol.state is not InitiatorState.CLOSED and not self._core.is_disconnected:
                self._core.protocol.disconnected("it was closed here")
            if not self._core.is_disconnected:
                self._core.qp.close(timeout_s * (1 - _CLOSE_SHARE))
        if not self.drive(lambda: self._core.is_disconnected, start + timeout_s):
            self._core.qp.abort()
            self.drive(lambda: self._core.is_disconnected, time.monotonic() + 1.0)
        self._core.pd.close()
        self._cq.close()

    def __enter__(self) -> InitiatorSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _discard(self) -> None:
        """End a session that nobody has got yet, and look at nothing that still comes."""
        with self._lock:
            self._is_closed = True
        self._core.qp.abort()
        deadline = time.monotonic() + _DISCARD_TIMEOUT_S
        while (
            not self._core.is_disconnected
            and time.monotonic() < deadline
            and not np.count_nonzero(self._cq.poll()["op"] == Op.DISCONNECTED)
        ):
            self._cq.wait(deadline - time.monotonic())
        self._core.pd.close()
        self._cq.close()

    def _process(self) -> bool:
        """Whether anything had come."""
        queue = self._loads_queue
        done = queue.poll_loads() if queue is not None else []
        if done:
            self._core.loads_done(done)
        completions = self._cq.poll()
        self._core.process(completions, time.monotonic())
        self._notify()
        return bool(done) or len(completions) > 0

    def _notify(self) -> None:
        if self._sleeper_count:
            self._changed.notify_all()
