"""What goes from a device through host memory and the store into another process is the same there, in every pool."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engines.sglang.cases import CASES, Case
from tests.soak.served import ROOT, ServedStore

_LIMIT_S = 240


@pytest.fixture(scope="module")
def trees(folder: Path, store: ServedStore) -> Path:
    """Every case produced by one process and consumed by the next."""
    for role in ("produce", "consume"):
        command = [sys.executable, "-m", "tests.engines.sglang.trees", role, str(folder), store.address]
        with (folder / f"{role}.log").open("wb") as out:
            subprocess.run(command, check=True, cwd=ROOT, stdout=out, stderr=out, timeout=_LIMIT_S, env=os.environ)
    return folder


def seen(trees: Path, case: Case, role: str) -> dict[str, Any]:
    found = json.loads((trees / f"{case.name}.{role}.json").read_text())
    assert "error" not in found, found["error"]
    return dict(found)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_of_all_pools_are_the_same_in_a_fresh_process(trees: Path, case: Case) -> None:
    produced, consumed = seen(trees, case, "produce"), seen(trees, case, "consume")
    want, got = (torch.load(trees / f"{case.name}.{role}.pt") for role in ("produce", "consume"))

    assert consumed["device_hit"] == consumed["host_hit"] > 0
    assert produced["tokens"] - consumed["host_hit"] in (0, 1)
    assert got.keys() == want.keys() == {"kv", *({case.model} & {"swa", "mamba"})}
    for pool, octets in got.items():
        assert len(octets) > 0
        assert torch.equal(octets, want[pool][: len(octets)] if pool == "kv" else want[pool])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_no_page_is_lost_and_none_fails_on_the_way(trees: Path, case: Case) -> None:
    produced, consumed = (seen(trees, case, role)["counts"] for role in ("produce", "consume"))
    assert produced["put/ok"] > 0
    for counts in (produced, consumed):
        assert {key for key, count in counts.items() if count} <= {"put/ok", "put/deduplicated", "get/ok"}
    assert consumed["get/ok"] > 0
