"""Threads of the connector are not the engine's: vLLM pins its worker to a core and keeps that core busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CORES_AT_START = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
"""Of the process, when vLLM loaded its plugins: before it pins anything."""


@contextmanager
def unpinned() -> Iterator[None]:
    """Threads that start meanwhile, native ones too, may run on every core that the process was given."""
    if _CORES_AT_START is None:
        yield
        return
    pinned = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _CORES_AT_START)
    try:
        yield
    finally:
        os.sched_setaffinity(0, pinned)
