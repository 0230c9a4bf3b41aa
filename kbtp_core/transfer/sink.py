"""Decode's end of a pull: LOAD a prefill's blocks straight into the engine's own memory, then FREE their handles.

One lane, a thread with one session, serves each prefill worker. A pull's life in its lane:

    waiting --session ready--> loading --every block answered--> fenced --> freeing --> reported
                                  |  ^
                                  |  '-- blocks that prefill has not bound yet are asked for again, a little later
                                  '-- deadline, cancel, lost session --> fenced --> reported

1. The destination pages are registered for one pull alone, and that region is closed (which waits for whatever touches it)
   before the pull is reported. So no late octet lands in a block that the engine has given to somebody else.
2. A block counts as loaded only if its own LOAD was answered OK. Everything else is in `PullResult.failed`, with the reason.
3. A LOAD is repeated only where that is sure to be right: the handle's generation is the one *before* the foretold one (prefill
   will bind it any moment), or the session was lost and the generation decides anew. Any other refusal is final.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Fabric
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.transfer.lane import FREE_ONLY, Lane, LaneSettings, Pull
from kbtp_core.transfer.memory import PagedMemory

__all__ = ["FREE_ONLY", "PullResult", "PullSink"]

LANE_LIMIT: Final = 256
"""Prefill workers that one sink talks to at once."""


@dataclass(frozen=True)
class PullResult:
    """What became of one pull. `failed` has one entry for each handle; `blocks` and `bytes` count what was loaded."""

    request_id: str
    ok: bool
    error: str
    blocks: int
    bytes: int
    seconds: float
    failed: NDArray[np.bool_] = field(compare=False)


class PullSink:
    """Pulls into `memory`. Every method may be called from any thread, and none waits, except `close`.

    `check_descriptor(descriptor, peer)` is called once for each session, before anything is loaded, and raises GeometryMismatch if
    the peer's memory is not laid out like ours. `trust_domain` and `secret` are shown to the peer.
    """

    def __init__(
        self,
        memory: PagedMemory,
        *,
        check_descriptor: Callable[[bytes, str], None],
        secret: bytes | None = None,
        trust_domain: str = "",
        name: str = "",
        fabric: Fabric | None = None,
    ) -> None:
        self._memory = memory
        self._owns_fabric = fabric is None
        self._fabric = fabric if fabric is not None else SoftRnic()
        self._settings = LaneSettings(memory, check_descriptor, secret, trust_domain, name)
        self._lock = threading.Lock()  # guards all below
        self._lanes: dict[tuple[str, int], Lane] = {}
        self._ending: list[Lane] = []  # over, but their threads may still say goodbye
        self._active: dict[str, Lane] = {}
        self._finished: list[PullResult] = []
        self._stats = {"pulls": 0, "pulls_failed": 0, "blocks_loaded": 0, "bytes_loaded": 0, "loads_repeated": 0}
        self._is_closed = False
        atexit.register(self.close)  # no thread may be in native code while the interpreter is torn down

    def pull(
        self,
        request_id: str,
        host: str,
        port: int,
        incarnation: int,
        handles: NDArray[np.uint64],
        generations: NDArray[np.uint16],
        blocks: NDArray[np.int64],
        *,
        timeout_s: float,
    ) -> None:
        """Load each handle into the block beside it, then free all handles. A block of FREE_ONLY is not loaded.

        Ends in exactly one `PullResult`, within `timeout_s`. Raises ValueError for lists of unequal length, a generation of zero, a
        block that does not exist, or a request that is being pulled already.
        """
        if not handles.size == generations.size == blocks.size:
            raise ValueError(f"{handles.size} handles, {generations.size} generations and {blocks.size} blocks")
        if not generations.all():
            raise ValueError(f"request {request_id} has a handle with generation 0, which would accept anybody's block")
        pages = self._memory.pages_of(blocks[blocks != FREE_ONLY])
        pull = Pull(request_id, incarnation, handles, generations, blocks, pages, timeout_s)
        with self._lock:
            if self._is_closed:
                raise ValueError("this sink is closed")
            if request_id in self._active:
                raise ValueError(f"request {request_id} is being pulled already")
            lane = self._lane(host, port)
            self._active[request_id] = lane
            self._stats["pulls"] += 1
        lane.add(pull)

    def cancel(self, request_id: str) -> None:
        """Give a pull up: its handles are freed, and it is reported as failed. Nothing if it is over already."""
        with self._lock:
            lane = self._active.get(request_id)
        if lane is not None:
            lane.cancel(request_id)

    def take_finished(self) -> list[PullResult]:
        """Pulls that ended since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def stats(self) -> dict[str, int]:
        """Counts since the start."""
        with self._lock:
            return dict(self._stats)

    def close(self) -> None:
        """End every pull and session; when this returns nothing touches the memory."""
        atexit.unregister(self.close)
        with self._lock:
            self._is_closed = True
            lanes = [*self._lanes.values(), *self._ending]
        for lane in lanes:
            lane.stop()
        for lane in lanes:
            lane.join()
        if self._owns_fabric:
            self._fabric.close()

    def _lane(self, host: str, port: int) -> Lane:
        lane = self._lanes.get((host, port))
        if lane is not None and not lane.is_over:
            return lane
        if lane is not None:
            self._ending.append(lane)
        self._ending = [one for one in self._ending if one.is_alive]
        if len(self._lanes) >= LANE_LIMIT:
            self._ending += [one for one in self._lanes.values() if one.is_over]
            self._lanes = {address: one for address, one in self._lanes.items() if not one.is_over}
        if len(self._lanes) >= LANE_LIMIT:
            raise ValueError(f"this sink talks to {LANE_LIMIT} prefill workers already; {host}:{port} would be one more")
        lane = Lane(self._fabric, host, port, self._settings, self._report, self._count_repeated)
        lane.start()
        self._lanes[host, port] = lane
        return lane

    def _count_repeated(self, count: int) -> None:
        with self._lock:
            self._stats["loads_repeated"] += count

    def _report(self, pull: Pull, seconds: float) -> None:
        """Called by a lane, once for each pull, after its memory is fenced."""
        failed = pull.wanted & ~pull.loaded
        count = int(np.count_nonzero(pull.loaded))
        result = PullResult(
            pull.request_id, not pull.error and not failed.any(), pull.error, count, count * self._memory.block_bytes, seconds, failed
        )
        with self._lock:
            self._active.pop(pull.request_id, None)
            self._finished.append(result)
            self._stats["pulls_failed"] += not result.ok
            self._stats["blocks_loaded"] += count
            self._stats["bytes_loaded"] += result.bytes
