"""One client of a soak: random batches on its own handles, every octet compared with what that handle must hold.

A block is filled with one word of 8 octets that tells client, handle and turn apart, so that a block of anybody else, of an earlier
turn, or torn between two is seen at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import DeadlineExceeded
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import HelloParameters, Status
from kbtp_core.session import InitiatorSession

HANDLES, QUOTA, LARGEST_BATCH = 64, 48, 16
PATIENCE_S = 30.0
NO_SPACE_IS_FINE = (int(Status.OK), int(Status.NO_SPACE))


class Client:
    """Works until its time is over; a short life or a long one, ended in order, by abort, or from outside."""

    def __init__(self, port: int, block_bytes: int, seed: int) -> None:
        self._random = Random(seed)
        self._seed = seed
        self._words = block_bytes // 8
        self._block_bytes = block_bytes
        self._port = port
        self._fabric = SoftRnic()
        self._turn = 0
        self._memory: NDArray[np.uint64] = np.zeros((LARGEST_BATCH, self._words), np.uint64)
        self.request_count = 0
        self._connect()

    def _connect(self) -> None:
        wish = HelloParameters(quota=QUOTA, handle_count=HANDLES, outstanding=64, inline_bytes=256, client_name=f"soak-{self._seed}")
        self._session = InitiatorSession.connect(self._fabric, "127.0.0.1", self._port, wish, deadline_s=PATIENCE_S)
        base = self._session.target.handle_base
        self._free = list(range(base, base + self._session.target.handle_count))
        self._held: dict[int, tuple[int, int]] = {}  # handle -> generation, word
        self._region = self._session.register(self._memory)

    def run(self, seconds: float) -> int:
        """Random batches; returns how many requests were made. Raises AssertionError on anything wrong."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            step = self._random.choices((self._store, self._load, self._free_some, self._give_up), (3, 6, 2, 1))[0]
            step()
        if self._random.random() < 0.7:
            self._session.close()
        self._fabric.close()
        return self.request_count

    def _rows(self, handles: list[int]) -> dict[str, Any]:
        self.request_count += len(handles)
        return {"offsets": np.arange(len(handles)) * self._block_bytes, "lengths": self._block_bytes}

    def _store(self) -> None:
        handles = self._free[: self._random.randint(1, LARGEST_BATCH)]
        if not handles:
            return
        self._turn += 1
        words = [self._seed << 40 | handle << 24 | self._turn & 0xFFFFFF for handle in handles]
        self._memory[: len(handles)] = np.array(words, np.uint64)[:, None]
        batch = self._session.alloc_store(handles, 0, self._region, **self._rows(handles), deadline=time.monotonic() + PATIENCE_S).wait()
        for handle, word, status, generation in zip(handles, words, batch.status.tolist(), batch.generation.tolist(), strict=True):
            assert status in NO_SPACE_IS_FINE, f"storing handle {handle}: status {status}"
            if status == Status.OK:
                self._free.remove(handle)
                self._held[handle] = (generation, word)

    def _load(self) -> None:
        handles = self._random.sample([*self._held], min(len(self._held), self._random.randint(1, LARGEST_BATCH)))
        if not handles:
            return
        self._memory[:] = 0
        generations = np.array([self._held[handle][0] for handle in handles], np.uint16)
        batch = self._session.load(
            np.array(handles, np.uint64), generations, self._region, **self._rows(handles), deadline=time.monotonic() + PATIENCE_S
        )
        assert batch.wait().ok, f"loading {handles}: {batch.status}"
        for row, handle in enumerate(handles):
            wrong = self._memory[row] != self._held[handle][1]
            assert not wrong.any(), f"handle {handle} holds {self._held[handle][1]:#x}; read {self._memory[row][wrong][:4]}"

    def _free_some(self) -> None:
        handles = [*self._held][: self._random.randint(1, LARGEST_BATCH)]
        if not handles:
            return
        self.request_count += len(handles)
        generations = [self._held[handle][0] for handle in handles]
        batch = self._session.free(handles, generations, deadline=time.monotonic() + PATIENCE_S).wait()
        assert batch.ok, f"freeing {handles}: {batch.status}"
        stale = self._session.load(handles, generations, self._region, **self._rows(handles), deadline=time.monotonic() + PATIENCE_S).wait()
        assert not (stale.status == Status.OK).any(), f"a freed handle of {handles} was loaded"
        for handle in handles:
            del self._held[handle]
            self._free.append(handle)

    def _give_up(self) -> None:
        """A load whose time is over at once: its memory stays as it is from then on. Data that comes too late may end the session."""
        handles = [*self._held][:LARGEST_BATCH]
        if not handles:
            return
        memory: NDArray[np.uint64] = np.zeros((len(handles), self._words), np.uint64)
        region = self._session.register(memory)
        batch = self._session.load(handles, 0, region, **self._rows(handles), deadline=time.monotonic() + 0.0005 * self._random.random())
        with contextlib.suppress(DeadlineExceeded):
            batch.wait()
        region.close()
        before = memory.copy()
        time.sleep(0.005)
        assert np.array_equal(before, memory), "memory changed after its region was closed"
        self._session.close()
        self._connect()


def life(port: int, block_bytes: int, seed: int, seconds: float) -> None:
    """A process: one client. What is wrong ends it with a traceback and status 1."""
    count = Client(port, block_bytes, seed).run(seconds)
    print(f"client {seed}: {count:,} requests", flush=True)
    os._exit(0)  # as a process that is killed would: nothing is tidied up
