"""A batch whose requests went out on several stripes, seen as one: the interface of `LoadBatch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import DeadlineExceeded
from kbtp_core.protocol.constants import NO_STATUS
from kbtp_core.session.initiator import LoadBatch
from kbtp_core.session.stripe_region import StripedRegion

Places = slice | NDArray[np.intp]
"""Which of the requests of a whole."""


class Requests:
    """Handles and what goes with each: columns of n values, or scalars that stand for all n. The last column is the lengths, if any."""

    def __init__(self, handles: ArrayLike, *columns: ArrayLike) -> None:
        self.handles: NDArray[np.uint64] = np.atleast_1d(np.asarray(handles, np.uint64))
        self.count = len(self.handles)
        self._columns = [column if isinstance(column, int) else _column(column, self.count) for column in columns]
        self._lengths = self._columns[2] if len(self._columns) == 3 else 0

    def values(self, places: Places) -> list[Any]:
        """The columns, as far as they belong to `places`."""
        return [column if isinstance(column, int) else column[places] for column in self._columns]

    def octets(self, places: Places) -> int:
        if isinstance(self._lengths, int):
            return self._lengths * len(self.handles[places])
        return int(self._lengths[places].sum(dtype=np.uint64))

    def runs(self, count: int) -> list[Places]:
        """At most `count` runs of about as many octets, none of them empty."""
        if count == 1:
            return [slice(0, self.count)]
        lengths = np.full(self.count, self._lengths) if isinstance(self._lengths, int) else self._lengths
        sums = np.cumsum(lengths, dtype=np.uint64).astype(np.float64)
        ends = np.searchsorted(sums, sums[-1] * np.arange(1, count) / count, side="left") + 1
        bounds = np.unique([0, *ends.tolist(), self.count]).tolist()
        return [slice(begin, end) for begin, end in pairwise(bounds)]


def _column(values: ArrayLike, count: int) -> Any:
    array = np.asarray(values)
    if array.ndim == 0:
        return int(array)
    if array.shape != (count,):
        raise ValueError(f"{array.size} values for {count} handles: a batch has as many handles as other values")
    return array


@dataclass(frozen=True)
class Part:
    """The requests at `places` of the whole; `batch` is what became of them, or the error that kept them from being sent."""

    places: Places
    batch: LoadBatch | Exception

    @property
    def is_done(self) -> bool:
        return isinstance(self.batch, Exception) or self.batch.done

    @property
    def error(self) -> Exception | None:
        return self.batch if isinstance(self.batch, Exception) else self.batch.error


class Waits(Protocol):
    """Who makes the progress of stripes: `StripedSession`."""

    def await_parts(self, parts: Sequence[Part], deadline: float) -> bool:
        """Until all parts are done, or the deadline has passed; whether they are done."""


class StripedBatch:
    """See `LoadBatch`. `error` is that of the first part that failed as a whole; the other parts' requests have their results.

    A deadline that passes fences the parts that are not done, and `wait` then closes the region on all stripes.
    """

    def __init__(self, session: Waits, count: int, parts: Sequence[Part], region: StripedRegion | None, deadline: float) -> None:
        self._session = session
        self.count = count
        self._parts = parts
        self._region = region
        self._deadline = deadline

    @property
    def done(self) -> bool:
        """Whether all is answered or will never be. Never waits; see `StripedSession.poll`."""
        return all(part.is_done for part in self._parts)

    @property
    def ok(self) -> bool:
        """Done, and every request was answered OK."""
        return all(not isinstance(part.batch, Exception) and part.batch.ok for part in self._parts)

    @property
    def error(self) -> Exception | None:
        return next((part.error for part in self._parts if part.error is not None), None)

    @property
    def status(self) -> NDArray[np.uint16]:
        return self._joined(np.uint16, NO_STATUS, lambda batch: batch.status)

    @property
    def generation(self) -> NDArray[np.uint16]:
        return self._joined(np.uint16, 0, lambda batch: batch.generation)

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return self._joined(np.uint32, 0, lambda batch: batch.data_length)

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return self._joined(np.uint64, 0, lambda batch: batch.block_offset)

    @property
    def checksum(self) -> NDArray[np.uint32]:
        return self._joined(np.uint32, 0, lambda batch: batch.checksum)

    def wait(self) -> StripedBatch:
        """Wait until all parts are done, at most until the deadline.

        Raises DeadlineExceeded, after the whole region was closed, or SessionClosed if a stripe was lost; the results of the other
        stripes are there all the same.
        """
        if not self._session.await_parts(self._parts, self._deadline):
            self.cancel()
        error = self.error
        if isinstance(error, DeadlineExceeded) and self._region is not None:
            self._region.close()
        if error is not None:
            raise error.with_traceback(None)
        return self

    def cancel(self) -> None:
        """Fence the batch now: its region is closed on all stripes, and what is not answered stays NO_STATUS. Nothing if it is done."""
        if self.done:
            return
        for part in self._parts:
            if not isinstance(part.batch, Exception):
                part.batch.cancel()
        if self._region is not None:
            self._region.close()

    def _joined(self, kind: type[Any], nothing: int, column: Callable[[LoadBatch], NDArray[Any]]) -> NDArray[Any]:
        values: NDArray[Any] = np.full(self.count, nothing, kind)
        for part in self._parts:
            if not isinstance(part.batch, Exception):
                values[part.places] = column(part.batch)
        return values
