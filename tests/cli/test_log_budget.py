"""Lines of a log, as many as an operator can read."""

from __future__ import annotations

import logging

from kbtp_core.cli.log_budget import LogBudget


class Lines(logging.Handler):
    def __init__(self, budget: LogBudget) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(budget)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def record(text: str, at: float, line: int = 1) -> logging.LogRecord:
    made = logging.LogRecord("kbtp", logging.WARNING, "a.py", line, "%s", (text,), None)
    made.created = at
    return made


def test_one_place_logs_so_many_lines_in_a_while_and_then_says_how_many_were_left_out() -> None:
    handler = Lines(LogBudget(most=3, period_s=10.0))
    for number in range(8):
        handler.handle(record(f"rejected {number}", 100.0 + number))
    handler.handle(record("serving", 104.0, line=2))
    handler.handle(record("rejected 8", 110.0))
    handler.handle(record("rejected 9", 111.0))
    assert handler.lines == [
        "rejected 0",
        "rejected 1",
        "rejected 2",
        "serving",
        "rejected 8 (and 5 lines like this that were left out)",
        "rejected 9",
    ]


def test_a_quiet_log_is_left_as_it_is() -> None:
    handler = Lines(LogBudget(most=2, period_s=1.0))
    for at in range(6):
        handler.handle(record(f"at {at}", at * 0.6))
    assert handler.lines == [f"at {at}" for at in range(6)]
