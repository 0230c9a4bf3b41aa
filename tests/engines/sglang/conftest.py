"""A store that the tests of SGLang share, and SGLang on the CPU."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"

from tests.soak.served import ServedStore


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
def store(folder: Path) -> Iterator[ServedStore]:
    """Shared: no test stops it or clears it."""
    served = ServedStore(folder, "--ram", "256M")
    try:
        yield served
    finally:
        served.stop()
