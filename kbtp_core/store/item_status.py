"""What became of one value of a batch, as a client tells it."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import NO_STATUS, Status


class ItemStatus(IntEnum):
    OK = 0
    EXISTS = 1
    """A put of a key that has a value already, which stays."""
    MISSING = 2
    """There is no such value, or it went while it was asked for."""
    TOO_LARGE = 3
    """A value does not fit into its buffer; a put is empty or larger than a block."""
    NO_SPACE = 4
    """The store has no room for it now, or its tenant has as much as it may have."""
    TIMED_OUT = 5
    """The deadline passed first. A put may or may not have happened."""
    UNAVAILABLE = 6
    """The node that holds the key can't be reached."""
    REFUSED = 7
    """The node does not do that for this client; the log says why."""


_OF_STATUS: Final = {
    Status.OK: ItemStatus.OK,
    Status.ALREADY_BOUND: ItemStatus.EXISTS,
    Status.NOT_BOUND: ItemStatus.MISSING,
    Status.STALE_GENERATION: ItemStatus.MISSING,
    Status.LENGTH: ItemStatus.TOO_LARGE,
    Status.NO_SPACE: ItemStatus.NO_SPACE,
    Status.SHUTTING_DOWN: ItemStatus.UNAVAILABLE,
}
_TABLE: Final = np.full(1 << 16, ItemStatus.REFUSED, np.uint8)
for _status, _item in _OF_STATUS.items():
    _TABLE[_status] = _item
_TABLE[NO_STATUS] = ItemStatus.UNAVAILABLE


def item_statuses(statuses: NDArray[np.uint16]) -> NDArray[np.uint8]:
    """ItemStatus for each status of the protocol."""
    return np.asarray(_TABLE[statuses])
