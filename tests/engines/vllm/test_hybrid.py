"""A model with sliding-window and full attention: two KV groups over one storage, and blocks that fell out of the window.

Decode stages its loads in host memory, as it does for an accelerator's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import SHARED, Pair, make_model, prompt_of
from tests.engines.vllm.harness import Engine, prefill

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def hybrid(logs: Path) -> Iterator[Pair]:
    model = make_model(logs, "hybrid")
    first = Engine("hybrid-prefill", model, logs, role="kv_producer", core=0, extra=SHARED)
    second = Engine("hybrid-decode", model, logs, role="kv_consumer", core=1, extra=SHARED | {"staging": "always"})
    try:
        yield Pair(first.ready(), second.ready())
    finally:
        second.stop()
        first.stop()


@pytest.mark.parametrize(("tokens", "blocks"), [(20, 2), (100, 8), (1000, 37)])
def test_both_groups_are_pulled_without_what_the_window_has_passed(
    hybrid: Pair, random_prompt: random.Random, tokens: int, blocks: int
) -> None:
    prompt = prompt_of(random_prompt, tokens)
    expected = hybrid.decode.alone(prompt, 16)
    before = hybrid.decode.ask("totals").get("blocks_pulled", 0)
    free = hybrid.prefill.settle(), hybrid.decode.settle()

    answer = hybrid.decode.run(f"d{tokens}", prompt, 16, prefill(hybrid.prefill, f"p{tokens}", prompt))

    assert answer.tokens == expected
    assert hybrid.decode.ask("totals")["blocks_pulled"] - before == blocks
    assert (hybrid.prefill.settle(5), hybrid.decode.settle()) == free
