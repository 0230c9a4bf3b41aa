"""The worker's half with the transfer layer's real ends, or with one that refuses; no engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kbtp_core.fabric.api import FabricError
from kbtp_core.transfer import HandleLedger, PagedMemory, PullResult, PullSource
from kbtp_vllm import geometry
from kbtp_vllm.config import ConnectorConfig
from kbtp_vllm.messages import FREE_ONLY, Offer, Pull, StepMetadata, WorkerAddress
from kbtp_vllm.worker import PullWorker

pytestmark = pytest.mark.vllm

BLOCKS, BLOCK_BYTES = 8, 512


class Sink:
    """Takes what `refuses` does not name, and keeps the ids."""

    def __init__(self, refuses: set[str]) -> None:
        self.taken: list[str] = []
        self._refuses = refuses

    def pull(self, request_id: str, *_: Any, **__: Any) -> None:
        if any(name in request_id for name in self._refuses):
            raise FabricError("no queue pair is left")
        self.taken.append(request_id)

    def take_finished(self) -> list[PullResult]:
        return []


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> PullWorker:
    monkeypatch.setattr(geometry, "check_movable", lambda *_: None)
    return PullWorker(SimpleNamespace(parallel_config=None), SimpleNamespace(), ConnectorConfig())


@pytest.fixture
def source() -> Iterator[PullSource]:
    octets = np.zeros((BLOCKS, BLOCK_BYTES), np.uint8)
    addresses = octets.ctypes.data + np.arange(BLOCKS, dtype=np.uint64).reshape(-1, 1) * np.uint64(BLOCK_BYTES)
    memory = PagedMemory(addresses, BLOCK_BYTES, octets)
    with closing(PullSource(memory, descriptor=b"{}", host="127.0.0.1", port=0, table_entries=100, lease_s=30.0)) as source:
        yield source


def pull_of(request_id: str, block: int = 1) -> Pull:
    return Pull(
        request_id,
        "prefill",
        (WorkerAddress("127.0.0.1", 1, 1),),
        np.array([17], np.uint64),
        np.array([2], np.uint16),
        np.array([block], np.int64),
    )


def test_an_offer_that_can_not_be_made_is_reported_sent_exactly_once(worker: PullWorker, source: PullSource) -> None:
    worker._source = source
    ledger = HandleLedger(100, source.first_handle)
    good, drifted = ledger.take(2), ledger.take(2)
    offers = [
        Offer("drifted", drifted[0], drifted[1] + 2, np.array([0, 1])),
        Offer("no such block", *ledger.take(1), np.array([BLOCKS])),
        Offer("good", *good, np.array([2, 3])),
    ]

    worker.start(StepMetadata(offers=offers))

    assert worker.results().finished_sending == {"drifted", "no such block"}
    assert worker.results().finished_sending == set()
    assert source.stats()["requests_on_offer"] == 1


def test_a_load_that_the_sink_does_not_take_is_reported_failed_exactly_once(worker: PullWorker) -> None:
    worker._sink = Sink({"bad"})  # type: ignore[assignment]
    worker.start(StepMetadata(pulls=[pull_of("bad"), pull_of("good")]))

    results = worker.results()

    assert (results.finished_recving, results.failed_recving) == ({"bad"}, {"bad"})
    assert worker.results().finished_recving == set()


def test_a_release_that_fails_does_not_end_the_load_of_the_same_request_id(worker: PullWorker) -> None:
    sink = Sink({"release"})
    worker._sink = sink  # type: ignore[assignment]

    worker.start(StepMetadata(pulls=[pull_of("r")], releases=[pull_of("r", FREE_ONLY)]))

    assert sink.taken == ["r"]
    assert worker.results().finished_recving == set()
