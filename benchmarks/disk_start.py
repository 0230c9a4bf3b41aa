"""How long a slab with many values takes to start, what its index costs, and how long a lookup of 10,000 keys takes.

    python benchmarks/disk_start.py FOLDER [--values 5000000]

The table is written here, record by record as docs/concepts/store.md says, without payloads: a start does not read them. The folder needs
4 KiB a value of free space, of which only the table is written.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kbtp_core.store.disk import KEY_BYTES, UNIT_BYTES
from kbtp_core.store.slab import EXTENT_BYTES, SlabEngine

U8 = NDArray[np.uint8]
RECORD_BYTES = 64
SLOTS = EXTENT_BYTES // UNIT_BYTES
RECORD = np.dtype(
    [
        ("check", "<u4"),
        ("crc", "<u4"),
        ("tenant", "<u8"),
        ("id", "u1", 16),
        ("namespace", "<u8"),
        ("sequence", "<u8"),
        ("length", "<u4"),
        ("expiry", "<u4"),
        ("reserved", "<u4"),
        ("units", "<u4"),
    ]
)


def crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ (np.uint32(0x82F63B78) * (table & 1))
    return table


def crc32c_rows(rows: U8) -> NDArray[np.uint32]:
    """The CRC-32C of each row."""
    table = crc_table()
    crc = np.full(len(rows), 0xFFFFFFFF, np.uint32)
    for column in range(rows.shape[1]):
        crc = table[(crc ^ rows[:, column]) & 0xFF] ^ (crc >> 8)
    return ~crc


def records(ids: U8, first: int, store: bytes) -> NDArray[np.void]:
    """One record for each id, in slots from number `first` of the whole store on."""
    made = np.zeros(len(ids), RECORD)
    made["tenant"], made["id"], made["length"], made["units"] = 1, ids, UNIT_BYTES, 1
    made["sequence"] = np.arange(first + 1, first + 1 + len(ids))
    made["crc"] = 0x12345678
    places = (np.arange(first, first + len(ids), dtype="<u8") * RECORD_BYTES).view(np.uint8).reshape(-1, 8)
    store_rows = np.broadcast_to(np.frombuffer(store, np.uint8), (len(ids), 16))
    made["check"] = crc32c_rows(np.hstack([store_rows, places, made.view(np.uint8).reshape(-1, RECORD_BYTES)[:, 4:]]))
    return made


def fill(folder: Path, capacity: int, count: int) -> U8:
    """Make a store and write its table; the ids in it."""
    SlabEngine(folder, capacity).close()
    store = (folder / "superblock").read_bytes()[56:72]
    ids = np.random.default_rng(1).integers(0, 256, (count, 16), np.uint8)
    with (folder / "slots.tbl").open("r+b") as table:
        for first in range(0, count, 1 << 18):
            table.write(records(ids[first : first + (1 << 18)], first, store).tobytes())
    return ids


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--values", type=int, default=5_000_000)
    arguments = parser.parse_args()
    count, folder = arguments.values, arguments.folder / "kbtp-disk-start"
    capacity = -(-count // SLOTS) * EXTENT_BYTES
    try:
        ids = fill(folder, capacity, count)
        keys = np.zeros((10_000, KEY_BYTES), np.uint8)
        keys[:, 7], keys[:, 8:] = 1, ids[np.random.default_rng(2).integers(0, count, 10_000)]
        before, started = resident_bytes(), time.perf_counter()
        engine = SlabEngine(folder, capacity)
        took, after = time.perf_counter() - started, resident_bytes()
        assert engine.stats()["values"] == count
        times = []
        for _ in range(50):
            started = time.perf_counter()
            assert engine.lookup(keys).all()
            times.append(time.perf_counter() - started)
        print(f"start with {count:,} values: {took:.2f} s")
        print(f"index: {engine.stats()['index_bytes'] / count:.0f} octets a value, {(after - before) / count:.0f} of resident memory")
        print(f"lookup of 10,000 keys: median {statistics.median(times) * 1e3:.2f} ms, slowest {max(times) * 1e3:.2f} ms")
        engine.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
