"""The tests of the device as a whole run with one progress thread, and with three."""

from __future__ import annotations

import pytest

from tests.fabric.world import Node

WITH_MORE_THREADS = {"driving", "executor", "requester", "rnic", "rnic_life", "rnic_order", "rnic_queues", "rnic_regions", "waiting"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.rpartition(".test_")[2] in WITH_MORE_THREADS:
        metafunc.fixturenames.append("progress_threads")
        metafunc.parametrize("progress_threads", [1, 3], ids=["1-thread", "3-threads"], indirect=True)


@pytest.fixture
def progress_threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(Node, "progress_threads", request.param)
    return int(request.param)
