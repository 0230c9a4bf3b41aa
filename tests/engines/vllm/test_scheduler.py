"""The scheduler's half alone: no engine, no worker, no socket."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from kbtp_vllm.messages import FREE_ONLY, WorkerAddress
from kbtp_vllm.params import describe_prefill, prompt_fingerprint
from kbtp_vllm.scheduler import PullScheduler

pytestmark = pytest.mark.vllm

BLOCK_TOKENS = 16


def decode_scheduler() -> PullScheduler:
    transfer = SimpleNamespace(engine_id="decode", is_kv_producer=False, is_kv_consumer=True)
    parallel = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=BLOCK_TOKENS))
    kv = SimpleNamespace(transfer_groups=[group], num_blocks=100, select_transfer_block_ids=lambda block_ids: block_ids)
    return PullScheduler(SimpleNamespace(kv_transfer_config=transfer, parallel_config=parallel), kv)


def request_with(handles: list[int], generations: list[int], tokens_of_last: int = BLOCK_TOKENS) -> SimpleNamespace:
    tokens = list(range(BLOCK_TOKENS * (len(handles) - 1) + tokens_of_last))
    request = SimpleNamespace(
        request_id="r", prompt_token_ids=tokens, num_prompt_tokens=len(tokens), lora_request=None, status=None, kv_transfer_params=None
    )
    prompt = prompt_fingerprint(request)
    assert prompt is not None
    request.kv_transfer_params = describe_prefill(
        engine_id="prefill",
        request_id="r",
        token_count=len(tokens),
        block_tokens=BLOCK_TOKENS,
        tp_size=1,
        pp_size=1,
        prompt=prompt,
        workers=[WorkerAddress("10.0.0.4", 7400, 1)],
        block_ids=[[1] * len(handles)],
        handles=[handles],
        generations=[generations],
    )
    return request


def test_parameters_without_a_block_are_not_claimed_and_queue_nothing() -> None:
    scheduler, request = decode_scheduler(), request_with([0, 0], [0, 0])
    scheduler.new_request(request)

    assert scheduler.matched_tokens(request, 0) == 0
    scheduler.allocated(request, [[5, 6]], 0)
    scheduler.finished(request, [[5, 6]])
    step = scheduler.take_step()
    assert (step.pulls, step.releases, step.refused) == ([], [], {})


def test_parameters_with_generation_zero_are_not_claimed() -> None:
    scheduler, request = decode_scheduler(), request_with([17, 18], [2, 0])
    scheduler.new_request(request)
    assert scheduler.matched_tokens(request, 0) == 0


def test_a_request_that_ends_before_it_is_scheduled_frees_its_handles() -> None:
    scheduler, request = decode_scheduler(), request_with([0, 18], [0, 4])
    scheduler.new_request(request)
    assert scheduler.matched_tokens(request, 0) == 2 * BLOCK_TOKENS

    scheduler.finished(request, [[]])

    (release,) = scheduler.take_step().releases
    assert np.array_equal(release.handles, [18])
    assert np.array_equal(release.generations, [4])
    assert np.array_equal(release.block_indexes, [FREE_ONLY])


def test_a_prompt_that_decode_computes_from_its_own_cache_loads_nothing_into_its_last_block() -> None:
    scheduler, request = decode_scheduler(), request_with([17, 18], [2, 4], tokens_of_last=1)
    scheduler.new_request(request)
    assert scheduler.matched_tokens(request, BLOCK_TOKENS) == 0

    scheduler.allocated(request, [[5, 6]], 0)

    step = scheduler.take_step()
    (release,) = step.releases
    assert step.pulls == []
    assert np.array_equal(release.handles, [17, 18])
    assert np.array_equal(release.generations, [2, 4])
    assert np.array_equal(release.block_indexes, [FREE_ONLY, FREE_ONLY])
