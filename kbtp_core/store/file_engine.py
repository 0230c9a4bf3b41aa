"""The file engine: one file a value, for diagnosis. What is stored can be seen with the usual tools.

A value is `blocks/<2 hex of the id>/<2 hex>/<16 hex tenant><32 hex id>`: its octets, then a trailer with the CRC, the namespace and the
expiry. It is written as `incoming/<name>`, synced, and renamed, so a name in `blocks` is a whole value. Rules:

1. A name in `blocks` that this module would not write refuses the store at start; nothing is deleted that is not understood.
2. A value goes by rename into nothing: an unlink, synced with its folder before `remove` returns.
3. The lock guards the index and is never held over I/O.

Slower than the slab by the cost of its inodes, and its index costs some 500 octets a value.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np

from kbtp_core import _native
from kbtp_core.store.disk import KEY_BYTES, U8, U32, U64, DiskError, DiskStatus, Flags, GetResult, Keys, Listing
from kbtp_core.store.quota import QuotaTable

_TRAILER: Final = struct.Struct("<8sQIIII")  # magic, namespace, length, crc, expiry, CRC of the trailer before it
_MAGIC: Final = b"KBTPFILE"
_STRIPES: Final = 64
_NAME: Final = re.compile("[0-9a-f]{48}")


@dataclass
class _Value:
    length: int
    crc: int
    namespace: int
    expiry: int
    is_committed: bool = False
    was_read: bool = False
    ended: threading.Event = field(default_factory=threading.Event)  # the put is over, and `outcome` says how
    outcome: DiskStatus = DiskStatus.IO_ERROR

    def is_live(self, now: float) -> bool:
        return self.is_committed and (self.expiry == 0 or self.expiry > now)


class FileEngine:
    """A `DiskEngine` over one folder of files."""

    def __init__(self, folder: Path, capacity_bytes: int, *, quotas: QuotaTable | None = None) -> None:
        """Open the store in `folder`, or make it. Raises DiskError."""
        self.folder, self.capacity_bytes = folder, capacity_bytes
        self.quotas = quotas or QuotaTable()
        self.error = ""
        self._stripes = tuple(threading.Lock() for _ in range(_STRIPES))  # whose holder alone changes the files of some keys
        self._lock = threading.Lock()  # after a stripe; guards all below
        self._index: dict[bytes, _Value] = {}  # in the order in which CLOCK's hand will come by
        self._bytes = 0
        self._is_closed = False
        self._counts = dict.fromkeys(("puts", "hits", "misses", "checksum_errors", "evicted_values", "removed_values", "expired_values"), 0)
        try:
            for name in ("blocks", "incoming"):
                (folder / name).mkdir(parents=True, exist_ok=True)
            for left in (folder / "incoming").iterdir():
                left.unlink()
            self._recover()
        except OSError as error:
            raise DiskError(f"{folder}: {error.strerror}: a store needs a folder that it may write") from None

    def put(self, keys: Keys, addresses: U64, lengths: U32, crcs: U32, namespaces: U64, expiries: U32) -> U8:
        columns = (column.tolist() for column in (addresses, lengths, crcs, namespaces, expiries))
        rows = zip(keys, *columns, strict=True)
        return np.array(
            [self._put(key.tobytes(), address, _Value(length, crc, ns, at)) for key, address, length, crc, ns, at in rows], np.uint8
        )

    def get(self, keys: Keys, addresses: U64, capacities: U32, offsets: U32) -> GetResult:
        rows = zip(keys, addresses.tolist(), capacities.tolist(), offsets.tolist(), strict=True)
        results = [self._get(key.tobytes(), address, capacity, offset) for key, address, capacity, offset in rows]
        table = np.array(results, np.int64).reshape(-1, 4)
        return GetResult(table[:, 0].astype(np.uint8), *(table[:, column].astype(np.uint32) for column in (1, 2, 3)))

    def lookup(self, keys: Keys) -> U32:
        now = time.time()
        with self._lock:
            values = [None if self.error else self._index.get(key.tobytes()) for key in keys]
            return np.array([value.length if value and value.is_live(now) else 0 for value in values], np.uint32)

    def remove(self, keys: Keys) -> Flags:
        now = time.time()
        found: list[_Value | None] = []
        for key in keys:
            found.append(self._remove(key.tobytes()))
        return np.array([value is not None and (value.is_live(now) or not value.is_committed) for value in found], np.bool_)

    def remove_namespace(self, tenant: int, namespace: int) -> int:
        return self._remove_all(
            lambda key, value: int.from_bytes(key[:8], "big") == tenant and value.namespace == namespace, "removed_values"
        )

    def expire(self, now: int) -> int:
        return self._remove_all(lambda _, value: 0 < value.expiry <= now, "expired_values")

    def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> Listing:
        now = time.time()
        with self._lock:
            names = [] if self.error else sorted(key for key, value in self._index.items() if value.is_live(now))
            values = [self._index[key] for key in names]
        chosen = [
            at
            for at, (key, value) in enumerate(zip(names, values, strict=True))
            if at >= cursor and tenant in (None, int.from_bytes(key[:8], "big")) and namespace in (None, value.namespace)
        ]
        rest, chosen = chosen[most:], chosen[:most]
        keys = np.frombuffer(b"".join(names[at] for at in chosen), np.uint8).reshape(-1, KEY_BYTES)
        lengths, expiries = (np.array([getattr(values[at], name) for at in chosen], np.uint32) for name in ("length", "expiry"))
        return Listing(keys, lengths, expiries, rest[0] if rest else 0)

    def usage(self) -> dict[int, int]:
        return self.quotas.usage()

    def stats(self) -> dict[str, int]:
        with self._lock:
            state = {"values": len(self._index), "committed_bytes": self._bytes, "capacity_bytes": self.capacity_bytes}
            return {**self._counts, **state, "is_degraded": int(bool(self.error))}

    def sync(self) -> None:
        """Every put and every removal synced what it did."""
        if self.error:
            raise DiskError(self.error)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for key, value in self._index.items():
                self._release(key, value)
            self._index.clear()

    def _files_of(self, key: bytes) -> threading.Lock:
        return self._stripes[key[-1] % _STRIPES]

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self.folder / "blocks" / name[16:18] / name[18:20] / name

    def _recover(self) -> None:
        for path in sorted((self.folder / "blocks").glob("**/*")):
            if path.is_dir() and re.fullmatch("[0-9a-f]{2}", path.name):
                continue
            key = bytes.fromhex(path.name) if _NAME.fullmatch(path.name) else b""
            if not key or path != self._path(key):
                raise DiskError(f"{path} is no value of a KBTP file store: move it away, or use another folder")
            value = _read_trailer(path)
            if value is None:
                path.unlink()
                continue
            self.quotas.ledger.count(int.from_bytes(key[:8], "big"), value.length)
            self._bytes += value.length
            self._index[key] = value

    def _put(self, key: bytes, address: int, value: _Value) -> DiskStatus:
        tenant = int.from_bytes(key[:8], "big")
        while True:
            with self._lock:
                if self._is_closed or self.error:
                    return DiskStatus.IO_ERROR
                if not 0 < value.length <= self.capacity_bytes:
                    return DiskStatus.LENGTH
                self._counts["puts"] += 1
                other = self._index.get(key)
                if other is None:
                    if not self.quotas.ledger.charge(tenant, value.length):
                        return DiskStatus.QUOTA
                    self._index[key] = value
                    self._bytes += value.length
                    break
                if other.is_live(time.time()):
                    return DiskStatus.EXISTS
            if other.is_committed:
                self._remove(key)  # its time is over
                continue
            other.ended.wait()
            return other.outcome
        value.outcome = self._write_out(key, address, value)
        value.ended.set()
        return value.outcome

    def _write_out(self, key: bytes, address: int, value: _Value) -> DiskStatus:
        outcome = self._write_and_commit(key, address, value) if self._make_room(key) else DiskStatus.NO_SPACE
        if outcome == DiskStatus.NO_SPACE and self._evict(key):
            outcome = self._write_and_commit(key, address, value)
        with self._lock:
            if outcome != DiskStatus.OK and self._index.get(key) is value:
                del self._index[key]
                self._release(key, value)
        return outcome

    def _write_and_commit(self, key: bytes, address: int, value: _Value) -> DiskStatus:
        with self._files_of(key):
            try:
                self._write(key, address, value)
            except OSError as error:
                return self._failed(error)
            with self._lock:
                if self._index.get(key) is value:
                    value.is_committed = True
                    return DiskStatus.OK
            self._path(key).unlink(missing_ok=True)
            return DiskStatus.REMOVED

    def _write(self, key: bytes, address: int, value: _Value) -> None:
        path, incoming = self._path(key), self.folder / "incoming" / key.hex()
        path.parent.mkdir(parents=True, exist_ok=True)
        head = _TRAILER.pack(_MAGIC, value.namespace, value.length, value.crc, value.expiry, 0)[:-4]
        try:
            with incoming.open("wb") as file:
                file.write(_memory(address, value.length))
                file.write(head + struct.pack("<I", _native.crc32c(head)))
                file.flush()
                os.fdatasync(file.fileno())
            incoming.rename(path)
        except OSError:
            incoming.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def _get(self, key: bytes, address: int, capacity: int, offset: int) -> tuple[DiskStatus, int, int, int]:
        with self._lock:
            value = None if self.error else self._index.get(key)
            if value is None or not value.is_live(time.time()):
                self._counts["misses"] += 1
                return DiskStatus.MISS, 0, 0, 0
            value.was_read = True
            self._counts["hits"] += 1
        if offset > value.length:
            return DiskStatus.LENGTH, value.length, 0, value.crc
        wanted = min(capacity, value.length - offset)
        is_right = wanted == 0 or self._read(key, _memory(address, wanted), offset, value)
        with self._lock:
            if is_right and self._index.get(key) is value:
                return DiskStatus.OK, value.length, wanted, value.crc
        return DiskStatus.MISS, 0, 0, 0

    def _read(self, key: bytes, into: memoryview, offset: int, value: _Value) -> bool:
        """Whether the octets are there, and are those that were put where all of them were asked for."""
        try:
            file = os.open(self._path(key), os.O_RDONLY)
        except FileNotFoundError:
            return False  # removed just now
        try:
            copied = os.preadv(file, [into], offset)
        except OSError as error:
            self._failed(error)
            return False
        finally:
            os.close(file)
        is_right = copied == len(into) and (copied < value.length or _crc(into) == value.crc)
        if not is_right:
            self._counts["checksum_errors"] += 1
            self._remove(key)
        return is_right

    def _remove(self, key: bytes) -> _Value | None:
        """Hide a value, wait for what is under way, and unlink it; what it was."""
        with self._lock:
            value = None if self.error else self._index.pop(key, None)
            if value is None:
                return None
            self._release(key, value)
            self._counts["removed_values"] += 1
        with self._files_of(key):  # so after a put of it that is under way
            with self._lock:
                other = self._index.get(key)
            if other is None or not other.is_committed:
                self._unlink(self._path(key))
        return value

    def _unlink(self, path: Path) -> None:
        try:
            if path.parent.exists():
                path.unlink(missing_ok=True)
                _sync_folder(path.parent)
        except OSError as error:
            self._failed(error)

    def _remove_all(self, which: Callable[[bytes, _Value], bool], counter: str) -> int:
        with self._lock:
            keys = [key for key, value in self._index.items() if which(key, value)]
        count = sum(self._remove(key) is not None for key in keys)
        with self._lock:
            self._counts[counter] += count
        return count

    def _make_room(self, key: bytes) -> bool:
        """Evict until the budget is kept, the value that is being put counted; False if nothing can go."""
        while True:
            with self._lock:
                if self._bytes <= self.capacity_bytes:
                    return True
            if not self._evict(key):
                return False

    def _evict(self, sparing: bytes) -> bool:
        """CLOCK: the first value that was not read since the hand came by last."""
        with self._lock:
            for key in [key for key, value in self._index.items() if value.is_committed and key != sparing]:
                value = self._index[key]
                if value.was_read:
                    value.was_read = False
                    self._index[key] = self._index.pop(key)
                    continue
                break
            else:
                key = next((key for key, value in self._index.items() if value.is_committed and key != sparing), b"")
            if not key:
                return False
            self._counts["evicted_values"] += 1
        return self._remove(key) is not None

    def _release(self, key: bytes, value: _Value) -> None:
        self._bytes -= value.length
        self.quotas.ledger.release(int.from_bytes(key[:8], "big"), value.length)

    def _failed(self, error: OSError) -> DiskStatus:
        if error.errno == errno.ENOSPC:
            return DiskStatus.NO_SPACE
        self.error = self.error or f"{self.folder}: {error.strerror}; what is on this disk is a miss until the store is opened again"
        return DiskStatus.IO_ERROR


def _read_trailer(path: Path) -> _Value | None:
    """What a file says of its value, or None if it is not whole."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TRAILER.size))
        octets = file.read()
    if len(octets) != _TRAILER.size:
        return None
    magic, namespace, length, crc, expiry, check = _TRAILER.unpack(octets)
    if magic != _MAGIC or check != _native.crc32c(octets[:-4]) or size != length + _TRAILER.size:
        return None
    return _Value(length, crc, namespace, expiry, is_committed=True)


def _memory(address: int, length: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * length).from_address(address)).cast("B")


def _crc(octets: memoryview) -> int:
    out = np.empty(1, np.uint32)
    array = np.frombuffer(octets, np.uint8)
    _native.crc32c_values(np.array([array.ctypes.data], np.uint64), np.array([array.size], np.uint32), out)
    return int(out[0])


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
