"""Prefill's end of a pull: a KBTP target whose pool is the engine's own paged memory.

A finished request's blocks are *offered*: bound and sealed under the handles that the scheduler chose. They are *released*, which lets
the engine use them again, when every handle was cleared (by decode's FREE, by `withdraw`, or because the lease ran out) and
nothing reads the blocks any more. The generation advances at the clear, before anything else happens, so a late LOAD is refused.

The engine's geometry descriptor is served too, as sealed blocks under the first handles, so that decode can compare before it loads.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import ConfigError
from kbtp_core.fabric.api import Access, Fabric, ProtectionDomain, Region
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol.pool import LentPool
from kbtp_core.protocol.table import BlockTable
from kbtp_core.protocol.target import Target
from kbtp_core.session.target import TargetServer
from kbtp_core.transfer.descriptor import DESCRIPTOR_HANDLES, DESCRIPTOR_PIECE_BYTES
from kbtp_core.transfer.ledger import generations_before
from kbtp_core.transfer.memory import PagedMemory

_log = logging.getLogger(__name__)


@dataclass
class _Offer:
    request_id: str
    pending: set[int]  # handles whose blocks may still be read
    expires_at: float


class PullSource:
    """Serves `memory` at host:port (port 0: any) until `close`. Every method may be called from any thread.

    `table_entries` bounds how many blocks can be on offer at once. `lease_s` is how long an offer stands. With `secret` every peer
    has to prove that it knows the trust domain's key. Raises FabricError if the address can't be bound, ConfigError for a descriptor
    that is too long.
    """

    def __init__(
        self,
        memory: PagedMemory,
        *,
        descriptor: bytes,
        host: str,
        port: int,
        table_entries: int,
        lease_s: float,
        secret: bytes | None = None,
        trust_domain: str = "",
        name: str = "",
        fabric: Fabric | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._memory = memory
        self._lease_s = lease_s
        self._clock = clock
        self._owns_fabric = fabric is None
        self._fabric = fabric if fabric is not None else SoftRnic()
        self._offers: dict[str, _Offer] = {}
        self._request_of: dict[int, str] = {}  # handle → request
        self._stats = {"requests_offered": 0, "blocks_offered": 0, "requests_released": 0, "leases_expired": 0}
        piece = min(DESCRIPTOR_PIECE_BYTES, memory.block_bytes)
        if not 0 < len(descriptor) <= piece * DESCRIPTOR_HANDLES:
            raise ConfigError(f"the geometry descriptor has {len(descriptor)} octets: 1 to {piece * DESCRIPTOR_HANDLES} can be served")
        self._pages, self._descriptor = _pages_with_descriptor(memory, descriptor)
        pool = LentPool(memory.block_bytes, self._pages.size * memory.page_bytes)
        self._target = Target(
            pool,
            BlockTable(max(table_entries, DESCRIPTOR_HANDLES + 1)),
            name=name,
            incarnation=secrets.randbits(63) | 1,  # of this source: another one on the same address is another life
            secrets={trust_domain: secret} if secret is not None else None,
            reserved_handles=DESCRIPTOR_HANDLES,
        )
        starts = np.arange(0, len(descriptor), piece)
        at = memory.block_count * memory.block_bytes + starts
        self._target.bind(np.arange(starts.size), at, np.minimum(piece, len(descriptor) - starts), sealed=True)
        self._lock = threading.Lock()  # guards the offers and their counts
        self._server = TargetServer(self._fabric, self._target, self._register_pool, host, port)

    @property
    def address(self) -> tuple[str, int]:
        return self._server.address

    @property
    def incarnation(self) -> int:
        return self._target.incarnation

    @property
    def first_handle(self) -> int:
        return DESCRIPTOR_HANDLES

    def offer(self, request_id: str, handles: NDArray[np.uint64], generations: NDArray[np.uint16], blocks: NDArray[np.int64]) -> None:
        """Bind and seal `blocks` under `handles`; the lease starts now.

        Raises ValueError, with nothing on offer, if a handle is in use or reserved, a block does not exist, or a handle's generation is not
        the foretold one (then the scheduler's ledger and this table have drifted apart, which is a defect).
        """
        if (handles < DESCRIPTOR_HANDLES).any():
            raise ValueError(f"handles below {DESCRIPTOR_HANDLES} are reserved for the descriptor")
        if ((blocks < 0) | (blocks >= self._memory.block_count)).any():
            raise ValueError(f"a block of request {request_id} does not exist: there are {self._memory.block_count}")
        with self._lock:
            if request_id in self._offers:
                raise ValueError(f"request {request_id} is on offer already")
            size = self._memory.block_bytes
            expected = generations_before(generations)
            found = self._target.table.lookup(handles)["generation"].astype(np.uint16)
            if not np.array_equal(found, expected):
                raise ValueError(
                    f"request {request_id}: the table is at generations {found.tolist()}, foretold was {expected.tolist()} before binding"
                )
            self._server.bind(handles, blocks.astype(np.uint64) * np.uint64(size), np.full(handles.size, size), sealed=True)
            names = [int(handle) for handle in handles]
            self._offers[request_id] = _Offer(request_id, set(names), self._clock() + self._lease_s)
            self._request_of.update(dict.fromkeys(names, request_id))
            self._stats["requests_offered"] += 1
            self._stats["blocks_offered"] += len(names)

    def withdraw(self, request_id: str) -> None:
        """Take an offer back: late LOADs are refused from now on. The blocks are released once nothing reads them."""
        with self._lock:
            offer = self._offers.get(request_id)
            if offer is not None:
                self._reclaim(offer)

    def take_released(self) -> list[str]:
        """Requests whose blocks nobody can read any more, each once. Also ends the leases that have run out."""
        released: list[str] = []
        self._server.check()
        with self._lock:
            self._expire()
            for handle in self._server.take_drained().tolist():
                offer = self._offers[self._request_of.pop(handle)]
                offer.pending.discard(handle)
                if not offer.pending:
                    del self._offers[offer.request_id]
                    released.append(offer.request_id)
            self._stats["requests_released"] += len(released)
        return released

    def stats(self) -> dict[str, int]:
        """Counts since the start, and `requests_on_offer` now."""
        with self._lock:
            return {**self._stats, "requests_on_offer": len(self._offers), "sessions": self._server.session_count}

    def close(self) -> None:
        """End all sessions; when this returns nothing reads the memory."""
        self._server.close()
        if self._owns_fabric:
            self._fabric.close()

    def _expire(self) -> None:
        now = self._clock()
        for offer in self._offers.values():
            if offer.expires_at <= now:
                offer.expires_at = float("inf")
                if self._reclaim(offer):
                    self._stats["leases_expired"] += 1
                    _log.warning(
                        "request %s was not fetched within its lease of %g s: its blocks are taken back. "
                        "If decode is only slow, raise lease_s on the prefill side.",
                        offer.request_id,
                        self._lease_s,
                    )

    def _reclaim(self, offer: _Offer) -> bool:
        """True if a block was still bound."""
        return bool(self._server.reclaim(np.fromiter(offer.pending, np.uint64, len(offer.pending))).any())

    def _register_pool(self, pd: ProtectionDomain) -> Region:
        # No right but reading for its own Writes: a pull session exposes nothing to one-sided operations.
        return pd.register_pages(self._pages, self._memory.page_bytes, Access.NONE, (self._memory.owner, self._descriptor))


def _pages_with_descriptor(memory: PagedMemory, descriptor: bytes) -> tuple[NDArray[np.uint64], NDArray[np.uint8]]:
    """The pool's pages: the engine's, then those that hold the descriptor, which are returned too."""
    count = -(-len(descriptor) // memory.page_bytes)
    octets = np.zeros((count, memory.page_bytes), np.uint8)
    octets.reshape(-1)[: len(descriptor)] = np.frombuffer(descriptor, np.uint8)
    own = octets.ctypes.data + np.arange(count, dtype=np.uint64) * np.uint64(memory.page_bytes)
    return np.concatenate([memory.addresses.reshape(-1), own.astype(np.uint64)]), octets
