"""A short run of the bench, two real processes and all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kbtp_core.cli import app


@pytest.mark.parametrize("op", ["load", "alloc_store"])
def test_a_short_run_measures_each_case_and_its_baselines(op: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    result = CliRunner().invoke(
        app,
        ["bench", "--ops", op, "--sizes", "4KiB,64KiB", "--batches", "1,8", "--seconds", "0.2", "--pool", "4MiB", "--json", str(file)],
    )
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert [(row["op"], row["size"], row["batch"]) for row in document["rows"]] == [(op, s, b) for s in (4096, 65536) for b in (1, 8)]
    for name in ("raw_tcp_gib_per_s", "native_loop_blocks_per_s", "memcpy_gib_per_s"):
        assert document[name] > 0
    for row in document["rows"]:
        assert row["gib_per_s"] == pytest.approx(row["blocks_per_s"] * row["size"] / 2**30)
        assert row["ratio_raw_tcp"] == pytest.approx(row["gib_per_s"] / row["raw_tcp_gib_per_s"])
        assert row["ratio_native_loop"] == pytest.approx(row["blocks_per_s"] / row["native_loop_blocks_per_s"])
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["cpu_us_per_block"] > 0
    assert "KBTP between two processes" in result.output
