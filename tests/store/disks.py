"""Builders for the disk engines' tests: values that follow from their names, batches of them, and folders that cost no disk.

A value's octets follow from its name and version alone, so what an engine gives back is checked against the name, wherever it was put.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from kbtp_core import _native
from kbtp_core.store.disk import KEY_BYTES, U8, U32, U64, DiskEngine, DiskStatus, GetResult, Keys

TENANT = 0x1122334455667788


@contextmanager
def folder_in_memory() -> Iterator[Path]:
    """A folder on a tmpfs, where there is one: what a killed process wrote is kept, and a sync is free."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="kbtp-", dir=memory if memory.is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


def key_of(name: str, tenant: int = TENANT) -> bytes:
    return tenant.to_bytes(8, "big") + hashlib.sha256(name.encode()).digest()[:16]


def keys_of(names: Sequence[str], tenant: int = TENANT) -> Keys:
    return np.frombuffer(b"".join(key_of(name, tenant) for name in names), np.uint8).reshape(-1, KEY_BYTES)


@lru_cache(maxsize=4096)
def octets_of(name: str, length: int, version: int = 0) -> bytes:
    seed = int.from_bytes(hashlib.sha256(f"{name}/{version}".encode()).digest()[:8], "big")
    return np.random.default_rng(seed).bytes(length)


def addresses_of(buffers: Sequence[U8]) -> U64:
    return np.array([buffer.ctypes.data for buffer in buffers], np.uint64)


@dataclass
class Batch:
    """Values to put; `memory` keeps them where `addresses` point."""

    keys: Keys
    memory: list[U8]
    lengths: U32
    crcs: U32
    namespaces: U64
    expiries: U32

    def put(self, engine: DiskEngine) -> list[DiskStatus]:
        columns = (self.lengths, self.crcs, self.namespaces, self.expiries)
        return [DiskStatus(status) for status in engine.put(self.keys, addresses_of(self.memory), *columns)]


def batch(
    names: Sequence[str],
    lengths: int | Sequence[int],
    *,
    version: int = 0,
    tenant: int = TENANT,
    namespace: int = 0,
    expiry: int = 0,
    offset: int = 0,
) -> Batch:
    """Values with these names; `offset` octets behind a 4096-aligned address."""
    count = len(names)
    sizes = [lengths] * count if isinstance(lengths, int) else list(lengths)
    memory = [_placed(octets_of(name, size, version), offset) for name, size in zip(names, sizes, strict=True)]
    length_array = np.array(sizes, np.uint32)
    crcs = np.empty(count, np.uint32)
    _native.crc32c_values(addresses_of(memory), length_array, crcs)
    return Batch(
        keys_of(names, tenant), memory, length_array, crcs, np.full(count, namespace, np.uint64), np.full(count, expiry, np.uint32)
    )


def put(engine: DiskEngine, names: Sequence[str], lengths: int | Sequence[int], **options: int) -> list[DiskStatus]:
    return batch(names, lengths, **options).put(engine)


def get(
    engine: DiskEngine, names: Sequence[str], capacity: int = 1 << 22, offset: int = 0, tenant: int = TENANT
) -> tuple[GetResult, list[bytes]]:
    """What the engine says, and the octets that it copied."""
    count = len(names)
    memory = [np.full(capacity, 0xDD, np.uint8) for _ in names]
    result = engine.get(
        keys_of(names, tenant), addresses_of(memory), np.full(count, capacity, np.uint32), np.full(count, offset, np.uint32)
    )
    for buffer, copied in zip(memory, result.copied, strict=True):
        assert (buffer[copied:] == 0xDD).all() or copied == 0, "octets behind the value were written"
    return result, [buffer[:copied].tobytes() for buffer, copied in zip(memory, result.copied, strict=True)]


def value(engine: DiskEngine, name: str, capacity: int = 1 << 22) -> bytes | None:
    """A value's octets, or None for a miss."""
    result, octets = get(engine, [name], capacity)
    return octets[0] if result.status[0] == DiskStatus.OK else None


def _placed(octets: bytes, offset: int) -> U8:
    room = np.empty(len(octets) + 2 * 4096, np.uint8)
    start = -room.ctypes.data % 4096 + offset
    placed = room[start : start + len(octets)]
    placed[:] = np.frombuffer(octets, np.uint8)
    return placed
