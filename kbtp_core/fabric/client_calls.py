"""What a provider may offer to clients of a store: whole calls in their usual case, without the interpreter in between."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import LoadRequests


class CallResult(IntEnum):
    REFUSED = 0
    """It is not the usual case, or a value is not in memory, or not where it was: go another way. Of a put nothing has happened."""
    DONE = 1
    """Every value was read, or stored."""
    INTERRUPTED = 2
    """Something else has come on the queue pair, or time is over: `resume`, or `give_up`."""
    PARTLY = 3
    """Not every value was there (`statuses`), or stored (`results`)."""


class ClientCalls(Protocol):
    """Whole calls of a store's client in their usual case (native/client_calls.hpp), one at a time; its thread drives the queue pair.

    Keys are lists of bytes or text, or (n, 16) ids. Values are lists of buffers, or a pair of arrays: addresses and lengths, (n, pieces).
    """

    def get(self, keys: Any, where: Any, timeout_s: float) -> int:
        """Read values that are in the store's memory. A CallResult."""

    def put(self, keys: Any, where: Any, flags: int, timeout_s: float) -> int:
        """Store values: ALLOC_STOREs and their PUBLISH, in one round trip. A CallResult."""

    def look_up(self, keys: Any, flags: int, timeout_s: float) -> int:
        """Ask for the `lengths` of values, 0 for what is not there. A CallResult."""

    def resume(self, timeout_s: float) -> int: ...

    def give_up(self) -> None:
        """Touch the caller's memory no more. What has come until now is the result. Nothing if no call is under way."""

    def statuses(self) -> bytes:
        """Of the last get, uint16 each; NO_STATUS where there is no answer."""

    def lengths(self) -> bytearray:
        """Of the last get or lookup, int64 each."""

    def results(self) -> bytes:
        """Of the last put if not all values were stored (dtype PUT_RESULT)."""

    def ids(self) -> bytes:
        """Of that put's values."""

    def used(self) -> bytes:
        """The handles (uint64) of that put. They are the caller's, and not used here any more."""


class LoadCall(Protocol):
    """LOADs that their caller waits for at once: he drives the queue pair from before they are posted."""

    def begin(self, handles: Any, generations: Any, stag: int, offsets: Any, lengths: Any, flags: int, timeout_s: float) -> int:
        """Arguments as for `Requester.post`, but all are numbers or arrays of their own types, else TypeError. A CallResult."""

    def resume(self, timeout_s: float) -> int: ...

    def give_up(self) -> None:
        """What was not answered until now never will be."""

    @property
    def requests(self) -> LoadRequests: ...


@runtime_checkable
class RunsLoadCalls(Protocol):
    """A requester that offers them."""

    def create_load_call(self, sequence: int) -> LoadCall:
        """`sequence` counts the calls; its last 30 bits are no other call's that is under way."""


@runtime_checkable
class RunsClientCalls(Protocol):
    """A queue pair that can do a store client's usual calls by itself."""

    def create_client_calls(
        self,
        cache: Any,
        prefix: bytes,
        tenant: int,
        inline_bytes: int,
        block_bytes: int,
        publish_items: int,
        get_items: int,
        lookup_items: int,
        handles: NDArray[np.uint64],
    ) -> ClientCalls:
        """`cache` is the client's HandleCache, `prefix` what an id begins its hash with, `handles` a share of the session's for puts.

        A message has up to so many items.
        """
