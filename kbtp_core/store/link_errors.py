"""Why a client's connection to a store is of no use, and what that makes of a batch."""

from __future__ import annotations

import logging
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import DeadlineExceeded, KbtpError, Malformed, SessionClosed, SessionRefused
from kbtp_core.store.item_status import ItemStatus

_log = logging.getLogger(__name__)


class Unavailable(KbtpError):
    """A store can't be reached; the text says how it was tried."""


class Refused(Unavailable):
    """A store does not let this client use its tenant's values; the text says why."""


class TenantRefused(SessionRefused):
    """Why there is no session: it would be of no use."""


class Failing:
    """What ends a batch as a whole is the status of the items that have no other yet."""

    def __init__(self, status: NDArray[np.uint8], name: str) -> None:
        self._status = status
        self._name = name

    def __enter__(self) -> None:
        """Nothing to do yet."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        if isinstance(error, DeadlineExceeded):
            self._status[self._status == ItemStatus.UNAVAILABLE] = ItemStatus.TIMED_OUT
        elif isinstance(error, Refused):
            self._status[self._status == ItemStatus.UNAVAILABLE] = ItemStatus.REFUSED
            _log.warning("%s", error)
        elif isinstance(error, (Unavailable, SessionClosed)):
            _log.debug("%s: %s", self._name, error)
        elif isinstance(error, Malformed):
            _log.warning("%s broke the protocol: %s", self._name, error)
        return isinstance(error, (DeadlineExceeded, Unavailable, SessionClosed, Malformed))
