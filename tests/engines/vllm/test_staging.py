"""Blocks that go through host memory, as those of an accelerator do.

The transfer layer and the software RNIC are the real ones; the engine is two tensors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from kbtp_core.errors import ConfigError
from kbtp_core.transfer import FREE_ONLY, HandleLedger, PullResult, PullSink, PullSource
from kbtp_vllm.staging import HostStage, StagedSink, StagedSource, _Pull

pytestmark = pytest.mark.vllm

BLOCKS, STAGE = 24, 6
LAYERS = ("a", "b")
BLOCK_BYTES = len(LAYERS) * 2 * 16 * 32 * 4


def engine_memory(seed: int) -> dict[str, torch.Tensor]:
    """Two layers, tokens before heads in memory, two rows a block."""
    draw = torch.Generator().manual_seed(seed)
    return {layer: torch.rand(2 * BLOCKS, 8, 2, 32, generator=draw).permute(0, 2, 1, 3) for layer in LAYERS}


def rows(memory: dict[str, torch.Tensor], block: int) -> torch.Tensor:
    return torch.stack([memory[layer][2 * block : 2 * block + 2] for layer in LAYERS])


@dataclass
class World:
    prefill: dict[str, torch.Tensor]
    decode: dict[str, torch.Tensor]
    source: StagedSource
    sink: StagedSink
    ledger: HandleLedger
    released: set[str] = field(default_factory=set)

    def offer(self, name: str, blocks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        handles, generations = self.ledger.take(len(blocks))
        self.source.offer(name, handles, generations, np.array(blocks))
        return handles, generations

    def pull(self, name: str, offered: tuple[np.ndarray, np.ndarray], blocks: list[int], timeout_s: float = 10.0) -> None:
        host, port = self.source.address
        self.sink.pull(name, host, port, self.source.incarnation, *offered, np.array(blocks), timeout_s=timeout_s)

    def finish(self, count: int, timeout_s: float = 20.0) -> dict[str, PullResult]:
        """Step both ends as an engine does, until `count` pulls have ended."""
        results: dict[str, PullResult] = {}
        deadline = time.monotonic() + timeout_s
        while len(results) < count:
            assert time.monotonic() < deadline, f"only {list(results)} ended"
            self.released.update(self.source.take_released())
            results.update({result.request_id: result for result in self.sink.take_finished()})
            time.sleep(0.002)
        return results

    def wait_released(self, name: str) -> bool:
        deadline = time.monotonic() + 10
        while name not in self.released and time.monotonic() < deadline:
            self.released.update(self.source.take_released())
            time.sleep(0.002)
        return name in self.released


@contextmanager
def world(lease_s: float = 30.0) -> Iterator[World]:
    prefill, decode = engine_memory(1), engine_memory(2)
    stages = [HostStage(memory, [LAYERS], BLOCKS, STAGE * BLOCK_BYTES) for memory in (prefill, decode)]
    with ExitStack() as stack:
        source = PullSource(stages[0].memory, descriptor=b"{}", host="127.0.0.1", port=0, table_entries=200, lease_s=lease_s)
        stack.callback(source.close)
        sink = PullSink(stages[1].memory, check_descriptor=lambda theirs, peer: None)
        stack.callback(sink.close)
        yield World(prefill, decode, StagedSource(stages[0], source), StagedSink(stages[1], sink), HandleLedger(200, source.first_handle))


def test_blocks_arrive_in_the_engines_memory_and_only_there() -> None:
    with world() as w:
        before = {layer: tensor.clone() for layer, tensor in w.decode.items()}
        offered = w.offer("r", [3, 1, 20])
        w.pull("r", offered, [7, FREE_ONLY, 2])

        result = w.finish(1)["r"]

        assert (result.ok, result.blocks, result.bytes) == (True, 2, 2 * BLOCK_BYTES)
        assert torch.equal(rows(w.decode, 7), rows(w.prefill, 3))
        assert torch.equal(rows(w.decode, 2), rows(w.prefill, 20))
        assert all(torch.equal(rows(w.decode, block), rows(before, block)) for block in range(BLOCKS) if block not in (7, 2))
        assert w.wait_released("r")


def test_what_prefill_computes_after_the_offer_is_not_seen() -> None:
    with world() as w:
        expected = rows(w.prefill, 3).clone()
        offered = w.offer("r", [3])
        w.prefill["a"][6:8] = 0
        w.pull("r", offered, [7])

        assert w.finish(1)["r"].ok
        assert torch.equal(rows(w.decode, 7), expected)


def test_requests_wait_in_line_for_room_in_the_stage_and_all_arrive() -> None:
    with world() as w:
        offers = {f"r{n}": w.offer(f"r{n}", [3 * n, 3 * n + 1, 3 * n + 2]) for n in range(8)}
        for n, (name, offered) in enumerate(offers.items()):
            w.pull(name, offered, [3 * n + 2, 3 * n, 3 * n + 1])

        results = w.finish(8)

        assert all(result.ok for result in results.values())
        assert all(torch.equal(rows(w.decode, 3 * n + 2), rows(w.prefill, 3 * n)) for n in range(8))


def test_a_pull_without_room_ends_at_its_deadline_and_frees_its_handles() -> None:
    with world() as w:
        (handles, generations) = w.ledger.take(STAGE)  # nobody offers these: the pull holds the stage until its own deadline
        w.pull("stuck", (handles, generations), list(range(STAGE)), timeout_s=2.0)
        offered = w.offer("late", [1])
        w.pull("late", offered, [9], timeout_s=0.3)

        results = w.finish(2)

        assert not results["stuck"].ok
        assert not results["late"].ok
        assert "no room within 0.3 s; raise stage_mib" in results["late"].error
        assert w.wait_released("late")


def test_a_pull_larger_than_the_stage_is_refused_by_name() -> None:
    with world() as w:
        handles, generations = w.ledger.take(STAGE + 1)
        w.pull("big", (handles, generations), list(range(STAGE + 1)))
        result = w.finish(1)["big"]
        assert "7 blocks do not fit into the stage's 6; raise stage_mib" in result.error
        assert result.failed.all()


def test_cancelled_pulls_end_wherever_they_are_and_give_the_stage_back() -> None:
    with world() as w:
        nobody = w.ledger.take(STAGE)
        w.pull("under way", nobody, list(range(STAGE)))
        w.pull("in line", w.offer("in line", [1]), [9])
        time.sleep(0.1)
        for name in ("under way", "in line"):
            w.sink.cancel(name)

        results = w.finish(2, timeout_s=5)

        assert not any(result.ok for result in results.values())
        w.pull("next", w.offer("next", [0, 1, 2, 3, 4]), [0, 1, 2, 3, 4])
        assert w.finish(1)["next"].ok


def test_a_pull_that_the_sink_does_not_take_fails_alone_and_gives_the_stage_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("can't start new thread")

    with world() as w:
        nobody = w.ledger.take(2)
        with monkeypatch.context() as broken:
            broken.setattr(PullSink, "pull", refuse)
            for n in range(STAGE):  # each would keep two of the stage's blocks
                w.pull(f"r{n}", nobody, [1, 2])
            results = w.finish(STAGE)

        assert {result.error for result in results.values()} == {"can't start new thread"}
        assert all(result.failed.all() for result in results.values())
        w.pull("next", w.offer("next", list(range(STAGE))), list(range(STAGE)))
        assert w.finish(1)["next"].ok


def test_a_pull_in_the_line_ends_even_where_its_handles_can_not_be_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("this sink talks to 256 prefill workers already")

    with world() as w:
        w.pull("stuck", w.ledger.take(STAGE), list(range(STAGE)), timeout_s=1.0)
        w.pull("late", w.ledger.take(1), [9], timeout_s=0.2)
        w.pull("cancelled", w.ledger.take(1), [10])
        monkeypatch.setattr(PullSink, "pull", refuse)
        w.sink.cancel("cancelled")

        results = w.finish(3)

        assert results["cancelled"].error == "it was cancelled"
        assert "no room within 0.2 s" in results["late"].error


def test_freeing_handles_under_a_loading_requests_id_does_not_end_its_load() -> None:
    with world() as w:
        late = w.ledger.take(2)  # the load waits until these are offered
        w.pull("r", late, [4, 5])
        with pytest.raises(ValueError, match="r is being pulled already"):
            w.pull("r", w.offer("r again", [1]), [FREE_ONLY])
        w.sink._free_handles(_Pull("r", *w.source.address, w.source.incarnation, *w.offer("other", [1]), np.array([9]), 5.0, 0.0))
        assert w.wait_released("other")
        assert w.sink.take_finished() == []
        w.source.offer("r", *late, np.array([6, 7]))

        assert w.finish(1)["r"].ok
        assert torch.equal(rows(w.decode, 4), rows(w.prefill, 6))


def test_an_offer_that_can_not_be_made_is_released_once_and_gives_the_stage_back() -> None:
    with world() as w:
        handles, generations = w.ledger.take(STAGE)
        w.source.offer("drifted", handles, generations + 2, np.arange(STAGE))

        assert w.source.take_released() == ["drifted"]
        assert w.source.take_released() == []
        w.pull("next", w.offer("next", list(range(STAGE))), list(range(STAGE)))
        assert w.finish(1)["next"].ok


def test_a_stage_without_room_for_a_block_is_refused_at_start() -> None:
    with pytest.raises(ConfigError, match="stage_mib"):
        HostStage(engine_memory(1), [LAYERS], BLOCKS, BLOCK_BYTES - 1)
