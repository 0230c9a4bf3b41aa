"""What the bench is asked to measure."""

from __future__ import annotations

import pytest

from kbtp_core.cli.bench.plan import BenchOp, Case, Plan, format_size, parse_cases, parse_size
from kbtp_core.errors import ConfigError


@pytest.mark.parametrize(("text", "octets"), [("4KiB", 4096), ("1 MiB", 1 << 20), ("512", 512), ("2gib", 2 << 30)])
def test_a_size_is_read_with_or_without_its_unit(text: str, octets: int) -> None:
    assert parse_size(text) == octets


@pytest.mark.parametrize("text", ["", "0", "4KB", "-1", "1.5MiB", "KiB"])
def test_what_is_no_size_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size; write it as 4KiB"):
        parse_size(text)


def test_cases_are_every_combination_in_order() -> None:
    assert parse_cases("load,alloc_store", "4KiB", "1,32") == (
        Case(BenchOp.LOAD, 4096, 1),
        Case(BenchOp.LOAD, 4096, 32),
        Case(BenchOp.ALLOC_STORE, 4096, 1),
        Case(BenchOp.ALLOC_STORE, 4096, 32),
    )


def test_an_unknown_operation_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'get' is no operation to measure; there are load, alloc_store"):
        parse_cases("get", "4KiB", "1")


def test_a_batch_that_does_not_fit_into_the_pool_is_refused() -> None:
    with pytest.raises(ConfigError, match="32 blocks of 1048576 octets do not fit into the pool of 8388608 octets"):
        Plan(parse_cases("load", "1MiB", "32"), 1.0, 8 << 20, "")


@pytest.mark.parametrize("stripes", [0, 65])
def test_a_count_of_stripes_that_makes_no_sense_is_refused(stripes: int) -> None:
    with pytest.raises(ConfigError, match=f"--stripes is {stripes}; it must be between 1 and 64"):
        Plan((), 1.0, 8 << 20, "", stripes=stripes)


@pytest.mark.parametrize(("octets", "text"), [(4096, "4 KiB"), (1 << 20, "1 MiB"), (513, "513 B")])
def test_a_size_is_shown_in_its_largest_whole_unit(octets: int, text: str) -> None:
    assert format_size(octets) == text
