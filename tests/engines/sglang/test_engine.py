"""Real SGLang servers over one store: hits, outputs and what happens when the store goes away.

One server after the other, each with the same model; what the first computed the second finds in the store.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engines.sglang.served import Answer, ServedEngine
from tests.soak.served import ROOT, ServedStore, total

MAKE_MODEL = ROOT / "examples" / "disagg_vllm" / "make_tiny_model.py"
PROMPT_TOKENS = 512
RESTORED = 496  # all whole pages but that of the last token


def prompt(seed: int) -> list[int]:
    return [random.Random(seed * 1000 + at).randrange(3, 250) for at in range(PROMPT_TOKENS)]


def extra(store: ServedStore, **more: object) -> str:
    """By its name alone: the plugin knows module and class."""
    return json.dumps({"backend_name": "kbtp", "stores": store.address, "prefetch_threshold": 16, "timeout_s": 0.6, "probe_s": 0.2, **more})


def until(is_so: Callable[[], bool], limit_s: float = 60) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def values(store: ServedStore) -> float:
    return total(store.metrics(), "kbtp_store_tenant_bytes")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    subprocess.run([sys.executable, str(MAKE_MODEL), str(folder / "llama")], check=True, capture_output=True, timeout=240)
    return folder / "llama"


@pytest.fixture(scope="module")
def own_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    served = ServedStore(tmp_path_factory.mktemp("store"), "--ram", "128M")
    yield served
    served.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def first(model: Path, folder: Path, own_store: ServedStore) -> Iterator[tuple[ServedEngine, dict[int, Answer]]]:
    """A server, and what it answered to three prompts that it had not seen; it has stored their pages."""
    engine = ServedEngine(
        "first", model, folder, "--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra(own_store)
    )
    try:
        cold: dict[int, Answer] = {}
        engine.ready()
        for seed in (1, 2, 3):
            before = values(own_store)
            cold[seed] = engine.generate(prompt(seed))
            until(lambda before=before: values(own_store) > before)
        yield engine, cold
    finally:
        engine.stop()


def same(one: Answer, other: Answer) -> bool:
    return one.tokens == other.tokens and one.log_probabilities == other.log_probabilities


def test_what_was_dropped_from_device_and_host_comes_back_from_the_store(first: tuple[ServedEngine, dict[int, Answer]]) -> None:
    engine, cold = first
    assert cold[1].stored == cold[1].cached == 0
    engine.flush()
    restored = engine.generate(prompt(1))
    assert restored.stored == RESTORED
    assert same(restored, cold[1])


def test_sglangs_metrics_have_what_was_moved(first: tuple[ServedEngine, dict[int, Answer]]) -> None:
    engine, _ = first
    until(lambda: engine.metric("sglang:prefetch_pgs_sum") >= RESTORED / 16)
    until(lambda: engine.metric("sglang:backup_pgs_sum") >= 3 * RESTORED / 16)


def test_the_backend_is_detached_cleared_and_attached_while_the_engine_runs(
    first: tuple[ServedEngine, dict[int, Answer]], own_store: ServedStore
) -> None:
    engine, cold = first
    assert engine.call("DELETE", "/hicache/storage-backend")[0] == 200
    until(lambda: own_store.metrics()["kbtp_store_sessions"] == 0)
    engine.flush()
    assert engine.generate(prompt(2)).stored == 0

    body = {"hicache_storage_backend": "dynamic", "hicache_storage_backend_extra_config_json": extra(own_store)}
    status, text = engine.call("PUT", "/hicache/storage-backend", body)
    assert status == 200, text
    engine.flush()
    restored = engine.generate(prompt(2))
    assert restored.stored == RESTORED
    assert same(restored, cold[2])

    engine.flush()
    assert engine.call("POST", "/hicache/storage-backend/clear")[0] == 200
    until(lambda: values(own_store) == 0)
    again = engine.generate(prompt(2))
    assert again.stored == 0
    assert same(again, cold[2])


def test_another_server_finds_the_pages_and_lives_through_the_stores_death(
    first: tuple[ServedEngine, dict[int, Answer]], own_store: ServedStore, model: Path, folder: Path
) -> None:
    engine, cold = first
    engine.flush()
    before = values(own_store)
    assert same(engine.generate(prompt(3)), cold[3])
    until(lambda: values(own_store) > before)
    engine.stop()

    second = ServedEngine(
        "second", model, folder, "--hicache-storage-backend", "dynamic", "--hicache-storage-backend-extra-config", extra(own_store)
    )
    try:
        restored = second.ready().generate(prompt(3))
        assert restored.stored == RESTORED
        assert same(restored, cold[3])

        own_store.stop(signal.SIGKILL)
        second.flush()
        without = second.generate(prompt(1))
        assert without.stored == 0
        assert same(without, cold[1])

        own_store.start()
        until(lambda: second.metric("sglang:backup_pgs_count") > 0)
        for seed in range(10, 60):
            second.generate(prompt(seed))
            if values(own_store) > 0:
                break
            time.sleep(0.2)
        second.flush()
        assert second.generate(prompt(seed)).stored == RESTORED
    finally:
        second.stop()
