"""What a target asks of the store whose values are in its pool's blocks; `store.ram` has the real one.

Arrays have the dtypes below, in host byte order; a table entry is named by its index. Nothing here waits: what takes time is a
`Deferred`, and `tick` tells what has been decided since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.keyed import ID_BYTES, Ids

if TYPE_CHECKING:
    from kbtp_core.protocol.target_session import TargetSession

UNDECIDED: Final = 0xFFFF
BEING_READ: Final = 0xFFFE
"""As a result of `KeyedPeer.publish`: the block is being read; try again."""
COMMITTING: Final = 0xFFFD
"""As a result of `KeyedPeer.publish`: the first writer of the id waits for the disk; try again."""

FOUND: Final = np.dtype([("handle", "u8"), ("data_length", "u4"), ("generation", "u2"), ("tier", "u1"), ("flags", "u1")])
"""What a lookup found, 16 octets an id."""
ADOPTION: Final = np.dtype([("id", "u1", ID_BYTES), ("handle", "u8"), ("crc", "u4"), ("generation", "u2"), ("flags", "u2")])
"""One block to adopt, 32 octets."""
IS_COPIED: Final = 1
"""In an ADOPTION's flags: its writer may write to it later, so the store takes a copy, and the caller frees it."""
IS_ON_DISK: Final = 2
"""In an ADOPTION's flags: the disk has a value of this id. The store's own business."""
ADOPTED: Final = np.dtype([("handle", "u8"), ("status", "u2"), ("generation", "u2"), ("is_committing", "u4")])
"""What became of it, 16 octets; UNDECIDED before. `is_committing`: `tick` will have the result of the disk."""
SETTLED: Final = np.dtype([("index", "u8"), ("generation", "u2"), ("status", "u2"), ("is_promotion", "u4")])
"""A commit or a promotion that has ended, 16 octets."""

_T = TypeVar("_T")


class Deferred(Generic[_T]):
    """A result that comes later, from another thread."""

    def __init__(self) -> None:
        self._value: list[_T] = []

    def set(self, value: _T) -> None:
        self._value.append(value)

    @property
    def is_done(self) -> bool:
        return bool(self._value)

    @property
    def value(self) -> _T:
        return self._value[0]


class _Total(Deferred[int]):
    def __init__(self, parts: Sequence[int | Deferred[int]], most: int) -> None:
        super().__init__()
        self._parts = parts
        self._most = most

    @property
    def is_done(self) -> bool:
        return all(part.is_done for part in self._parts if isinstance(part, Deferred))

    @property
    def value(self) -> int:
        return min(self._most, sum(part.value if isinstance(part, Deferred) else part for part in self._parts))


def total_of(parts: Sequence[int | Deferred[int]], most: int) -> int | Deferred[int]:
    """The sum of results, of which some may come later, or `most`."""
    total = _Total(parts, most)
    return total.value if total.is_done else total


class KeyedPeer(Protocol):
    """One session of the store."""

    native: Any
    """What an executor has to know of it (`StoreGrant.keyed`)."""

    @property
    def is_limited(self) -> bool:
        """Whether there are tenants whose values it may not use."""

    def may_use(self, tenant: int) -> bool:
        """Whether it may use this tenant's values; it is logged, now and then, if not."""

    def set_namespace(self, tenant: int, namespace: int, ttl_s: int) -> None: ...

    def pin(self, handles: NDArray[np.uint64], generations: NDArray[np.uint16], wanted: bool, lease_ms: int) -> NDArray[np.uint16]: ...

    def publish(self, tenant: int, flags: int, items: NDArray[Any], results: NDArray[Any]) -> int:
        """Decide the `items` (ADOPTION) whose `results` (ADOPTED) are undecided; returns how many still are."""


class KeyedBackend(Protocol):
    executor: Any
    """What shares the pool with the target (`Target.share`): for a fabric that can use it, too."""
    wake: Callable[[], None] | None
    """Called from any thread when `tick` has something to tell."""

    def open_peer(self, session: TargetSession) -> KeyedPeer:
        """For a session that was granted anything, be it STORE or not: who may LOAD handles is limited all the same."""

    def lookup(self, tenant: int, ids: Ids, flags: int) -> NDArray[Any]:
        """What is known of each id (FOUND); with PREFIX up to the first absent one."""

    def remove(self, tenant: int, ids: Ids) -> int | Deferred[int]: ...

    def remove_namespace(self, tenant: int, namespace: int) -> int | Deferred[int]: ...

    def list(self, tenant: int, namespace: int, cursor: int, limit: int) -> tuple[int, NDArray[Any]]:
        """(Where to go on, values as `keyed.LIST_ITEM`)."""

    def tenant_of(self, index: int) -> int | None:
        """Whose value the entry has or will have; None if it has none, or is not the store's."""

    def will_have(self, index: int, generation: int) -> bool:
        """Whether the entry's value is being read from disk and will have this generation; zero accepts any."""

    @property
    def promoting_count(self) -> int: ...

    def kept_counts(self) -> tuple[int, int]:
        """(Blocks that wait for their last reader, blocks that are read from disk)."""

    def tick(self) -> NDArray[Any]:
        """Move on what has no more readers, end leases and lifetimes; what has settled since the last call (SETTLED)."""

    def check_integrity(self) -> None: ...
