"""The executor of a simulated device: plain LOADs are answered by the fabric itself, as the software RNIC does (draft section 8).

It reads the request and the table entry as octets, and counts a reader from the moment it has seen the entry until the block was read,
which may be long after. Everything that is not the plain case goes up.
"""

from __future__ import annotations

import struct
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Array, Op
from kbtp_core.fabric.sim_memory import SimRegion
from kbtp_core.fabric.sim_message import Message

_request = struct.Struct(">BBHQQHHIQI")
_entry = struct.Struct(">HHIQ")
_completion = struct.Struct(">BBHQQHHIIQ")
_VERSION, _LOAD, _COMPLETION = 1, 3, 8
_INVALIDATE, _ALLOW_UNSEALED = 0x08, 0x10
_VALID, _SEALED = 1, 2
_ENTRY_BYTES: Final = 16


class SimExecutor:
    """See `fabric.api.Executor`."""

    def __init__(self, table: Array, base_handle: int, block_bytes: int) -> None:
        self._octets = table.reshape(-1).view(np.uint8).data
        self._base_handle = base_handle
        self._block_bytes = block_bytes
        self._entry_count = len(self._octets) // _ENTRY_BYTES
        self._readers: NDArray[np.uint32] = np.zeros(self._entry_count, np.uint32)
        self.load_count = 0

    def readers(self, entries: NDArray[np.uint64]) -> NDArray[np.uint32]:
        found: NDArray[np.uint32] = self._readers[entries.astype(np.intp)]
        return found

    def begin(self, index: int) -> None:
        self._readers[index] += 1

    def done(self, index: int) -> None:
        self._readers[index] -= 1

    def execute(self, data: bytes, pool: SimRegion) -> tuple[int, Message, Message] | None:
        """The table entry, the Write and the Send that answer a plain LOAD, or None for anything else. The Write's source is unread."""
        if len(data) != _request.size:
            return None
        version, opcode, flags, request_id, handle, generation, status, stag, to, room = _request.unpack(data)
        index = handle - self._base_handle
        is_plain = version == _VERSION and opcode == _LOAD and not flags & ~(_INVALIDATE | _ALLOW_UNSEALED) and status == 0
        if not is_plain or not 0 <= index < self._entry_count:
            return None
        entry_flags, current, length, block_offset = _entry.unpack_from(self._octets, index * _ENTRY_BYTES)
        is_sealed = bool(entry_flags & _SEALED)
        if not entry_flags & _VALID or generation not in (0, current) or not (is_sealed or flags & _ALLOW_UNSEALED):
            return None
        if length > room or length > self._block_bytes or block_offset + length > pool.length:
            return None
        self.load_count += 1
        write = Message(int(Op.WRITE), None, pool, block_offset, length, None, stag, to)
        if not is_sealed:
            write.data = pool.read(block_offset, length)
        octets = _completion.pack(_VERSION, _COMPLETION, 0, request_id, handle, current, 0, length, 0, block_offset)
        op = Op.SEND_INVALIDATE if flags & _INVALIDATE else Op.SEND
        return index, write, Message(int(op), None, None, 0, len(octets), octets, stag if flags & _INVALIDATE else 0)
