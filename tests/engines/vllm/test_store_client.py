"""When a store that was slow is asked again."""

from __future__ import annotations

import time

import pytest

from kbtp_vllm.store_client import Breaker

pytestmark = pytest.mark.vllm


def test_a_store_that_was_slow_many_times_is_left_alone_for_two_seconds_and_no_longer() -> None:
    breaker = Breaker()
    for _ in range(8):
        breaker.report("lookup", 1.0, 1.0)
    begin = time.monotonic()
    while breaker.is_open:
        assert time.monotonic() - begin < 2.5
        time.sleep(0.01)
    assert time.monotonic() - begin > 1.9
