"""What a disk engine is: values by key, on disk, in batches.

`slab` is the engine for use, `file_engine` the one for diagnosis, `disk_group` several of them as one. All have this interface. Rules:

1. A batch is arrays, and its answer is arrays; the failure of one item is in its place, never an exception.
2. Memory is named by addresses. The caller keeps it until the call returns; after that nobody writes to it.
3. A put that is OK is durable: it is there after a crash at any later moment. The first writer of a key wins.
4. A get gives the value's own octets or a miss, whatever happened to the disk meanwhile.
5. A disk that fails or hangs is degraded: puts are IO_ERROR, everything on it is a miss, and no call waits longer than its timeout.

A key is 24 octets: the tenant's id, big-endian, and the 16 octets of the object id (`identity`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import KbtpError

KEY_BYTES: Final = 24
UNIT_BYTES: Final = 4096
"""Slots are whole units: a value takes its length, rounded up to this."""

Keys = NDArray[np.uint8]
U8 = NDArray[np.uint8]
U32 = NDArray[np.uint32]
U64 = NDArray[np.uint64]
Flags = NDArray[np.bool_]


class DiskError(KbtpError):
    """A disk engine can't be opened; the text names the folder, what is wrong and the way out."""


class DiskStatus(IntEnum):
    """What became of one item of a batch."""

    OK = 0
    MISS = 1
    EXISTS = 2
    """A put of a key that is there already; its value stays as it is."""
    LENGTH = 3
    """A put of nothing or of more than an engine takes; a get from behind the value's end."""
    NO_SPACE = 4
    """Nothing could be evicted for it, or the filesystem is full."""
    QUOTA = 5
    """Its tenant has as much as it may have."""
    IO_ERROR = 6
    """The disk failed or hangs; the engine's `error` says how."""
    REMOVED = 7
    """The key was removed while the put was under way."""


class GetResult(NamedTuple):
    """Each of shape (n,)."""

    status: U8
    stored_lengths: U32
    """Full lengths of the values, whatever part was asked for; 0 for a miss."""
    copied: U32
    crcs: U32
    """CRC-32C of the full values."""


class Listing(NamedTuple):
    keys: Keys
    lengths: U32
    expiries: U32
    cursor: int
    """Where the next call goes on; 0: that was all."""


@dataclass(frozen=True)
class Fault:
    """A fault on purpose, for tests: `action` happens at a visit of `point` (see `slab.FAULT_POINTS`).

    `visit` counts from 1, and 0 is every visit. `amount` is octets written before the kill (torn), a bit (flip), milliseconds (hang), or a
    seed for which writes a power failure loses, 0 for all (lose).
    """

    point: str
    visit: int
    action: str
    amount: int = 0


class DiskEngine(Protocol):
    """A disk's values. Any thread; nothing that waits holds the GIL."""

    @property
    def error(self) -> str:
        """Why the disk, or which disk of a group, is degraded; empty if none is."""
        ...

    def put(self, keys: Keys, addresses: U64, lengths: U32, crcs: U32, namespaces: U64, expiries: U32) -> U8:
        """Write values; returns a DiskStatus each, when those that are OK are durable.

        `crcs` are the values' CRC-32C, `namespaces` any number that `remove_namespace` will name, `expiries` unix seconds or 0 for never.
        A put of a key that another put is writing waits for that one and has its status.
        """
        ...

    def get(self, keys: Keys, addresses: U64, capacities: U32, offsets: U32) -> GetResult:
        """Read values, or from `offsets` on as much of them as there is and `capacities` allow.

        An offset equal to the stored length is OK with nothing copied, one beyond it LENGTH. A value that is read whole is checked
        against its CRC; what does not match is a miss, and is gone.
        """
        ...

    def lookup(self, keys: Keys) -> U32:
        """Stored lengths, 0 for what is not there."""
        ...

    def remove(self, keys: Keys) -> Flags:
        """Hide values at once, and return when that is durable and nothing is in flight on them; which of them were there."""
        ...

    def remove_namespace(self, tenant: int, namespace: int) -> int:
        """Remove all values of a tenant's namespace; how many there were."""
        ...

    def expire(self, now: int) -> int:
        """Remove what expires at `now` (unix seconds) or before; how many values. Expired ones are misses even before that."""
        ...

    def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> Listing:
        """At most `most` values from `cursor` on (0: from the start), of one tenant and namespace or of all."""
        ...

    def usage(self) -> dict[int, int]:
        """Committed octets of each tenant."""
        ...

    def stats(self) -> dict[str, int]: ...

    def sync(self) -> None:
        """Return when all that was written is durable. Raises DiskError if the disk does not take it."""
        ...

    def close(self) -> None:
        """End in order. Idempotent; later calls are misses and IO_ERRORs."""
        ...
