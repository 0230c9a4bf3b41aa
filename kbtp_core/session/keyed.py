"""A session's calls for values by key (docs/store-protocol.md). Thousands of ids go in one call, and results are arrays.

A put is ALLOC_STOREs and the PUBLISH of their blocks, sent back to back: `put`. A get is a LOOKUP and then LOADs of what it found, by
handle and generation; who remembers both from before needs the LOADs alone, and looks up again where they fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.fabric.api import Array, Region
from kbtp_core.protocol import keyed, keyed_batch
from kbtp_core.protocol.constants import NO_STATUS, Status
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.keyed import Ids, LookupFlag, PinFlag, PublishFlag
from kbtp_core.protocol.keyed_batch import Encode

_OK, _ALREADY_BOUND = int(Status.OK), int(Status.ALREADY_BOUND)  # plain numbers are far quicker than members


class Pending(Protocol):
    """Messages under way."""

    @property
    def deadline(self) -> float: ...
    @property
    def done(self) -> bool: ...
    @property
    def error(self) -> Exception | None: ...
    @property
    def answers(self) -> list[bytes]: ...


class Drives(Protocol):
    """What waits for them (`InitiatorSession`)."""

    def await_batch(self, pending: Any) -> bool: ...
    def cancel(self, pending: Any) -> None: ...


class Asked:
    """Messages under way. `wait` as for a LoadBatch; `answers` are octets, empty where there is none."""

    def __init__(self, session: Drives, pending: Pending) -> None:
        self._session = session
        self._pending = pending

    @property
    def done(self) -> bool:
        return self._pending.done

    @property
    def error(self) -> Exception | None:
        return self._pending.error

    @property
    def answers(self) -> list[bytes]:
        return self._pending.answers

    def wait(self) -> None:
        pending = self._pending
        if not self._session.await_batch(pending):
            self._session.cancel(pending)
        if pending.error is not None:
            raise pending.error.with_traceback(None)

    def cancel(self) -> None:
        self._session.cancel(self._pending)


class KeyedResults:
    """n results under way; see `KeyedCalls`. Results are read when they are first asked for, after `wait`."""

    def __init__(self, asked: Asked, read: Callable[[], NDArray[Any]]) -> None:
        self._asked = asked
        self._read = read
        self._items: NDArray[Any] | None = None

    @property
    def done(self) -> bool:
        """Whether all is answered or will never be. Never waits."""
        return self._asked.done

    @property
    def error(self) -> Exception | None:
        """Why the batch as a whole has failed (SessionClosed, DeadlineExceeded)."""
        return self._asked.error

    def wait(self) -> Any:
        """Wait until done, at most until the deadline; returns itself. Raises DeadlineExceeded, SessionClosed."""
        self._asked.wait()
        return self

    def cancel(self) -> None:
        self._asked.cancel()

    @property
    def items(self) -> NDArray[Any]:
        """(n,) The results as one structured array."""
        if self._items is None:
            items = self._read()
            if not self.done:
                return items
            self._items = items
        return self._items


class Lookups(KeyedResults):
    """Where n values are (keyed_batch.FOUND). `tier` is zero for what is absent."""

    @property
    def handle(self) -> NDArray[np.uint64]:
        return np.asarray(self.items["handle"])

    @property
    def generation(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["generation"])

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return np.asarray(self.items["data_length"])

    @property
    def tier(self) -> NDArray[np.uint8]:
        return np.asarray(self.items["tier"])

    @property
    def flags(self) -> NDArray[np.uint8]:
        return np.asarray(self.items["flags"])

    @property
    def has_handle(self) -> NDArray[np.bool_]:
        """Which of them can be loaded: in RAM, or on their way there."""
        return np.asarray(self.items["handle"] != keyed.NO_HANDLE)

    @property
    def prefix_count(self) -> int:
        """How many from the first one on are there."""
        absent = np.flatnonzero(self.tier == keyed.Tier.ABSENT)
        return int(absent[0]) if len(absent) else len(self.items)


class Publishes(KeyedResults):
    """What became of n values (keyed_batch.PUBLISHED); NO_STATUS where there is no answer."""

    @property
    def status(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["status"])

    @property
    def handle(self) -> NDArray[np.uint64]:
        return np.asarray(self.items["handle"])

    @property
    def generation(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["generation"])

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """Which of the ids have a value now: this one, or that of an earlier writer."""
        status = self.status
        return np.asarray((status == Status.OK) | (status == Status.ALREADY_BOUND))


class Pins(KeyedResults):
    @property
    def status(self) -> NDArray[np.uint16]:
        return np.asarray(self.items)


class Counted:
    """A count that is under way."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def wait(self) -> Counted:
        """See `KeyedResults.wait`."""
        self._asked.wait()
        return self

    @property
    def done(self) -> bool:
        return self._asked.done

    @property
    def count(self) -> int:
        return keyed_batch.counted(self._asked.answers)[0]

    @property
    def status(self) -> int:
        """Status.OK, or the first that was not."""
        return keyed_batch.counted(self._asked.answers)[1]


class Page:
    """A page of a list that is under way."""

    def __init__(self, asked: Asked) -> None:
        self._asked = asked

    def wait(self) -> Page:
        """See `KeyedResults.wait`."""
        self._asked.wait()
        return self

    @property
    def status(self) -> int:
        return keyed_batch.listed(self._asked.answers[0])[2]

    @property
    def cursor(self) -> int:
        """Where to go on; zero at the end."""
        return keyed_batch.listed(self._asked.answers[0])[0]

    @property
    def items(self) -> NDArray[Any]:
        """Values (keyed_batch.LISTED)."""
        return keyed_batch.listed(self._asked.answers[0])[1]


class PutBatch:
    """n values on their way to a store. `status` is that of their PUBLISH, `stored` that of the ALLOC_STORE before it.

    NO_STATUS where there is no answer. Where `is_settled` the handle that was used is free again; elsewhere its block may be bound.
    """

    def __init__(self, asked: Asked, read: Callable[[], Array]) -> None:
        self._asked = asked
        self._read = read
        self._items: Array | None = None

    @property
    def done(self) -> bool:
        """Whether all is answered or will never be. Never waits."""
        return self._asked.done

    @property
    def error(self) -> Exception | None:
        """Why the batch as a whole has failed (SessionClosed, DeadlineExceeded)."""
        return self._asked.error

    def wait(self) -> PutBatch:
        """See `KeyedResults.wait`. After it nothing reads the values any more."""
        self._asked.wait()
        return self

    def cancel(self) -> None:
        self._asked.cancel()

    @property
    def items(self) -> Array:
        """(n,) The results as one array (dtype PUT_RESULT)."""
        if self._items is None:
            items = self._read()
            if not self.done:
                return items
            self._items = items
        return self._items

    @property
    def stored(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["stored"])

    @property
    def status(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["status"])

    @property
    def handle(self) -> NDArray[np.uint64]:
        """Where the store has the value."""
        return np.asarray(self.items["handle"])

    @property
    def generation(self) -> NDArray[np.uint16]:
        return np.asarray(self.items["generation"])

    @property
    def is_kept(self) -> NDArray[np.bool_]:
        """See the function of that name."""
        return is_kept(self.items)

    @property
    def is_settled(self) -> NDArray[np.bool_]:
        """See the function of that name."""
        return is_settled(self.items)


def is_kept(results: Array) -> NDArray[np.bool_]:
    """Which of the ids of a put (dtype PUT_RESULT) have a value now: this one, or that of an earlier writer."""
    status = results["status"]
    return np.asarray((status == _OK) | (status == _ALREADY_BOUND))


def is_settled(results: Array) -> NDArray[np.bool_]:
    """Which of the handles that a put used are free again; elsewhere a block may be bound."""
    stored, status = results["stored"], results["status"]
    failed = (stored != _OK) & (stored != NO_STATUS) & (stored != _ALREADY_BOUND)
    return np.asarray(is_kept(results) | (failed & (status != NO_STATUS)))


class KeyedCalls(ABC):
    """Needs STORE. `tenant` is a tenant id, `ids` are (n, 16) octets; deadlines are times of `time.monotonic()`. All return at once."""

    @abstractmethod
    def ask(self, encode: Encode, deadline: float) -> Asked:
        """Send keyed messages."""

    @abstractmethod
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
        """Give values to the store, in one round trip: ALLOC_STOREs into `handles` of this session, and the PUBLISH of them.

        Value i lies at `addresses[i]`, `lengths[i]` octets; both may be of shape (n, pieces). Up to `put_inline_bytes` its octets are
        copied now. Longer ones are read by the target at `offsets[i]` of `region`, which is closed if the deadline passes.

        Raises ValueError for a long value without `region`, or if the target did not grant STORE; SessionClosed.
        """

    @property
    @abstractmethod
    def target(self) -> HelloAck: ...

    @property
    def put_inline_bytes(self) -> int:
        """Values up to this go inside their messages, and need no region."""
        return self.target.inline_bytes

    def lookup(self, ids: Ids, tenant: int, *, deadline: float, flags: int = LookupFlag.NONE) -> Lookups:
        """Where are these values? With PREFIX what lies behind the first absent id counts as absent, too."""
        count, inline = len(ids), self.target.inline_bytes
        asked = self.ask(keyed_batch.lookups(ids, tenant, flags, inline), deadline)
        is_prefix = bool(flags & LookupFlag.PREFIX)
        return Lookups(asked, lambda: keyed_batch.found(asked.answers, count, inline, is_prefix=is_prefix))

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
        """Give blocks that this session bound and sealed to the store. Generation 0 takes what was bound last.

        Where the status is neither OK nor ALREADY_BOUND the block is still this session's.
        """
        items = np.zeros(len(ids), keyed.PUBLISH_ITEM)
        items["id"], items["handle"], items["generation"], items["crc"] = ids, handles, generations, crcs
        count, inline = len(ids), self.target.inline_bytes
        asked = self.ask(keyed_batch.publishes(items, tenant, flags, inline), deadline)
        return Publishes(asked, lambda: keyed_batch.published(asked.answers, count, inline))

    def remove(self, ids: Ids, tenant: int, *, deadline: float) -> Counted:
        """Forget values; `count` is how many were there."""
        return Counted(self.ask(keyed_batch.removes(ids, tenant, self.target.inline_bytes), deadline))

    def pin(
        self, handles: NDArray[np.uint64], generations: ArrayLike, *, deadline: float, lease_ms: int = 0, is_pinned: bool = True
    ) -> Pins:
        """Keep blocks of the store from being evicted for `lease_ms` (zero: the target's default), or let them go."""
        items = np.zeros(len(handles), keyed.PIN_ITEM)
        items["handle"], items["generation"] = handles, generations
        count, inline = len(handles), self.target.inline_bytes
        asked = self.ask(keyed_batch.pins(items, PinFlag.PIN if is_pinned else PinFlag.UNPIN, lease_ms, inline), deadline)
        return Pins(asked, lambda: keyed_batch.pinned(asked.answers, count, inline))

    def set_namespace(self, tenant: int, namespace: int, *, deadline: float, ttl_s: int = 0) -> Counted:
        """What this session publishes for `tenant` from now on belongs to `namespace`, and is forgotten after `ttl_s` (zero: never)."""
        return Counted(self.ask(lambda first: [keyed.SetNamespace(first, tenant, namespace, ttl_s).encode()], deadline))

    def remove_namespace(self, tenant: int, namespace: int, *, deadline: float) -> Counted:
        """Forget all values of a namespace; `count` is how many were there."""
        return Counted(self.ask(lambda first: [keyed.RemoveNamespace(first, tenant, namespace).encode()], deadline))

    def list_values(
        self, tenant: int, namespace: int = keyed.ANY_NAMESPACE, cursor: int = 0, *, deadline: float, limit: int = 0xFFFF_FFFF
    ) -> Page:
        """A page of a namespace's values, or of all the tenant's."""
        return Page(self.ask(lambda first: [keyed.List(first, tenant, namespace, cursor, limit).encode()], deadline))
