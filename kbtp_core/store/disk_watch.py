"""Tells the log what becomes of the disks: each error once it is there, with its disk, what the system said, and what to do."""

from __future__ import annotations

import logging
from typing import Final

from kbtp_core.store.disk_group import DiskGroup

_log = logging.getLogger(__name__)

_OUT_OF_SERVICE: Final = "disk out of service: %s. %s. Look at the disk (dmesg, its mount), mend or replace it, then start the store again."
_FULL: Final = (
    "the filesystem of %s is full: No space left on device, %d times. Values of its keys stay in RAM alone, and durable puts are refused. "
    "Make room there, or start the store with an empty folder and a smaller `disk`."
)
_BAD_READS: Final = "%d reads of %s failed, or had the wrong checksum: those values are misses. Look at the disk (dmesg, smartctl)."
_REPEAT_LOOKS: Final = 60


class DiskWatch:
    """Call `look` about once a second. What goes on is told again after a minute of looks."""

    def __init__(self, disks: DiskGroup) -> None:
        self._disks = disks
        self._out_of_service: set[str] = set()
        self._told: dict[tuple[str, str], int] = {}  # (disk, what) -> its count when it was told last
        self._pauses: dict[tuple[str, str], int] = {}

    def look(self) -> None:
        for name, engine in zip(self._disks.names, self._disks.engines, strict=True):
            error = engine.error
            if error and name not in self._out_of_service:
                self._out_of_service.add(name)
                left = len(self._disks.names) - len(self._disks.degraded_names)
                _log.error(_OUT_OF_SERVICE, error, f"{left} of {len(self._disks.names)} disks go on" if left else "No disk is left")
            stats = engine.stats()
            if (count := self._news(name, "no_space", stats.get("errors_no_space", 0))) and not error:
                _log.error(_FULL, name, count)
            if (count := self._news(name, "reads", stats.get("read_errors", 0) + stats.get("checksum_errors", 0))) and not error:
                _log.warning(_BAD_READS, count, name)

    def _news(self, name: str, what: str, count: int) -> int:
        """How much a counter has grown since it was told, or 0 where it has not or was told just now."""
        key = name, what
        pause = self._pauses.get(key, 0)
        news = count - self._told.get(key, 0)
        if not news or pause:
            self._pauses[key] = max(pause - 1, 0)
            return 0
        self._told[key], self._pauses[key] = count, _REPEAT_LOOKS
        return news
