"""What a target's state machine asks its driver to do, in the order of the list.

Order matters: a completion is a Send right behind the Write whose data it vouches for. Every Write and Read has a token, unique
in its session, that the driver hands back in `write_done` or `read_done` when the request's completion is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Send:
    """Send `data`; with `invalidate_stag` as Send with Invalidate. `answers` is how many received messages it finishes."""

    data: bytes
    invalidate_stag: int | None = None
    answers: int = 1


@dataclass(frozen=True, eq=False)
class SendMany:
    """Send n messages of equal length, (n, length) octets, in order; each finishes one received message."""

    messages: NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class LoadMany:
    """Answer n LOADs in order: send message i, right behind the RDMA Write of its block if it has one; each finishes one received message.

    `requests` (dtype wire.REQUEST) are the LOADs. Where `lengths` is zero nothing is written: that LOAD has failed. `token` is handed
    back in `write_done` when the last Write has completed.
    """

    messages: NDArray[np.uint8]
    requests: NDArray[Any]
    block_offsets: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    token: int


@dataclass(frozen=True)
class Write:
    """RDMA Write `length` octets of the pool at `block_offset` to `offset` of the initiator's `stag`.

    `snapshot`: the block may change meanwhile.
    """

    block_offset: int
    length: int
    stag: int
    offset: int
    token: int
    snapshot: bool = False


@dataclass(frozen=True)
class Read:
    """RDMA Read `length` octets at `offset` of the initiator's `stag` into the pool at `block_offset`."""

    block_offset: int
    length: int
    stag: int
    offset: int
    token: int


@dataclass(frozen=True)
class Record:
    """Write the completion record `data` to `offset` of the initiator's `stag`, with `immediate`; finishes one received message.

    The immediate is the low 32 bits of `offset`, so that the initiator knows which record has come.
    """

    data: bytes
    stag: int
    offset: int
    immediate: int


@dataclass(frozen=True)
class RevokePartition:
    """Invalidate the Partition and Head STags at once, then call `TargetSession.partition_revoked`."""


@dataclass(frozen=True)
class Close:
    """End the connection once everything before is sent; `reason` is for logs, and `error` what failed on this side, if that is it."""

    reason: str
    error: Exception | None = None


Effect: TypeAlias = Send | SendMany | LoadMany | Write | Read | Record | RevokePartition | Close
