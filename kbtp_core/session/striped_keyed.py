"""Keyed calls over several connections to one store (`StripedSession`): what goes to one of them, and what is cut by handle.

1. Blocks are put and published through the stripe whose range has their handle, so a PUBLISH is behind its ALLOC_STOREs. A batch
   whose handles are of several stripes is cut, and its results are joined.
2. What names values by id goes to the stripe with the least under way: a value that was answered as published can be found by all.
   Calls of which none was waited for are in no order, unless they are of one handle.
3. The namespace is told to each connection right before its first PUBLISH, and again to one that was made anew.
4. A deadline that passes fences the memory on all stripes.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import DeadlineExceeded, SessionClosed
from kbtp_core.fabric.api import PUT_RESULT, Array
from kbtp_core.protocol import keyed_batch
from kbtp_core.protocol.constants import NO_STATUS
from kbtp_core.protocol.keyed import NO_HANDLE, Ids, PublishFlag
from kbtp_core.protocol.keyed_batch import Encode
from kbtp_core.session.initiator import InitiatorSession
from kbtp_core.session.keyed import Asked, Counted, KeyedCalls, Lookups, Publishes, PutBatch
from kbtp_core.session.stripe import Stripe
from kbtp_core.session.stripe_batch import Places, Requests
from kbtp_core.session.stripe_region import StripedRegion


@dataclass(frozen=True)
class _Part:
    """The values at `places` of the whole; `batch` is what is under way for them, or why they were not sent."""

    places: Places
    batch: PutBatch | Publishes | Exception


class AskedParts(Asked):
    """What is under way on several stripes, as if it were on one."""

    def __init__(self, parts: Sequence[_Part], region: StripedRegion | None) -> None:
        self._parts = parts
        self._region = region

    @property
    def done(self) -> bool:
        return all(isinstance(part.batch, Exception) or part.batch.done for part in self._parts)

    @property
    def error(self) -> Exception | None:
        errors = (part.batch if isinstance(part.batch, Exception) else part.batch.error for part in self._parts)
        return next((error for error in errors if error is not None), None)

    @property
    def answers(self) -> list[bytes]:
        raise TypeError("answers of several stripes are read as results")

    def wait(self) -> None:
        for part in self._parts:
            if not isinstance(part.batch, Exception):
                try:
                    part.batch.wait()
                except (DeadlineExceeded, SessionClosed):
                    continue  # it is the part's error, and the others have ends of their own
        if (error := self.error) is not None:
            if isinstance(error, DeadlineExceeded) and self._region is not None:
                self._region.close()
            raise error.with_traceback(None)

    def cancel(self) -> None:
        if self.done:
            return
        for part in self._parts:
            if not isinstance(part.batch, Exception):
                part.batch.cancel()
        if self._region is not None:
            self._region.close()

    def joined(self, nothing: Array) -> Array:
        """`nothing`, with the results of those parts that have some."""
        for part in self._parts:
            if not isinstance(part.batch, Exception):
                nothing[part.places] = part.batch.items
        return nothing


class StripedKeyed(KeyedCalls):
    """The keyed calls of a `StripedSession`, which has the rest."""

    _lock: threading.Lock
    _space: tuple[int, int, int] | None = None  # tenant, namespace, lifetime

    def __init__(self) -> None:
        self._told: dict[InitiatorSession, tuple[int, int, int]] = {}

    @abstractmethod
    def _ready(self) -> list[Stripe]: ...

    @abstractmethod
    def _by_range(self, requests: Requests) -> list[tuple[Stripe, Places]]: ...

    def ask(self, encode: Encode, deadline: float) -> Asked:
        """See `InitiatorSession.ask`."""
        return self._least().ask(encode, deadline)

    def lookup(self, ids: Ids, tenant: int, *, deadline: float, flags: int = 0) -> Lookups:
        """See `KeyedCalls.lookup`."""
        return self._least().lookup(ids, tenant, deadline=deadline, flags=flags)

    def set_namespace(self, tenant: int, namespace: int, *, deadline: float, ttl_s: int = 0) -> Counted:
        """See `KeyedCalls.set_namespace`; the answer is that of one stripe, and the others are told when it matters to them."""
        with self._lock:
            session = self._session_of(self._ready()[0])
            self._space = self._told[session] = (tenant, namespace, ttl_s)
            return session.set_namespace(tenant, namespace, deadline=deadline, ttl_s=ttl_s)

    def publish(
        self,
        ids: Ids,
        tenant: int,
        handles: ArrayLike,
        generations: ArrayLike = 0,
        crcs: ArrayLike = 0,
        *,
        deadline: float,
        flags: int = PublishFlag.NONE,
    ) -> Publishes:
        """See `KeyedCalls.publish`."""
        requests = Requests(np.broadcast_to(np.asarray(handles, np.uint64), len(ids)), generations, crcs)

        def post(session: InitiatorSession, at: Places) -> Publishes:
            generation, crc = requests.values(at)
            return session.publish(ids[at], tenant, requests.handles[at], generation, crc, deadline=deadline, flags=flags)

        asked = self._cut(requests, lambda _: 0, post, None, deadline)
        nothing = np.zeros(len(ids), keyed_batch.PUBLISHED)
        nothing["handle"], nothing["status"] = NO_HANDLE, NO_STATUS
        return Publishes(asked, lambda: asked.joined(nothing.copy()))

    def put(
        self,
        ids: Ids,
        tenant: int,
        handles: NDArray[np.uint64],
        addresses: NDArray[np.uint64],
        lengths: NDArray[np.uint32],
        *,
        deadline: float,
        region: Any = None,
        offsets: ArrayLike = 0,
        flags: int = PublishFlag.NONE,
    ) -> PutBatch:
        """See `KeyedCalls.put`; `region` is a StripedRegion."""
        requests = Requests(handles, offsets)

        def post(session: InitiatorSession, at: Places) -> PutBatch:
            (offset,) = requests.values(at)
            part = None if region is None else region.on(session)
            return session.put(
                ids[at],
                tenant,
                requests.handles[at],
                addresses[at],
                lengths[at],
                deadline=deadline,
                region=part,
                offsets=offset,
                flags=flags,
            )

        asked = self._cut(requests, lambda at: int(lengths[at].sum(dtype=np.uint64)), post, region, deadline)
        nothing = np.zeros(requests.count, PUT_RESULT)
        nothing["handle"], nothing["stored"], nothing["status"] = NO_HANDLE, NO_STATUS, NO_STATUS
        return PutBatch(asked, lambda: asked.joined(nothing.copy()))

    # Inside ----------------------------------------------------------------------------------------------------------

    def _least(self) -> InitiatorSession:
        with self._lock:
            return self._session_of(min(self._ready(), key=lambda stripe: stripe.outstanding_bytes))

    def _session_of(self, stripe: Stripe) -> InitiatorSession:
        session = stripe.session
        assert session is not None, "a stripe that is ready has a session"
        return session

    def _cut(
        self,
        requests: Requests,
        octets: Callable[[Places], int],
        post: Callable[[InitiatorSession, Places], Any],
        region: StripedRegion | None,
        deadline: float,
    ) -> AskedParts:
        """Post each part on the stripe that has its handles. What was not sent has the error instead."""
        with self._lock:
            routes = [(stripe, stripe.session, places) for stripe, places in self._by_range(requests)]
            for _, session, _ in routes:
                self._tell(session, deadline)
        parts = []
        for stripe, session, places in routes:
            batch: Any
            try:
                if session is None or not session.is_open:
                    raise SessionClosed("the stripe that has these handles is lost, and their blocks are freed")
                batch = post(session, places)
                with self._lock:
                    stripe.note(batch, octets(places))
            except SessionClosed as error:
                batch = error
            parts.append(_Part(places, batch))
        return AskedParts(parts, region)

    def _tell(self, session: InitiatorSession | None, deadline: float) -> None:
        """With the lock: what this session publishes from now on belongs to the namespace."""
        if session is None or self._space is None or not session.is_open or self._told.get(session) == self._space:
            return
        tenant, namespace, ttl_s = self._space
        try:
            session.set_namespace(tenant, namespace, deadline=deadline, ttl_s=ttl_s)
        except SessionClosed:
            return
        self._told = {one: space for one, space in self._told.items() if not one.is_over} | {session: self._space}
