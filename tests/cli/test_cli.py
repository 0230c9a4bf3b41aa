"""The command `kbtp`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kbtp_core
from kbtp_core.cli import app


def test_version_names_the_package_and_the_python() -> None:
    result = CliRunner().invoke(app, ["version"])
    assert result.exit_code == 0
    assert result.output.startswith(f"kbtp {kbtp_core.__version__}\nPython {sys.version_info.major}.")


def test_the_module_is_the_command() -> None:
    run = subprocess.run([sys.executable, "-m", "kbtp_core.cli", "version"], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout.startswith(f"kbtp {kbtp_core.__version__}")


def test_demo_outside_of_a_source_tree_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kbtp_core, "__file__", str(tmp_path / "kbtp_core" / "__init__.py"))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "run `make demo` in it" in result.output


def test_demo_in_a_source_tree_runs_it_with_its_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "examples" / "disagg_vllm" / "demo.py"
    script.parent.mkdir(parents=True)
    script.write_text("import sys\nprint('demo', *sys.argv[1:])\n")
    monkeypatch.setattr(kbtp_core, "__file__", str(tmp_path / "kbtp_core" / "__init__.py"))
    result = CliRunner().invoke(app, ["demo", "--prompts", "3"])
    assert (result.exit_code, result.output) == (0, "demo --prompts 3\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sizes", "4KB"], "'4KB' is no size"),
        (["--ops", "get"], "'get' is no operation"),
        (["--batches", "0"], "'0' is no batch"),
        (["--seconds", "0"], "must be more than zero"),
    ],
)
def test_bench_refuses_what_it_can_not_measure(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1
    assert message in result.output
