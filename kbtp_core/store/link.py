"""A client's connection to one store: batches of ids in, statuses out. Any thread.

Rules:
1. A store that can't be reached is known to be so for a while, which doubles up to five seconds; calls fail at once meanwhile. One that
   is slow is not: a deadline that passes says nothing about the next call.
2. Handles for puts are this session's. One whose put has no known end is *doubtful*: it is freed, and used again when that was answered.
3. Where a value was is remembered (`native/handle_cache.hpp`), so a get of it again is one round trip. A generation that does not fit
   any more is looked up anew, once; what is gone then is MISSING.
4. When a call returns nothing touches its memory any more: a deadline closes the region first.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.errors import DeadlineExceeded, KbtpError, SessionClosed, SessionRefused
from kbtp_core.fabric.api import PUT_RESULT, Array, Fabric, Region
from kbtp_core.protocol.constants import NO_STATUS, Capability, Status, status_name
from kbtp_core.protocol.initiator import HelloParameters
from kbtp_core.protocol.keyed import NO_HANDLE, Ids, LookupFlag, PublishFlag, Tier
from kbtp_core.session import InitiatorSession, StripedSession
from kbtp_core.session.calls import StoreCalls
from kbtp_core.session.keyed import PutBatch, is_kept, is_settled
from kbtp_core.store.item_status import ItemStatus, item_statuses
from kbtp_core.store.link_errors import Failing, Refused, TenantRefused, Unavailable
from kbtp_core.store.places import Places
from kbtp_core.store.regions import regions_of

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 5.0
_CACHE_LOG2_SETS: Final = 14
_IDLE_TURNS: Final = 20
_PAUSE_S: Final = 0.005
# Plain numbers: looking a member up in its enumeration costs more than what is done with it.
_UNAVAILABLE: Final = int(ItemStatus.UNAVAILABLE)
_DURABLE, _PIN = int(PublishFlag.DURABLE), int(PublishFlag.PIN)
_TOUCH, _PROMOTE = int(LookupFlag.TOUCH), int(LookupFlag.PROMOTE)
_STALE: Final = (int(Status.STALE_GENERATION), int(Status.NOT_BOUND))


@dataclass(frozen=True)
class LinkOptions:
    """How a client connects to each store."""

    block_bytes: int = 0
    """The largest value; 0 takes the store's default pool."""
    secret: bytes | None = None
    trust_domain: str = ""
    client_name: str = ""
    connect_timeout_s: float = 3.0
    quota: int = 1024
    """Blocks that values may hold that are on their way."""
    outstanding: int = 1024
    inline_bytes: int = 1 << 16
    stripes: int = 1
    """Connections to each store: more than one where a single one is slower than the network between."""


@dataclass(frozen=True)
class SpaceOf:
    """What a client's values belong to."""

    tenant: int
    namespace: int
    ttl_s: int
    id_prefix: bytes
    """What is hashed before a key (`identity.id_prefix`)."""


class _Handles:
    """Handles of a session for values on their way to the store, at most so many. Under the link's lock."""

    def __init__(self, runs: list[tuple[int, int]], most: int) -> None:
        self._most_each = -(-most // max(1, len(runs)))
        self._runs: list[tuple[int, int]] = []
        self.free: list[int] = []
        self.doubtful: list[int] = []
        self.update(runs)

    @property
    def count(self) -> int:
        return sum(count for _, count in self._runs)

    def update(self, runs: list[tuple[int, int]]) -> None:
        """The session has these now, base and count each: a connection that was made anew has others."""
        runs = [(base, min(count, self._most_each)) for base, count in runs]
        if runs == self._runs:
            return
        new = [range(base, base + count) for base, count in runs if (base, count) not in self._runs]
        self._runs = runs
        self.free, self.doubtful = self._own(self.free), self._own(self.doubtful)
        # In turns, so that a batch takes some of each connection.
        self.free += [handle for turn in itertools.zip_longest(*new) for handle in turn if handle is not None]

    def give_back(self, free: list[int], doubtful: list[int]) -> None:
        """Those that are not the session's any more are dropped."""
        self.free += free if len(self._runs) == 1 else self._own(free)
        self.doubtful += doubtful if len(self._runs) == 1 else self._own(doubtful)

    def _own(self, handles: list[int]) -> list[int]:
        return [handle for handle in handles if any(0 <= handle - base < count for base, count in self._runs)]


class Link:
    """See the module. `space` is told to the store at the start of every session."""

    def __init__(self, fabric: Fabric, host: str, port: int, space: SpaceOf, options: LinkOptions) -> None:
        self.name: Final = f"{host}:{port}"
        self._fabric = fabric
        self._address = host, port
        self._space = space
        self._options = options
        self._cache = _native.HandleCache(_CACHE_LOG2_SETS)
        self._lock = threading.Lock()  # of all below; held while connecting, too
        self._changed = threading.Condition(self._lock)
        self._session: InitiatorSession | None = None
        self._handles = _Handles([], 0)
        self._calls: StoreCalls | None = None  # of the session, for the usual case
        self._pause_s = 0.0
        self._retry_at = 0.0
        self._failure: KbtpError = KbtpError("it was never tried")
        self._is_closed = False

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self, deadline: float) -> InitiatorSession:
        """The session, made anew if need be. Raises Unavailable, SessionRefused."""
        session = self._session
        if session is not None and session.is_open:
            return session
        with self._lock:
            if self._is_closed:
                raise Unavailable(f"the client of {self.name} is closed")
            if self._session is not None and self._session.is_open:
                return self._session
            now = time.monotonic()
            if now < self._retry_at:
                raise self._unreached(f", and is tried again in {self._retry_at - now:.1f} s")
            self._drop_session()
            try:
                self._session = self._connect(deadline)
            except (SessionClosed, DeadlineExceeded, SessionRefused) as error:
                self._pause_s = min(max(2 * self._pause_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
                self._retry_at = time.monotonic() + self._pause_s
                self._failure = error
                raise self._unreached("") from error
            self._pause_s = 0.0
            return self._session

    def _unreached(self, when: str) -> Unavailable:
        kind, what = (Refused, "refuses this client") if isinstance(self._failure, TenantRefused) else (Unavailable, "can't be reached")
        return kind(f"{self.name} {what}{when}: {self._failure}")

    def _connect(self, deadline: float) -> InitiatorSession:
        options = self._options
        limit = min(options.connect_timeout_s, max(deadline - time.monotonic(), 0.001))
        parameters = HelloParameters(
            capabilities=int(Capability.STORE),
            block_bytes=options.block_bytes,
            quota=options.quota,
            handle_count=max(options.quota, 1),
            outstanding=options.outstanding,
            inline_bytes=options.inline_bytes,
            client_name=options.client_name,
            trust_domain=options.trust_domain,
        )
        session = self._open_session(parameters, limit)
        try:
            if not session.target.capabilities & Capability.STORE:
                raise SessionRefused(f"{self.name} is a KBTP target without a store: point the client at a `kbtp serve`")
            space = self._space
            named = session.set_namespace(space.tenant, space.namespace, deadline=time.monotonic() + limit, ttl_s=space.ttl_s).wait()
            if named.status == Status.NOT_PERMITTED:
                raise TenantRefused(
                    f"it does not let trust domain {options.trust_domain!r} use the values of tenant {space.tenant:016x}: "
                    "use a namespace of a tenant of the domain, or name the tenant in the domain's line of the store's secret file"
                )
            self._check(named.status)
        except KbtpError:
            session.close(0.5)
            raise
        self._share_handles(session)
        self._cache.clear()  # another session may be with another incarnation, whose generations mean nothing
        return session

    def _open_session(self, parameters: HelloParameters, limit_s: float) -> InitiatorSession:
        stripes, secret = self._options.stripes, self._options.secret
        if stripes == 1:
            return InitiatorSession.connect(self._fabric, *self._address, parameters, deadline_s=limit_s, secret=secret)
        striped = StripedSession.connect(self._fabric, *self._address, parameters, stripes=stripes, deadline_s=limit_s, secret=secret)
        return cast(InitiatorSession, striped)  # it has all calls that are made here

    def _share_handles(self, session: InitiatorSession) -> None:
        """Half of them are for calls that the provider makes by itself."""
        runs, most = session.own_handles, self._options.quota
        if most and not any(count for _, count in runs):
            _log.warning("%s has promised its memory to other clients and refuses puts: give it more RAM, or close clients", self.name)
        self._calls = None
        if self._options.stripes == 1:
            (base, count), space = runs[0], self._space
            count = min(count, most)
            share = np.arange(base, base + count // 2, dtype=np.uint64)
            self._calls = StoreCalls.create(session, self._cache, space.id_prefix, space.tenant, share)
            if self._calls is not None:
                runs, most = [(base + len(share), count - len(share))], count - len(share)
        self._handles = _Handles(runs, most)

    def _drop_session(self) -> None:
        if self._session is not None:
            _log.info("the session with %s has ended: %s", self.name, self._session.error)
            self._session.close(0.1)
            self._session = self._calls = None

    def close(self, timeout_s: float = 2.0) -> None:
        with self._lock:
            self._is_closed = True
            session, self._session, self._calls = self._session, None, None
            self._changed.notify_all()
        if session is not None:
            session.close(timeout_s)

    @property
    def block_bytes(self) -> int:
        """The largest value of the session there is now, or 0."""
        session = self._session
        return 0 if session is None else session.target.block_bytes

    # The usual case -------------------------------------------------------------------------------------------------------

    def get_at_once(self, keys: Any, where: Any, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """As `get`, of values that are in the store's memory. None: `get` has to do it.

        `keys` are a list of keys, or ids; `where` is a list of buffers, or a pair of arrays: addresses and lengths.
        """
        calls = self._calls
        found = None if calls is None else calls.get(keys, where, deadline)
        if found is None:
            return None
        statuses, lengths, error = found
        if statuses is None:
            return np.zeros(len(lengths), np.uint8), lengths
        status = item_statuses(statuses)
        with Failing(status, self.name):
            if error is not None:
                raise error
        return status, lengths

    def put_at_once(self, keys: Any, where: Any, deadline: float, *, durable: bool, pin: bool) -> NDArray[np.uint8] | None:
        """As `put`, of values that need no second round trip. None: `put` has to do it. Arguments as for `get_at_once`."""
        calls = self._calls
        done = None if calls is None else calls.put(keys, where, (_DURABLE if durable else 0) | (_PIN if pin else 0), deadline)
        if calls is None or done is None:
            return None
        results, ids, handles, error = done
        if results is None:
            return np.zeros(len(keys), np.uint8)
        status = self._settle_put(calls.session, ids, handles, results)
        with Failing(status, self.name):
            if error is not None:
                raise error
        return status

    def lengths_at_once(self, keys: Any, deadline: float, *, touch: bool, promote: bool) -> NDArray[np.int64] | None:
        """As `lengths`; None: that has to do it."""
        calls = self._calls
        if calls is None:
            return None
        with Failing(np.empty(0, np.uint8), self.name):
            return calls.look_up(keys, (_TOUCH if touch else 0) | (_PROMOTE if promote else 0), deadline)
        return np.zeros(len(keys), np.int64)

    # Reading ---------------------------------------------------------------------------------------------------------

    def lengths(self, ids: Ids, deadline: float, *, touch: bool = False, promote: bool = False) -> NDArray[np.int64]:
        """Octets of each value; 0 for what is not there or can't be asked."""
        at_once = self.lengths_at_once(ids, deadline, touch=touch, promote=promote)
        if at_once is not None:
            return at_once
        flags = (_TOUCH if touch else 0) | (_PROMOTE if promote else 0)
        with Failing(np.empty(0, np.uint8), self.name):
            found = self.session(deadline).lookup(ids, self._space.tenant, deadline=deadline, flags=flags).wait().items
            self._keep(ids, found)
            return np.where(found["tier"] == Tier.ABSENT, 0, found["data_length"]).astype(np.int64)
        return np.zeros(len(ids), np.int64)

    def get(self, ids: Ids, places: Places, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read values into their places; (ItemStatus, length) each. Where a value does not fit the length is what it would take."""
        found = self.get_at_once(ids, (places.addresses, places.lengths), deadline)
        if found is not None:
            return found
        count = len(ids)
        status: NDArray[np.uint8] = np.full(count, _UNAVAILABLE, np.uint8)
        lengths: NDArray[np.int64] = np.zeros(count, np.int64)
        handles: NDArray[np.uint64] = np.empty(count, np.uint64)
        generations: NDArray[np.uint16] = np.empty(count, np.uint16)
        is_known: NDArray[np.bool_] = np.empty(count, np.bool_)
        with Failing(status, self.name):
            session = self.session(deadline)
            if self._cache.find(ids, handles, generations, is_known) == count:
                self._load(session, slice(None), handles, generations, places, deadline, status, lengths)
            else:
                known, unknown = np.flatnonzero(is_known), np.flatnonzero(~is_known)
                if len(known):
                    self._load(session, known, handles[known], generations[known], places, deadline, status, lengths)
                self._look_up_and_load(session, ids, unknown, places, deadline, status, lengths)
            if not np.count_nonzero(status):
                return status, lengths
            again = np.flatnonzero(is_known & (status == ItemStatus.MISSING))
            if len(again):
                self._cache.forget(np.ascontiguousarray(ids[again]))
                self._look_up_and_load(session, ids, again, places, deadline, status, lengths)
            self._load_in_turns(session, ids, places, deadline, status, lengths)
        too_large = np.flatnonzero((status == ItemStatus.TOO_LARGE) & (lengths == 0))
        if len(too_large):
            lengths[too_large] = self.lengths(np.ascontiguousarray(ids[too_large]), deadline)
        return status, lengths

    def _load_in_turns(
        self,
        session: InitiatorSession,
        ids: Ids,
        places: Places,
        deadline: float,
        status: NDArray[np.uint8],
        lengths: NDArray[np.int64],
    ) -> None:
        """Those on disk for which there was no room in memory: as what was loaded makes room, as long as that gets on."""
        left, idle_turns = np.flatnonzero(status == ItemStatus.NO_SPACE), 0
        while len(left) and idle_turns < _IDLE_TURNS and time.monotonic() < deadline:
            if idle_turns:
                time.sleep(_PAUSE_S)
            self._look_up_and_load(session, ids, left, places, deadline, status, lengths)
            before, left = len(left), left[status[left] == ItemStatus.NO_SPACE]
            idle_turns = 0 if len(left) < before else idle_turns + 1

    def _look_up_and_load(
        self,
        session: InitiatorSession,
        ids: Ids,
        at: NDArray[np.intp],
        places: Places,
        deadline: float,
        status: NDArray[np.uint8],
        lengths: NDArray[np.int64],
    ) -> None:
        """Of the values at `at`, of which nothing is known."""
        wanted = np.ascontiguousarray(ids[at])
        flags = int(LookupFlag.PROMOTE | LookupFlag.TOUCH)
        found = session.lookup(wanted, self._space.tenant, deadline=deadline, flags=flags).wait().items
        lengths[at] = found["data_length"]
        is_loadable = (found["tier"] == Tier.RAM) | (found["tier"] == Tier.PROMOTING)
        status[at] = np.where(found["tier"] == Tier.DISK, ItemStatus.NO_SPACE, ItemStatus.MISSING)
        if not is_loadable.any():
            return
        handles, generations = found["handle"][is_loadable], found["generation"][is_loadable]
        self._keep(wanted, found)
        self._load(session, at[is_loadable], handles, generations, places, deadline, status, lengths)

    def _keep(self, ids: Ids, found: Array) -> None:
        """Remember where values in memory are, so that getting them is one round trip."""
        at = np.flatnonzero(found["tier"] == Tier.RAM)
        columns = [np.ascontiguousarray(column[at]) for column in (ids, found["handle"], found["generation"])]
        self._cache.keep(*columns)

    def _load(
        self,
        session: InitiatorSession,
        at: NDArray[np.intp] | slice,
        handles: NDArray[np.uint64],
        generations: NDArray[np.uint16],
        places: Places,
        deadline: float,
        status: NDArray[np.uint8],
        lengths: NDArray[np.int64],
    ) -> None:
        part = places.part(at) if isinstance(at, np.ndarray) else places
        loaded: NDArray[np.uint16] = np.full(len(part), NO_STATUS, np.uint16)
        sizes: NDArray[np.uint32] = np.zeros(len(part), np.uint32)
        batches = []
        try:
            for group, region, offsets, capacity in regions_of(session, part):
                batch = session.load(handles[group], generations[group], region, offsets, capacity, deadline=deadline)
                batches.append((group, region, batch))
            for group, _, batch in batches:
                batch.wait()
                loaded[group], sizes[group] = batch.status, batch.data_length
        finally:
            for _, region, _ in batches:
                region.close()
            if np.count_nonzero(loaded):
                status[at] = item_statuses(loaded)
                lengths[at] = np.where(loaded == Status.OK, sizes, lengths[at])
            else:  # the usual case: all of them are there
                status[at], lengths[at] = 0, sizes

    # Writing ---------------------------------------------------------------------------------------------------------

    def put(self, ids: Ids, places: Places, deadline: float, *, durable: bool = False, pin: bool = False) -> NDArray[np.uint8]:
        """Keep values; an ItemStatus each."""
        done = self.put_at_once(ids, (places.addresses, places.lengths), deadline, durable=durable, pin=pin)
        if done is not None:
            return done
        status: NDArray[np.uint8] = np.full(len(ids), _UNAVAILABLE, np.uint8)
        flags = (_DURABLE if durable else 0) | (_PIN if pin else 0)
        if not len(ids):
            return status
        with Failing(status, self.name):
            session = self.session(deadline)
            if not self._handles.count:
                status[:] = ItemStatus.NO_SPACE
                return status
            totals = places.totals
            longest = int(totals.max())
            if longest <= session.target.block_bytes and np.count_nonzero(totals) == len(ids):
                handles = self._take_handles(session, len(ids), deadline)
                if len(handles) == len(ids):
                    self._put(session, ids, places, longest, handles, deadline, flags, status, slice(None))
                    return status
                self._give_back(session, handles, None)
            fits = (totals > 0) & (totals <= session.target.block_bytes)
            status[~fits] = ItemStatus.TOO_LARGE
            left = np.flatnonzero(fits)
            while len(left):
                handles = self._take_handles(session, len(left), deadline)
                now, left = left[: len(handles)], left[len(handles) :]
                part = places.part(now)
                self._put(session, np.ascontiguousarray(ids[now]), part, int(part.totals.max()), handles, deadline, flags, status, now)
        return status

    def _put(
        self,
        session: InitiatorSession,
        ids: Ids,
        part: Places,
        longest: int,
        handles: NDArray[np.uint64],
        deadline: float,
        flags: int,
        status: NDArray[np.uint8],
        at: NDArray[np.intp] | slice,
    ) -> None:
        """Put all of these, of up to `longest` octets each; what became of them goes to `status[at]`."""
        results = np.zeros(len(ids), PUT_RESULT)
        results["stored"] = results["status"] = NO_STATUS
        puts: list[tuple[NDArray[np.intp] | slice, Region | None, PutBatch]] = []
        try:
            if longest <= session.put_inline_bytes:
                put = session.put(ids, self._space.tenant, handles, part.addresses, part.lengths, deadline=deadline, flags=flags)
                results = put.wait().items
            else:
                puts += self._long_puts(session, ids, part, handles, deadline, flags)
                for group, _, put in puts:
                    results[group] = put.wait().items
        finally:
            for _, region, _ in puts:
                if region is not None:
                    region.close()
            status[at] = self._settle_put(session, ids, handles, results)

    def _long_puts(
        self, session: InitiatorSession, ids: Ids, part: Places, handles: NDArray[np.uint64], deadline: float, flags: int
    ) -> Iterator[tuple[NDArray[np.intp] | slice, Region | None, PutBatch]]:
        """Those of equal size together, read by the store from memory that is registered for it."""
        for group, region, offsets, _ in regions_of(session, part):
            some = part.part(group)
            try:
                put = session.put(
                    ids[group],
                    self._space.tenant,
                    handles[group],
                    some.addresses,
                    some.lengths,
                    region=region,
                    offsets=offsets,
                    deadline=deadline,
                    flags=flags,
                )
            except BaseException:
                region.close()
                raise
            yield group, region, put

    def _settle_put(self, session: InitiatorSession, ids: Ids, handles: NDArray[np.uint64], results: Array) -> NDArray[np.uint8]:
        """Remember where values are now and which handles are free again; an ItemStatus each."""
        stored, published = results["stored"], results["status"]
        if not np.count_nonzero(published):  # the usual case: all of them are stored
            self._cache.keep(ids, np.ascontiguousarray(results["handle"]), np.ascontiguousarray(results["generation"]))
            self._give_back(session, handles, None)
            return np.zeros(len(ids), np.uint8)
        kept = np.flatnonzero(is_kept(results) & (results["handle"] != NO_HANDLE))  # it may be on disk alone
        if len(kept):
            columns = [np.ascontiguousarray(results[name][kept]) for name in ("handle", "generation")]
            self._cache.keep(np.ascontiguousarray(ids[kept]), *columns)
        self._give_back(session, handles, is_settled(results))
        refused = (stored != Status.OK) & (stored != NO_STATUS)
        status = item_statuses(np.where(refused, stored, published))
        status[refused & (stored == Status.ALREADY_BOUND)] = ItemStatus.NO_SPACE
        return status

    def _take_handles(self, session: InitiatorSession, wanted: int, deadline: float) -> NDArray[np.uint64]:
        """One or more handles of the session, up to `wanted`; waits until there is one. Raises DeadlineExceeded, SessionClosed."""
        while True:
            with self._lock:
                if self._session is not session:
                    raise SessionClosed(f"the session with {self.name} has ended")
                own = self._handles
                if self._options.stripes > 1:
                    own.update(session.own_handles)
                if own.free:
                    taken = own.free[-wanted:]
                    del own.free[-wanted:]
                    return np.array(taken, np.uint64)
                doubtful, own.doubtful = own.doubtful, []
                if (
                    not doubtful
                    and not self._changed.wait(max(0.0, min(deadline - time.monotonic(), 0.25)))
                    and time.monotonic() >= deadline
                ):
                    raise DeadlineExceeded(f"no block of {self.name} came free in time; ask for more quota, or put less at once")
            if doubtful:
                self._free(session, doubtful, deadline)

    def _give_back(self, session: InitiatorSession, handles: NDArray[np.uint64], is_free: NDArray[np.bool_] | None) -> None:
        """Handles that a put has used; those that are not `is_free` are doubtful, and with None there are none of them."""
        with self._lock:
            if self._session is session:
                free, doubtful = (handles.tolist(), []) if is_free is None else (handles[is_free].tolist(), handles[~is_free].tolist())
                self._handles.give_back(free, doubtful)
                self._changed.notify_all()

    def _free(self, session: InitiatorSession, handles: list[int], deadline: float) -> None:
        """Free handles whose puts have no known end: the answer comes behind those of the puts."""
        is_settled: NDArray[np.bool_] = np.zeros(len(handles), np.bool_)
        try:
            status = session.free(handles, 0, deadline=deadline).wait().status
            is_settled = (status == Status.OK) | (status == Status.NOT_BOUND)
        finally:
            self._give_back(session, np.array(handles, np.uint64), is_settled)

    # By id, without data -----------------------------------------------------------------------------------------------

    def remove(self, ids: Ids, deadline: float) -> int:
        """Forget values; how many there were. Raises Unavailable, SessionClosed, DeadlineExceeded."""
        self._cache.forget(ids)
        return self._count(self.session(deadline).remove(ids, self._space.tenant, deadline=deadline).wait())

    def pin(self, ids: Ids, deadline: float, *, lease_ms: int, is_pinned: bool) -> NDArray[np.uint8]:
        """Keep values from being evicted for so long, or let them go; an ItemStatus each."""
        status: NDArray[np.uint8] = np.full(len(ids), ItemStatus.UNAVAILABLE, np.uint8)
        with Failing(status, self.name):
            session = self.session(deadline)
            found = session.lookup(ids, self._space.tenant, deadline=deadline, flags=int(LookupFlag.PROMOTE)).wait().items
            at = np.flatnonzero((found["tier"] == Tier.RAM) | (found["tier"] == Tier.PROMOTING))
            status[:] = ItemStatus.MISSING
            if len(at):
                pins = session.pin(found["handle"][at], found["generation"][at], deadline=deadline, lease_ms=lease_ms, is_pinned=is_pinned)
                status[at] = item_statuses(pins.wait().status)
        return status

    def remove_namespace(self, deadline: float) -> int:
        """Forget all values of the client's namespace; how many there were."""
        self._cache.clear()
        space = self._space
        return self._count(self.session(deadline).remove_namespace(space.tenant, space.namespace, deadline=deadline).wait())

    def pages(self, deadline: float, *, namespace: int, limit: int = 4096) -> Iterator[NDArray[Any]]:
        """What there is (keyed_batch.LISTED), page by page."""
        cursor = 0
        while True:
            page = self.session(deadline).list_values(self._space.tenant, namespace, cursor, deadline=deadline, limit=limit).wait()
            self._check(page.status)
            yield page.items
            cursor = page.cursor
            if not cursor:
                return

    def _count(self, counted: Any) -> int:
        self._check(counted.status)
        return int(counted.count)

    def _check(self, status: int) -> None:
        if status == NO_STATUS:
            raise SessionClosed(f"{self.name} did not answer")
        if status != Status.OK:
            raise KbtpError(f"{self.name} refuses that: {status_name(status)}")
