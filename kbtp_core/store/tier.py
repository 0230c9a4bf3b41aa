"""Values on their way between the RAM tier and a disk engine (docs/store-protocol.md, "Tiers").

Flushers take dirty values in batches and write them; readers fill the blocks that LOOKUPs with PROMOTE reserved. Both wait in native
code without the GIL, and use the blocks themselves: nothing is copied on the way. Rules:

1. A value is held in RAM until the disk has it. What the disk does not take stays in RAM as if it were clean, unless a writer waits for it.
2. The disk's value wins: where a key turns out to be there already, the one in RAM goes.
3. A key that was removed while it was written is removed from the disk, too, before anything of that key is written again, and before the
   removal is answered.
4. Each disk has threads of its own (`disk_lane`): nobody waits for a disk that has nothing of his.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.keyed import Ids
from kbtp_core.protocol.keyed_backend import Deferred, total_of
from kbtp_core.store.disk import DiskEngine
from kbtp_core.store.disk_group import DiskGroup
from kbtp_core.store.disk_lane import DISK_ITEM, DiskLane, keys_of
from kbtp_core.store.slab import SlabEngine

if TYPE_CHECKING:
    from kbtp_core import _native

__all__ = ["DISK_ITEM", "DiskTier", "keys_of", "slabs_of"]

_EXIT_TIMEOUT_S: Final = 2.0  # for a tier that was not closed before the interpreter ends
_MOST: Final = 0xFFFF_FFFF


def slabs_of(engine: DiskEngine) -> list[_native.Slab] | None:
    """The native engines that `engine` stands for, if it is nothing but slabs: their index can be asked without the interpreter."""
    if isinstance(engine, SlabEngine):
        return [engine.native]
    if isinstance(engine, DiskGroup) and all(isinstance(one, SlabEngine) for one in engine.engines):
        return [one.native for one in engine.engines if isinstance(one, SlabEngine)]
    return None


class DiskTier:
    """Moves values between `native` and `engine` until `close`. `settled` is called when something has been decided.

    There are `flusher_count` threads that write and `reader_count` that read for each disk.
    """

    def __init__(
        self,
        native: _native.KeyedStore,
        engine: DiskEngine,
        settled: Callable[[], None],
        *,
        flusher_count: int = 2,
        reader_count: int = 2,
        batch_count: int = 64,
    ) -> None:
        self.engine: Final = engine
        self._native = native
        slabs = slabs_of(engine)
        self.is_asked_natively: Final = slabs is not None
        """Whether `native` knows by itself what is on disk."""
        if slabs is not None:
            native.ask_slabs(slabs)
        self._placement = engine.placement if isinstance(engine, DiskGroup) and len(engine.engines) > 1 else None
        engines = engine.engines if isinstance(engine, DiskGroup) and self._placement is not None else (engine,)
        if self._placement is not None:
            native.set_lanes(*self._placement.points(), len(engines))
        counts = {"flusher_count": flusher_count, "reader_count": reader_count, "batch_count": batch_count}
        self.lanes: Final = tuple(DiskLane(native, number, one, settled, **counts) for number, one in enumerate(engines))
        # A thread that still waits in native code while the interpreter is torn down would take the process with it.
        atexit.register(self.close, _EXIT_TIMEOUT_S)

    def lookup(self, tenant: int, ids: Ids) -> NDArray[np.uint32]:
        """Lengths of what is on disk, 0 for what is not."""
        return self.engine.lookup(keys_of(tenant, ids))

    # Asked by the RAM tier, which waits for nothing --------------------------------------------------------------------------

    def promote(self, items: NDArray[Any]) -> None:
        """Read these values (DISK_ITEM, as `reserve` left them) into their blocks."""
        for lane, rows in self._cut(items["id"]):
            lane.read(items[rows])

    def remove(self, tenant: int, ids: Ids) -> int | Deferred[int]:
        """Forget values in RAM at once, and on disk; how many there were."""
        was_there = np.zeros(len(ids), np.uint8)
        self._native.remove(tenant, ids, True, was_there)
        parts = [lane.remove(tenant, np.ascontiguousarray(ids[rows]), was_there[rows]) for lane, rows in self._cut(ids)]
        return total_of(parts, _MOST)

    def remove_namespace(self, tenant: int, namespace: int, in_ram: Callable[[int], int]) -> int | Deferred[int]:
        """Forget a namespace's values: `in_ram` does so in RAM, for one lane, and says how many there were that are on no disk."""
        return total_of([lane.remove_namespace(tenant, namespace, in_ram) for lane in self.lanes], _MOST)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what is dirty, within `timeout_s`, and end the threads; whether all of it was written. The engine stays open."""
        atexit.unregister(self.close)
        deadline = time.monotonic() + timeout_s
        while self._native.stats()["dirty"] and time.monotonic() < deadline:
            self._native.wake_flushers()
            time.sleep(0.005)
        for lane in self.lanes:
            lane.begin_close()
        for lane in self.lanes:
            lane.end(deadline)
        return self._native.stats()["dirty"] == 0

    def forget_absent(self) -> None:
        """Let go of values that were read from disk and are not there any more."""
        for lane in self.lanes:
            lane.forget_absent()

    def _cut(self, ids: Ids) -> list[tuple[DiskLane, NDArray[np.intp]]]:
        """Each lane that has some of the ids, and which ones."""
        if self._placement is None:
            return [(self.lanes[0], np.arange(len(ids)))] if len(ids) else []
        owners = self._placement.owners(ids)
        return [(self.lanes[number], np.flatnonzero(owners == number)) for number in np.unique(owners).tolist()]
