"""Decode pulls a prompt's KV out of a prefill engine: real vLLM on both sides, and the answer is the one without any transfer."""

from __future__ import annotations

import random
import time

import pytest

from tests.engines.vllm.conftest import LEASE_S, Pair, prompt_of
from tests.engines.vllm.harness import BLOCK_TOKENS, prefill

pytestmark = pytest.mark.vllm


def pulled_blocks(pair: Pair) -> int:
    return int(pair.decode.ask("totals").get("blocks_pulled", 0))


@pytest.mark.parametrize("tokens", [2, 31, 32, 33, 64, 65, 1500])
def test_decode_answers_with_pulled_blocks_as_it_does_alone(pair: Pair, random_prompt: random.Random, tokens: int) -> None:
    prompt = prompt_of(random_prompt, tokens)
    expected = pair.decode.alone(prompt, 16)
    before = pulled_blocks(pair)

    answer = pair.decode.run(f"d{tokens}", prompt, 16, prefill(pair.prefill, f"p{tokens}", prompt))

    assert answer.tokens == expected
    assert pulled_blocks(pair) - before == -(-tokens // BLOCK_TOKENS)


def test_the_answer_comes_from_the_blocks_that_were_pulled(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 300)
    expected = pair.decode.alone(prompt, 16)
    params = prefill(pair.prefill, "spoiled", prompt)
    pair.prefill.ask("zero_blocks", params["remote_block_ids"][0])

    answer = pair.decode.run("spoiled", prompt, 16, params)

    assert answer.tokens != expected
    pair.prefill.settle(LEASE_S / 2)
    for engine in (pair.prefill, pair.decode):
        engine.ask("reset_prefix_cache")


def test_eight_requests_at_once_answer_as_each_does_alone(pair: Pair, random_prompt: random.Random) -> None:
    prompts = [prompt_of(random_prompt, 50 + 37 * number) for number in range(8)]
    expected = [pair.decode.alone(prompt, 16) for prompt in prompts]
    free = pair.prefill.settle(), pair.decode.settle()
    handles = pair.prefill.ask("free_handles")
    before = pulled_blocks(pair)

    for number, prompt in enumerate(prompts):
        pair.prefill.ask("add", f"p{number}", prompt, 1, {"do_remote_decode": True})
    for number, prompt in enumerate(prompts):
        pair.decode.ask("add", f"d{number}", prompt, 16, pair.prefill.wait(f"p{number}").params)
    answers = [pair.decode.wait(f"d{number}").tokens for number in range(8)]

    assert answers == expected
    assert pulled_blocks(pair) - before == sum(-(-len(prompt) // BLOCK_TOKENS) for prompt in prompts)
    assert (pair.prefill.settle(), pair.decode.settle()) == free
    assert pair.prefill.ask("free_handles") == handles


def test_prompts_that_share_a_prefix_share_its_blocks_on_both_sides(pair: Pair, random_prompt: random.Random) -> None:
    prefix = prompt_of(random_prompt, 4 * BLOCK_TOKENS)
    first, second = prefix + prompt_of(random_prompt, 40), prefix + prompt_of(random_prompt, 70)
    expected = [pair.decode.alone(prompt, 16) for prompt in (first, second)]
    params = [prefill(pair.prefill, "first", first), prefill(pair.prefill, "second", second)]
    assert params[0]["remote_block_ids"][0][:4] == params[1]["remote_block_ids"][0][:4]
    before = pulled_blocks(pair)

    one = pair.decode.run("first", first, 16, params[0])
    middle = pulled_blocks(pair)
    two = pair.decode.run("second", second, 16, params[1])

    assert [one.tokens, two.tokens] == expected
    assert (middle - before, pulled_blocks(pair) - middle) == (6, 3)  # the second finds the prefix in decode's own cache
    pair.prefill.settle(LEASE_S / 2)


def test_a_prompt_that_decode_has_already_frees_prefill_and_loads_nothing_but_the_tail(pair: Pair, random_prompt: random.Random) -> None:
    prompt = prompt_of(random_prompt, 3 * BLOCK_TOKENS + 1)
    expected = pair.decode.alone(prompt, 16)
    pair.decode.run("before", prompt, 16)
    before = pulled_blocks(pair)

    answer = pair.decode.run("again", prompt, 16, prefill(pair.prefill, "again", prompt))

    assert answer.tokens == expected
    assert pulled_blocks(pair) == before
    pair.prefill.settle(LEASE_S / 2)


def test_requests_that_decode_preempts_answer_as_each_does_alone(pair: Pair, random_prompt: random.Random) -> None:
    prompts = [prompt_of(random_prompt, 790) for _ in range(5)]  # 5 × 25 blocks fit into decode's 127; with 11 tokens more each they do not
    expected = [pair.decode.alone(prompt, 40) for prompt in prompts]
    free = pair.decode.settle()
    before = pair.decode.ask("totals")["preempted"]

    offers = [prefill(pair.prefill, f"p{number}", prompt) for number, prompt in enumerate(prompts)]
    # All at once: else the first is done before the last comes.
    for number, (prompt, offer) in enumerate(zip(prompts, offers, strict=True)):
        pair.decode.ask("add", f"d{number}", prompt, 40, offer)
    answers = [pair.decode.wait(f"d{number}", 120.0).tokens for number in range(len(prompts))]

    assert answers == expected
    assert pair.decode.ask("totals")["preempted"] > before
    assert pair.decode.settle() == free


def test_blocks_that_nobody_pulls_go_back_to_prefill_when_the_lease_ends(pair: Pair, random_prompt: random.Random) -> None:
    free, handles = pair.prefill.settle(), pair.prefill.ask("free_handles")
    begin = time.monotonic()
    prefill(pair.prefill, "left", prompt_of(random_prompt, 300))
    assert pair.prefill.ask("live_requests") == 1

    assert pair.prefill.settle(LEASE_S + 5) == free

    assert time.monotonic() - begin >= LEASE_S
    assert pair.prefill.ask("free_handles") == handles
    assert pair.prefill.ask("totals")["leases_expired"] >= 1
