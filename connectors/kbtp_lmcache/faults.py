"""What went wrong, counted, and said once for each kind until it goes well again."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.store.item_status import ItemStatus

_log = logging.getLogger(__name__)

_WAY_OUT: Final = {
    ItemStatus.TOO_LARGE: "a chunk is larger than the store's blocks: start `kbtp serve` with larger ones, or lower LMCache's chunk_size",
    ItemStatus.NO_SPACE: "the store is full of values that are in use, or the tenant has as much as it may: give it more memory or quota",
    ItemStatus.TIMED_OUT: "the store did not answer in time: raise timeout_s if it is only slow",
    ItemStatus.UNAVAILABLE: "the store can't be reached; it is tried again by itself",
    ItemStatus.REFUSED: "the store refuses it; its log says why",
}
_FINE: Final = (ItemStatus.OK, ItemStatus.EXISTS, ItemStatus.MISSING)


class Faults:
    """Any thread. `counts` is by (operation, kind): the names of ItemStatus, and `error` for what was not foreseen."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.counts: Counter[tuple[str, str]] = Counter()
        self._said: set[tuple[str, str]] = set()
        self._lock = threading.Lock()

    def note(self, operation: str, status: NDArray[np.uint8]) -> None:
        """What became of the values of a batch."""
        kinds, counts = np.unique(status, return_counts=True)
        found = [(ItemStatus(int(kind)), int(count)) for kind, count in zip(kinds, counts, strict=True)]
        for kind, count in found:
            if self._count(operation, kind.name.lower(), count) and kind not in _FINE:
                _log.warning(
                    "%s: %d of %d chunks of a %s: %s; they count as misses", self.name, count, len(status), operation, _WAY_OUT[kind]
                )
        if found and all(kind in _FINE for kind, _ in found):
            self._recovered(operation)

    def unforeseen(self, operation: str, error: BaseException) -> None:
        """An exception that LMCache must not see."""
        kind = f"error:{type(error).__name__}"
        if self._count(operation, kind, 1):
            _log.error("%s: %s failed, which counts as a miss: %s", self.name, operation, error, exc_info=error)

    def misfit(self, operation: str, why: str) -> None:
        """A value that is not what this engine stores under its key, or a chunk for which LMCache has no memory."""
        if self._count(operation, "misfit", 1):
            _log.warning("%s: %s; it counts as a miss", self.name, why)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return {f"{operation}/{kind}": count for (operation, kind), count in sorted(self.counts.items())}

    def _count(self, operation: str, kind: str, count: int) -> bool:
        """Whether this kind has not been said yet."""
        with self._lock:
            self.counts[operation, kind] += count
            is_new = (operation, kind) not in self._said
            self._said.add((operation, kind))
            return is_new

    def _recovered(self, operation: str) -> None:
        fine = {kind.name.lower() for kind in _FINE}
        with self._lock:
            gone = {one for one in self._said if one[0] == operation and one[1] not in fine}
            self._said -= gone
        if gone:
            _log.info("%s: a %s went well again, after: %s", self.name, operation, ", ".join(sorted(kind for _, kind in gone)))
