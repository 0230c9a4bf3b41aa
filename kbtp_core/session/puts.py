"""Puts of a session: what a caller gives as one request, and the way without a requester of the provider.

Without one a put is several batches of the protocol machine, queued one behind the other, so that they are sent in the same order.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core import _native
from kbtp_core.fabric.api import PUT_RESULT, Array, Puts, Region
from kbtp_core.protocol import keyed, keyed_batch
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.keyed import Ids, KeyedOpcode

if TYPE_CHECKING:
    from kbtp_core.session.initiator_core import InitiatorCore


def make_puts(
    ids: Ids,
    tenant: int,
    handles: NDArray[np.uint64],
    addresses: NDArray[np.uint64],
    lengths: NDArray[np.uint32],
    region: Region | None,
    offsets: ArrayLike,
    flags: int,
    granted_bytes: int,
    inline_bytes: int,
) -> Puts:
    """The arrays of a put as a requester takes them."""
    starts = offsets if isinstance(offsets, int) else np.ascontiguousarray(offsets, np.uint64)
    stag = 0 if region is None else region.stag
    return Puts(
        np.ascontiguousarray(ids, np.uint8),
        tenant,
        np.ascontiguousarray(handles, np.uint64),
        np.ascontiguousarray(addresses, np.uint64),
        np.ascontiguousarray(lengths, np.uint32),
        starts,
        stag,
        int(flags),
        inline_bytes,
        keyed.items_limit(KeyedOpcode.PUBLISH, granted_bytes),
    )


class SplitPut:
    """A put as batches of the protocol machine: values inside their messages, longer ones, and the PUBLISH."""

    def __init__(self, core: InitiatorCore, puts: Puts, region: Region | None, deadline: float) -> None:
        self.deadline = deadline
        self._puts = puts
        lengths = puts.lengths.reshape(len(puts.handles), -1)
        addresses = puts.addresses.reshape(len(puts.handles), -1)
        totals = lengths.sum(axis=1)
        self._near, self._far = np.flatnonzero(totals <= puts.inline_bytes), np.flatnonzero(totals > puts.inline_bytes)
        if len(self._far) and region is None:
            raise ValueError("a value that is longer than inline values may be lies in no region: register its memory")
        crcs = np.empty(len(totals), np.uint32)
        _native.crc32c_each(np.ascontiguousarray(addresses.reshape(-1)), np.ascontiguousarray(lengths.reshape(-1)), lengths.shape[1], crcs)
        self._stores: list[tuple[NDArray[np.intp], Any]] = []
        if len(self._near):
            data = [b"".join(map(ctypes.string_at, addresses[at].tolist(), lengths[at].tolist())) for at in self._near.tolist()]
            batch = core.protocol.alloc_store_inline(puts.handles[self._near], 0, data, Flag.SEAL)
            self._stores.append((self._near, core.submit(batch, None, deadline)))
        if len(self._far):
            at = self._far
            batch = core.protocol.alloc_store(
                puts.handles[at], 0, puts.stag, np.broadcast_to(puts.offsets, len(totals))[at], totals[at].astype(np.uint32), Flag.SEAL
            )
            self._stores.append((at, core.submit(batch, region, deadline)))
        items = np.zeros(len(totals), keyed.PUBLISH_ITEM)
        items["id"], items["handle"], items["crc"] = puts.ids, puts.handles, crcs
        assert core.protocol.ack is not None
        self._granted_bytes = core.protocol.ack.inline_bytes
        publishes = keyed_batch.publishes(items, puts.tenant, puts.flags, self._granted_bytes)
        self._publish: Any = core.submit(core.protocol.ask(publishes), None, deadline)

    @property
    def parts(self) -> list[Any]:
        return [*(part for _, part in self._stores), self._publish]

    @property
    def done(self) -> bool:
        return all(part.done for part in self.parts)

    @property
    def error(self) -> Exception | None:
        return next((part.error for part in self.parts if part.error is not None), None)

    @property
    def answers(self) -> list[bytes]:
        return list(self._publish.answers)

    def results(self) -> Array:
        """As `PutRequests.results`."""
        results = np.zeros(len(self._puts.handles), PUT_RESULT)
        published = keyed_batch.published(self.answers, len(results), self._granted_bytes)
        for name in ("handle", "status", "generation"):
            results[name] = published[name]
        for at, part in self._stores:
            results["stored"][at] = part.status
        return results
