"""Prompts' prefixes in a store: real vLLM, a real `kbtp serve`, and the answers are those of an engine without any connector."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.client import Client
from kbtp_core.store.link import LinkOptions
from tests.engines.vllm.conftest import prompt_of
from tests.engines.vllm.harness import BLOCK_TOKENS, Engine, Prompt
from tests.soak.served import ServedStore

pytestmark = pytest.mark.vllm

TENANT = "these-tests"
KV_BYTES = 8 << 20  # 127 blocks


def settings(store: ServedStore) -> dict[str, object]:
    return {"mode": "store", "store": store.address, "tenant": TENANT, "store_timeout_s": 1.0, "load_timeout_s": 3.0, "save_timeout_s": 2.0}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStore]:
    folder = tmp_path_factory.mktemp("store")
    store = ServedStore(folder, "--ram", str(256 << 20), "--data-dir", str(folder / "data"), "--disk", str(512 << 20))
    yield store
    store.stop(signal.SIGKILL)


@pytest.fixture(scope="module")
def engine(model: Path, logs: Path, store: ServedStore) -> Iterator[Engine]:
    engine = Engine("stored", model, logs, role="kv_both", core=1, extra=settings(store), kv_cache_memory_bytes=KV_BYTES)
    yield engine.ready()
    engine.stop()


def forget(engine: Engine) -> None:
    """What the engine itself has cached."""
    engine.settle()
    assert engine.ask("reset_prefix_cache")


@pytest.mark.parametrize("tokens", [31, 32, 33, 64, 65, 1500])
def test_a_prompt_answers_as_without_a_store_and_is_loaded_the_next_time(
    plain: Engine, engine: Engine, random_prompt: random.Random, tokens: int
) -> None:
    prompt = prompt_of(random_prompt, tokens)
    expected = plain.alone(prompt, 16)

    assert engine.run(f"cold{tokens}", prompt, 16).tokens == expected
    forget(engine)
    before = engine.total("store_blocks_loaded")
    assert engine.run(f"warm{tokens}", prompt, 16).tokens == expected
    assert engine.total("store_blocks_loaded") - before == (tokens - 1) // BLOCK_TOKENS


def test_an_answer_is_saved_too_and_found_by_the_next_turn_of_a_conversation(
    plain: Engine, engine: Engine, random_prompt: random.Random
) -> None:
    first = prompt_of(random_prompt, 50)
    answer = engine.run("turn1", first, 80).tokens
    second = first + answer + prompt_of(random_prompt, 20)
    expected = plain.alone(second, 16)
    forget(engine)
    before = engine.total("store_blocks_loaded")

    assert engine.run("turn2", second, 16).tokens == expected
    # The last token of the answer was never an input, so its block may not be full.
    assert engine.total("store_blocks_loaded") - before == (50 + 80 - 1) // BLOCK_TOKENS


def test_nothing_is_saved_twice(engine: Engine, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 200)
    engine.run("once", prompt, 1)
    forget(engine)
    before = engine.total("store_blocks_saved"), engine.total("store_blocks_unsaved")
    engine.run("twice", prompt, 1)
    engine.settle()
    assert (engine.total("store_blocks_saved"), engine.total("store_blocks_unsaved")) == before


@contextmanager
def spoiled(store: ServedStore) -> Iterator[int]:
    """Every value that the store has gets other octets, until all of them go; how many."""
    with Client(store.address, TENANT.encode(), options=LinkOptions(block_bytes=64 << 10)) as client:
        listed = list(client.list(whole_tenant=True))
        ids = np.frombuffer(b"".join(one.object_id for one in listed), np.uint8).reshape(-1, 16)
        assert client.remove(ids) == len(listed)
        client.put(ids, [np.zeros(one.length, np.uint8) for one in listed])
        yield len(listed)
        assert client.remove(ids) == len(listed)


def test_the_answer_comes_from_the_blocks_that_were_loaded(
    plain: Engine, engine: Engine, store: ServedStore, random_prompt: random.Random
) -> None:
    prompt = prompt_of(random_prompt, 300)
    expected = plain.alone(prompt, 16)
    assert engine.run("good", prompt, 16).tokens == expected
    forget(engine)
    with spoiled(store) as count:
        assert count >= 300 // BLOCK_TOKENS
        assert engine.run("spoiled", prompt, 16).tokens != expected
        forget(engine)
    assert engine.run("new", prompt, 16).tokens == expected


def test_a_reset_removes_what_the_store_has(engine: Engine, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 200)
    engine.run("before", prompt, 1)
    engine.settle()
    assert engine.ask("reset_store")
    before = engine.total("store_blocks_loaded")
    engine.run("after", prompt, 1)
    assert engine.total("store_blocks_loaded") == before


def test_requests_with_another_salt_share_nothing(engine: Engine, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 200)
    for number, salt in enumerate(("mine", "yours", "mine")):
        before = engine.total("store_blocks_loaded")
        engine.ask("add", f"salted{number}", prompt, 4, None, salt)
        engine.wait(f"salted{number}")
        forget(engine)
        assert engine.total("store_blocks_loaded") - before == (6 if number == 2 else 0)


def test_requests_that_are_preempted_answer_as_each_does_alone(plain: Engine, engine: Engine, random_prompt: random.Random) -> None:
    prompts = [prompt_of(random_prompt, 790) for _ in range(5)]
    expected = [plain.alone(prompt, 40) for prompt in prompts]
    for turn in range(2):
        forget(engine)
        free, before = engine.ask("free_blocks"), engine.ask("totals").get("preempted", 0)
        for number, prompt in enumerate(prompts):
            engine.ask("add", f"tight{turn}.{number}", prompt, 40, None)
        assert [engine.wait(f"tight{turn}.{number}", 120.0).tokens for number in range(5)] == expected
        assert engine.ask("totals")["preempted"] > before
        assert engine.settle() == free
    assert engine.total("store_blocks_loaded") > 0


def test_aborted_requests_leave_no_block_behind(engine: Engine, random_prompt: random.Random) -> None:
    prompts = [prompt_of(random_prompt, 500) for _ in range(4)]
    free = engine.settle()
    for number, prompt in enumerate(prompts):
        engine.run(f"saved{number}", prompt, 1)
    forget(engine)
    for number, prompt in enumerate(prompts):
        engine.ask_all(("add", f"gone{number}", prompt, 50, None))
        time.sleep(0.003 * number)  # before it is scheduled, while it is loaded, while it is computed
        engine.ask("abort", f"gone{number}")
    assert engine.settle() == free


def test_a_store_that_dies_costs_no_answer_and_is_used_again_when_it_is_back(
    plain: Engine, engine: Engine, store: ServedStore, random_prompt: random.Random
) -> None:
    prompts = [prompt_of(random_prompt, 400) for _ in range(3)]
    expected = [plain.alone(prompt, 16) for prompt in prompts]
    engine.run("kept", prompts[0], 16)
    forget(engine)
    store.stop(signal.SIGKILL)
    for number, prompt in enumerate(prompts):
        begin = time.monotonic()
        assert engine.run(f"dead{number}", prompt, 16, None).tokens == expected[number]
        assert time.monotonic() - begin < 5.0
    forget(engine)
    store.start()

    def hits(prompt: Prompt, name: str) -> int:
        before = engine.total("store_blocks_loaded")
        assert engine.run(name, prompt, 16).tokens == expected[prompts.index(prompt)]
        forget(engine)
        return engine.total("store_blocks_loaded") - before

    deadline, turn = time.monotonic() + 20, 0
    while hits(prompts[1], f"back{turn}") != 399 // BLOCK_TOKENS:
        turn += 1
        assert time.monotonic() < deadline, "the store is back and is not used"


def test_a_store_that_hangs_costs_a_deadline_once(plain: Engine, engine: Engine, store: ServedStore, random_prompt: random.Random) -> None:
    prompts = [prompt_of(random_prompt, 100) for _ in range(4)]
    expected = [plain.alone(prompt, 8) for prompt in prompts]
    engine.settle()
    store.process.send_signal(signal.SIGSTOP)
    try:
        begin = time.monotonic()
        answers = [engine.run(f"hung{number}", prompt, 8).tokens for number, prompt in enumerate(prompts)]
        seconds = time.monotonic() - begin
    finally:
        store.process.send_signal(signal.SIGCONT)
    assert answers == expected
    assert seconds < 4.0
    deadline, turn = time.monotonic() + 20, 0
    while True:
        forget(engine)
        before = engine.total("store_blocks_loaded")
        assert engine.run(f"woken{turn}", prompts[0], 8).tokens == expected[0]
        if engine.total("store_blocks_loaded") > before:
            break
        turn += 1
        assert time.monotonic() < deadline, "the store goes on and is not used"


def test_another_engine_finds_what_this_one_saved_and_one_of_another_geometry_does_not(
    model: Path, logs: Path, plain: Engine, engine: Engine, store: ServedStore, random_prompt: random.Random
) -> None:
    prompt = prompt_of(random_prompt, 600)
    expected = plain.alone(prompt, 16)
    assert engine.run("here", prompt, 16).tokens == expected
    engine.settle()
    same = Engine("same", model, logs, role="kv_both", core=0, extra=settings(store) | {"staging": "always", "stage_mib": 1})
    other = Engine("other", model, logs, role="kv_both", core=0, extra=settings(store), block_size=64)
    try:
        assert same.ready().run("there", prompt, 16).tokens == expected
        assert same.total("store_blocks_loaded") == 599 // BLOCK_TOKENS
        assert other.ready().run("there", prompt, 16).tokens == expected
        assert other.total("store_blocks_loaded") == 0
    finally:
        same.stop()
        other.stop()
