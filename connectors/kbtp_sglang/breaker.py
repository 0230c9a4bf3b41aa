"""Whether the store is worth asking.

Rules:
1. A call that nothing came back from opens the breaker. From then on callers are told at once that there is nothing.
2. One thread asks the store again every `probe_s`; the first answer, whatever it says, closes the breaker, and the thread ends.
3. So a store that is dead costs the one wait that found it out, and nothing after.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Final

_log = logging.getLogger(__name__)


class Breaker:
    """`probe()` says whether the store answers; it is called in the breaker's own thread. Any thread."""

    def __init__(self, name: str, probe: Callable[[], bool], probe_s: float) -> None:
        self._name: Final = name
        self._probe: Final = probe
        self._probe_s: Final = probe_s
        self._lock = threading.Lock()  # guards the thread and what is counted
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()
        self.trip_count = 0

    @property
    def is_open(self) -> bool:
        """Whether the store was found dead and has not been back since."""
        return self._thread is not None or self._ended.is_set()

    def trip(self, why: str) -> None:
        """Nothing came back."""
        with self._lock:
            if self.is_open:
                return
            self.trip_count += 1
            _log.warning("%s: %s; its pages are misses until it is back", self._name, why)
            self._thread = threading.Thread(target=self._look, name="kbtp-probe", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the thread; the breaker stays open. Idempotent."""
        self._ended.set()
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join()

    def _look(self) -> None:
        while not self._ended.wait(self._probe_s):
            if self._answers():
                with self._lock:
                    self._thread = None
                _log.warning("%s is back", self._name)
                return

    def _answers(self) -> bool:
        try:
            return self._probe()
        except Exception as error:  # noqa: BLE001 - whatever it is, the store is not back
            _log.debug("%s: %s", self._name, error)
            return False
