"""A keyed cache in this process's own memory: what a client uses where there is no server.

Values live in blocks of one size inside one budget. The first writer of a key wins. When no block is free, CLOCK chooses a victim:
the hand passes over values that were read since it last came by, and takes the first that was not. A value that is read is copied
out under the lock, so an eviction never shows through. What is pinned is passed over until its time is over.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.keyed import Ids, Tier
from kbtp_core.protocol.keyed_batch import LISTED
from kbtp_core.store.item_status import ItemStatus
from kbtp_core.store.places import Places

_PIN_S: Final = 60.0


@dataclass
class _Value:
    block: int
    length: int
    pinned_until: float = 0.0


class EmbeddedStore:
    """At most `ram_bytes // block_bytes` values of at most `block_bytes` octets each. Any thread."""

    def __init__(self, ram_bytes: int, block_bytes: int) -> None:
        if not 0 < block_bytes <= ram_bytes:
            raise ValueError(f"blocks of {block_bytes} octets do not fit into a budget of {ram_bytes}")
        self.block_bytes = block_bytes
        self.block_count = ram_bytes // block_bytes
        self._memory: NDArray[np.uint8] = np.zeros((self.block_count, block_bytes), np.uint8)
        self._lock = threading.Lock()  # guards all below
        self._index: dict[bytes, _Value] = {}
        self._owner: list[bytes | None] = [None] * self.block_count
        self._was_read = np.zeros(self.block_count, np.bool_)
        self._free = list(range(self.block_count - 1, -1, -1))
        self._hand = 0

    def put(self, object_id: bytes, octets: memoryview, *, pin: bool = False) -> ItemStatus:
        """Keep a copy of `octets`: OK, EXISTS, TOO_LARGE for none or more than a block's, NO_SPACE if all is pinned."""
        if not 0 < octets.nbytes <= self.block_bytes:
            return ItemStatus.TOO_LARGE
        with self._lock:
            if object_id in self._index:
                return ItemStatus.EXISTS
            block = self._free.pop() if self._free else self._evict()
            if block is None:
                return ItemStatus.NO_SPACE
            self._memory[block, : octets.nbytes] = np.frombuffer(octets, np.uint8)
            self._index[object_id] = _Value(block, octets.nbytes, time.monotonic() + _PIN_S if pin else 0.0)
            self._owner[block] = object_id
            self._was_read[block] = False
            return ItemStatus.OK

    def get_into(self, object_id: bytes, out: memoryview) -> int:
        """Copy a value to the start of `out`; returns its length, or -1 if it is not there.

        Raises ValueError if `out` is too small for it.
        """
        with self._lock:
            value = self._index.get(object_id)
            if value is None:
                return -1
            if out.nbytes < value.length:
                raise ValueError(f"the value has {value.length} octets, the buffer {out.nbytes}")
            out.cast("B")[: value.length] = memoryview(self._memory[value.block])[: value.length]
            self._was_read[value.block] = True
            return value.length

    def length(self, object_id: bytes, *, touch: bool = False) -> int:
        """Octets of a value, 0 if it is not there; counts as a read only with `touch`."""
        with self._lock:
            value = self._index.get(object_id)
            if value is None:
                return 0
            self._was_read[value.block] |= touch
            return value.length

    def pin(self, object_id: bytes, until: float) -> bool:
        """Keep a value until then (time.monotonic); whether it is there."""
        with self._lock:
            value = self._index.get(object_id)
            if value is not None:
                value.pinned_until = until
            return value is not None

    def listed(self) -> list[tuple[bytes, int]]:
        """(Object id, length) of everything."""
        with self._lock:
            return [(key, value.length) for key, value in self._index.items()]

    def remove(self, object_id: bytes) -> bool:
        """Forget a value; whether it was there."""
        with self._lock:
            value = self._index.pop(object_id, None)
            if value is None:
                return False
            self._owner[value.block] = None
            self._free.append(value.block)
            return True

    def check_integrity(self) -> None:
        """Assert that every block is free or owned by exactly the value that names it."""
        with self._lock:
            owned = {value.block for value in self._index.values()}
            assert len(owned) == len(self._index), "two values share a block"
            assert owned.isdisjoint(self._free), "a block is free and owned"
            assert len(owned) + len(self._free) == self.block_count, "a block is lost"
            assert all(self._owner[value.block] == key for key, value in self._index.items()), "a block has another owner"

    def _evict(self) -> int | None:
        """With the lock, and no block free: the block of a value that was not read lately, which is forgotten; None if all are pinned."""
        now = time.monotonic()
        for _ in range(2 * self.block_count):
            block, self._hand = self._hand, (self._hand + 1) % self.block_count
            owner = self._owner[block]
            assert owner is not None, "no block is free, so every block has an owner"
            if self._was_read[block]:
                self._was_read[block] = False
            elif self._index[owner].pinned_until <= now:
                del self._index[owner]
                self._owner[block] = None
                return block
        return None


class EmbeddedLink:
    """The calls of `store.link.Link`, answered by a store in this process; deadlines are always met."""

    def __init__(self, store: EmbeddedStore) -> None:
        self.store: Final = store
        self.block_bytes: Final = store.block_bytes

    def put(self, ids: Ids, places: Places, deadline: float, *, durable: bool = False, pin: bool = False) -> NDArray[np.uint8]:  # noqa: ARG002
        status: NDArray[np.uint8] = np.full(len(ids), ItemStatus.TOO_LARGE, np.uint8)
        for at, total in enumerate(places.totals.tolist()):
            if 0 < total <= self.block_bytes:
                octets = b"".join(_octets(places, at))
                status[at] = self.store.put(ids[at].tobytes(), memoryview(octets), pin=pin)
        return status

    def get(self, ids: Ids, places: Places, deadline: float) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:  # noqa: ARG002
        status: NDArray[np.uint8] = np.full(len(ids), ItemStatus.MISSING, np.uint8)
        lengths: NDArray[np.int64] = np.zeros(len(ids), np.int64)
        whole = bytearray(self.block_bytes)
        for at, room in enumerate(places.totals.tolist()):
            length = self.store.get_into(ids[at].tobytes(), memoryview(whole))
            if length < 0:
                continue
            lengths[at] = length
            status[at] = ItemStatus.TOO_LARGE if length > room else ItemStatus.OK
            done = 0
            for piece in _octets(places, at) if length <= room else ():
                size = min(len(piece), length - done)
                piece[:size] = whole[done : done + size]
                done += size
        return status, lengths

    def lengths(self, ids: Ids, deadline: float, *, touch: bool = False, promote: bool = False) -> NDArray[np.int64]:  # noqa: ARG002
        return np.fromiter((self.store.length(one.tobytes(), touch=touch) for one in ids), np.int64, len(ids))

    def remove(self, ids: Ids, deadline: float) -> int:  # noqa: ARG002
        return sum(self.store.remove(one.tobytes()) for one in ids)

    def pin(self, ids: Ids, deadline: float, *, lease_ms: int, is_pinned: bool) -> NDArray[np.uint8]:  # noqa: ARG002
        until = time.monotonic() + lease_ms / 1000 if is_pinned else 0.0
        found = (self.store.pin(one.tobytes(), until) for one in ids)
        return np.fromiter((ItemStatus.OK if there else ItemStatus.MISSING for there in found), np.uint8, len(ids))

    def remove_namespace(self, deadline: float) -> int:  # noqa: ARG002
        return sum(self.store.remove(key) for key, _ in self.store.listed())

    def pages(self, deadline: float, *, namespace: int) -> Iterator[NDArray[Any]]:  # noqa: ARG002
        page = np.zeros(len(listed := self.store.listed()), LISTED)
        for at, (key, length) in enumerate(listed):
            page["id"][at], page["data_length"][at], page["tier"][at] = np.frombuffer(key, np.uint8), length, Tier.RAM
        yield page

    def close(self) -> None:
        """Nothing to end."""


def _octets(places: Places, at: int) -> list[memoryview]:
    """The pieces of one value, which `places` keeps alive."""
    pieces = zip(places.addresses[at].tolist(), places.lengths[at].tolist(), strict=True)
    return [memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B") for address, size in pieces if size]
