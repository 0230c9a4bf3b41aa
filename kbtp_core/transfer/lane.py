"""One lane of a pull sink: a thread with one session to one prefill worker, and the pulls that go over it.

The rules of `sink` are kept here. A lane never waits for one pull alone: it waits until its session, a new pull, a cancel or the next
timer has news, and moves every pull that can move. What has to wait, connecting and saying goodbye, is done by a thread of its own, so
that no pull ends late because another one's peer is slow. A lane that has been idle for a while ends.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import GeometryMismatch, KbtpError, SessionClosed
from kbtp_core.fabric.api import Access, Fabric, FabricError, Region
from kbtp_core.protocol.constants import NO_STATUS, Status, status_name
from kbtp_core.protocol.initiator import HelloParameters
from kbtp_core.session.initiator import InitiatorSession, LoadBatch
from kbtp_core.transfer.descriptor import fetch_descriptor
from kbtp_core.transfer.ledger import generations_before
from kbtp_core.transfer.memory import PagedMemory

_log = logging.getLogger(__name__)

FREE_ONLY: Final = -1
"""As a block number: the handle is freed and nothing is loaded."""

_CONNECT_S: Final = 5.0
_ATTEMPTS: Final = 3  # sessions that one pull may use
_FIRST_PAUSE_S: Final = 0.001  # before asking again for a block that is not bound yet; doubles up to:
_LAST_PAUSE_S: Final = 0.05
_IDLE_S: Final = 60.0
_FREE_S: Final = 5.0
_OUTSTANDING: Final = 1024
_SINK_ACCESS: Final = Access.REMOTE_WRITE


@dataclass(frozen=True)
class LaneSettings:
    """What all lanes of a sink share."""

    memory: PagedMemory
    check_descriptor: Callable[[bytes, str], None]
    secret: bytes | None
    trust_domain: str
    name: str


@dataclass
class Pull:
    """One request's pull, and how far it is. Arrays have one entry a handle; `pages` are those of the wanted blocks, in order."""

    request_id: str
    incarnation: int
    handles: NDArray[np.uint64]
    generations: NDArray[np.uint16]
    blocks: NDArray[np.int64]
    pages: NDArray[np.uint64]
    timeout_s: float
    wanted: NDArray[np.bool_] = field(init=False)
    loaded: NDArray[np.bool_] = field(init=False)
    asked: NDArray[np.intp] = field(init=False)  # what `batch` asked for
    started_at: float = field(default_factory=time.monotonic)
    attempts: int = 0
    error: str = ""
    region: Region | None = None
    batch: LoadBatch | None = None
    ask_at: float | None = 0.0  # when to (re)ask for what is missing; None while `batch` is under way
    pause_s: float = _FIRST_PAUSE_S

    def __post_init__(self) -> None:
        self.wanted = self.blocks != FREE_ONLY
        self.loaded = np.zeros(self.handles.size, np.bool_)
        self.asked = np.zeros(0, np.intp)

    @property
    def deadline(self) -> float:
        return self.started_at + self.timeout_s

    @property
    def missing(self) -> NDArray[np.intp]:
        return np.flatnonzero(self.wanted & ~self.loaded)


class Lane:
    """See the module. From the lane's thread, `report(pull, seconds)` is called once for each pull, when its memory is fenced, and
    `count_repeated(n)` when n LOADs are to be sent again."""

    def __init__(
        self,
        fabric: Fabric,
        host: str,
        port: int,
        settings: LaneSettings,
        report: Callable[[Pull, float], None],
        count_repeated: Callable[[int], None],
    ) -> None:
        self._fabric = fabric
        self._host, self._port = host, port
        self._settings = settings
        self._report = report
        self._count_repeated = count_repeated
        self._session: InitiatorSession | None = None
        self._session_since = 0.0
        self._pulls: list[Pull] = []
        self._idle_since = time.monotonic()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connector: threading.Thread | None = None  # while a session is being made
        self._closers: list[threading.Thread] = []  # saying goodbye; each is bounded
        self._lock = threading.Lock()  # guards the five below
        self._new: deque[Pull] = deque()
        self._cancelled: set[str] = set()
        self._connected: InitiatorSession | Exception | None = None  # what the connector brought
        self._is_stopping = False
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"kbtp-pull-{host}:{port}", daemon=True)

    # Any thread --------------------------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Ended, or ending: takes no more pulls."""
        with self._lock:
            return self._is_over or self._is_stopping

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def start(self) -> None:
        self._thread.start()

    def add(self, pull: Pull) -> None:
        with self._lock:
            if not self._is_over:
                self._new.append(pull)
                os.eventfd_write(self._wake_fd, 1)
                return
        pull.error = "the sink is closed"
        self._report(pull, 0.0)

    def cancel(self, request_id: str) -> None:
        with self._lock:
            if not self._is_over:
                self._cancelled.add(request_id)
                os.eventfd_write(self._wake_fd, 1)

    def stop(self) -> None:
        """Give everything up and end; `join` waits for it."""
        with self._lock:
            self._is_stopping = True
            if not self._is_over:
                os.eventfd_write(self._wake_fd, 1)

    def join(self) -> None:
        self._thread.join()

    # The lane's thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take_news():
                self._step(time.monotonic())
                self._wait()
        finally:
            self._end()

    def _take_news(self) -> bool:
        """Take new pulls and cancels; False when the lane is to end."""
        with self._lock:
            while self._new:
                self._pulls.append(self._new.popleft())
            cancelled, self._cancelled = self._cancelled, set()
            connected, self._connected = self._connected, None
            if not self._pulls and time.monotonic() - self._idle_since > _IDLE_S:
                self._is_over = True
            is_ending = self._is_stopping or self._is_over
        if connected is not None:
            self._take_session(connected)
        if is_ending:
            return False
        for pull in [pull for pull in self._pulls if pull.request_id in cancelled]:
            self._finish(pull, "it was cancelled")
        return True

    def _step(self, now: float) -> None:
        if self._session is not None:
            self._session.poll()
            if not self._session.is_open:
                self._lose_session()
        for pull in list(self._pulls):
            if pull not in self._pulls:  # finished by another one's loss of the session
                continue
            try:
                self._advance(pull, now)
            except SessionClosed:
                self._lose_session()
            except (KbtpError, FabricError, ValueError) as error:
                self._finish(pull, str(error))
        if self._pulls:
            self._idle_since = now

    def _advance(self, pull: Pull, now: float) -> None:
        if pull.batch is not None and pull.batch.done:
            self._take_answers(pull, now)
            if pull not in self._pulls:
                return
        if not pull.missing.size and (pull.wanted.any() or self._has_session(pull)):  # without a session nothing can be freed
            self._finish(pull, "")
        elif now >= pull.deadline:
            left = pull.missing.size
            self._finish(
                pull, f"{left} of {np.count_nonzero(pull.wanted)} blocks did not arrive from {self._peer} within {pull.timeout_s:g} s"
            )
        elif pull.ask_at is not None and now >= pull.ask_at and self._has_session(pull):
            self._ask(pull)

    def _ask(self, pull: Pull) -> None:
        """LOAD what is missing into its places."""
        session, memory = self._session, self._settings.memory
        assert session is not None
        if pull.region is None:
            pull.region = session.register_pages(pull.pages, memory.page_bytes, memory.owner, _SINK_ACCESS)
        pull.asked = pull.missing
        place = np.cumsum(pull.wanted) - 1  # position among the wanted blocks, which is the order of the region
        offsets = place[pull.asked].astype(np.uint64) * np.uint64(memory.block_bytes)
        pull.batch = session.load(
            pull.handles[pull.asked], pull.generations[pull.asked], pull.region, offsets, memory.block_bytes, deadline=pull.deadline
        )
        pull.ask_at = None

    def _take_answers(self, pull: Pull, now: float) -> None:
        batch = pull.batch
        assert batch is not None
        pull.batch = None
        status = batch.status
        is_whole = self._is_whole(batch)
        pull.loaded[pull.asked[is_whole]] = True
        expected = pull.generations[pull.asked]
        is_early = (status == Status.NOT_BOUND) & (batch.generation == generations_before(expected))
        refused = ~is_whole & ~is_early & (status != NO_STATUS)
        if refused.any():
            first = int(np.flatnonzero(refused)[0])
            self._finish(pull, self._refusal(pull, first, int(np.count_nonzero(refused)), batch))
            return
        if (status == NO_STATUS).any():
            raise batch.error or SessionClosed(f"the session with {self._peer} ended")
        if is_early.any():
            pull.ask_at = now + pull.pause_s
            pull.pause_s = min(2 * pull.pause_s, _LAST_PAUSE_S)
            self._count_repeated(int(np.count_nonzero(is_early)))

    def _is_whole(self, batch: LoadBatch) -> NDArray[np.bool_]:
        """Which blocks were answered OK and filled their place."""
        return np.asarray((batch.status == Status.OK) & (batch.data_length == self._settings.memory.block_bytes))

    def _refusal(self, pull: Pull, at: int, count: int, batch: LoadBatch) -> str:
        status = int(batch.status[at])
        handle, expected, found = int(pull.handles[pull.asked[at]]), int(pull.generations[pull.asked[at]]), int(batch.generation[at])
        if status == Status.OK:
            return f"{self._peer} sent {int(batch.data_length[at])} octets for a block of {self._settings.memory.block_bytes}"
        way_out = ""
        if status in (Status.STALE_GENERATION, Status.NOT_BOUND):
            way_out = ": prefill has taken the blocks back, most likely because their lease ran out; raise lease_s on the prefill side"
        refused = f"{self._peer} refused {count} of {pull.asked.size} blocks"
        return f"{refused}, handle {handle} with {status_name(status)} (generation {found}, not {expected}){way_out}"

    def _finish(self, pull: Pull, error: str) -> None:
        """Fence the pull's memory, free its handles, report it."""
        self._pulls.remove(pull)
        pull.error = error
        try:
            self._fence(pull)
            self._free(pull)
        finally:
            self._report(pull, time.monotonic() - pull.started_at)

    def _free(self, pull: Pull) -> None:
        session = self._session
        if session is None or not session.is_open or not pull.handles.size or session.target.incarnation != pull.incarnation:
            return
        try:
            session.free(pull.handles, pull.generations, deadline=time.monotonic() + _FREE_S)
        except (KbtpError, FabricError, ValueError) as problem:
            _log.debug("the handles of request %s are left to their lease: %s", pull.request_id, problem)

    def _fence(self, pull: Pull) -> None:
        """After this nothing touches the destination, whatever is still on its way."""
        if pull.batch is not None:
            pull.batch.cancel()
            pull.batch = None
        if pull.region is not None:
            pull.region.close()
            pull.region = None

    # The session -------------------------------------------------------------------------------------------------------

    @property
    def _peer(self) -> str:
        name = f" ({self._session.target.target_name!r})" if self._session is not None and self._session.target.target_name else ""
        return f"prefill worker {self._host}:{self._port}{name}"

    def _has_session(self, pull: Pull) -> bool:
        """Whether there is a session that this pull can use; otherwise one is being made. Raises KbtpError if prefill was restarted."""
        if self._session is None:
            if self._connector is None:
                self._connector = threading.Thread(target=self._run_connector, name=f"kbtp-connect-{self._host}:{self._port}", daemon=True)
                self._connector.start()
            return False
        found = self._session.target.incarnation
        if found == pull.incarnation:
            return True
        is_needed = any(other.batch is not None for other in self._pulls)
        if self._session_since < pull.started_at and not is_needed:
            # Either the blocks or this session are of an earlier life: a host that crashed says no goodbye. A new session tells.
            self._drop_session()
            return self._has_session(pull)
        raise KbtpError(f"{self._peer} was restarted since it offered the blocks (incarnation {found:#x}, not {pull.incarnation:#x})")

    def _run_connector(self) -> None:
        """The connector's thread."""
        try:
            connected: InitiatorSession | Exception = self._connect(_CONNECT_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, the pulls that wait for it fail by its name
            connected = error
        with self._lock:
            self._connected = connected
            if not self._is_over:
                os.eventfd_write(self._wake_fd, 1)

    def _take_session(self, connected: InitiatorSession | Exception) -> None:
        assert self._connector is not None
        self._connector.join()
        self._connector = None
        if isinstance(connected, InitiatorSession):
            self._session, self._session_since = connected, time.monotonic()
            return
        for pull in list(self._pulls):
            self._finish(pull, str(connected))

    def _connect(self, timeout_s: float) -> InitiatorSession:
        settings = self._settings
        deadline = time.monotonic() + timeout_s
        wish = HelloParameters(outstanding=_OUTSTANDING, client_name=settings.name, trust_domain=settings.trust_domain)
        try:
            session = InitiatorSession.connect(self._fabric, self._host, self._port, wish, deadline_s=timeout_s, secret=settings.secret)
        except SessionClosed as error:
            raise KbtpError(f"prefill worker {self._host}:{self._port} can't be reached: {error}") from None
        try:
            settings.check_descriptor(fetch_descriptor(session, deadline), f"{self._host}:{self._port}")
            if session.target.block_bytes != settings.memory.block_bytes:
                raise GeometryMismatch(
                    f"prefill worker {self._host}:{self._port} serves blocks of {session.target.block_bytes} octets, this engine's have "
                    f"{settings.memory.block_bytes}. Start both with the same model and KV cache settings."
                )
        except GeometryMismatch:
            session.close()
            raise
        except SessionClosed as error:
            session.close()
            raise KbtpError(f"prefill worker {self._host}:{self._port} ended the session at once: {error}") from None
        except BaseException:
            session.close()
            raise
        return session

    def _lose_session(self) -> None:
        """The session is over: every pull fences its memory and asks again on a new one, or gives up."""
        reason = self._session.error if self._session is not None else None
        self._drop_session()
        for pull in list(self._pulls):
            if pull.batch is not None:
                pull.loaded[pull.asked[self._is_whole(pull.batch)]] = True
            self._fence(pull)
            pull.ask_at = 0.0
            pull.attempts += 1
            self._count_repeated(pull.missing.size)
            if pull.attempts >= _ATTEMPTS:
                self._finish(pull, f"prefill worker {self._host}:{self._port} lost {pull.attempts} sessions: {reason}")

    def _drop_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            self._closers = [closer for closer in self._closers if closer.is_alive()]
            self._closers.append(threading.Thread(target=session.close, args=(0.5,), name="kbtp-close", daemon=True))
            self._closers[-1].start()

    # Waiting -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        """Until the session, another thread or a timer has something to do."""
        now = time.monotonic()
        timers = [pull.deadline for pull in self._pulls]
        if self._connector is None:
            timers += [pull.ask_at for pull in self._pulls if pull.ask_at is not None]
        until = min(timers, default=now + 1.0)
        poller = select.poll()
        poller.register(self._wake_fd, select.POLLIN)
        if self._session is not None:
            poller.register(self._session.fileno(), select.POLLIN)
        for fd, _ in poller.poll(max(0.0, min(until - now, 1.0)) * 1000 + 0.5):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def _end(self) -> None:
        """Report every pull, then end everything; each step is taken whatever becomes of the others."""
        with self._lock:
            self._is_over = True
            self._pulls.extend(self._new)
            self._new.clear()
        for pull in list(self._pulls):
            try:
                self._finish(pull, "the sink was closed")
            except Exception:  # noqa: BLE001 - every other pull has to end too
                _log.exception("the pull of request %s did not end cleanly", pull.request_id)
        if self._connector is not None:
            self._connector.join()
        with self._lock:
            connected, self._connected = self._connected, None
        for session in (connected, self._session):
            if isinstance(session, InitiatorSession):
                session.close()
        for closer in self._closers:
            closer.join()
        os.close(self._wake_fd)
