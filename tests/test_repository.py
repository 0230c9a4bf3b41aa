"""Rules of the tree itself."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import kbtp_core
from kbtp_core.protocol.constants import Opcode, Status

ROOT = Path(__file__).resolve().parent.parent
TEXT_SUFFIXES = {".py", ".pyi", ".cpp", ".hpp", ".md", ".toml", ".yml", ".yaml", ".sh", ".txt", ""}


def tracked(*patterns: str) -> list[Path]:
    names = subprocess.run(["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in names.split("\0") if name and (ROOT / name).is_file()]


def test_no_file_is_over_600_lines() -> None:
    long = {path.name: count for path in tracked("*.py", "*.cpp", "*.hpp") if (count := len(path.read_text().splitlines())) > 600}
    assert long == {}


def test_no_file_names_a_path_or_a_host_of_one_machine() -> None:
    pattern = re.compile("|".join(["/" + "work/", "/" + "root/", "/" + "home/[a-z]", "pypi" + r"\.org", "pythonhosted" + r"\.org"]))
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in tracked()
        if path.suffix in TEXT_SUFFIXES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


def test_the_changelog_has_the_version() -> None:
    assert f"## {kbtp_core.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_module_says_what_it_is_for() -> None:
    silent = [
        str(path.relative_to(ROOT)) for path in tracked("*.py") if path.stat().st_size and not path.read_text().startswith(('"""', "#!"))
    ]
    assert silent == []


@pytest.mark.parametrize("page", [path.relative_to(ROOT).as_posix() for path in tracked("*.md")])
def test_links_between_pages_lead_somewhere(page: str) -> None:
    source = ROOT / page
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", source.read_text())
    assert [link for link in links if not (source.parent / link).exists()] == []


def test_every_page_of_the_documentation_is_in_its_menu() -> None:
    menu = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in tracked("docs/*.md", "docs/**/*.md")}
    assert menu == pages


def test_the_protocol_page_has_the_numbers_of_the_code() -> None:
    page = (ROOT / "docs" / "protocol.md").read_text()
    rows = {(int(number), name) for number, name in re.findall(r"\| (\d+) \| ([A-Z_]+) (?=\|)", page)}
    assert {(status.value, status.name) for status in Status} <= rows
    assert {(opcode.value, opcode.name) for opcode in Opcode} <= rows


def test_the_conformance_page_is_what_the_tests_say() -> None:
    script = ROOT / "scripts" / "conformance_table.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_pages_of_settings_and_metrics_are_what_the_code_declares() -> None:
    script = ROOT / "scripts" / "reference_pages.py"
    run = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_the_conformance_suite_has_at_least_150_rules_and_both_roles() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    counts = re.search(r"(\d+) rules .* (\d+) that bind the sender and (\d+) that bind the receiver", page)
    assert counts is not None
    total, senders, receivers = (int(count) for count in counts.groups())
    assert total == senders + receivers >= 150
    assert min(senders, receivers) >= 60
