"""Put and get by key, over the stores of a cluster or over one in this process.

    with Client("127.0.0.1:7400", b"my-namespace") as client:
        client.put([b"page-0"], [page])
        found = client.get([b"page-0"], [buffer])

Rules:
1. Calls take batches and answer with arrays: a failure of one item is in its place in the array, never an exception. A value that can't
   be had is a miss, whatever the reason; `GetResult.status` says which.
2. Every call has a deadline. When it returns, nothing touches the caller's memory any more.
3. Keys are bytes or text. Where they are known as 16-octet object ids already, an array (n, 16) of them goes in their place.
4. A key belongs to one member (`cluster.placement`); there is no second copy, and a member that is lost is a miss for its keys.

Any thread. The same calls for asyncio are in `AsyncClient`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.cluster.placement import Placement
from kbtp_core.fabric.api import Fabric
from kbtp_core.protocol.keyed import namespace_id
from kbtp_core.store import places
from kbtp_core.store.embedded import EmbeddedLink, EmbeddedStore
from kbtp_core.store.identity import Namespace, id_prefix, object_ids, tenant_id, tenant_of
from kbtp_core.store.item_status import ItemStatus
from kbtp_core.store.link import Link, LinkOptions, SpaceOf
from kbtp_core.store.places import Places
from kbtp_core.store.settings import parse_address

__all__ = ["Client", "GetResult", "ItemStatus", "Keys", "ListedValue"]

Keys: TypeAlias = Sequence[bytes | str] | NDArray[np.uint8]
_T = TypeVar("_T")
_Links: TypeAlias = Mapping[str, Link | EmbeddedLink]


class GetResult(NamedTuple):
    """Each of shape (n,)."""

    status: NDArray[np.uint8]
    """An ItemStatus."""
    lengths: NDArray[np.int64]
    """Octets of the value, also where it is TOO_LARGE for its buffer; 0 for a miss."""

    @property
    def ok(self) -> NDArray[np.bool_]:
        return np.asarray(self.status == ItemStatus.OK)


class ListedValue(NamedTuple):
    member: str
    object_id: bytes
    length: int
    tier: str
    ttl_s: int
    """Seconds left; 0: it stays."""


class Client:
    """Values of one namespace. See the module."""

    def __init__(
        self,
        members: str | Sequence[str] | Mapping[str, int],
        namespace: bytes | Namespace,
        *,
        timeout_s: float = 10.0,
        ttl_s: int = 0,
        options: LinkOptions = LinkOptions(),
        fabric: Fabric | None = None,
    ) -> None:
        """Connect when it is first needed. `members` are "host:port", with weights if they differ.

        `timeout_s` is for calls that name none, `ttl_s` is how long values live that this client puts (0: until they are evicted).
        Raises ValueError for a member that is no address or an empty namespace.
        """
        weights = {members: 1} if isinstance(members, str) else dict(members if isinstance(members, Mapping) else dict.fromkeys(members, 1))
        self._own_fabric = _open_fabric() if fabric is None else None
        space = _space(namespace, ttl_s)
        used = fabric or self._own_fabric
        assert used is not None
        self._begin(namespace, Placement(weights), {name: Link(used, *parse_address(name), space, options) for name in weights}, timeout_s)

    @classmethod
    def embedded(cls, namespace: bytes | Namespace, *, ram_bytes: int, block_bytes: int) -> Client:
        """A client with a store of its own, in this process: no server, no sockets, gone with the client."""
        client = cls.__new__(cls)
        client._own_fabric = None
        link = EmbeddedLink(EmbeddedStore(ram_bytes, block_bytes))
        client._begin(namespace, Placement({"embedded": 1}), {"embedded": link}, 10.0)
        return client

    def _begin(self, namespace: bytes | Namespace, placement: Placement, links: _Links, timeout_s: float) -> None:
        self.namespace = namespace.encode() if isinstance(namespace, Namespace) else namespace
        self.timeout_s = timeout_s
        self._placement = placement
        self._links = links
        self._sole = next(iter(links.values())) if len(links) == 1 else None
        self._link = self._sole if isinstance(self._sole, Link) else None
        self._threads: ThreadPoolExecutor | None = None

    # Values ----------------------------------------------------------------------------------------------------------

    def put(
        self, keys: Keys, values: Sequence[Any], *, durable: bool = False, pin: bool = False, timeout_s: float | None = None
    ) -> NDArray[np.uint8]:
        """Keep the octets of buffers; an ItemStatus each.

        OK: this call stored it. EXISTS: the key had a value, which stays. With `durable` the answer comes after the disk commit, with
        `pin` the value is kept from eviction for the store's usual lease.

        Raises ValueError, with nothing stored, if there are not as many values as keys, or for a buffer that can't be used.
        """
        if self._link is not None and type(keys) is list and type(values) is list:
            status = self._link.put_at_once(keys, values, self._deadline(timeout_s), durable=durable, pin=pin)
            if status is not None:
                return status
        return self.put_from(keys, places.of_buffers(values, writable=False), durable=durable, pin=pin, timeout_s=timeout_s)

    def get(self, keys: Keys, into: Sequence[Any], *, timeout_s: float | None = None) -> GetResult:
        """Read values into writable buffers. Raises ValueError, with nothing read, as `put` does."""
        if self._link is not None and type(keys) is list and type(into) is list:
            found = self._link.get_at_once(keys, into, self._deadline(timeout_s))
            if found is not None:
                return GetResult(*found)
        return self.get_into(keys, places.of_buffers(into, writable=True), timeout_s=timeout_s)

    def put_from(
        self, keys: Keys, where: Places, *, durable: bool = False, pin: bool = False, timeout_s: float | None = None
    ) -> NDArray[np.uint8]:
        """As `put`, from addresses (`places.of_addresses`): for values in pieces, and for batches without an object a value."""
        ids, deadline = self._ids(keys, len(where)), self._deadline(timeout_s)
        if self._sole is not None and len(ids):
            return self._sole.put(ids, where, deadline, durable=durable, pin=pin)
        status: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
        for at, part in self._each(ids, lambda link, at: link.put(ids[at], where.part(at), deadline, durable=durable, pin=pin)):
            status[at] = part
        return status

    def get_into(self, keys: Keys, where: Places, *, timeout_s: float | None = None) -> GetResult:
        """As `get`, into addresses (`places.of_addresses`)."""
        ids, deadline = self._ids(keys, len(where)), self._deadline(timeout_s)
        if self._sole is not None and len(ids):
            return GetResult(*self._sole.get(ids, where, deadline))
        result = GetResult(np.zeros(len(ids), np.uint8), np.zeros(len(ids), np.int64))
        for at, (status, lengths) in self._each(ids, lambda link, at: link.get(ids[at], where.part(at), deadline)):
            result.status[at], result.lengths[at] = status, lengths
        return result

    # Keys alone ------------------------------------------------------------------------------------------------------

    def lengths(self, keys: Keys, *, touch: bool = False, promote: bool = False, timeout_s: float | None = None) -> NDArray[np.int64]:
        """Octets of each value, 0 for what is not there or can't be asked.

        With `touch` the values count as used just now, with `promote` those on disk are read into memory in the background.
        """
        deadline = self._deadline(timeout_s)
        if self._link is not None and type(keys) is list:
            known = self._link.lengths_at_once(keys, deadline, touch=touch, promote=promote)
            if known is not None:
                return known
        ids = self._ids(keys)
        found: NDArray[np.int64] = np.zeros(len(ids), np.int64)
        for at, part in self._each(ids, lambda link, at: link.lengths(ids[at], deadline, touch=touch, promote=promote)):
            found[at] = part
        return found

    def exists(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.bool_]:
        """Which keys have a value. Keeps nothing from being evicted."""
        return np.asarray(self.lengths(keys, timeout_s=timeout_s) > 0)

    def prefix(self, keys: Keys, *, promote: bool = True, timeout_s: float | None = None) -> int:
        """How many of the keys have a value, up to the first that has none; those count as used."""
        missing = np.flatnonzero(self.lengths(keys, touch=True, promote=promote, timeout_s=timeout_s) == 0)
        return int(missing[0]) if len(missing) else len(keys)

    def touch(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.bool_]:
        """Count values as used just now; which there were."""
        return np.asarray(self.lengths(keys, touch=True, timeout_s=timeout_s) > 0)

    def remove(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        """Forget values; how many there were. Raises KbtpError if a member can't be asked: its values may be there still."""
        ids, deadline = self._ids(keys), self._deadline(timeout_s)
        return sum(count for _, count in self._each(ids, lambda link, at: link.remove(ids[at], deadline)))

    def pin(self, keys: Keys, *, lease_s: float = 60.0, timeout_s: float | None = None) -> NDArray[np.uint8]:
        """Keep values from being evicted for `lease_s` seconds, or as long as the store allows; an ItemStatus each."""
        return self._pin(keys, max(1, int(lease_s * 1000)), True, timeout_s)

    def unpin(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.uint8]:
        """Let pinned values go; an ItemStatus each."""
        return self._pin(keys, 0, False, timeout_s)

    def _pin(self, keys: Keys, lease_ms: int, is_pinned: bool, timeout_s: float | None) -> NDArray[np.uint8]:
        ids, deadline = self._ids(keys), self._deadline(timeout_s)
        status: NDArray[np.uint8] = np.zeros(len(ids), np.uint8)
        for at, part in self._each(ids, lambda link, at: link.pin(ids[at], deadline, lease_ms=lease_ms, is_pinned=is_pinned)):
            status[at] = part
        return status

    # The namespace -----------------------------------------------------------------------------------------------------

    def remove_all(self, *, timeout_s: float | None = None) -> int:
        """Forget all values of the namespace on every member; how many there were. Raises KbtpError if a member can't be asked."""
        deadline = self._deadline(timeout_s)
        return sum(link.remove_namespace(deadline) for link in self._links.values())

    def list(self, *, whole_tenant: bool = False, timeout_s: float | None = None) -> Iterator[ListedValue]:
        """The values of the namespace, or of its tenant, by object id (keys are not kept). What comes and goes meanwhile may be missed.

        Raises KbtpError if a member can't be asked.
        """
        deadline = self._deadline(timeout_s)
        namespace = 0 if whole_tenant else namespace_id(self.namespace)
        for name, link in self._links.items():
            for page in link.pages(deadline, namespace=namespace):
                for one in page.tolist():
                    octets, length, tier, _, ttl_s = _listed(page.dtype.names, one)
                    yield ListedValue(name, octets, length, tier, ttl_s)

    @property
    def block_bytes(self) -> int:
        """The largest value that every member takes which was connected to; 0 before."""
        return min((link.block_bytes for link in self._links.values() if link.block_bytes), default=0)

    def close(self) -> None:
        """End the connections. Idempotent."""
        for link in self._links.values():
            link.close()
        if self._threads is not None:
            self._threads.shutdown()
        if self._own_fabric is not None:
            self._own_fabric.close()
            self._own_fabric = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _ids(self, keys: Keys, count: int | None = None) -> NDArray[np.uint8]:
        if isinstance(keys, np.ndarray):
            if keys.dtype != np.uint8 or keys.ndim != 2 or keys.shape[1] != 16:
                raise ValueError(f"object ids have the shape (n, 16) and the type uint8, not {keys.shape} and {keys.dtype}")
            ids = np.ascontiguousarray(keys)
        else:
            ids = object_ids(self.namespace, keys)
        if count is not None and len(ids) != count:
            raise ValueError(f"{len(ids)} keys, but {count} buffers")
        return ids

    def _deadline(self, timeout_s: float | None) -> float:
        return time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)

    def _each(self, ids: NDArray[np.uint8], work: Callable[[Any, Any], _T]) -> Iterator[tuple[Any, _T]]:
        """`work(link, which)` for every member that has some of the ids, all members at once."""
        if self._sole is not None:
            if len(ids):
                yield slice(None), work(self._sole, slice(None))
            return
        owners = self._placement.owners(ids)
        parts = [(self._links[self._placement.names[owner]], np.flatnonzero(owners == owner)) for owner in np.unique(owners).tolist()]
        if len(parts) == 1:
            yield parts[0][1], work(*parts[0])
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(len(self._links), thread_name_prefix="kbtp-client")
        futures = [self._threads.submit(work, *part) for part in parts]
        results = [future.exception() or future.result() for future in futures]  # all have ended before any of them is told
        for (_, at), result in zip(parts, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            yield at, result


def _space(namespace: bytes | Namespace, ttl_s: int) -> SpaceOf:
    octets = namespace.encode() if isinstance(namespace, Namespace) else namespace
    if not octets:
        raise ValueError("a client needs a namespace: kbtp_core.store.identity.Namespace makes one from an engine's geometry")
    return SpaceOf(tenant_id(tenant_of(octets)), namespace_id(octets), ttl_s, id_prefix(octets))


def _open_fabric() -> Fabric:
    from kbtp_core.fabric.softrnic import SoftRnic

    return SoftRnic()


def _listed(names: Sequence[str] | None, values: Sequence[Any]) -> tuple[bytes, int, str, int, int]:
    one = dict(zip(names or (), values, strict=True))
    return (
        bytes(one["id"]),
        int(one["data_length"]),
        ("absent", "ram", "disk", "promoting")[one["tier"]],
        int(one["flags"]),
        int(one["ttl_s"]),
    )
