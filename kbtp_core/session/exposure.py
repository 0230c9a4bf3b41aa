"""Registers what a session may reach by the direct modes, in its own protection domain and with exactly these rights:

table, pool and slots   remote read          (DIRECT_LOAD: table and pool; DIRECT_ALLOC: slots)
Head                    remote atomic
partition               remote write, its own blocks only

A Block Offset must mean the same under the Pool and the Partition STag, and a partition's blocks lie anywhere in the pool. So the
partition is registered as as many pages as the pool has blocks, of which those that belong to others lead to one page of nobody's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Access, FabricError, ProtectionDomain, Region
from kbtp_core.protocol.hello import DirectAccess
from kbtp_core.protocol.partition import Partition
from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.target_grant import Exposure


class ExposedMemory:
    """The regions of one session. `revoke` takes the writable and the atomic one back."""

    def __init__(self, pd: ProtectionDomain, report: Callable[[FabricError], None]) -> None:
        self._pd = pd
        self._report = report
        self._revocable: list[Region] = []
        self._regions: list[Region] = []

    def expose(self, exposure: Exposure) -> DirectAccess | None:
        """Register; None, with nothing registered, if the provider refuses."""
        try:
            return self._register(exposure)
        except FabricError as error:
            self._report(error)
            for region in [*self._revocable, *self._regions]:
                region.close()
            return None

    def revoke(self) -> None:
        """When this returns, no Write reaches the partition any more, and no FetchAdd its Head."""
        for region in self._revocable:
            region.close()

    def _register(self, exposure: Exposure) -> DirectAccess:
        pool, partition = exposure.pool, exposure.partition
        table = pool_stag = partition_stag = slots = head = 0
        if exposure.is_readable:
            table = self._add(self._pd.register(_octets(exposure.table), Access.REMOTE_READ))
            pool_stag = self._add(self._pd.register(pool.memory, Access.REMOTE_READ))
        if partition is not None:
            addresses, owner = _partition_pages(pool, partition)
            if not exposure.is_readable:
                pool_stag = self._add(self._pd.register_pages(addresses, pool.block_bytes, Access.REMOTE_READ, owner))
            slots = self._add(self._pd.register(_octets(partition.ring.slots), Access.REMOTE_READ))
            self._revocable = [
                self._pd.register_pages(addresses, pool.block_bytes, Access.REMOTE_WRITE, owner),
                self._pd.register(_octets(partition.ring.counters[:1]), Access.REMOTE_ATOMIC),
            ]
            partition_stag, head = (region.stag for region in self._revocable)
        return DirectAccess(
            table_stag=table,
            pool_stag=pool_stag,
            pool_offset=-pool.base_offset % (1 << 64),
            partition_stag=partition_stag,
            ring_stag=slots,
            head_stag=head,
        )

    def _add(self, region: Region) -> int:
        self._regions.append(region)
        return region.stag


def _octets(memory: NDArray[Any]) -> NDArray[np.uint8]:
    return memory.view(np.uint8).reshape(-1)


def _partition_pages(pool: BlockPool, partition: Partition) -> tuple[NDArray[np.uint64], object]:
    """Where each block of the pool lies for this partition's writer, and what must be kept alive."""
    nobodys: NDArray[np.uint8] = np.zeros(pool.block_bytes, np.uint8)
    addresses: NDArray[np.uint64] = np.full(pool.block_count, nobodys.ctypes.data, np.uint64)
    offsets = np.array(partition.block_offsets, np.uint64) - np.uint64(pool.base_offset)
    addresses[offsets // np.uint64(pool.block_bytes)] = np.uint64(pool.memory.ctypes.data) + offsets
    return addresses, (pool.memory, nobodys)
