"""Many FREEs of lent handles at once: the same checks as one by one, a few NumPy calls for all.

An engine that has loaded a request frees each of its handles, thousands at a time; these go to whoever lent the blocks, and nothing
has to wait for anything. `TargetSession.receive_frees` decides whether a run of messages is that plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import COMPLETION_BYTES, HEADER_BYTES, VERSION, EntryFlag, Opcode, Status
from kbtp_core.protocol.wire import COMPLETION, HEADER

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target

_FREE_WORD = np.frombuffer(bytes([VERSION, Opcode.FREE, 0, 0]), np.uint32)[0]  # version, opcode and no flags


def plain_frees(raw: NDArray[np.uint8]) -> NDArray[Any] | None:
    """(n, 24) octets as headers, if all are FREEs without flags and no handle and no Request ID comes twice; else None."""
    octets = np.ascontiguousarray(raw)
    if octets.shape[1] != HEADER_BYTES or np.count_nonzero(octets.view(np.uint32)[:, 0] != _FREE_WORD):
        return None
    headers = octets.view(HEADER)[:, 0]
    for field in ("request_id", "handle"):
        if np.unique(headers[field]).size != len(headers):
            return None
    return headers


def free_lent(target: Target, handle_base: int, handle_count: int, headers: NDArray[Any]) -> NDArray[np.uint8]:
    """Check and run FREEs of handles that the session may free from `handle_base` on; returns their COMPLETIONs, (n, 40) octets."""
    table = target.table
    handles, wanted = headers["handle"].astype(np.uint64), headers["generation"].astype(np.uint16)
    indexes = handles - np.uint64(table.base_handle)  # a handle below the base wraps to a huge index
    has_entry = indexes < np.uint64(table.entry_count)
    at = np.where(has_entry, indexes, np.uint64(0)).astype(np.intp)
    entries = table.entries[at]
    is_permitted = (handles - np.uint64(handle_base) < np.uint64(handle_count)) & (wanted != 0)
    is_bound = entries["flags"].astype(np.uint16) & np.uint16(EntryFlag.VALID) != 0
    is_current = entries["generation"] == wanted
    status = np.select(
        [~is_permitted, ~is_bound, ~is_current], [Status.NOT_PERMITTED, Status.NOT_BOUND, Status.STALE_GENERATION], Status.OK
    )
    target.clear_lent(at[status == Status.OK])
    answers = np.zeros(len(headers), COMPLETION)
    answers["version"], answers["opcode"] = VERSION, Opcode.COMPLETION
    answers["request_id"], answers["handle"], answers["status"] = headers["request_id"], headers["handle"], status
    answers["generation"] = np.where(has_entry, table.entries["generation"][at], 0)
    return answers.view(np.uint8).reshape(-1, COMPLETION_BYTES)
