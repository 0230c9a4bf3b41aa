"""CRC-32C in every form that this CPU can run, against the table-driven one and against the tests' own."""

from __future__ import annotations

import platform
from pathlib import Path
from random import Random

import numpy as np
import pytest

from kbtp_core import _native
from tests.fabric.wire import crc32c

FORMS = _native.crc32c_implementations()
SHORT = range(601)
LONG = [767, 768, 2047, 2048, 2049, 4031, 4032, 4095, 4096, 4100, 4224, 8191, 8192, 12288, 12289, 20000, 65536 + 127]
STARTS = [*range(17), 31, 32, 33, 63]
OCTETS = np.frombuffer(Random(5).randbytes(70000), np.uint8)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [SHORT, LONG], ids=["0 to 600", "long"])
@pytest.mark.parametrize("is_cold", [False, True], ids=["hot", "cold"])
def test_every_form_has_the_tables_crc_for_every_length_and_start(form: str, lengths: list[int], is_cold: bool) -> None:
    for length in lengths:
        for start in STARTS:
            data = OCTETS[start : start + length]
            before = length * 0x9E3779B1 & 0xFFFFFFFF
            assert _native.crc32c_of(form, data, before, is_cold) == _native.crc32c_portable(data.tobytes(), before), (length, start)


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_has_the_octets_and_the_crc_of_what_was_copied(form: str) -> None:
    for length in [*SHORT[::13], *LONG]:
        for to in (0, 1, 16):
            for start in (0, 1, 8):
                data, memory = OCTETS[start : start + length], np.zeros(length + 48, np.uint8)
                assert _native.crc32c_copy(form, memory[to : to + length], data, 7) == _native.crc32c_portable(data.tobytes(), 7)
                assert memory.tobytes() == bytes(to) + data.tobytes() + bytes(48 - to), (length, to, start)


@pytest.mark.parametrize("form", FORMS)
def test_the_crc_of_the_whole_is_the_crc_of_its_parts_in_turn(form: str) -> None:
    whole = _native.crc32c_of(form, OCTETS[:9000])
    for cut in (1, 20, 127, 128, 4096, 8999):
        assert _native.crc32c_of(form, OCTETS[cut:9000], _native.crc32c_of(form, OCTETS[:cut])) == whole


@pytest.mark.parametrize("form", FORMS)
def test_the_check_value_of_the_polynomial_is_that_of_the_standard(form: str) -> None:
    digits = np.frombuffer(b"123456789", np.uint8)
    assert _native.crc32c_of(form, digits) == crc32c(b"123456789") == 0xE3069283


def test_the_table_is_always_there_and_a_cpu_that_can_do_better_does() -> None:
    assert FORMS[-1] == "portable"
    assert len(set(FORMS)) == len(FORMS)
    if platform.machine() == "x86_64":
        features = set(Path("/proc/cpuinfo").read_text().split())
        assert ("sse4.2" in FORMS) == ("sse4_2" in features)
        assert ("vpclmulqdq" in FORMS) == ({"avx2", "pclmulqdq", "vpclmulqdq", "sse4_2"} <= features)


def test_a_form_that_the_cpu_has_not_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="no CRC-32C form called abacus"):
        _native.crc32c_of("abacus", OCTETS[:1])
