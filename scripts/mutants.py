"""What `mutmut run` found: figures by file, and whether docs/mutation.md argues every mutant that survived.

    python scripts/mutants.py           print both; exit 1 if a survivor is not listed on the page
    python scripts/mutants.py --write   write the figures into the page, too

A survivor is known by its function and by the line that it changes, not by its number, which moves with every edit above it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "mutation.md"
MUTANTS = ROOT / "mutants"
BEGIN, END = "<!-- figures -->", "<!-- end of figures -->"
OUTCOMES = {0: "survived", 5: "survived", 33: "survived", -24: "timeout", 24: "timeout", 36: "timeout", 152: "timeout"}
"""By exit status of a mutant's tests (5 and 33: no test reaches it). Any other is a kill; None: not run."""


class Mutant(NamedTuple):
    path: str  # of the file that it is a mutant of
    name: str
    outcome: str


def mutants() -> list[Mutant]:
    """All that were made. Raises ValueError if one was not run."""
    found = []
    for path in sorted(MUTANTS.rglob("*.py.meta")):
        for name, status in json.loads(path.read_text(encoding="utf-8"))["exit_code_by_key"].items():
            if status is None:
                raise ValueError(f"{name} was not run: let `mutmut run` come to its end")
            found.append(Mutant(str(path.relative_to(MUTANTS).with_suffix("")), name, OUTCOMES.get(status, "killed")))
    if not found:
        raise ValueError(f"no mutants in {MUTANTS.name}/: `mutmut run` makes them")
    return found


def figures(found: Iterable[Mutant]) -> str:
    """The table, a line a file."""
    counts: dict[str, Counter[str]] = {}
    for mutant in found:
        counts.setdefault(f"`{Path(mutant.path).name}`", Counter())[mutant.outcome] += 1
    lines = ["| file | mutants | killed | timeout | survived | score |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for name, count in [*counts.items(), ("**all**", sum(counts.values(), Counter()))]:
        total = sum(count.values())
        score = f"{100 * (total - count['survived']) / total:.1f} %"
        lines.append(f"| {name} | {total:,} | {count['killed']:,} | {count['timeout']} | {count['survived']} | {score} |")
    return "\n".join(lines)


def change(mutant: Mutant) -> str:
    """A survivor as the page lists it: its function, and the line before → after."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant
    from mutmut.utils.format_utils import orig_function_and_class_names_from_key

    diff = get_diff_for_mutant(mutant.name, path=mutant.path).splitlines()[3:]
    before, after = (" ".join(line[1:].strip() for line in diff if line.startswith(sign)) for sign in "-+")
    function, owner = orig_function_and_class_names_from_key(mutant.name)
    where = ".".join(part for part in (Path(mutant.path).stem, owner, function) if part)
    return f"- `{where}`: `{before}` → {f'`{after}`' if after else 'gone'}"


def main() -> None:
    found = mutants()
    table, page = figures(found), PAGE.read_text(encoding="utf-8")
    survivors = {change(mutant) for mutant in found if mutant.outcome == "survived"}
    listed = {line for line in page.splitlines() if line.startswith("- `") and " → " in line}
    if "--write" in sys.argv:
        PAGE.write_text(page[: page.index(BEGIN)] + f"{BEGIN}\n{table}\n" + page[page.index(END) :], encoding="utf-8")
    print(table)
    print(f"\nlisted on the page, but killed or gone: {len(listed - survivors)}", *sorted(listed - survivors), sep="\n")
    print(f"\nsurvived, but not listed on the page: {len(survivors - listed)}", *sorted(survivors - listed), sep="\n")
    if survivors - listed:
        sys.exit(1)


if __name__ == "__main__":
    main()
