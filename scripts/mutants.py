"""Reads what `mutmut run` found and keeps docs/mutation.md true: the table of figures, and that every survivor is argued there.

    python scripts/mutants.py           print the figures and the survivors that docs/mutation.md doesn't list, as lines to paste there
    python scripts/mutants.py --write   also write the figures into the page
    python scripts/mutants.py --check   exit 1 if the page's figures or its list differ from what was found

A survivor is known by its function and by the line that it changes, not by its number, which moves with every edit above it.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mutation.md"
MUTANTS = ROOT / "mutants"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
OUTCOMES = {0: "survived", 5: "untested", 33: "untested", 36: "timeout", -24: "timeout", 24: "timeout", 152: "timeout"}
"""By exit status of a mutant's tests; any other was a kill, and None was not run."""


class Mutant(NamedTuple):
    path: str  # of the file that it is a mutant of
    name: str
    outcome: str

    @property
    def module(self) -> str:
        return Path(self.path).stem


def mutants() -> list[Mutant]:
    """All that were made, by module and name. Raises ValueError if one was not run."""
    found = []
    for path in sorted(MUTANTS.rglob("*.py.meta")):
        for name, status in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items():
            if status is None:
                raise ValueError(f"{name} was not run: finish `mutmut run` first")
            found.append(Mutant(str(path.relative_to(MUTANTS).with_suffix("")), name, OUTCOMES.get(status, "killed")))
    if not found:
        raise ValueError(f"no mutants in {MUTANTS.name}/: run `mutmut run` first")
    return found


def figures(found: Iterable[Mutant]) -> str:
    """The table, a line a module."""
    counts: dict[str, Counter[str]] = {}
    for mutant in found:
        counts.setdefault(f"`{mutant.module}.py`", Counter())[mutant.outcome] += 1
    rows = [*counts.items(), ("**all**", sum(counts.values(), Counter()))]
    lines = ["| file | mutants | killed | timeout | survived | score |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, count in rows:
        caught, survived = count["killed"] + count["timeout"], count["survived"] + count["untested"]
        score = f"{100 * caught / count.total():.1f} %"
        lines.append(f"| {name} | {count.total()} | {count['killed']} | {count['timeout']} | {survived} | {score} |")
    return "\n".join(lines)


def change(mutant: Mutant) -> str:
    """A survivor as a list item: its function, and the line before → after."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    diff = get_diff_for_mutant(mutant.name, path=mutant.path).splitlines()[3:]
    before, after = (" ".join(line[1:].strip() for line in diff if line.startswith(sign)) for sign in "-+")
    function = re.sub(r"x_?|__mutmut_\d+", "", mutant.name.rpartition(".")[2], count=2) if "ǁ" not in mutant.name else ""
    function = function or ".".join(mutant.name.rpartition(".")[2].partition("__mutmut_")[0].split("ǁ")[1:])
    return f"- `{mutant.module}` `{function}`: `{before}` → {f'`{after}`' if after else 'removed'}"


def main() -> None:
    found = mutants()
    table = figures(found)
    page = PAGE.read_text(encoding="utf-8")
    survivors = {change(mutant) for mutant in found if mutant.outcome in ("survived", "untested")}
    listed = {line for line in page.splitlines() if line.startswith("- `") and " → " in line}
    kept = page[page.index(BEGIN) + len(BEGIN) : page.index(END)].strip() == table
    if "--write" in sys.argv:
        PAGE.write_text(page[: page.index(BEGIN)] + f"{BEGIN}\n{table}\n" + page[page.index(END) :], encoding="utf-8")
    print(table)
    print(f"\nnot listed ({len(survivors - listed)}):", *sorted(survivors - listed), sep="\n")
    print(f"\nlisted, but killed or gone ({len(listed - survivors)}):", *sorted(listed - survivors), sep="\n")
    if "--check" in sys.argv and not (kept and listed == survivors):
        sys.exit(f"{PAGE.name} is out of date")


if __name__ == "__main__":
    main()
