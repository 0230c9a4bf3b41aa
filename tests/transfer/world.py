"""Two engines' worth of paged memory and the two ends of a pull, over the software RNIC on loopback."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from kbtp_core.errors import GeometryMismatch
from kbtp_core.transfer import HandleLedger, PagedMemory, PullResult, PullSink, PullSource

LAYERS, PAGE_BYTES, ENTRIES = 3, 1024, 256
DESCRIPTOR = b'{"model": "tiny", "dtype": "bfloat16"}'


class Engine:
    """KV memory of one engine: `LAYERS` arrays of `blocks` pages, as an engine keeps them."""

    def __init__(self, blocks: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        self.layers = [random.integers(0, 256, (blocks, PAGE_BYTES), np.uint8) for _ in range(LAYERS)]
        pages = np.arange(blocks, dtype=np.uint64) * np.uint64(PAGE_BYTES)
        addresses = np.stack([np.uint64(layer.ctypes.data) + pages for layer in self.layers], axis=1)
        self.memory = PagedMemory(addresses, PAGE_BYTES, self.layers)

    def block(self, index: int) -> bytes:
        return b"".join(layer[index].tobytes() for layer in self.layers)


def accept_same(theirs: bytes, peer: str) -> None:
    if theirs != DESCRIPTOR:
        raise GeometryMismatch(f"prefill engine at {peer} is {theirs!r}, this engine {DESCRIPTOR!r}")


@dataclass
class World:
    prefill: Engine
    decode: Engine
    source: PullSource
    sink: PullSink
    ledger: HandleLedger
    now: list[float] = field(default_factory=lambda: [0.0])

    def offer(self, request_id: str, blocks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        handles, generations = self.ledger.take(len(blocks))
        self.source.offer(request_id, handles, generations, np.array(blocks))
        return handles, generations

    def pull(self, request_id: str, offered: tuple[np.ndarray, np.ndarray], into: list[int], timeout_s: float = 5.0, **other: int) -> None:
        host, port = self.source.address
        incarnation = other.get("incarnation", self.source.incarnation)
        self.sink.pull(request_id, host, other.get("port", port), incarnation, *offered, np.array(into, np.int64), timeout_s=timeout_s)

    def result(self, timeout_s: float = 10.0) -> PullResult:
        return self.results(1, timeout_s)[0]

    def results(self, count: int, timeout_s: float = 10.0) -> list[PullResult]:
        found: list[PullResult] = []
        until(lambda: found.extend(self.sink.take_finished()) or len(found) >= count, timeout_s)
        assert len(found) == count
        return found

    def released(self, count: int = 1, timeout_s: float = 5.0) -> list[str]:
        found: list[str] = []
        until(lambda: found.extend(self.source.take_released()) or len(found) >= count, timeout_s)
        return found


def until(condition: object, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "nothing happened in time"
        time.sleep(0.001)


@contextmanager
def world(
    blocks: int = 8,
    lease_s: float = 60.0,
    descriptor: bytes = DESCRIPTOR,
    source_secret: bytes | None = None,
    sink_secret: bytes | None = None,
) -> Iterator[World]:
    prefill, decode, now = Engine(blocks, 1), Engine(blocks, 2), [0.0]
    source = PullSource(
        prefill.memory,
        descriptor=descriptor,
        host="127.0.0.1",
        port=0,
        table_entries=ENTRIES,
        lease_s=lease_s,
        secret=source_secret,
        trust_domain="pair",
        name="prefill/0",
        clock=lambda: now[0],
    )
    sink = PullSink(decode.memory, check_descriptor=accept_same, secret=sink_secret, trust_domain="pair", name="decode/0")
    try:
        yield World(prefill, decode, source, sink, HandleLedger(ENTRIES, source.first_handle), now)
    finally:
        sink.close()
        source.close()
