"""What the generated pages of the documentation have in common: `SCRIPT.py` writes the page, `SCRIPT.py --check` fails if it is old."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def cell(text: str) -> str:
    """`text` inside a Markdown table."""
    return re.sub(r"([|<\[\]*_])", r"\\\1", text)


def write_or_check(page: Path, wanted: str, script: str) -> int:
    """Write `wanted` into `page`, or with --check say whether that is what it holds; returns the exit status."""
    if "--check" in sys.argv[1:]:
        is_current = page.exists() and page.read_text(encoding="utf-8") == wanted
        if not is_current:
            print(f"{page.relative_to(ROOT)} is out of date: run python scripts/{script}")
        return 0 if is_current else 1
    page.write_text(wanted, encoding="utf-8")
    return 0
