"""A source's geometry descriptor: an opaque text that it serves as sealed blocks under handles 0, 1, …, at most `DESCRIPTOR_HANDLES`.

Each piece but the last has the same length, at most `DESCRIPTOR_PIECE_BYTES`; the first handle that is not bound ends it.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Access
from kbtp_core.protocol.constants import Status, status_name
from kbtp_core.session.initiator import InitiatorSession

DESCRIPTOR_HANDLES: Final = 16
DESCRIPTOR_PIECE_BYTES: Final = 4096


def fetch_descriptor(session: InitiatorSession, deadline: float) -> bytes:
    """Load a source's descriptor. Raises KbtpError if there is none, SessionClosed, DeadlineExceeded."""
    pieces = np.zeros((DESCRIPTOR_HANDLES, DESCRIPTOR_PIECE_BYTES), np.uint8)
    region = session.register(pieces, Access.REMOTE_WRITE)
    try:
        handles = np.arange(DESCRIPTOR_HANDLES, dtype=np.uint64)
        batch = session.load(
            handles, 0, region, handles * np.uint64(DESCRIPTOR_PIECE_BYTES), DESCRIPTOR_PIECE_BYTES, deadline=deadline
        ).wait()
    finally:
        region.close()
    count = int(np.count_nonzero(batch.status == Status.OK))
    if count == 0 or (batch.status[:count] != Status.OK).any():
        raise KbtpError(f"{session.peer} serves no geometry descriptor ({status_name(int(batch.status[0]))}): it is no prefill worker")
    lengths = batch.data_length[:count].tolist()
    return b"".join(piece[:length].tobytes() for piece, length in zip(pieces, lengths, strict=False))
