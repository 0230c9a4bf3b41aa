"""So that no client fills the disk with lines: one place in the code logs so many lines in a while, and the rest is counted.

The first line after that while says how many like it were left out. Lines of other places come through meanwhile.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass


@dataclass
class _Place:
    since: float
    count: int = 0


class LogBudget(logging.Filter):
    """For handlers: at most `most` lines of one place in each `period_s` seconds. Any thread."""

    def __init__(self, most: int = 50, period_s: float = 10.0) -> None:
        super().__init__()
        self._most = most
        self._period_s = period_s
        self._lock = threading.Lock()
        self._places: dict[tuple[str, int], _Place] = {}  # as many as there are calls of loggers

    def filter(self, record: logging.LogRecord) -> bool:
        with self._lock:
            place = self._places.setdefault((record.pathname, record.lineno), _Place(record.created))
            if record.created - place.since >= self._period_s:
                left_out = place.count - self._most
                place.since, place.count = record.created, 0
                if left_out > 0:
                    record.msg, record.args = f"{record.getMessage()} (and {left_out} lines like this that were left out)", None
            place.count += 1
            return place.count <= self._most
