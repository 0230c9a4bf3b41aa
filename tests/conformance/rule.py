"""The mark of a conformance test: which rule of which RFC it checks, and whom the rule binds.

    @rule("RFC 5044 section 4.1", "receiver", "Pad octets are not looked at, but the CRC covers them.")
    def test_...

One test, one rule; a rule that binds both sides has a test for each. The sentence is in our own words. The mark changes
nothing at run time: scripts/conformance_table.py reads it from the source and writes docs/conformance.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Role = Literal["sender", "receiver"]
SECTION = re.compile(r"RFC (5040|5041|5042|5044|6581|7306) section [0-9]+(\.[0-9]+)*")


def rule(section: str, role: Role, sentence: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark a test. Raises ValueError for a section that has another form, or a sentence that is none."""
    if not SECTION.fullmatch(section):
        raise ValueError(f"{section!r} is no section: write it as 'RFC 5044 section 4.1'")
    if not sentence.endswith(".") or not (sentence[0].isupper() or sentence[0].isdigit()):
        raise ValueError(f"{sentence!r} is no sentence")
    return lambda test: test
