"""What goes between the RAM tier and one disk: threads that write dirty values, and threads that read, remove and expire.

A disk has a lane of its own, so that one that hangs holds up nobody but those who want something of it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.keyed import ID_BYTES, Ids
from kbtp_core.protocol.keyed_backend import Deferred
from kbtp_core.store.disk import DiskEngine, DiskStatus, Keys

if TYPE_CHECKING:
    from kbtp_core import _native

_log = logging.getLogger(__name__)

DISK_ITEM: Final = np.dtype(
    [
        ("tenant", "u8"),
        ("id", "u1", ID_BYTES),
        ("namespace", "u8"),
        ("address", "u8"),
        ("handle", "u8"),
        ("number", "u4"),
        ("length", "u4"),
        ("crc", "u4"),
        ("expiry_s", "u4"),
        ("generation", "u2"),
        ("status", "u2"),
        ("has_left", "u4"),
    ]
)
"""A value on its way, 72 octets; mirrors native/keyed_store.hpp."""

_STATUS: Final = {
    DiskStatus.OK: Status.OK,
    DiskStatus.EXISTS: Status.ALREADY_BOUND,
    DiskStatus.LENGTH: Status.LENGTH,
    DiskStatus.REMOVED: Status.NOT_BOUND,
}
_PUT_STATUS: Final = np.array([_STATUS.get(status, Status.NO_SPACE) for status in DiskStatus], np.uint16)
_WAIT_S: Final = 0.25
_EXPIRE_EVERY_S: Final = 1.0
_BEING_WRITTEN: Final = 2  # in what native `remove` says of a value


def keys_of(tenant: int, ids: Ids) -> Keys:
    """(n, 24) Keys of a tenant's ids."""
    keys = np.empty((len(ids), 8 + ID_BYTES), np.uint8)
    keys[:, :8] = np.frombuffer(tenant.to_bytes(8, "big"), np.uint8)
    keys[:, 8:] = ids
    return keys


def _item_keys(items: NDArray[Any]) -> Keys:
    keys = np.empty((len(items), 8 + ID_BYTES), np.uint8)
    keys[:, :8] = items["tenant"].astype(">u8").view(np.uint8).reshape(-1, 8)
    keys[:, 8:] = items["id"]
    return keys


class DiskLane:
    """The `number`-th disk of `native`, from construction until `close`. `settled` is called when something has been decided."""

    def __init__(
        self,
        native: _native.KeyedStore,
        number: int,
        engine: DiskEngine,
        settled: Callable[[], None],
        *,
        flusher_count: int,
        reader_count: int,
        batch_count: int,
    ) -> None:
        self.engine: Final = engine
        self._native = native
        self._number = number
        self._settled = settled
        self._batch_count = batch_count
        self._is_closing = False
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reader_count = reader_count
        self._next_expiry = 0.0
        self._flushing = threading.Condition()  # guards the three below
        self._writing: set[object] = set()  # one for each batch that is being written
        self._pause_count = 0
        threads = [(self._flush, f"kbtp-flush-{number}.{at}") for at in range(flusher_count)]
        threads += [(self._run_tasks, f"kbtp-disk-{number}.{at}") for at in range(reader_count)]
        self._threads = [threading.Thread(target=run, name=name, daemon=True) for run, name in threads]
        for thread in self._threads:
            thread.start()

    # Asked by the tier, which waits for nothing ----------------------------------------------------------------------

    def read(self, items: NDArray[Any]) -> None:
        """Read these values (DISK_ITEM, as `reserve` left them) into their blocks."""
        for start in range(0, len(items), self._batch_count):
            part = items[start : start + self._batch_count].copy()
            self._tasks.put(lambda part=part: self._read(part))  # type: ignore[misc]

    def remove(self, tenant: int, ids: Ids, was_there: NDArray[np.uint8]) -> Deferred[int]:
        """Forget on disk what was fenced off and hidden in RAM, where `was_there` says what there was; how many there were."""
        result: Deferred[int] = Deferred()

        def run() -> None:
            was_on_disk: NDArray[np.bool_] = np.zeros(len(ids), np.bool_)
            try:
                was_on_disk = self.engine.remove(keys_of(tenant, ids))
                if (was_there == _BEING_WRITTEN).any():
                    self._until_written()  # whoever wrote it takes it off the disk
            finally:
                self._native.unfence(tenant, ids)
                result.set(int(np.count_nonzero(was_on_disk | (was_there != 0))))

        self._tasks.put(run)
        return result

    def remove_namespace(self, tenant: int, namespace: int, in_ram: Callable[[int], int]) -> Deferred[int]:
        """Forget a namespace's values: `in_ram` does so in RAM, for this lane, and says how many there were that are on no disk."""
        result: Deferred[int] = Deferred()

        def run() -> None:
            count = 0
            with self._no_flush():  # a value that is being written would count twice
                count = in_ram(self._number)
                try:
                    count += self.engine.remove_namespace(tenant, namespace)
                finally:
                    in_ram(self._number)  # what was read from disk meanwhile
                    result.set(count)

        self._tasks.put(run)
        return result

    def begin_close(self) -> None:
        self._is_closing = True
        for _ in range(self._reader_count):
            self._tasks.put(None)

    def end(self, deadline: float) -> None:
        for thread in self._threads:
            self._native.wake_flushers()
            thread.join(max(0.1, deadline - time.monotonic()))

    @contextmanager
    def _no_flush(self) -> Iterator[None]:
        """No batch is being written meanwhile."""
        with self._flushing:
            self._pause_count += 1
            self._flushing.wait_for(lambda: not self._writing)
        try:
            yield
        finally:
            with self._flushing:
                self._pause_count -= 1
                self._flushing.notify_all()

    def _until_written(self) -> None:
        """The batches that are being written now are written."""
        with self._flushing:
            now = set(self._writing)
            self._flushing.wait_for(lambda: not now & self._writing)

    # Threads ---------------------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        items = np.zeros(self._batch_count, DISK_ITEM)
        while not self._is_closing:
            batch = object()
            with self._flushing:
                self._flushing.wait_for(lambda: self._pause_count == 0)
                self._writing.add(batch)
            try:
                count = self._native.take_dirty(self._number, items, _WAIT_S)
                if count:
                    self._write(items[:count].copy())
            finally:
                with self._flushing:
                    self._writing.discard(batch)
                    self._flushing.notify_all()
            self._expire()

    def _write(self, items: NDArray[Any]) -> None:
        keys = _item_keys(items)
        columns = [np.ascontiguousarray(items[name]) for name in ("address", "length", "crc", "namespace", "expiry_s")]
        try:
            items["status"] = _PUT_STATUS[self.engine.put(keys, *columns)]
        except Exception:  # noqa: BLE001 - logged; the next batch may fare better
            _log.exception("a batch of %d values could not be written", len(items))
            items["status"] = Status.NO_SPACE
        was_written = (items["status"] == Status.OK) | (items["status"] == Status.ALREADY_BOUND)
        self._native.flushed(items)
        was_removed = items["has_left"] != 0
        if was_removed.any():
            self.engine.remove(keys[was_removed & was_written])
            for item in items[was_removed]:
                self._native.unfence(int(item["tenant"]), np.ascontiguousarray(item["id"]))
        self._settled()

    def _run_tasks(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception:  # noqa: BLE001 - logged; the next batch may fare better
                _log.exception("a task of the disk tier has failed")
            self._settled()

    def _read(self, items: NDArray[Any]) -> None:
        keys, lengths = _item_keys(items), np.ascontiguousarray(items["length"])
        try:
            got = self.engine.get(keys, np.ascontiguousarray(items["address"]), lengths, np.zeros(len(items), np.uint32))
            is_whole = (got.status == DiskStatus.OK) & (got.stored_lengths == lengths)
            items["crc"] = got.crcs
            items["status"] = np.where(is_whole, Status.OK, Status.NOT_BOUND)
        except Exception:  # noqa: BLE001 - logged; the next batch may fare better
            _log.exception("a batch of %d values could not be read", len(items))
            items["status"] = Status.NOT_BOUND
        self._native.promoted(items)

    def _expire(self) -> None:
        """Now and then: values on disk whose time is over, and what was read of them."""
        now = time.monotonic()
        if now < self._next_expiry:
            return
        self._next_expiry = now + _EXPIRE_EVERY_S
        if self.engine.expire(self._native.now_ms() // 1000):
            self.forget_absent()

    def forget_absent(self) -> None:
        """Let go of values that were read from disk and are not there any more: of their times RAM knows nothing."""
        raw = np.zeros(self._batch_count * 64, DISK_ITEM)
        cursor = 0
        while True:
            cursor, count = self._native.list_read(self._number, cursor, raw)
            items = raw[:count]
            self._native.drop_read(items[self.engine.lookup(_item_keys(items)) == 0])
            if not cursor:
                return
