"""The table of the draft's sentences is up to date, and says what the tests say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_coverage_table_is_what_the_tests_say() -> None:
    checked = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "draft_table.py"), "--check"], capture_output=True, text=True, timeout=60
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_section_of_rules_has_tests() -> None:
    text = (ROOT / "docs" / "protocol-coverage.md").read_text(encoding="utf-8")
    for section in ("3.1", "3.2", "3.3", "3.4", "5.1", "5.2", "6.1", "6.2", "6.3", "6.4", "6.5", "6.6", "9.1", "9.2"):
        assert f"## {section} " in text
