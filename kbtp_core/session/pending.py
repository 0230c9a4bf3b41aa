"""A batch of the protocol machine, as its caller sees it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import Region
from kbtp_core.protocol.constants import Status
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.keyed_batch import KeyedBatch


class PendingBatch:
    """n requests under way, and their results as arrays of shape (n,); NO_STATUS where there is no answer.

    `error` is why the batch as a whole has failed, or None; a request's own failure is only in `status`.
    """

    def __init__(self, batch: Batch, region: Region | None, deadline: float) -> None:
        self.count = batch.count
        self.deadline = deadline
        self.error: KbtpError | None = None
        self.done = False
        self.region = region
        self.batch = batch
        self._results: tuple[NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint64]] | None = None
        self._checksum: NDArray[np.uint32] | None = None

    @property
    def status(self) -> NDArray[np.uint16]:
        return self.batch.status if self._results is None else self._results[0]

    @property
    def generation(self) -> NDArray[np.uint16]:
        return self.batch.generation if self._results is None else self._results[1]

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return self.batch.data_length if self._results is None else self._results[2]

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return self.batch.block_offset if self._results is None else self._results[3]

    @property
    def checksum(self) -> NDArray[np.uint32]:
        return self.batch.checksum if self._checksum is None else self._checksum

    @property
    def answers(self) -> list[bytes]:
        """Of keyed messages: the octets of the answer to each, empty where there is none."""
        return list(self.batch.answers) if isinstance(self.batch, KeyedBatch) else []

    @property
    def ok(self) -> bool:
        """Done, and every request was answered OK."""
        return self.done and self.error is None and bool((self.status == Status.OK).all())

    def finish(self, error: KbtpError | None) -> None:
        """Done: results stay as they are now, whatever still arrives."""
        batch = self.batch
        self._results = (batch.status, batch.generation, batch.data_length, batch.block_offset)
        self._checksum = batch.checksum
        self.error = error
        self.done = True
