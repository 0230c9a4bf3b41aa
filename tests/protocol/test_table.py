"""The block table: octets in memory, generations, and that a refused call changes nothing."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import EntryFlag
from kbtp_core.protocol.table import ENTRY, BlockTable


def test_an_entry_lies_in_memory_as_the_draft_draws_it() -> None:
    table = BlockTable(4, base_handle=10)
    assert table.bind([11], [0x1122334455667788], [0x01020304], sealed=True).tolist() == [2]
    assert table.entries[1].tobytes().hex() == "0003000201020304" + "1122334455667788"
    assert table.entries[0].tobytes().hex() == "00000001" + "00" * 12


def test_clearing_advances_the_generation_and_leaves_the_rest_in_memory() -> None:
    table = BlockTable(1)
    table.bind([0], [64], [5], sealed=False)
    assert table.entries[0].tobytes().hex() == "0001000200000005" + "0000000000000040"
    assert table.clear([0]).tolist() == [3]
    assert table.entries[0].tobytes().hex() == "0000000300000005" + "0000000000000040"


def test_generations_skip_zero() -> None:
    table = BlockTable(2)
    for _ in range(65534 // 2):
        table.bind_one(0, 0, 1, True)
        table.clear_one(0)
    assert table.entry(0).generation == 65535
    assert table.bind([0, 1], [0, 0], [1, 1], sealed=True).tolist() == [1, 2]
    table.check_integrity()


def test_vector_calls_bind_and_clear_many_handles_in_the_order_given() -> None:
    table = BlockTable(100, base_handle=1000)
    handles = np.array([1099, 1000, 1050], np.uint64)
    assert table.bind(handles, [1, 2, 3], [10, 20, 30], sealed=True).tolist() == [2, 2, 2]
    found = table.lookup(handles)
    assert found["block_offset"].tolist() == [1, 2, 3]
    assert found["data_length"].tolist() == [10, 20, 30]
    assert table.clear(handles[:2]).tolist() == [3, 3]
    assert table.valid_indexes(0, 100).tolist() == [50]
    table.check_integrity()


@pytest.mark.parametrize(
    ("handles", "why"),
    [
        ([5, 20], r"handle 5 is outside the table \[10, \+5\)"),
        ([11, 15], r"handle 15 is outside the table \[10, \+5\)"),
        ([9], r"handle 9 is outside the table \[10, \+5\)"),
        ([11, 12], "handle 12 is bound already"),
        ([13, 13], "a handle is named twice in one call"),
    ],
)
def test_a_refused_bind_changes_nothing(handles: list[int], why: str) -> None:
    table = BlockTable(5, base_handle=10)
    table.bind([12], [0], [1], sealed=True)
    before = table.entries.tobytes()
    with pytest.raises(ValueError, match=rf"^{why}$"):
        table.bind(handles, [64] * len(handles), [1] * len(handles), sealed=True)
    assert table.entries.tobytes() == before


def test_a_refused_clear_changes_nothing() -> None:
    table = BlockTable(5)
    table.bind([0], [0], [1], sealed=True)
    before = table.entries.tobytes()
    with pytest.raises(ValueError, match="1 is not bound"):
        table.clear([0, 1])
    assert table.entries.tobytes() == before


def test_an_update_keeps_the_generation_and_can_seal() -> None:
    table = BlockTable(1)
    table.bind_one(0, 64, 10, sealed=False)
    table.update_one(0, 20, seal=False)
    assert table.entry(0) == (EntryFlag.VALID, 2, 20, 64)
    table.update_one(0, 30, seal=True)
    assert table.entry(0) == (EntryFlag.VALID | EntryFlag.SEALED, 2, 30, 64)


def test_a_table_lives_in_memory_that_the_caller_supplies() -> None:
    memory = np.frombuffer(bytearray(b"\xff" * 64), ENTRY)
    table = BlockTable(4, memory=memory)
    assert memory["generation"].tolist() == [1, 1, 1, 1]
    assert memory["flags"].tolist() == [0, 0, 0, 0]
    table.bind([3], [128], [7], sealed=True)
    assert memory["block_offset"][3] == 128
    with pytest.raises(ValueError, match="5 aligned, contiguous entries"):
        BlockTable(5, memory=memory)


def test_valid_entries_of_a_range_are_found_where_they_are() -> None:
    table = BlockTable(8, base_handle=10)
    table.bind([11, 13, 15, 17], [0, 64, 128, 192], 1, sealed=False)
    assert table.valid_indexes(0, 8).tolist() == [1, 3, 5, 7]
    assert table.valid_indexes(3, 4).tolist() == [3, 5]
    assert table.valid_indexes(4, 1).tolist() == []


@pytest.mark.parametrize(("count", "base"), [(0, 0), (-1, 0), (1 << 32, 0), (1 << 32, -1), (4, -1), (4, (1 << 64) - 3), (1, 1 << 64)])
def test_a_table_that_handles_or_indexes_cant_name_is_refused(count: int, base: int) -> None:
    with pytest.raises(ValueError, match=rf"^a table of {count} entries from handle {base} does not fit the wire format$"):
        BlockTable(count, base)


def test_a_table_may_end_with_the_last_handle() -> None:
    last = (1 << 64) - 1
    table = BlockTable(2, last - 1)
    assert table.bind([last], [64], [1], sealed=True).tolist() == [2]
    assert (table.index_of(last), table.index_of(last + 1), table.index_of(0)) == (1, None, None)


@pytest.mark.parametrize(
    "memory",
    [np.zeros(4, "V16"), np.zeros(3, ENTRY), np.zeros((4, 1), ENTRY), np.zeros(8, ENTRY)[::2], np.zeros(72, np.uint8)[4:68].view(ENTRY)],
    ids=["other fields", "too short", "two dimensions", "gaps", "not aligned"],
)
def test_memory_that_a_native_reader_would_misread_is_refused(memory: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"^table memory must be 4 aligned, contiguous entries of dtype ENTRY$"):
        BlockTable(4, memory=memory)


def test_length_and_offset_are_written_before_the_word_that_makes_them_count(monkeypatch: pytest.MonkeyPatch) -> None:
    table = BlockTable(2)
    seen: list[str] = []
    monkeypatch.setattr("kbtp_core.protocol.table.memory_fence", lambda: seen.append(table.entries[1].tobytes().hex()))
    rest = "00000005" + "0000000000000040"
    table.bind_one(1, 64, 5, sealed=True)
    assert seen == ["00000001" + rest, "00030002" + rest]
    table.clear_one(1)
    assert seen[2:] == ["00030002" + rest, "00000003" + rest]
    table.bind([1], [64], [5], sealed=False)
    assert seen[4:] == ["00000003" + rest, "00010004" + rest]
    table.clear([1])
    assert seen[6:] == ["00010004" + rest, "00000005" + rest]


def test_generations_are_told_as_numbers_of_16_bits() -> None:
    table = BlockTable(2)
    told = [table.bind([0], [0], [1], sealed=True), table.clear([0]), table.clear_indexes(np.arange(0))]
    assert [generations.dtype for generations in told] == [np.uint16] * 3
