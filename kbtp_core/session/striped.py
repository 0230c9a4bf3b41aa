"""Several connections to one target behind one session: large batches are spread over them by octets, small ones take the least loaded.

Each stripe is a KBTP session of its own, so the target gives each a handle range and a quota. What holds:

1. A request that binds, writes or frees goes through the stripe whose range has its handle. Where all stripes have one range (a lent
   pool) any will do.
2. Requests for one handle are in order on one stripe only. Loads take any, but while writes are under way those of own handles follow
   them; so wait for the loads of a handle before it is written or freed.
3. A stripe that is lost fails its part of a batch, with its error. Later batches go to the others, and meanwhile it is connected again,
   once at a time and less often the longer it fails.
4. All stripes see one life of the target: a connection to another incarnation is refused, and a session whose last stripe is lost is over.
5. Whoever waits makes the progress of all stripes; the device's threads move the octets.
"""

from __future__ import annotations

import contextlib
import select
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.api import Access, Fabric
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.initiator import HelloParameters
from kbtp_core.session.initiator import BUFFER_ACCESS, InitiatorSession, LoadBatch
from kbtp_core.session.stripe import Stripe
from kbtp_core.session.stripe_batch import Part, Places, Requests, StripedBatch
from kbtp_core.session.stripe_region import StripedRegion
from kbtp_core.session.striped_keyed import StripedKeyed

SPLIT_BYTES = 256 << 10
"""A batch takes another stripe for every so many octets."""

_LONGEST_WAIT_S = 0.005  # another thread may have taken the completion that this one waits for
_Post = Callable[[InitiatorSession, Places], LoadBatch]
_Route = tuple[Stripe, Places]


class StripedSession(StripedKeyed):
    """As `InitiatorSession`, without the direct modes; made by `connect`."""

    def __init__(self, stripes: Sequence[Stripe], first: InitiatorSession) -> None:
        super().__init__()
        self._stripes = stripes
        self._lock = threading.Lock()  # of all below, and of the stripes' bookkeeping
        self._writes: list[StripedBatch] = []
        self._epoll: select.epoll | None = None
        self._watched: dict[InitiatorSession, int] = {}
        self._last = first
        self._is_closed = False

    @classmethod
    def connect(
        cls,
        fabric: Fabric,
        host: str,
        port: int,
        parameters: HelloParameters = HelloParameters(),
        *,
        stripes: int = 4,
        deadline_s: float = 5.0,
        secret: bytes | None = None,
        incarnation: int | None = None,
    ) -> StripedSession:
        """Connect, within `deadline_s` seconds each. Quota and handles are wished for in equal shares, the rest by each stripe.

        Raises as `InitiatorSession.connect` does if the first stripe can't be had; others are tried again later.
        """
        if not 1 <= stripes <= 64:
            raise ValueError(f"{stripes} stripes: there must be between 1 and 64")
        share = replace(parameters, quota=-(-parameters.quota // stripes), handle_count=-(-parameters.handle_count // stripes))

        def make() -> InitiatorSession:
            return InitiatorSession.connect(fabric, host, port, share, deadline_s=deadline_s, secret=secret, incarnation=incarnation)

        first = make()
        made = [Stripe(make, first)]
        for _ in range(stripes - 1):
            made.append(Stripe(make))
            made[-1].connect(first.target)
        return cls(made, first)

    @property
    def peer(self) -> str:
        return self._last.peer

    @property
    def target(self) -> HelloAck:
        """What the target granted to the first open stripe; `ranges` and `quota` say it for all."""
        return next(iter(self._open()), self._last).target

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """Base and count of the handles that this session may bind: one range a stripe, each once."""
        return [*dict.fromkeys(stripe.handles for stripe in self._stripes if stripe.session is not None)]

    @property
    def own_handles(self) -> list[tuple[int, int]]:
        """See `InitiatorSession.own_handles`; of the open stripes."""
        return [run for session in self._open() for run in session.own_handles]

    @property
    def quota(self) -> int:
        return sum(session.target.quota for session in self._open())

    @property
    def open_count(self) -> int:
        """Stripes that are connected now."""
        return len(self._open())

    @property
    def posted_bytes(self) -> list[int]:
        """Octets asked for on each stripe so far."""
        return [stripe.posted_bytes for stripe in self._stripes]

    @property
    def is_open(self) -> bool:
        return not self._is_closed and bool(self._open())

    @property
    def error(self) -> Exception | None:
        """Why the session has ended."""
        return None if self._open() else self._last.error

    def register(self, memory: Any, access: Access = BUFFER_ACCESS) -> StripedRegion:
        """Register a buffer for this session's requests; tagged offsets start at 0."""
        return StripedRegion(lambda session: session.register(memory, access), self._any())

    def register_pages(
        self, addresses: NDArray[np.uint64], page_bytes: int, owner: object, access: Access = BUFFER_ACCESS
    ) -> StripedRegion:
        """Register equal pages scattered in memory as one run of tagged offsets."""
        return StripedRegion(lambda session: session.register_pages(addresses, page_bytes, owner, access), self._any())

    def load(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: StripedRegion,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.NONE,
    ) -> StripedBatch:
        """See `InitiatorSession.load`. Raises FabricError if `region` was closed or fenced."""
        region.expect_valid()
        requests = Requests(handles, generations, offsets, lengths)

        def post(session: InitiatorSession, at: Places) -> LoadBatch:
            generation, offset, length = requests.values(at)
            return session.load(requests.handles[at], generation, region.on(session), offset, length, deadline=deadline, flags=flags)

        with self._lock:
            self._writes = [write for write in self._writes if not write.done]
            is_whole = bool(int(flags) & int(Flag.INVALIDATE))
            routes = self._by_range(requests) if self._writes else self._by_octets(requests, is_whole)
            return self._post(routes, post, requests, region, deadline)

    def store(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: StripedRegion,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.NONE,
    ) -> StripedBatch:
        """See `InitiatorSession.store`."""
        return self._write("store", handles, generations, region, offsets, lengths, deadline, flags)

    def alloc_store(
        self,
        handles: ArrayLike,
        generations: ArrayLike,
        region: StripedRegion,
        offsets: ArrayLike,
        lengths: ArrayLike,
        *,
        deadline: float,
        flags: int = Flag.SEAL,
    ) -> StripedBatch:
        """See `InitiatorSession.alloc_store`."""
        return self._write("alloc_store", handles, generations, region, offsets, lengths, deadline, flags)

    def store_inline(
        self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], *, deadline: float, flags: int = Flag.NONE
    ) -> StripedBatch:
        """See `InitiatorSession.store_inline`."""
        return self._write_inline("store_inline", handles, generations, data, deadline, flags)

    def alloc_store_inline(
        self, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], *, deadline: float, flags: int = Flag.SEAL
    ) -> StripedBatch:
        """See `InitiatorSession.alloc_store_inline`."""
        return self._write_inline("alloc_store_inline", handles, generations, data, deadline, flags)

    def free(self, handles: ArrayLike, generations: ArrayLike, *, deadline: float) -> StripedBatch:
        """See `InitiatorSession.free`."""
        requests = Requests(handles, generations)

        def post(session: InitiatorSession, at: Places) -> LoadBatch:
            return session.free(requests.handles[at], *requests.values(at), deadline=deadline)

        return self._post_write(post, requests, None, deadline)

    def poll(self) -> None:
        """Process what has come on any stripe, without waiting. Fences overdue batches."""
        for session in self._sessions():
            session.poll()

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._watch().fileno()

    def await_parts(self, parts: Sequence[Part], deadline: float) -> bool:
        """See `stripe_batch.Waits`."""
        waiting = [part.batch for part in parts if isinstance(part.batch, LoadBatch) and not part.batch.done]
        if len(waiting) == 1:  # the waiting thread itself asks that connection's socket
            return waiting[0].await_done()
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._watch().poll(min(left, _LONGEST_WAIT_S))
            self.poll()
            waiting = [batch for batch in waiting if not batch.done]
        return True

    def close(self, timeout_s: float = 2.0) -> None:
        """Say goodbye on every stripe; see `InitiatorSession.close`. Idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        threads = [threading.Thread(target=stripe.close, args=(timeout_s,), daemon=True) for stripe in self._stripes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def __enter__(self) -> StripedSession:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _write(
        self,
        operation: str,
        handles: ArrayLike,
        generations: ArrayLike,
        region: StripedRegion,
        offsets: ArrayLike,
        lengths: ArrayLike,
        deadline: float,
        flags: int,
    ) -> StripedBatch:
        region.expect_valid()
        requests = Requests(handles, generations, offsets, lengths)

        def post(session: InitiatorSession, at: Places) -> LoadBatch:
            run: Callable[..., LoadBatch] = getattr(session, operation)
            generation, offset, length = requests.values(at)
            return run(requests.handles[at], generation, region.on(session), offset, length, deadline=deadline, flags=flags)

        return self._post_write(post, requests, region, deadline)

    def _write_inline(
        self, operation: str, handles: ArrayLike, generations: ArrayLike, data: Sequence[bytes], deadline: float, flags: int
    ) -> StripedBatch:
        requests = Requests(handles, generations)

        def post(session: InitiatorSession, at: Places) -> LoadBatch:
            run: Callable[..., LoadBatch] = getattr(session, operation)
            items = [data[place] for place in np.arange(requests.count)[at].tolist()]
            return run(requests.handles[at], *requests.values(at), items, deadline=deadline, flags=flags)

        return self._post_write(post, requests, None, deadline)

    def _post_write(self, post: _Post, requests: Requests, region: StripedRegion | None, deadline: float) -> StripedBatch:
        with self._lock:
            batch = self._post(self._by_range(requests), post, requests, region, deadline)
            self._writes = [*(write for write in self._writes if not write.done), batch]
            return batch

    def _sessions(self) -> list[InitiatorSession]:
        """Of all stripes that have one, be it open or not: what is outstanding on it is still answered, or fails."""
        return [stripe.session for stripe in self._stripes if stripe.session is not None]

    def _open(self) -> list[InitiatorSession]:
        return [session for session in self._sessions() if session.is_open]

    def _any(self) -> InitiatorSession:
        for session in self._open():
            return session
        raise self._ended()

    def _ended(self) -> SessionClosed:
        return SessionClosed(f"the session with {self.peer} has ended, and all of its stripes are lost: {self._last.error}")

    def _by_octets(self, requests: Requests, is_whole: bool) -> list[_Route]:
        """Runs of about as many octets, for the least loaded stripes first."""
        stripes = sorted(self._ready(), key=lambda stripe: stripe.outstanding_bytes)
        count = 1 if is_whole else max(1, min(len(stripes), requests.count, requests.octets(slice(None)) // SPLIT_BYTES))
        return [*zip(stripes, requests.runs(count), strict=False)]

    def _by_range(self, requests: Requests) -> list[_Route]:
        """Each handle to the stripe whose range has it; those that nobody's range has to any, for the target to judge."""
        ready = self._ready()
        if len(self.ranges) == 1:
            return [(min(ready, key=lambda stripe: stripe.outstanding_bytes), slice(0, requests.count))]
        routes: list[_Route] = []
        is_left: NDArray[np.bool_] = np.ones(requests.count, np.bool_)
        for stripe in self._stripes:
            base, size = stripe.handles
            is_mine = is_left & (requests.handles >= base) & (requests.handles < base + size)
            if is_mine.any():
                routes.append((stripe, np.flatnonzero(is_mine)))
                is_left &= ~is_mine
        if is_left.any():
            routes.append((ready[0], np.flatnonzero(is_left)))
        return routes

    def _ready(self) -> list[Stripe]:
        """With the lock: open stripes; the others are connected again in the background. Raises SessionClosed if there are none."""
        ready = [stripe for stripe in self._stripes if stripe.is_open]
        if self._is_closed or not ready:
            raise self._ended()
        self._last = ready[0].session or self._last
        for stripe in self._stripes:
            if not stripe.is_open:
                stripe.reconnect(self._last)
        return ready

    def _post(self, routes: list[_Route], post: _Post, requests: Requests, region: StripedRegion | None, deadline: float) -> StripedBatch:
        parts = []
        for stripe, places in routes:
            batch: LoadBatch | Exception
            try:
                batch = stripe.post(post, places, requests.octets(places))
            except SessionClosed as error:
                batch = error
            parts.append(Part(places, batch))
        if not self._open():
            raise self._ended()
        return StripedBatch(self, requests.count, parts, region, deadline)

    def _watch(self) -> select.epoll:
        """What is readable when a stripe has news."""
        with self._lock:
            if self._epoll is None:
                self._epoll = select.epoll()
            now = {session for session in self._sessions() if not session.is_over}
            for session in now - self._watched.keys():
                self._watched[session] = session.fileno()
                self._epoll.register(self._watched[session], select.EPOLLIN)
            for session in self._watched.keys() - now:
                with contextlib.suppress(OSError):
                    self._epoll.unregister(self._watched.pop(session))
            return self._epoll
