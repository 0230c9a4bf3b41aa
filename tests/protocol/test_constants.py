"""The numbers of KBTP where people or arithmetic meet them."""

from __future__ import annotations

import pytest

from kbtp_core.protocol.constants import NO_STATUS, Status, next_generation, status_name


@pytest.mark.parametrize(("status", "name"), [(Status.OK, "OK"), (18, "DATA_CORRUPT"), (19, "status 19"), (NO_STATUS, "no answer")])
def test_a_status_is_shown_by_its_name_or_else_by_its_number(status: int, name: str) -> None:
    assert status_name(status) == name


def test_the_generation_after_the_last_is_one() -> None:
    assert [next_generation(generation) for generation in (1, 65534, 65535)] == [2, 65535, 1]
