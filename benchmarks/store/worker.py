"""One peer's client, as a process of its own: `python worker.py PEER FOLDER`, orders as JSON lines on stdin, answers on stdout.

{"do": "put"|"hot"|"cold", "size": octets, "batch": n, "seconds": s}  ->  {"values": n, "seconds": s, "p50_us": ..., "p99_us": ...}

Every value is drawn from its key and checked octet by octet outside of the measured time, once in each order.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers import Octets, PeerLike

LARGEST = 4 << 20
HOT_BYTES = 2 << 20
"""Hot reads go round among so much: it stays in the caches."""
COLD_BYTES = 128 << 20
"""Cold reads and puts go through so much, each value once a round."""

MAKE_ROOM_S = 5.0


class Worker:
    def __init__(self, peer: PeerLike) -> None:
        self.peer = peer
        self.arena = np.random.default_rng(1).integers(0, 256, COLD_BYTES + LARGEST, np.uint8)
        self._sizes: set[int] = set()
        self.sink = np.zeros(32 * LARGEST, np.uint8)

    def run(self, order: dict[str, Any]) -> dict[str, Any]:
        size, batch = int(order["size"]), int(order["batch"])
        count = max(batch, (HOT_BYTES if order["do"] == "hot" else COLD_BYTES) // size // batch * batch)
        keys = [f"bench/{size}/{i}" for i in range(count)]
        values = [self.arena[i * size : (i + 1) * size] if (i + 1) * size <= self.arena.size else self.arena[:size] for i in range(count)]
        batches = [slice(at, at + batch) for at in range(0, count, batch)]
        self.peer.put(keys[:1], values[:1])  # whatever comes with the first use of a size is not measured
        self._drop(keys[:1])
        if order["do"] == "put":
            return self._put(keys, values, batches, float(order["seconds"]))
        for at in range(0, count, 32):
            self.peer.put(keys[at : at + 32], values[at : at + 32])
        into = [self.sink[i * size : (i + 1) * size] for i in range(batch)]
        self._check(keys[:batch], values[:batch])
        times: list[float] = []
        begun = time.perf_counter()
        while not times or time.perf_counter() - begun < float(order["seconds"]):
            for part in batches:
                start = time.perf_counter()
                self.peer.get(keys[part], into)
                times.append(time.perf_counter() - start)
                if time.perf_counter() - begun > float(order["seconds"]):
                    break
        seconds = sum(times)
        self._check(keys[-batch:], values[-batch:])
        self._drop(keys)
        return _figures(len(times) * batch, seconds, times)

    def _put(self, keys: list[str], values: list[Octets], batches: Sequence[slice], limit_s: float) -> dict[str, Any]:
        self._make_room(keys, values)
        times: list[float] = []
        spent, done = 0.0, 0
        while spent < limit_s:
            for part in batches:
                start = time.perf_counter()
                self.peer.put(keys[part], values[part])
                times.append(time.perf_counter() - start)
                spent += times[-1]
                done = part.stop
                if spent > limit_s:
                    break
            self._check(keys[:1], values[:1])
            self._drop(keys[:done])
        return _figures(len(times) * (batches[0].stop - batches[0].start), spent, times)

    def _make_room(self, keys: list[str], values: list[Octets]) -> None:
        """Whatever memory the peer takes for so much, or as much as it takes within some seconds, is not measured: once for each size."""
        if values[0].size in self._sizes:
            return
        self._sizes.add(values[0].size)
        end = time.perf_counter() + MAKE_ROOM_S
        for at in range(0, len(keys), 32):
            self.peer.put(keys[at : at + 32], values[at : at + 32])
            if time.perf_counter() > end:
                break
        self._drop(keys[: at + 32])

    def _check(self, keys: Sequence[str], values: Sequence[Octets]) -> None:
        for key, found, wanted in zip(keys, self.peer.octets(keys), values, strict=True):
            if found != wanted.tobytes():
                raise RuntimeError(f"{key} has wrong octets")

    def _drop(self, keys: Sequence[str]) -> None:
        for at in range(0, len(keys), 512):
            self.peer.drop(keys[at : at + 512])


def _figures(values: int, seconds: float, times: list[float]) -> dict[str, Any]:
    p50, p99 = np.percentile(np.array(times) * 1e6, [50, 99]).tolist()
    return {"values": values, "seconds": seconds, "p50_us": p50, "p99_us": p99}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what a peer's library prints goes to stderr
    peer = importlib.import_module(f"peers.{sys.argv[1]}").Peer(Path(sys.argv[2]), LARGEST)
    try:
        worker = Worker(peer)
        answers.write('{"ready": true}\n')
        for line in sys.stdin:
            answers.write(json.dumps(worker.run(json.loads(line))) + "\n")
    finally:
        peer.close()


if __name__ == "__main__":
    main()
