"""What a slab reads and writes a second, with io_uring for its small reads and with threads alone.

    python benchmarks/disk_io.py FOLDER [--seconds 1]

Both stores are on the same disk, 1 GiB each, with the same values; their turns are A B B A A B. Reads are O_DIRECT, of random values; puts
are durable when they return, and evict once the store is full.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.store.disk import KEY_BYTES
from kbtp_core.store.slab import SlabEngine

CAPACITY = 1 << 30
CASES = [(4 << 10, 1), (4 << 10, 32), (64 << 10, 1), (64 << 10, 32), (2_883_584, 1), (2_883_584, 32)]
Memory = NDArray[np.uint8]


def aligned(count: int, size: int) -> Memory:
    memory = np.zeros(count * size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + count * size].reshape(count, size)


class Store:
    """Values of one size; those that were there at the start are read, others are put and removed again."""

    def __init__(self, folder: Path, size: int, batch: int, io_uring: bool) -> None:
        self.engine = SlabEngine(folder, CAPACITY, io_uring=io_uring)
        self.batch, self.size = batch, size
        self.count = min(4096, (CAPACITY // 2) // (size + 4096))
        self.random = np.random.default_rng(1)
        self.keys = self.random.integers(0, 256, (self.count, KEY_BYTES), np.uint8)
        self.memory = aligned(batch, size)
        self.memory[:] = self.random.integers(0, 256, self.memory.shape, np.uint8)
        self.addresses = np.array([row.ctypes.data for row in self.memory], np.uint64)
        self.lengths, self.zeros = np.full(batch, size, np.uint32), np.zeros(batch, np.uint32)
        for first in range(0, self.count - batch + 1, batch):
            self.put_keys(self.keys[first : first + batch])
        self.count -= self.count % batch

    def put_keys(self, keys: Memory) -> None:
        crcs = np.empty(self.batch, np.uint32)
        _native.crc32c_values(self.addresses, self.lengths, crcs)
        assert not self.engine.put(keys, self.addresses, self.lengths, crcs, self.zeros.astype(np.uint64), self.zeros).any()

    def get(self) -> None:
        keys = self.keys[self.random.integers(0, self.count, self.batch)]
        assert not self.engine.get(keys, self.addresses, self.lengths, self.zeros).status.any()

    def put(self) -> None:
        self.put_keys(self.random.integers(0, 256, (self.batch, KEY_BYTES), np.uint8))


def rate(call: Callable[[], None], seconds: float, batch: int) -> float:
    calls, started = 0, time.perf_counter()
    while (took := time.perf_counter() - started) < seconds:
        call()
        calls += 1
    return calls * batch / took


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0)
    arguments = parser.parse_args()
    print("| case | io_uring, values/s | threads, values/s | io_uring, MB/s | threads, MB/s |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for size, batch in CASES:
        folder = arguments.folder / "kbtp-disk-io"
        try:
            stores = [Store(folder / name, size, batch, name == "ring") for name in ("ring", "threads")]
            for operation in ("get", "put"):
                rates: list[list[float]] = [[], []]
                for turn in (0, 1, 1, 0, 0, 1):
                    rates[turn].append(rate(getattr(stores[turn], operation), arguments.seconds, batch))
                ring, threads = (statistics.median(side) for side in rates)
                megabytes = " | ".join(f"{side * size / 1e6:,.0f}" for side in (ring, threads))
                print(f"| {operation} {size / 1024:g} KiB × {batch} | {ring:,.0f} | {threads:,.0f} | {megabytes} |", flush=True)
            for store in stores:
                store.engine.close()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
