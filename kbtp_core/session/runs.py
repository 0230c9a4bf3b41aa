"""Completions of a target that are taken together, and answers that are cut to what fits."""

from __future__ import annotations

from typing import Final

import numpy as np

from kbtp_core.fabric.api import Array, CompletionStatus, Op
from kbtp_core.protocol.constants import HEADER_BYTES, REQUEST_BYTES
from kbtp_core.protocol.effects import LoadMany

GREETING_ID: Final = 1 << 32  # wr_id of the receive for a HELLO


def first_run(completions: Array, limit: int) -> tuple[Array, int, Array]:
    """The first run of one session's completions, and what is left of them.

    A run of several messages that have the length of a FREE, or of a LOAD, comes with that length; a run of anything else with zero.
    Runs of FREEs are as long as they are, others have at most `limit` completions.
    """
    is_message = (completions["op"] == Op.RECEIVE) & (completions["wr_id"] < GREETING_ID)
    is_message &= completions["status"] == CompletionStatus.OK
    length = np.where(is_message, completions["length"], 0)
    length[(length != HEADER_BYTES) & (length != REQUEST_BYTES)] = 0
    changes = np.flatnonzero(length[1:] != length[:-1])
    stop = int(changes[0]) + 1 if len(changes) else len(completions)
    kind = int(length[0]) if stop > 1 else 0
    if kind != HEADER_BYTES:
        stop = min(stop, limit)
    return completions[:stop], kind, completions[stop:]


def split_loads(effect: LoadMany, count: int) -> tuple[LoadMany, LoadMany | None]:
    """The first `count` answers, and the rest. The token goes where the last Write is."""
    if count == len(effect.messages):
        return effect, None
    is_last_behind = bool(np.count_nonzero(effect.lengths[count:]))

    def part(at: slice, token: int) -> LoadMany:
        return LoadMany(effect.messages[at], effect.requests[at], effect.block_offsets[at], effect.lengths[at], token)

    return part(slice(0, count), 0 if is_last_behind else effect.token), part(slice(count, None), effect.token if is_last_behind else 0)
