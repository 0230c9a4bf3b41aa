"""Many LOADs, or many FREEs of lent handles, at once: the same checks as one by one, a few NumPy calls for all.

An engine that has loaded a request frees each of its handles, thousands at a time; these go to whoever lent the blocks, and nothing
has to wait for anything. LOADs of sealed blocks wait for nothing either. `TargetSession.receive_frees` and `receive_loads` decide
whether a run of messages is that plain.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import COMPLETION_BYTES, HEADER_BYTES, REQUEST_BYTES, VERSION, EntryFlag, Flag, Opcode, Status
from kbtp_core.protocol.wire import COMPLETION, HEADER, REQUEST

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target

_FREE_WORD = np.frombuffer(bytes([VERSION, Opcode.FREE, 0, 0]), np.uint32)[0]  # version, opcode and no flags
_LOAD_WORDS = [np.frombuffer(bytes([VERSION, Opcode.LOAD, 0, flags]), np.uint32)[0] for flags in (0, Flag.INVALIDATE)]


def plain_loads(raw: NDArray[np.uint8]) -> NDArray[Any] | None:
    """(n, 40) octets as requests, if all are LOADs with no flag but INVALIDATE and no Request ID comes twice; else None."""
    octets = np.ascontiguousarray(raw)
    words = octets.view(np.uint32)[:, 0]
    if octets.shape[1] != REQUEST_BYTES or np.count_nonzero((words != _LOAD_WORDS[0]) & (words != _LOAD_WORDS[1])):
        return None
    requests = octets.view(REQUEST)[:, 0]
    return requests if np.unique(requests["request_id"]).size == len(requests) else None


def judge_loads(target: Target, requests: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[np.intp], NDArray[Any]]:
    """The COMPLETIONs of these LOADs, (n, 40) octets; where in the table the handles are; and a copy of their entries.

    An entry's Data Length is made zero where its LOAD fails.
    """
    table = target.table
    indexes = requests["handle"].astype(np.uint64) - np.uint64(table.base_handle)  # a handle below the base wraps to a huge index
    has_entry = indexes < np.uint64(table.entry_count)
    at = np.where(has_entry, indexes, np.uint64(0)).astype(np.intp)
    entries = table.entries[at]
    flags, generation = entries["flags"].astype(np.uint16), entries["generation"].astype(np.uint16)
    wanted = requests["generation"].astype(np.uint16)
    status = np.select(
        [
            ~has_entry,
            flags & np.uint16(EntryFlag.VALID) == 0,
            (wanted != 0) & (wanted != generation),
            flags & np.uint16(EntryFlag.SEALED) == 0,
            entries["data_length"] > requests["length"],
        ],
        [Status.NOT_PERMITTED, Status.NOT_BOUND, Status.STALE_GENERATION, Status.NOT_SEALED, Status.LENGTH],
        Status.OK,
    )
    entries["data_length"][status != Status.OK] = 0
    answers = np.zeros(len(requests), COMPLETION)
    answers["version"], answers["opcode"] = VERSION, Opcode.COMPLETION
    answers["request_id"], answers["handle"], answers["status"] = requests["request_id"], requests["handle"], status
    answers["generation"] = np.where(has_entry, generation, 0)
    answers["data_length"] = entries["data_length"]
    answers["block_offset"] = np.where(status == Status.OK, entries["block_offset"], 0)
    return answers.view(np.uint8).reshape(-1, COMPLETION_BYTES), at, entries


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
