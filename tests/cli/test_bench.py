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
        [
            "bench",
            "--ops",
            op,
            "--sizes",
            "4KiB,64KiB",
            "--batches",
            "1,8",
            "--seconds",
            "0.2",
            "--pool",
            "4MiB",
            "--no-extras",
            "--json",
            str(file),
        ],
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
        assert row["cpu_us_per_block"] > row["target_cpu_us_per_block"] > 0
    assert "KBTP between two processes" in result.output
    assert document["python_target"] is document["clients"] is document["interpreter"] is document["round_trip"] is None
    assert document["large"] == []


@pytest.mark.parametrize("op", ["load", "alloc_store"])
def test_stripes_carry_the_same_cases(op: str, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    cases = ["--ops", op, "--sizes", "64KiB", "--batches", "1,32", "--seconds", "0.2", "--pool", "8MiB", "--no-extras"]
    result = CliRunner().invoke(app, ["bench", *cases, "--stripes", "3", "--json", str(file)])
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    assert document["stripes"] == 3
    assert [row["batch"] for row in document["rows"]] == [1, 32]
    assert min(row["blocks_per_s"] for row in document["rows"]) > 0


def test_a_run_also_measures_what_no_single_case_shows(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    cases = ["--ops", "load", "--sizes", "4KiB", "--batches", "32", "--seconds", "0.4", "--pool", "4MiB"]
    result = CliRunner().invoke(app, ["bench", *cases, "--json", str(file)])
    assert result.exit_code == 0, result.output
    document = json.loads(file.read_text())
    native, python = document["rows"][0], document["python_target"]
    assert (python["size"], python["batch"]) == (4096, 32)
    assert python["target_cpu_us_per_block"] > 2 * native["target_cpu_us_per_block"]
    clients = document["clients"]
    assert clients["count"] == 2
    assert min(clients["blocks_per_s"], clients["alone_blocks_per_s"], clients["native_loop_blocks_per_s"]) > 0
    interpreter = document["interpreter"]
    assert interpreter["batch"] == (4 << 20) // 4096
    assert 0 < interpreter["post_ms"] < interpreter["load_ms"]
    assert interpreter["gil_share"] == pytest.approx(interpreter["gil_ms"] / interpreter["load_ms"])
    assert interpreter["spin_share"] > 0
    assert [(row["size"], row["batch"], row["has_crc"]) for row in document["large"]] == [(1 << 20, 1, True), (1 << 20, 1, False)]
    for row in document["large"]:
        assert row["ratio_raw_tcp"] == pytest.approx(row["gib_per_s"] / row["raw_tcp_gib_per_s"])
        assert row["ratio_cpu"] == pytest.approx(row["cpu_s_per_gib"] / row["raw_tcp_cpu_s_per_gib"])
    trip = document["round_trip"]
    assert trip["size"] == 64
    assert trip["ratio_send"] == pytest.approx(trip["send_us"] / trip["raw_tcp_us"])
    assert trip["ratio_load"] == pytest.approx(trip["load_us"] / trip["raw_tcp_us"])
    assert "1 MiB × 1 without CRCs" in result.output
    assert "round trip of 64 octets" in result.output
    assert "2 clients: " in result.output
    assert "GIL held" in result.output
