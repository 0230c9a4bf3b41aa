"""Requests of an initiator that were asked for together, and their results.

Request ID = batch sequence << 32 | index in the batch, so that an array of completions finds its places without a Python object per
request. Results are final once written; a request that was never answered keeps status NO_STATUS.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.protocol.constants import COMPLETION_BYTES, DESCRIPTOR_BYTES, HEADER_BYTES, NO_STATUS, REQUEST_BYTES, Flag, Opcode, Status
from kbtp_core.protocol.wire import COMPLETION

_DESCRIPTOR: Final = np.dtype([("stag", ">u4"), ("offset", ">u8"), ("reserved", ">u4")])
_OCTETS: Final = np.dtype(f"V{COMPLETION_BYTES}")  # a completion that is copied as it is


class Batch:
    """n requests and their results, as arrays of shape (n,)."""

    takes_records: ClassVar[bool] = True
    """Whether its requests may be completed by records."""

    def __init__(self, sequence: int, messages: NDArray[np.uint8], message_lengths: NDArray[np.uint32] | None = None) -> None:
        self.sequence = sequence
        self.messages = messages
        """(n, width) octets; row i is request i, in its first `message_lengths[i]` octets, or whole if that is None."""
        self.message_lengths = message_lengths
        self.count = len(messages)
        self._results = np.zeros(self.count, COMPLETION)
        self._results["status"] = NO_STATUS
        self.is_outstanding: NDArray[np.bool_] = np.zeros(self.count, np.bool_)
        self.outstanding_count = 0
        self.sent_count = 0
        self.is_abandoned = False
        self.has_records = False
        """Whether its requests are completed by records, whose places `set_records` gives."""

    @property
    def status(self) -> NDArray[np.uint16]:
        """As answered; NO_STATUS where there was no answer yet."""
        return self._results["status"].astype(np.uint16)

    @property
    def generation(self) -> NDArray[np.uint16]:
        return self._results["generation"].astype(np.uint16)

    @property
    def data_length(self) -> NDArray[np.uint32]:
        return self._results["data_length"].astype(np.uint32)

    @property
    def block_offset(self) -> NDArray[np.uint64]:
        return self._results["block_offset"].astype(np.uint64)

    @property
    def checksum(self) -> NDArray[np.uint32]:
        """CRC-32C of each block's data, if CHECKSUM was granted."""
        return self._results["checksum"].astype(np.uint32)

    @property
    def opcode(self) -> int:
        return int(self.messages[0, 1])

    def settle(self, indexes: NDArray[np.intp], completions: NDArray[Any]) -> bool:
        """Take the answers to the requests at `indexes`; False if one matches nothing, comes twice, or says what can't be."""
        try:
            matched = np.count_nonzero(self.is_outstanding[indexes])
        except IndexError:
            return False
        self.is_outstanding[indexes] = False
        left = int(np.count_nonzero(self.is_outstanding))
        if matched != len(indexes) or self.outstanding_count - left != matched or not self._fit(indexes, completions):
            return False
        self.outstanding_count = left
        self._results.view(_OCTETS)[indexes] = completions.view(_OCTETS)
        return True

    def _fit(self, indexes: NDArray[np.intp], completions: NDArray[Any]) -> bool:
        """Whether no LOAD brought more octets than it had room for."""
        if self.opcode != Opcode.LOAD:
            return True
        room = np.ascontiguousarray(self.messages[indexes, REQUEST_BYTES - 4 : REQUEST_BYTES]).view(">u4")[:, 0]
        return not np.count_nonzero((completions["data_length"] > room) & (completions["status"] == Status.OK))

    def add_records(self) -> None:
        """Put the RECORD flag and an empty Completion Descriptor into each message, behind the header and the Data Descriptor if any."""
        at = self._record_at
        octets = np.zeros((self.count, DESCRIPTOR_BYTES), np.uint8)
        self.messages = np.concatenate([self.messages[:, :at], octets, self.messages[:, at:]], axis=1)
        self.messages[:, 3] |= np.uint8(Flag.RECORD)
        if self.message_lengths is not None:
            self.message_lengths = self.message_lengths + np.uint32(DESCRIPTOR_BYTES)
        self.has_records = True

    def set_records(self, start: int, stag: int, offsets: NDArray[np.uint64]) -> None:
        """The records of the requests from `start` on go to (stag, offset); before they are sent."""
        descriptors = np.zeros(len(offsets), _DESCRIPTOR)
        descriptors["stag"], descriptors["offset"] = stag, offsets
        at = self._record_at
        octets = descriptors.view(np.uint8).reshape(-1, DESCRIPTOR_BYTES)
        self.messages[start : start + len(offsets), at : at + DESCRIPTOR_BYTES] = octets

    @property
    def _record_at(self) -> int:
        return HEADER_BYTES if self.opcode == Opcode.FREE else REQUEST_BYTES

    @property
    def is_done(self) -> bool:
        """Every request that was or will be sent is answered."""
        return self.outstanding_count == 0 and (self.is_abandoned or self.sent_count == self.count)
