"""What goes wrong is a miss: decode computes the prompt itself, answers the same, and loses no block. Real vLLM on both sides."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import LEASE_S, LOAD_TIMEOUT_S, SHARED, Pair, prompt_of
from tests.engines.vllm.harness import BLOCK_TOKENS, Engine, prefill

pytestmark = pytest.mark.vllm


def test_blocks_and_handles_reused_after_the_lease_are_refused_by_their_generation(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 500)
    expected = pair.decode.alone(prompt, 16)
    params = prefill(pair.prefill, "late", prompt)
    pair.prefill.settle(LEASE_S + 5)
    other = prompt_of(random_prompt, 60 * BLOCK_TOKENS)  # its offers share blocks, and together take every handle
    while free := min(pair.prefill.ask("free_handles"), 60):
        prefill(pair.prefill, f"other{free}.{time.monotonic_ns()}", other[: free * BLOCK_TOKENS])

    answer = pair.decode.run("late", prompt, 16, params)

    assert answer.tokens == expected
    assert "STALE_GENERATION" in pair.decode.log()
    pair.prefill.settle(LEASE_S + 5)


def test_blocks_taken_back_after_the_lease_are_refused(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 500)
    expected = pair.decode.alone(prompt, 16)
    params = prefill(pair.prefill, "expired", prompt)
    pair.prefill.settle(LEASE_S + 5)
    pair.prefill.ask("reset_prefix_cache")
    for number in range(5):  # 5 × 63 blocks: every block of the prefill engine holds something else now
        pair.prefill.run(f"flood{number}", prompt_of(random_prompt, 2000), 1)

    answer = pair.decode.run("expired", prompt, 16, params)

    assert answer.tokens == expected
    assert "raise lease_s on the prefill side" in pair.decode.log()


def test_a_load_that_fails_in_part_keeps_the_blocks_before_the_first_lost_one(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 7 * BLOCK_TOKENS)
    expected = pair.decode.alone(prompt, 16)
    params = prefill(pair.prefill, "part", prompt)
    params["kbtp_generations"][0][4] += 2

    answer = pair.decode.run("part", prompt, 16, params)

    assert answer.tokens == expected
    assert f"1 request(s) rescheduled ({3 * BLOCK_TOKENS} tokens affected)" in pair.decode.log()
    pair.prefill.settle(LEASE_S + 5)


def test_aborting_a_load_gives_the_blocks_back_at_once(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 200)
    params = prefill(pair.prefill, "load", prompt)
    pair.decode.run("loaded", prompt, 1, params)
    pair.prefill.settle(LEASE_S / 2)
    pair.decode.ask("reset_prefix_cache")
    free = pair.decode.settle()
    foretold = [
        [generation + 2 for generation in group] for group in params["kbtp_generations"]
    ]  # what prefill would bind next, and does not
    pair.decode.ask("add", "load", prompt, 16, params | {"kbtp_generations": foretold})
    time.sleep(0.5)
    assert pair.decode.ask("free_blocks") < free

    pair.decode.ask("abort", "load")

    assert pair.decode.settle(LOAD_TIMEOUT_S / 2) == free


def test_a_request_aborted_before_it_is_scheduled_frees_prefill(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 200)
    free = pair.prefill.settle(), pair.decode.settle()
    params = prefill(pair.prefill, "early", prompt)

    pair.decode.ask_all(("add", "early", prompt, 16, params), ("abort", "early"))

    assert (pair.prefill.settle(LEASE_S / 2), pair.decode.settle()) == free


def test_a_prefill_that_is_aborted_offers_nothing(pair: Pair, random_prompt: random.Random) -> None:
    free, handles = pair.prefill.settle(), pair.prefill.ask("free_handles")

    pair.prefill.ask_all(("add", "gone", prompt_of(random_prompt, 1500), 4, {"do_remote_decode": True}), ("abort", "gone"))

    assert pair.prefill.settle(LEASE_S / 2) == free
    assert pair.prefill.ask("free_handles") == handles


BAD = {
    "another connector's": ({"kbtp_format": None}, "kbtp_format"),
    "of another prompt": ({"kbtp_prompt": "0" * 64}, "kbtp_prompt"),
    "with another tensor parallelism": ({"tp_size": 2, "kbtp_workers": "twice"}, "--tensor-parallel-size"),
    "with a handle that is no number": ({"kbtp_handles": [["x"]]}, "kbtp_handles"),
    "with too few blocks": ({"kbtp_handles": [[7]], "kbtp_generations": [[2]]}, "prefill holds"),
    "with a port that is none": ({"kbtp_workers": [{"host": "127.0.0.1", "port": 0, "incarnation": "0" * 16}]}, "port"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parameters_are_named_and_the_prompt_is_computed(pair: Pair, random_prompt: random.Random, case: str) -> None:
    change, named = BAD[case]
    prompt = prompt_of(random_prompt, 100)
    expected = pair.decode.alone(prompt, 8)
    params = prefill(pair.prefill, "bad", prompt)
    if change.get("kbtp_workers") == "twice":
        change = change | {"kbtp_workers": params["kbtp_workers"] * 2}

    answer = pair.decode.run("bad", prompt, 8, params | change)

    assert answer.tokens == expected
    assert any("is computed here" in line and named in line for line in pair.decode.log().splitlines())


def test_a_prefill_engine_of_another_geometry_is_refused_by_naming_the_field(
    pair: Pair, model: Path, logs: Path, random_prompt: random.Random
) -> None:
    other = Engine("bfloat16", model, logs, role="kv_producer", core=0, extra=SHARED, dtype="bfloat16")
    try:
        other.ready()
        prompts = [prompt_of(random_prompt, 150) for _ in range(2)]
        expected = [pair.decode.alone(prompt, 16) for prompt in prompts]

        answers = [pair.decode.run(f"g{n}", prompt, 16, prefill(other, f"g{n}", prompt)).tokens for n, prompt in enumerate(prompts)]

        assert answers == expected
        mismatch = "has dtype 'bfloat16', this engine 'float32'. Start both with the same --dtype"
        assert pair.decode.log().count(mismatch) == 1
    finally:
        other.stop()


def test_a_prefill_engine_killed_before_the_load_costs_no_answer(model: Path, logs: Path, pair: Pair, random_prompt: random.Random) -> None:
    doomed = Engine("doomed", model, logs, role="kv_both", core=0, extra=SHARED | {"staging": "always"})
    try:
        doomed.ready()
        warm, prompt = prompt_of(random_prompt, 100), prompt_of(random_prompt, 900)
        expected = pair.decode.alone(prompt, 16)
        before = pair.decode.ask("totals").get("blocks_pulled", 0)
        pair.decode.run("warm", warm, 4, prefill(doomed, "warm", warm))  # the session between the two exists
        assert pair.decode.ask("totals")["blocks_pulled"] - before == 4
        params = prefill(doomed, "lost", prompt)
        free = pair.decode.settle()
        doomed.kill()
        begin = time.monotonic()

        answer = pair.decode.run("lost", prompt, 16, params)

        assert answer.tokens == expected
        assert time.monotonic() - begin < LOAD_TIMEOUT_S + 5
        assert pair.decode.settle() == free
    finally:
        doomed.stop()
