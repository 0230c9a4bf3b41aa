"""A disk engine in memory, whose reads and writes can be held up or made to fail: the disk of tests of what is above it."""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kbtp_core.store.disk import U8, U32, U64, DiskStatus, Flags, GetResult, Keys, Listing


@dataclass
class Stored:
    octets: bytes
    crc: int
    namespace: int
    expiry: int


class MemoryEngine:
    """See `store.disk.DiskEngine`. `puts` and `gets` are closed gates while a test wants I/O to be under way."""

    def __init__(self) -> None:
        self.values: dict[bytes, Stored] = {}
        self.puts, self.gets = threading.Event(), threading.Event()
        self.puts.set()
        self.gets.set()
        self.put_status: DiskStatus | None = None
        self.is_corrupt = False
        self.put_calls: list[int] = []
        self.get_calls: list[int] = []
        self.put_started, self.get_started = threading.Event(), threading.Event()
        self.error = ""
        self._lock = threading.Lock()

    def put(self, keys: Keys, addresses: U64, lengths: U32, crcs: U32, namespaces: U64, expiries: U32) -> U8:
        self.put_calls.append(len(keys))
        self.put_started.set()
        assert self.puts.wait(10)
        status = np.zeros(len(keys), np.uint8)
        with self._lock:
            for i, key in enumerate(_keys(keys)):
                if self.put_status is not None:
                    status[i] = self.put_status
                elif key in self.values:
                    status[i] = DiskStatus.EXISTS
                else:
                    octets = ctypes.string_at(int(addresses[i]), int(lengths[i]))
                    self.values[key] = Stored(octets, int(crcs[i]), int(namespaces[i]), int(expiries[i]))
        return status

    def get(self, keys: Keys, addresses: U64, capacities: U32, offsets: U32) -> GetResult:
        self.get_calls.append(len(keys))
        self.get_started.set()
        assert self.gets.wait(10)
        assert not offsets.any()
        status = np.full(len(keys), DiskStatus.MISS, np.uint8)
        stored, crcs = np.zeros(len(keys), np.uint32), np.zeros(len(keys), np.uint32)
        with self._lock:
            for i, key in enumerate(_keys(keys)):
                value = self.values.get(key)
                if value is not None and not self.is_corrupt:
                    assert len(value.octets) <= capacities[i]
                    ctypes.memmove(int(addresses[i]), value.octets, len(value.octets))
                    status[i], stored[i], crcs[i] = DiskStatus.OK, len(value.octets), value.crc
        return GetResult(status, stored, stored.copy(), crcs)

    def lookup(self, keys: Keys) -> U32:
        with self._lock:
            lengths = [len(self.values[key].octets) if key in self.values else 0 for key in _keys(keys)]
        return np.array(lengths, np.uint32)

    def remove(self, keys: Keys) -> Flags:
        with self._lock:
            return np.array([self.values.pop(key, None) is not None for key in _keys(keys)], np.bool_)

    def remove_namespace(self, tenant: int, namespace: int) -> int:
        with self._lock:
            mine = [key for key, value in self.values.items() if _tenant(key) == tenant and value.namespace == namespace]
            for key in mine:
                del self.values[key]
            return len(mine)

    def expire(self, now: int) -> int:
        with self._lock:
            over = [key for key, value in self.values.items() if 0 < value.expiry <= now]
            for key in over:
                del self.values[key]
            return len(over)

    def list(self, tenant: int | None, namespace: int | None, cursor: int, most: int) -> Listing:
        with self._lock:
            rows = [
                (key, len(value.octets), value.expiry)
                for key, value in sorted(self.values.items())
                if (tenant is None or _tenant(key) == tenant) and (namespace is None or value.namespace == namespace)
            ]
        page = rows[cursor : cursor + most]
        keys = np.frombuffer(b"".join(row[0] for row in page), np.uint8).reshape(-1, 24)
        end = cursor + len(page)
        columns: list[NDArray[np.uint32]] = [np.array([row[at] for row in page], np.uint32) for at in (1, 2)]
        return Listing(keys, columns[0], columns[1], end if end < len(rows) else 0)

    def usage(self) -> dict[int, int]:
        return {}

    def stats(self) -> dict[str, int]:
        return {}

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _keys(keys: Keys) -> list[bytes]:
    return [row.tobytes() for row in keys]


def _tenant(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")
