"""Some cells of the matrix (`matrix.py` runs all): each value of each dimension at least once, in pairs that differ most."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import make_model
from tests.engines.vllm.matrix import Cell, run
from tests.soak.served import ServedStore

pytestmark = pytest.mark.vllm

CELLS = (
    Cell("llama", 2, 128, "fp32"),
    Cell("qwen3", 1, 128, "bf16"),
    Cell("hybrid", 2, 32, "bf16"),
    Cell("hybrid", 1, 128, "fp32"),
    Cell("mla", 1, 32, "fp32"),
    Cell("mla", 2, 128, "bf16"),
)


@pytest.fixture(scope="module")
def store(logs: Path) -> Iterator[ServedStore]:
    store = ServedStore(logs, "--ram", str(512 << 20))
    yield store
    store.stop(signal.SIGKILL)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_what_is_moved_answers_as_what_was_computed(cell: Cell, logs: Path, store: ServedStore) -> None:
    assert run(cell, make_model(logs, cell.model), logs, store) == "exact"


def test_layers_with_a_state_are_refused_by_name(logs: Path, store: ServedStore) -> None:
    reason = run(Cell("mamba", 1, 32, "fp32"), make_model(logs, "mamba"), logs, store)
    assert reason.startswith("KV layers model.layers.0.short_conv, model.layers.2.short_conv, ... hold MambaSpec;")


def test_a_kv_type_that_vllm_does_not_have_here_is_refused_and_one_that_it_has_is_exact(logs: Path, store: ServedStore) -> None:
    flags = Path("/proc/cpuinfo").read_text()
    expected = "exact" if "avx512" in flags or "amx" in flags else "FP8 KV cache on CPU requires x86 with AVX-512 or AMX."
    assert run(Cell("llama", 1, 32, "fp8 KV"), make_model(logs, "llama"), logs, store) == expected
