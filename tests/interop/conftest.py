"""What these tests need is there, or they fail: nothing is skipped."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(autouse=True, scope="session")
def tshark() -> None:
    if shutil.which("tshark") is None:
        pytest.fail("tshark is not installed; as root: python scripts/debian.py tshark (or leave these tests out: -m 'not interop')")
