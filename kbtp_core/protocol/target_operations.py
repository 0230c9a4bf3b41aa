"""What a target's session has in progress, and the checks that several requests share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import Flag, Status
from kbtp_core.protocol.table import Entry
from kbtp_core.protocol.wire import Load, Message, Request, Store

_INVALIDATE: Final = int(Flag.INVALIDATE)  # a plain number is far quicker than a flag


@dataclass(frozen=True)
class Loading:
    """A Write of the block of entry `index`; `holds_line`: later requests for its handle wait for it."""

    index: int
    holds_line: bool


@dataclass(frozen=True, eq=False)
class LoadingMany:
    """Writes of the blocks of these entries; one that comes several times has as many readers."""

    indexes: NDArray[np.intp]


@dataclass(frozen=True)
class Storing:
    """A Read into the block at `block_offset`, for the entry at `index`."""

    request: Store
    index: int
    block_offset: int


Operation: TypeAlias = Loading | LoadingMany | Storing


def check_bound(request: Request, entry: Entry | None) -> Status:
    """Range, binding and generation of a request for a bound handle."""
    if entry is None:
        return Status.NOT_PERMITTED
    if not entry.is_valid:
        return Status.NOT_BOUND
    if request.generation not in (0, entry.generation):
        return Status.STALE_GENERATION
    return Status.OK


def invalidated_stag(request: Message) -> int | None:
    """What the completion of this request invalidates, whatever its status."""
    is_asked = isinstance(request, (Load, Store)) and request.flags & _INVALIDATE
    return request.data.stag if is_asked and isinstance(request, (Load, Store)) else None
