"""Load: many requests at once with aborts, preemptions and mixed lengths. Every answer is a plain engine's, and nothing is left behind."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import SHARED, prompt_of
from tests.engines.vllm.harness import Engine, Prompt
from tests.engines.vllm.traffic import Job, Traffic
from tests.soak.served import ServedStore

pytestmark = pytest.mark.vllm

CONCURRENCY = 16
DEADLINE_S = 60.0  # of one request, from the router's view; on two free cores the slowest takes a few seconds
LEASE_S = 10.0
MAX_TOKENS = 1024
KV_BYTES = {"prefill": 8 << 20, "decode": 3 << 20}  # 127 and 47 blocks: 16 requests never fit
LONGEST_ANSWER = 60


def prompts_of(draw: random.Random, count: int) -> list[Prompt]:
    """Short and long ones; a third continues one of a few beginnings."""
    beginnings = [prompt_of(draw, tokens) for tokens in (64, 190, 400)]
    return [
        (draw.choice(beginnings) if draw.random() < 1 / 3 else []) + prompt_of(draw, draw.choice((1, 20, 33, 100, 250, 500)))
        for _ in range(count)
    ]


def jobs_of(draw: random.Random, prompts: list[Prompt], routes: list[str], count: int) -> list[Job]:
    jobs = []
    for _ in range(count):
        fate = draw.random()
        prompt, length = draw.choice(prompts), draw.choice((2, 8, 25, LONGEST_ANSWER))
        abort_s = draw.uniform(0, 1.5) if fate < 0.2 else None
        jobs.append(Job(prompt, length, draw.choice(routes), abort_s, leaves=fate > 0.95))
    return jobs


def answers_of(plain: Engine, prompts: list[Prompt]) -> list[list[int]]:
    for number, prompt in enumerate(prompts):
        plain.post("add", f"plain{number}", prompt, LONGEST_ANSWER, None)
    return [plain.wait(f"plain{number}", 120.0).tokens for number in range(len(prompts))]


def check_load(plain: Engine, engines: list[Engine], draw: random.Random, routes: list[str], count: int) -> None:
    prompts = prompts_of(draw, 60)
    expected = dict(zip(map(tuple, prompts), answers_of(plain, prompts), strict=True))
    before = [(one.settle(), one.ask("free_handles")) for one in engines]
    traffic = Traffic(*engines, jobs_of(draw, prompts, routes, count), CONCURRENCY)

    assert traffic.run(lambda: len(traffic.outcomes) == count, 200.0), f"{len(traffic.outcomes)} of {count} requests ended"

    answered = [one for one in traffic.outcomes if one.tokens is not None]
    for one in answered:
        assert one.tokens == expected[tuple(one.job.prompt)][: one.job.max_tokens]
    assert max(one.seconds for one in answered) < DEADLINE_S
    assert 0.1 * count < count - len(answered) < 0.4 * count
    assert [(one.settle(LEASE_S + 5), one.ask("free_handles")) for one in engines] == before
    assert [one.ask("leftovers") for one in engines] == [{}, {}]
    assert engines[1].total("blocks_pulled") > 0
    assert engines[1].total("preempted") > 0


def test_200_requests_with_aborts_and_preemptions_through_both_engines_and_a_store(
    plain: Engine, model: Path, logs: Path, tmp_path: Path, random_prompt: random.Random
) -> None:
    store = ServedStore(tmp_path, "--ram", str(256 << 20))
    extra = {"mode": "pull+store", "store": store.address, "lease_s": LEASE_S}
    engines = [
        Engine(name, model, logs, role="kv_both", core=core, extra=extra, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES[name])
        for core, name in enumerate(KV_BYTES)
    ]
    try:
        for one in engines:
            one.ready()
        check_load(plain, engines, random_prompt, ["both", "both", "both", "prefill", "decode"], 200)
        assert all(one.total("store_blocks_loaded") > 0 and one.total("store_blocks_saved") > 0 for one in engines)
    finally:
        for one in engines:
            one.stop()
        store.stop(signal.SIGKILL)


def test_80_requests_with_aborts_and_preemptions_that_decode_pulls(
    plain: Engine, model: Path, logs: Path, random_prompt: random.Random
) -> None:
    extra = SHARED | {"lease_s": LEASE_S}
    engines = [
        Engine(name, model, logs, role=role, core=core, extra=extra, max_model_len=MAX_TOKENS, kv_cache_memory_bytes=KV_BYTES[name])
        for core, (name, role) in enumerate((("prefill", "kv_producer"), ("decode", "kv_consumer")))
    ]
    try:
        for one in engines:
            one.ready()
        check_load(plain, engines, random_prompt, ["both"], 80)
    finally:
        for one in engines:
            one.stop()
