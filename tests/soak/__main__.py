"""A soak: `python -m tests.soak SECONDS`. One target, clients that come and go in processes of their own, some of them killed.

It fails if a client reads a wrong octet or sees an answer that can't be, or if the target is not whole in the end: blocks free, nobody
reading, as many descriptors and about as much memory as after the first minute.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import numpy as np

from kbtp_core.fabric.api import Access, ProtectionDomain, Region
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import BlockPool, BlockTable, Target
from kbtp_core.session import TargetServer, process_incarnation
from tests.soak.client import HANDLES, life

BLOCK, BLOCKS, CLIENTS = 16 << 10, 256, 6
LONGEST_LIFE_S = 20.0
MEMORY_GROWTH_LIMIT_MIB = 32.0


def memory_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def descriptor_count() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


class Soak:
    """The target, and the lives of its clients."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self._memory = np.zeros(BLOCK * BLOCKS, np.uint8)
        self._target = Target(
            BlockPool(BLOCK, self._memory), BlockTable(HANDLES * CLIENTS * 2), name="soak", incarnation=process_incarnation()
        )
        self._fabric = SoftRnic()
        self.server = TargetServer(self._fabric, self._target, self._register)
        self._context = multiprocessing.get_context("spawn")
        self._lives: dict[BaseProcess, float] = {}  # -> when it is killed
        self._killed: set[BaseProcess] = set()
        self.born_count = self.killed_count = 0

    def _register(self, pd: ProtectionDomain) -> Region:
        return pd.register(self._memory, Access.LOCAL_WRITE)

    def step(self, end: float) -> None:
        """Start what is missing, kill whose time has come; raises if a client has failed."""
        now = time.monotonic()
        while len(self._lives) < CLIENTS and now < end:
            seconds = min(self._random.uniform(1, LONGEST_LIFE_S), end - now)
            self.born_count += 1
            process = self._context.Process(target=life, args=(self.server.address[1], BLOCK, self.born_count, seconds), daemon=True)
            process.start()
            self._lives[process] = now + seconds / 2 + 2 if self._random.random() < 0.3 else float("inf")
        for process, death in [*self._lives.items()]:
            if now > death and process.is_alive() and process not in self._killed:
                process.kill()
                self._killed.add(process)
                self.killed_count += 1
            if process.exitcode is not None:
                process.join()
                if process.exitcode != 0 and process not in self._killed:
                    raise SystemExit(f"a client failed with exit status {process.exitcode}; its words are above")
                del self._lives[process]
                self._killed.discard(process)
                process.close()
        self.server.check()

    @property
    def is_alone(self) -> bool:
        return not self._lives and self.server.session_count == 0

    def check(self) -> None:
        """Nobody is left: all blocks are free and the target is whole."""
        self.server.check_integrity()
        pool = self._target.pool
        assert isinstance(pool, BlockPool)
        assert pool.ring.free_count == BLOCKS, f"{BLOCKS - pool.ring.free_count} blocks are lost"

    def close(self) -> None:
        self.server.close()
        self.server.check()
        self._fabric.close()


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    soak = Soak(seed)
    begun = time.monotonic()
    before: tuple[int, float] | None = None
    end = begun
    for share in (0.25, 1.0):  # in between nobody is there, and the target is looked at
        end = begun + seconds * share
        deadline = end + 60
        while time.monotonic() < end or not soak.is_alone:
            assert time.monotonic() < deadline, "a session does not end"
            soak.step(end)
            time.sleep(0.05)
        soak.check()
        now = (descriptor_count(), memory_mib())
        print(f"{time.monotonic() - begun:.0f} s: {soak.born_count} clients, {soak.killed_count} killed", flush=True)
        print(f"    {now[0]} descriptors, {now[1]:.0f} MiB", flush=True)
        if before is not None:
            assert now[0] <= before[0], f"descriptors: {before[0]} after a quarter, {now[0]} in the end"
            assert now[1] <= before[1] + MEMORY_GROWTH_LIMIT_MIB, f"memory: {before[1]:.0f} MiB after a quarter, {now[1]:.0f} in the end"
        before = now
    soak.close()


if __name__ == "__main__":
    main()
