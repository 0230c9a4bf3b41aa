"""Rows for messages."""

from __future__ import annotations

import re
from pathlib import Path

from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.session.slots import ReceiveRows


def resident_bytes(address: int) -> int:
    """What the mapping with this address takes of the machine's memory."""
    for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text()):
        first, last = (int(part, 16) for part in mapping.split(" ", 1)[0].split("-"))
        found = re.search(r"Rss: +(\d+)", mapping)
        if first <= address < last and found is not None:
            return int(found[1]) << 10
    raise AssertionError("the address is in no mapping")


def test_rows_for_long_messages_that_hold_short_ones_take_a_page_each() -> None:
    fabric = SoftRnic()
    rows = ReceiveRows(fabric.alloc_pd(), 512, 1 << 16)
    before = resident_bytes(rows.memory.ctypes.data)
    rows.memory[:, :64] = 1
    assert resident_bytes(rows.memory.ctypes.data) - before <= 513 * 4096
    fabric.close()
