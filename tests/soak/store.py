"""A soak of a store: `python -m tests.soak.store SECONDS [SEED] [RESTARTS]`. One `kbtp serve` and eight clients in processes of their own.

There are far more values than the disk has room for, and more on the disk than in RAM. Clients come and go, a third of them is killed, and
now and then one is stopped for up to five seconds. It fails if a client reads a wrong octet, if a call of a client that was not stopped
ends later than 100 ms after its deadline (`store_client`), if the store takes more RAM or disk than it may have, or if it is not whole
once nobody is left: all blocks there, nothing pinned, no session, no more descriptors, no more memory than at the first such look.

With RESTARTS the store itself is killed so many times and started again. Every other time the clients are stopped before, and what was put
as durable right then must be there afterwards.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from random import Random

import numpy as np

from kbtp_core.client import Client, ItemStatus
from kbtp_core.store.link import LinkOptions
from tests.soak.served import ServedStore, total
from tests.soak.store_client import OUTSTANDING, life
from tests.soak.values import SPACES

CLIENTS = 8
RAM_BYTES, DISK_BYTES = 64 << 20, 256 << 20
LONGEST_LIFE_S = 30.0
LEASE_S = 62.0  # of a put with `pin`, and a little
MEMORY_BESIDES_BYTES = 128 << 20  # what the process takes besides values: the interpreter, the index, threads' own
SESSION_BYTES = (OUTSTANDING + 16) * (66 << 10)  # of messages that may come
ENDING_SESSIONS = 4
MEMORY_GROWTH_LIMIT_BYTES = 64 << 20
QUIET_LIMIT_S = 30.0
WATCH_EVERY_S = 0.5
RINGS_KEPT = 16  # native/store/slab_disk.cpp
KEPT = 32  # values that a restart is checked with


@dataclass
class Life:
    process: BaseProcess
    report: Connection
    dies_at: float
    stopped_until: float = 0.0
    is_killed: bool = False


class Soak:
    """The store, and the lives of its clients."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._random = Random(seed)
        self._data = folder / "data"
        self.store = ServedStore(
            folder,
            "--block",
            "65536",
            "--data-dir",
            str(self._data),
            "--ram",
            str(RAM_BYTES),
            "--disk",
            str(DISK_BYTES),
            "--session-quota",
            str(4 << 20),
        )
        self._context = multiprocessing.get_context("spawn")
        self._lives: list[Life] = []
        self._next_watch = self._next_stop = self._next_restart = 0.0
        self.counts: Counter[str] = Counter()
        self.most_memory_bytes = self._session_count = 0
        self.latest_s = 0.0

    # Clients ---------------------------------------------------------------------------------------------------------

    def step(self, end: float) -> None:
        """Start what is missing, stop, continue and kill whose time has come; raises if a client has failed."""
        now = time.monotonic()
        while len(self._lives) < CLIENTS and now < end:
            self._begin_life(now, end)
        if now >= self._next_stop:
            self._next_stop = now + self._random.uniform(0.2, 2.0)
            self._stop_one(now)
        for one in [*self._lives]:
            self._look_at(one, now)
        if now >= self._next_watch:
            self._next_watch = now + WATCH_EVERY_S
            self._watch()

    def _begin_life(self, now: float, end: float) -> None:
        seconds = min(self._random.uniform(2, LONGEST_LIFE_S), end - now)
        self.counts["clients"] += 1
        number = self.counts["clients"]
        theirs, ours = self._context.Pipe(duplex=False)[::-1]
        arguments = (self.store.address, number, number % len(SPACES), seconds, end - LEASE_S, theirs)
        process = self._context.Process(target=life, args=arguments, daemon=True)
        process.start()
        theirs.close()
        dies_at = now + self._random.uniform(1, seconds + 1) if self._random.random() < 0.4 else float("inf")
        self._lives.append(Life(process, ours, dies_at))

    def _stop_one(self, now: float) -> None:
        running = [one for one in self._lives if not one.stopped_until and not one.is_killed]
        if running:
            one = self._random.choice(running)
            one.stopped_until = now + self._random.uniform(0.2, 5.0)
            self._signal(one, signal.SIGSTOP)
            self.counts["stops"] += 1

    def _look_at(self, one: Life, now: float) -> None:
        if one.stopped_until and now >= one.stopped_until:
            one.stopped_until = 0.0
            self._signal(one, signal.SIGCONT)
        if now >= one.dies_at and not one.is_killed and one.process.exitcode is None:
            one.process.kill()
            one.is_killed = True
            self.counts["killed clients"] += 1
        if one.process.exitcode is None:
            return
        self._lives.remove(one)
        if one.process.exitcode != 0 and not one.is_killed:
            raise SystemExit(f"a client failed with exit status {one.process.exitcode}; its words are above")
        if one.process.exitcode == 0:
            counts, latest_s = one.report.recv()
            self.counts.update(counts)
            self.latest_s = max(self.latest_s, latest_s)
        one.report.close()
        one.process.close()

    @staticmethod
    def _signal(one: Life, number: int) -> None:
        if one.process.exitcode is None and one.process.pid is not None:
            os.kill(one.process.pid, number)

    @property
    def is_alone(self) -> bool:
        return not self._lives

    # The store -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Raises if the store takes more than it may."""
        metrics = self.store.metrics()
        assert total(metrics, "kbtp_store_pool_bytes") <= RAM_BYTES, f"the pools have more than the RAM: {metrics}"
        used = sum(
            value * int(key.rpartition("/")[2])
            for name in ("used", "of_clients")
            for key, value in metrics.items()
            if key.startswith(f"kbtp_store_blocks_{name}/")
        )
        assert used <= RAM_BYTES, f"values take {used} octets of RAM"
        assert total(metrics, "kbtp_disk_slot_bytes") <= DISK_BYTES, f"values take more of the disk than it has: {metrics}"
        on_disk = sum(path.stat().st_blocks * 512 for path in self._data.iterdir())
        assert on_disk <= DISK_BYTES + (8 << 20), f"the folder takes {on_disk} octets of its disk"
        memory_bytes = self.store.memory_bytes()
        sessions = max(self._session_count, int(metrics["kbtp_store_sessions"])) + ENDING_SESSIONS
        self._session_count = int(metrics["kbtp_store_sessions"])
        limit_bytes = RAM_BYTES + MEMORY_BESIDES_BYTES + sessions * SESSION_BYTES
        assert memory_bytes <= limit_bytes, f"the process takes {memory_bytes >> 20} MiB with {sessions} sessions"
        self.most_memory_bytes = max(self.most_memory_bytes, memory_bytes)

    def check(self) -> tuple[int, int]:
        """Nobody is left: the store is whole. Its descriptors, but for the rings that it keeps for reads, and octets of memory."""
        quiet = ("kbtp_store_sessions", "kbtp_store_pinned", "kbtp_store_dirty", "kbtp_store_leaving", "kbtp_store_promoting")
        deadline = time.monotonic() + QUIET_LIMIT_S
        while True:
            metrics = self.store.metrics()
            busy = {name: total(metrics, name) for name in quiet if total(metrics, name)}
            if not busy:
                break
            assert time.monotonic() < deadline, f"nobody is left, and there is still {busy}"
            time.sleep(0.1)
        for size in [key.rpartition("/")[2] for key in metrics if key.startswith("kbtp_store_blocks/")]:
            live, free, used, theirs = (metrics[f"kbtp_store_blocks{what}/{size}"] for what in ("", "_free", "_used", "_of_clients"))
            assert theirs == 0, f"{theirs:.0f} blocks of {size} octets are still their clients'"
            assert free + used == live, f"{live:.0f} blocks of {size} octets: {free:.0f} are free, {used:.0f} are used"
        descriptors = self.store.descriptors()
        rings = descriptors.pop("anon_inode:[io_uring]", 0)
        assert rings <= RINGS_KEPT, f"{rings} rings for reads"
        return descriptors.total(), self.store.memory_bytes()

    def restart(self, *, quietly: bool) -> None:
        """Kill the store and start it again. `quietly`: with the clients stopped, so that what was durable can't be evicted since."""
        self.counts["restarts"] += 1
        if not quietly:
            self.store.stop(signal.SIGKILL)
            self.store.start()
            return
        for one in self._lives:
            self._signal(one, signal.SIGSTOP)
        keys = [f"{self.counts['restarts']}/{at}" for at in range(KEPT)]
        values = [np.full(3000 + at, at, np.uint8) for at in range(KEPT)]
        with Client(self.store.address, b"soak-kept", options=LinkOptions(block_bytes=SPACES[0].block_bytes, quota=KEPT)) as client:
            self._until_written()
            status = client.put(keys, values, durable=True)
            assert (status == ItemStatus.OK).all(), f"putting durable values: {status}"
            self.store.stop(signal.SIGKILL)
            self.store.start()
        with Client(self.store.address, b"soak-kept", options=LinkOptions(block_bytes=SPACES[0].block_bytes, quota=KEPT)) as client:
            buffers = [np.zeros_like(value) for value in values]
            status = client.get(keys, buffers).status
            assert (status == ItemStatus.OK).all(), f"values that were durable before the store was killed: {status}"
            assert all(map(np.array_equal, buffers, values)), "values that were durable have other octets after the store was killed"
        for one in self._lives:
            if not one.stopped_until:
                self._signal(one, signal.SIGCONT)

    def _until_written(self) -> None:
        deadline = time.monotonic() + QUIET_LIMIT_S
        while total(self.store.metrics(), "kbtp_store_dirty"):
            assert time.monotonic() < deadline, "values still wait for the disk, though nobody puts any"
            time.sleep(0.1)

    def close(self) -> None:
        assert self.store.stop() == 0, self.store.words()

    def abandon(self) -> None:
        """After a failure: leave no process behind."""
        for one in self._lives:
            one.process.kill()
        if self.store.process.poll() is None:
            self.store.stop(signal.SIGKILL)


def run(soak: Soak, seconds: float, restarts: int) -> None:
    begun = time.monotonic()
    before: tuple[int, int] | None = None
    restart_times = [begun + seconds * (0.3 + 0.6 * at / max(restarts, 1)) for at in range(restarts)]
    for share in (0.25, 1.0):  # in between nobody is there, and the store is looked at
        end = begun + seconds * share
        deadline = end + 60
        while time.monotonic() < end or not soak.is_alone:
            assert time.monotonic() < deadline, "a client does not end"
            soak.step(end)
            if restart_times and time.monotonic() > restart_times[0]:
                soak.restart(quietly=len(restart_times) % 2 == 1)
                del restart_times[0]
                before = None
            time.sleep(0.02)
        now = soak.check()
        print(f"{time.monotonic() - begun:.0f} s: {dict(sorted(soak.counts.items()))}")
        print(f"    {now[0]} descriptors, {now[1] >> 20} MiB, {soak.most_memory_bytes >> 20} MiB at most,")
        print(f"    the latest answer {soak.latest_s * 1000:.0f} ms after its deadline", flush=True)
        if before is not None:
            assert now[0] <= before[0], f"descriptors: {before[0]} after a quarter, {now[0]} in the end"
            assert now[1] <= before[1] + MEMORY_GROWTH_LIMIT_BYTES, f"memory: {before[1]} octets after a quarter, {now[1]} in the end"
        before = now
    assert soak.counts["get OK"] > 20 * seconds, "too few values were read for this to say anything"
    for name in ("get", "put"):
        failed = soak.counts[f"{name} UNAVAILABLE"] + soak.counts[f"{name} TIMED_OUT"]
        assert restarts or failed <= 0.01 * soak.counts[f"{name} OK"], f"{failed} times a {name} that had time enough found no store"
    soak.close()


def main() -> None:
    seconds, seed, restarts = [float(text) for text in sys.argv[1:4]] + [60.0, 1, 0][len(sys.argv) - 1 :]
    folder = Path(tempfile.mkdtemp(prefix="kbtp-soak-"))
    soak = Soak(folder, int(seed))
    try:
        run(soak, seconds, int(restarts))
    except BaseException:
        print(soak.store.words()[-4000:], file=sys.stderr)
        raise
    finally:
        soak.abandon()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
