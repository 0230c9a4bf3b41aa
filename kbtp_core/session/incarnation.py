"""The incarnation of this process: random, not zero, drawn once per process start, so that no peer mistakes it for an earlier life."""

from __future__ import annotations

import functools
import os
import secrets


def process_incarnation() -> int:
    """The same 64-bit number in every call of one process; another one in a forked child."""
    return _drawn_for(os.getpid())


@functools.lru_cache(maxsize=1)
def _drawn_for(process: int) -> int:
    del process
    return secrets.randbits(64) or 1
