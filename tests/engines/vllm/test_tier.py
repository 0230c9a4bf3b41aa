"""The offloading tier, driven as vLLM's tiering manager drives it, over a real `kbtp serve`.

vLLM's OffloadingConnector itself does not run on CPUs.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.base import JobResult, TransferJob
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

from kbtp_core.errors import ConfigError
from kbtp_vllm.tier import KBTPTier
from tests.soak.served import ServedStore

pytestmark = pytest.mark.vllm

CHUNKS, CHUNK_BYTES = 16, 20_000
PARALLEL = OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, False)


def config(block_tokens: int = 16) -> OffloadingConfig:
    return OffloadingConfig(
        groups=(OffloadingGroupConfig(block_tokens, ("layer",), 0),),
        worker_kv_bytes_per_block=CHUNK_BYTES,
        enable_kv_cache_events=False,
        extra_config={},
        engine_id="e",
        model=OffloadingModelConfig("tiny", "float16"),
        cache=OffloadingCacheConfig(block_tokens, 1),
        parallel=PARALLEL,
    )


class Primary:
    """A primary tier's memory and the KBTP tier behind it."""

    def __init__(self, address: str, *, block_tokens: int = 16, **settings: Any) -> None:
        self.memory = np.zeros((CHUNKS, CHUNK_BYTES), np.int8)
        entry = {"type": "KBTPTier", "module_path": "kbtp_vllm.tier", "store": address, "timeout_s": 2.0, **settings}
        spec: Any = SimpleNamespace(config=config(block_tokens))
        tier = SecondaryTierFactory.create_secondary_tier(entry, memoryview(self.memory), spec)
        assert isinstance(tier, KBTPTier)
        self.tier = tier
        self._jobs = 0

    def job(self, keys: list[OffloadKey], chunks: list[int], *, load: bool) -> JobResult:
        self._jobs += 1
        job = TransferJob(self._jobs, keys, np.array(chunks), load, ReqContext(req_id="r"))
        (self.tier.submit_load if load else self.tier.submit_store)(job)
        assert self.tier.has_pending_work()
        deadline = time.monotonic() + 10
        while not (results := list(self.tier.get_finished_jobs())):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        assert not self.tier.has_pending_work()
        (result,) = results
        assert result.job_id == self._jobs
        return result

    def lookup(self, keys: list[OffloadKey], request: str = "r") -> list[LookupResult]:
        """As the scheduler asks: again in the next step, as long as there is no answer."""
        deadline = time.monotonic() + 10
        while True:
            found = [self.tier.lookup(key, ReqContext(req_id=request)) for key in keys]
            if LookupResult.RETRY not in found:
                return found
            assert time.monotonic() < deadline
            self.tier.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.005)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServedStore]:
    store = ServedStore(tmp_path, "--ram", str(64 << 20))
    yield store
    if store.process.poll() is None:
        store.stop(signal.SIGKILL)


@pytest.fixture
def first(store: ServedStore) -> Iterator[Primary]:
    primary = Primary(store.address)
    primary.memory[:] = np.random.default_rng(1).integers(-128, 128, primary.memory.shape, np.int8)
    yield primary
    primary.tier.shutdown()


def keys_of(*names: str) -> list[OffloadKey]:
    return [make_offload_key(name.encode().ljust(32, b"."), 0) for name in names]


def test_chunks_that_one_engine_stored_another_loads(first: Primary, store: ServedStore) -> None:
    keys = keys_of("a", "b", "c")
    stored = first.job(keys, [3, 1, 7], load=False)
    assert (stored.success, stored.transfer_bytes) == (True, 3 * CHUNK_BYTES)
    second = Primary(store.address)
    assert second.lookup([*keys, *keys_of("d")]) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
    loaded = second.job(keys, [0, 2, 4], load=True)
    assert (loaded.success, loaded.transfer_bytes) == (True, 3 * CHUNK_BYTES)
    assert np.array_equal(second.memory[[0, 2, 4]], first.memory[[3, 1, 7]])
    assert not second.memory[[1, 3, 5]].any()
    again = second.job(keys, [0, 2, 4], load=False)
    assert (again.success, again.transfer_bytes) == (True, 0)  # the store has them
    second.tier.shutdown()


def test_a_load_that_finds_part_says_which_and_the_rest_is_a_miss_from_then_on(first: Primary, store: ServedStore) -> None:
    there, gone = keys_of("there"), keys_of("gone")
    first.job([*there, *gone], [0, 1], load=False)
    assert first.lookup([*there, *gone]) == [LookupResult.HIT] * 2
    assert first.tier._client.remove([bytes(gone[0])]) == 1
    result = first.job([*there, *gone], [8, 9], load=True)
    assert (result.success, result.successful_keys) == (False, there)
    assert np.array_equal(first.memory[8], first.memory[0])
    assert first.lookup([*there, *gone]) == [LookupResult.HIT, LookupResult.MISS]
    first.tier.on_request_finished(ReqContext(req_id="r"))


def test_another_geometry_finds_nothing(first: Primary, store: ServedStore) -> None:
    first.job(keys_of("a"), [0], load=False)
    other = Primary(store.address, block_tokens=32)
    assert other.lookup(keys_of("a")) == [LookupResult.MISS]
    other.tier.shutdown()


def test_a_store_that_is_not_there_fails_jobs_and_misses_and_is_used_when_it_is_back(first: Primary, store: ServedStore) -> None:
    first.job(keys_of("a"), [0], load=False)
    store.stop(signal.SIGKILL)
    begin = time.monotonic()
    assert first.lookup(keys_of("a"), "during") == [LookupResult.MISS]
    assert not first.job(keys_of("b"), [1], load=False).success
    assert not first.job(keys_of("a"), [2], load=True).success
    assert time.monotonic() - begin < 8.0
    store.start()
    deadline, turn = time.monotonic() + 15, 0
    while not first.job(keys_of("b"), [1], load=False).success:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    while first.lookup(keys_of("b"), f"after {turn}") != [LookupResult.HIT]:
        first.tier.on_request_finished(ReqContext(req_id=f"after {turn}"))
        turn += 1
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_draining_waits_for_all_jobs_and_keeps_their_results(first: Primary) -> None:
    for number in range(4):
        first.tier.submit_store(TransferJob(number, keys_of(str(number)), np.array([number]), False, ReqContext(req_id="r")))
    first.tier.drain_jobs()
    assert not first.tier.has_pending_work()
    assert sorted((result.job_id, result.success) for result in first.tier.get_finished_jobs()) == [(n, True) for n in range(4)]


@pytest.mark.parametrize(
    ("settings", "text"), [({"tenat": "x"}, "did you mean 'tenant'?"), ({"store": "nowhere"}, "'nowhere' is no address")]
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Primary("127.0.0.1:1", **settings)
    assert text in str(refusal.value)
