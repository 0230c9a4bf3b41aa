"""A client's connection to one store: batches of ids in, statuses out. Any thread.

Rules:
1. A store that can't be reached is known to be so for a while (`dialer`). One that is slow is not: a deadline that passes says nothing
   about the next call.
2. Handles for puts are their session's. One whose put has no known end is *doubtful*: it is freed, and used again when that was answered.
3. Where a value was is remembered (`native/handle_cache.hpp`), so a get of it again is one round trip. A generation that does not fit
   any more is looked up anew, once; what is gone then is MISSING.
4. When a call returns nothing touches its memory any more: a deadline closes the region first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import KbtpError, SessionClosed, SessionRefused
from kbtp_core.fabric.api import PUT_RESULT, Array, Fabric, Region
from kbtp_core.protocol.constants import NO_STATUS, Capability, Status, status_name
from kbtp_core.protocol.initiator import HelloParameters
from kbtp_core.protocol.keyed import NO_HANDLE, Ids, LookupFlag, PublishFlag, Tier
from kbtp_core.session import InitiatorSession, StripedSession
from kbtp_core.session.keyed import PutBatch, is_kept, is_settled
from kbtp_core.store.channel import Channel, LinkOptions, SpaceOf
from kbtp_core.store.dialer import Dialer
from kbtp_core.store.item_status import ItemStatus, item_statuses
from kbtp_core.store.link_errors import Failing, TenantRefused
from kbtp_core.store.places import Places
from kbtp_core.store.regions import regions_of

__all__ = ["Link", "LinkOptions", "SpaceOf"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_IDLE_TURNS: Final = 20
_PAUSE_S: Final = 0.005
_ASK_AGAIN_S: Final = 2.0
# Plain numbers: looking a member up in its enumeration costs more than what is done with it.
_UNAVAILABLE: Final = int(ItemStatus.UNAVAILABLE)
_DURABLE, _PIN = int(PublishFlag.DURABLE), int(PublishFlag.PIN)
_TOUCH, _PROMOTE = int(LookupFlag.TOUCH), int(LookupFlag.PROMOTE)
_STALE: Final = (int(Status.STALE_GENERATION), int(Status.NOT_BOUND))


class Link:
    """See the module. `space` is told to the store at the start of every session."""

    def __init__(self, fabric: Fabric, host: str, port: int, space: SpaceOf, options: LinkOptions) -> None:
        self.name: Final = f"{host}:{port}"
        self._fabric = fabric
        self._address = host, port
        self._space = space
        self._options = options
        self._dialer = Dialer(self.name, self._connect)

    # Sessions --------------------------------------------------------------------------------------------------------

    def session(self, deadline: float) -> InitiatorSession:
        """The session, made anew if need be. Raises Unavailable, DeadlineExceeded."""
        return self._dialer.get(deadline).session

    def _on_channel(self, deadline: float, work: Callable[[Channel, bool], _T]) -> _T:
        """`work(channel, False)`, and once more, with True, over the next session where that one ends meanwhile.

        So what a call costs the session whose deadline has passed, for data that comes too late ends it, is not the next call's loss.
        """
        channel = self._dialer.get(deadline)
        try:
            return work(channel, False)
        except SessionClosed as error:
            self._has_ended(channel, error)
            return work(self._dialer.get(deadline), True)

    def _connect(self, is_wanted: Callable[[], bool]) -> Channel:
        options = self._options
        deadline = time.monotonic() + options.connect_timeout_s
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
        session = self._open_session(parameters, options.connect_timeout_s, is_wanted)
        try:
            if not session.target.capabilities & Capability.STORE:
                raise SessionRefused(f"{self.name} is a KBTP target without a store: point the client at a `kbtp serve`")
            space = self._space
            named = session.set_namespace(space.tenant, space.namespace, deadline=deadline, ttl_s=space.ttl_s).wait()
            if named.status == Status.NOT_PERMITTED:
                raise TenantRefused(
                    f"it does not let trust domain {options.trust_domain!r} use the values of tenant {space.tenant:016x}: "
                    "use a namespace of a tenant of the domain, or name the tenant in the domain's line of the store's secret file"
                )
            self._check(named.status)
        except KbtpError:
            session.close(0.5)
            raise
        channel = Channel(session, options, space)
        if not channel.takes_values:
            _log.warning("%s has promised its memory to other clients and refuses puts: give it more RAM, or close clients", self.name)
        return channel

    def _open_session(self, parameters: HelloParameters, limit_s: float, is_wanted: Callable[[], bool]) -> InitiatorSession:
        stripes, secret = self._options.stripes, self._options.secret
        if stripes == 1:
            return InitiatorSession.connect(
                self._fabric, *self._address, parameters, deadline_s=limit_s, secret=secret, is_wanted=is_wanted
            )
        striped = StripedSession.connect(self._fabric, *self._address, parameters, stripes=stripes, deadline_s=limit_s, secret=secret)
        return cast(InitiatorSession, striped)  # it has all calls that are made here

    def close(self, timeout_s: float = 2.0) -> None:
        self._dialer.close(timeout_s)

    @property
    def block_bytes(self) -> int:
        """The largest value of the session there is now, or 0."""
        channel = self._dialer.current
        return 0 if channel is None else channel.session.target.block_bytes

    # The usual case -------------------------------------------------------------------------------------------------------

    def get_at_once(self, keys: Any, where: Any, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
        """As `get`, of values that are in the store's memory. None: `get` has to do it.

        `keys` are a list of keys, or ids; `where` is a list of buffers, or a pair of arrays: addresses and lengths.
        """
        channel = self._dialer.open
        found = None if channel is None or channel.calls is None else channel.calls.get(keys, where, deadline)
        if channel is None or found is None or self._has_ended(channel, found[-1]):
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
        channel, flags = self._dialer.open, (_DURABLE if durable else 0) | (_PIN if pin else 0)
        done = None if channel is None or channel.calls is None else channel.calls.put(keys, where, flags, deadline)
        if channel is None or done is None:
            return None
        results, ids, handles, error = done
        if results is None:
            return np.zeros(len(keys), np.uint8)
        status = self._settle_put(channel, ids, handles, results)
        if self._has_ended(channel, error):
            return None  # what was stored is there, and EXISTS
        with Failing(status, self.name):
            if error is not None:
                raise error
        return status

    def lengths_at_once(self, keys: Any, deadline: float, *, touch: bool, promote: bool) -> NDArray[np.int64] | None:
        """As `lengths`; None: that has to do it."""
        channel = self._dialer.open
        if channel is None or channel.calls is None:
            return None
        with Failing(np.empty(0, np.uint8), self.name):
            try:
                return channel.calls.look_up(keys, (_TOUCH if touch else 0) | (_PROMOTE if promote else 0), deadline)
            except SessionClosed as error:
                self._has_ended(channel, error)
                return None
        return np.zeros(len(keys), np.int64)

    def _has_ended(self, channel: Channel, error: Exception | None) -> bool:
        """Whether a call has failed because the session ended: the general way is over another one."""
        if not isinstance(error, SessionClosed):
            return False
        if self._options.stripes == 1 or not channel.session.is_open:  # it may have lost one stripe of several
            self._dialer.drop(channel)
        return True

    # Reading ---------------------------------------------------------------------------------------------------------

    def lengths(self, ids: Ids, deadline: float, *, touch: bool = False, promote: bool = False) -> NDArray[np.int64]:
        """Octets of each value; 0 for what is not there or can't be asked."""
        at_once = self.lengths_at_once(ids, deadline, touch=touch, promote=promote)
        if at_once is not None:
            return at_once
        flags = (_TOUCH if touch else 0) | (_PROMOTE if promote else 0)

        def look(channel: Channel, _: bool) -> NDArray[np.int64]:
            found = channel.session.lookup(ids, self._space.tenant, deadline=deadline, flags=flags).wait().items
            self._keep(channel, ids, found)
            return np.where(found["tier"] == Tier.ABSENT, 0, found["data_length"]).astype(np.int64)

        with Failing(np.empty(0, np.uint8), self.name):
            return self._on_channel(deadline, look)
        return np.zeros(len(ids), np.int64)

    def get(self, ids: Ids, places: Places, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """Read values into their places; (ItemStatus, length) each. Where a value does not fit the length is what it would take."""
        found = self.get_at_once(ids, (places.addresses, places.lengths), deadline)
        if found is not None:
            return found
        status: NDArray[np.uint8] = np.full(len(ids), _UNAVAILABLE, np.uint8)
        lengths: NDArray[np.int64] = np.zeros(len(ids), np.int64)
        with Failing(status, self.name):
            self._on_channel(deadline, lambda channel, _: self._get(channel, ids, places, deadline, status, lengths))
        too_large = np.flatnonzero((status == ItemStatus.TOO_LARGE) & (lengths == 0))
        if len(too_large):
            lengths[too_large] = self.lengths(np.ascontiguousarray(ids[too_large]), deadline)
        return status, lengths

    def _get(
        self, channel: Channel, ids: Ids, places: Places, deadline: float, status: NDArray[np.uint8], lengths: NDArray[np.int64]
    ) -> None:
        """Those that have no status yet."""
        count = len(ids)
        handles: NDArray[np.uint64] = np.empty(count, np.uint64)
        generations: NDArray[np.uint16] = np.empty(count, np.uint16)
        is_known: NDArray[np.bool_] = np.empty(count, np.bool_)
        if channel.cache.find(ids, handles, generations, is_known) == count:
            self._load(channel, slice(None), handles, generations, places, deadline, status, lengths)
        else:
            is_left = status == _UNAVAILABLE
            known, unknown = np.flatnonzero(is_known & is_left), np.flatnonzero(~is_known & is_left)
            if len(known):
                self._load(channel, known, handles[known], generations[known], places, deadline, status, lengths)
            if len(unknown):
                self._look_up_and_load(channel, ids, unknown, places, deadline, status, lengths)
        if not np.count_nonzero(status):
            return
        again = np.flatnonzero(is_known & (status == ItemStatus.MISSING))
        if len(again):
            channel.cache.forget(np.ascontiguousarray(ids[again]))
            self._look_up_and_load(channel, ids, again, places, deadline, status, lengths)
        self._load_in_turns(channel, ids, places, deadline, status, lengths)

    def _load_in_turns(
        self,
        channel: Channel,
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
            self._look_up_and_load(channel, ids, left, places, deadline, status, lengths)
            before, left = len(left), left[status[left] == ItemStatus.NO_SPACE]
            idle_turns = 0 if len(left) < before else idle_turns + 1

    def _look_up_and_load(
        self,
        channel: Channel,
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
        found = channel.session.lookup(wanted, self._space.tenant, deadline=deadline, flags=flags).wait().items
        lengths[at] = found["data_length"]
        is_loadable = (found["tier"] == Tier.RAM) | (found["tier"] == Tier.PROMOTING)
        status[at] = np.where(found["tier"] == Tier.DISK, ItemStatus.NO_SPACE, ItemStatus.MISSING)
        if not is_loadable.any():
            return
        handles, generations = found["handle"][is_loadable], found["generation"][is_loadable]
        self._keep(channel, wanted, found)
        self._load(channel, at[is_loadable], handles, generations, places, deadline, status, lengths)

    def _keep(self, channel: Channel, ids: Ids, found: Array) -> None:
        """Remember where values in memory are, so that getting them is one round trip."""
        at = np.flatnonzero(found["tier"] == Tier.RAM)
        columns = [np.ascontiguousarray(column[at]) for column in (ids, found["handle"], found["generation"])]
        channel.cache.keep(*columns)

    def _load(
        self,
        channel: Channel,
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
            for group, region, offsets, capacity in regions_of(channel.session, part):
                batch = channel.session.load(handles[group], generations[group], region, offsets, capacity, deadline=deadline)
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
            self._on_channel(deadline, lambda channel, is_again: self._put_all(channel, ids, places, deadline, flags, status, is_again))
        return status

    def _put_all(
        self, channel: Channel, ids: Ids, places: Places, deadline: float, flags: int, status: NDArray[np.uint8], is_again: bool
    ) -> None:
        """All of them, or again those that have no known end."""
        if not channel.takes_values or not channel.handles.count:
            status[:] = ItemStatus.NO_SPACE
            if time.monotonic() - channel.since > _ASK_AGAIN_S:  # others may have left
                self._dialer.drop(channel)
            return
        block_bytes = channel.session.target.block_bytes
        totals = places.totals
        longest = int(totals.max())
        if longest <= block_bytes and np.count_nonzero(totals) == len(ids) and not is_again:
            handles = channel.take_handles(len(ids), deadline)
            if len(handles) == len(ids):
                self._put(channel, ids, places, longest, handles, deadline, flags, status, slice(None))
                return
            channel.give_back(handles, None)
        fits = (totals > 0) & (totals <= block_bytes)
        status[~fits] = ItemStatus.TOO_LARGE
        left = np.flatnonzero(fits & (status == _UNAVAILABLE))
        while len(left):
            handles = channel.take_handles(len(left), deadline)
            now, left = left[: len(handles)], left[len(handles) :]
            part = places.part(now)
            self._put(channel, np.ascontiguousarray(ids[now]), part, int(part.totals.max()), handles, deadline, flags, status, now)

    def _put(
        self,
        channel: Channel,
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
            if longest <= channel.session.put_inline_bytes:
                put = channel.session.put(ids, self._space.tenant, handles, part.addresses, part.lengths, deadline=deadline, flags=flags)
                results = put.wait().items
            else:
                puts += self._long_puts(channel.session, ids, part, handles, deadline, flags)
                for group, _, put in puts:
                    results[group] = put.wait().items
        finally:
            for _, region, _ in puts:
                if region is not None:
                    region.close()
            status[at] = self._settle_put(channel, ids, handles, results)

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

    def _settle_put(self, channel: Channel, ids: Ids, handles: NDArray[np.uint64], results: Array) -> NDArray[np.uint8]:
        """Remember where values are now and which handles are free again; an ItemStatus each."""
        stored, published = results["stored"], results["status"]
        if not np.count_nonzero(published):  # the usual case: all of them are stored
            channel.cache.keep(ids, np.ascontiguousarray(results["handle"]), np.ascontiguousarray(results["generation"]))
            channel.give_back(handles, None)
            return np.zeros(len(ids), np.uint8)
        kept = np.flatnonzero(is_kept(results) & (results["handle"] != NO_HANDLE))  # it may be on disk alone
        if len(kept):
            columns = [np.ascontiguousarray(results[name][kept]) for name in ("handle", "generation")]
            channel.cache.keep(np.ascontiguousarray(ids[kept]), *columns)
        channel.give_back(handles, is_settled(results))
        refused = (stored != Status.OK) & (stored != NO_STATUS)
        status = item_statuses(np.where(refused, stored, published))
        status[refused & (stored == Status.ALREADY_BOUND)] = ItemStatus.NO_SPACE
        return status

    # By id, without data -----------------------------------------------------------------------------------------------

    def remove(self, ids: Ids, deadline: float) -> int:
        """Forget values; how many there were. Raises Unavailable, SessionClosed, DeadlineExceeded."""

        def forget(channel: Channel, _: bool) -> int:
            channel.cache.forget(ids)
            return self._count(channel.session.remove(ids, self._space.tenant, deadline=deadline).wait())

        return self._on_channel(deadline, forget)

    def pin(self, ids: Ids, deadline: float, *, lease_ms: int, is_pinned: bool) -> NDArray[np.uint8]:
        """Keep values from being evicted for so long, or let them go; an ItemStatus each."""
        status: NDArray[np.uint8] = np.full(len(ids), ItemStatus.UNAVAILABLE, np.uint8)

        def mark(channel: Channel, _: bool) -> None:
            found = channel.session.lookup(ids, self._space.tenant, deadline=deadline, flags=_PROMOTE).wait().items
            is_there = (found["tier"] == Tier.RAM) | (found["tier"] == Tier.PROMOTING)
            status[~is_there] = ItemStatus.MISSING
            if is_there.any():
                columns = found["handle"][is_there], found["generation"][is_there]
                pins = channel.session.pin(*columns, deadline=deadline, lease_ms=lease_ms, is_pinned=is_pinned)
                status[is_there] = item_statuses(pins.wait().status)

        with Failing(status, self.name):
            self._on_channel(deadline, mark)
        return status

    def remove_namespace(self, deadline: float) -> int:
        """Forget all values of the client's namespace; how many there were."""

        def forget(channel: Channel, _: bool) -> int:
            channel.cache.clear()
            space = self._space
            return self._count(channel.session.remove_namespace(space.tenant, space.namespace, deadline=deadline).wait())

        return self._on_channel(deadline, forget)

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
