"""`python -m kbtp_core.cli` is the command `kbtp`."""

from __future__ import annotations

from kbtp_core.cli import app

app(prog_name="kbtp")
