"""One batch of a target's work requests, from the effects of its session to an array that is posted at once.

Rule: the last request of a batch is signaled, so that every send row is known to be free some time after.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import WORK_REQUEST, Array, Op, WrFlag
from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.effects import LoadMany, Read, Record, Send, Write
from kbtp_core.session.slots import SendRows


class PostBatch:
    """Work requests that will be posted together, behind `posted_count` earlier ones."""

    def __init__(self, posted_count: int) -> None:
        self.answer_count = 0  # received messages that these requests answer
        self.signaled: list[tuple[int, int]] = []  # (requests ever posted up to a signaled one, mark in the send rows)
        self._posted_count = posted_count
        self._rows: list[tuple[int, ...]] = []  # single requests behind the last of `_arrays`
        self._arrays: list[Array] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add_signaled(self, op: Op, flags: int, effect: Write | Read, pool_stag: int, mark: int) -> None:
        self._add(effect.token, op, flags | WrFlag.SIGNALED, effect.length, pool_stag, effect.stag, effect.block_offset, effect.offset)
        self.signaled.append((self._posted_count + self._count, mark))

    def add_send(self, rows: SendRows, effect: Send) -> None:
        (row,), _ = rows.take(1)
        rows.memory[row, : len(effect.data)] = np.frombuffer(effect.data, np.uint8)
        op = Op.SEND if effect.invalidate_stag is None else Op.SEND_INVALIDATE
        self._add(0, op, WrFlag.NONE, len(effect.data), rows.region.stag, effect.invalidate_stag or 0, rows.offset(int(row)), 0)
        self.answer_count += effect.answers

    def add_record(self, rows: SendRows, effect: Record, op: int) -> None:
        (row,), _ = rows.take(1)
        rows.memory[row, : len(effect.data)] = np.frombuffer(effect.data, np.uint8)
        self._add(
            0, op, WrFlag.NONE, len(effect.data), rows.region.stag, effect.stag, rows.offset(int(row)), effect.offset, effect.immediate
        )
        self.answer_count += 1

    def add_sends(self, rows: SendRows, messages: NDArray[np.uint8]) -> None:
        numbers, _ = rows.take(len(messages))
        rows.memory[numbers, : messages.shape[1]] = messages
        requests = np.zeros(len(messages), WORK_REQUEST)
        requests["op"], requests["length"] = Op.SEND, messages.shape[1]
        requests["local_stag"], requests["local_offset"] = rows.region.stag, numbers * rows.stride
        self._gather()
        self._arrays.append(requests)
        self._count += len(requests)
        self.answer_count += len(requests)

    def add_loads(self, rows: SendRows, effect: LoadMany, pool_stag: int) -> None:
        """The Writes and Sends of many LOADs; only the last Write is signaled, if there is a token."""
        count = len(effect.messages)
        has_write = effect.lengths != 0
        numbers, mark = rows.take(count)
        rows.memory[numbers, : effect.messages.shape[1]] = effect.messages
        requests = np.zeros(2 * count, WORK_REQUEST)
        writes, sends, asked = requests[0::2], requests[1::2], effect.requests
        writes["op"], writes["length"], writes["local_stag"] = Op.WRITE, effect.lengths, pool_stag
        writes["local_offset"], writes["remote_stag"], writes["remote_offset"] = effect.block_offsets, asked["stag"], asked["offset"]
        is_invalidating = asked["flags"] & int(Flag.INVALIDATE) != 0
        sends["op"] = np.where(is_invalidating, int(Op.SEND_INVALIDATE), int(Op.SEND))
        sends["remote_stag"] = np.where(is_invalidating, asked["stag"], 0)
        sends["length"], sends["local_stag"], sends["local_offset"] = effect.messages.shape[1], rows.region.stag, numbers * rows.stride
        wanted = np.ones(2 * count, np.bool_)
        wanted[0::2] = has_write
        places = np.flatnonzero(has_write)
        requests = requests[wanted]
        self._gather()
        if effect.token:
            last = int(2 * places[-1] - np.count_nonzero(~has_write[: places[-1]]))
            requests["wr_id"][last], requests["flags"][last] = effect.token, int(WrFlag.SIGNALED)
            self.signaled.append((self._posted_count + self._count + last + 1, mark - count + int(places[-1])))
        self._arrays.append(requests)
        self._count += len(requests)
        self.answer_count += count

    def finish(self, mark: int) -> Array:
        """All of it as one array, whose last request is signaled."""
        self._gather()
        requests = self._arrays[0] if len(self._arrays) == 1 else np.concatenate(self._arrays)
        if not requests["flags"][-1] & int(WrFlag.SIGNALED):
            requests["flags"][-1] |= int(WrFlag.SIGNALED)
            self.signaled.append((self._posted_count + self._count, mark))
        return requests

    def _add(
        self, wr_id: int, op: int, flags: int, length: int, local_stag: int, stag: int, local_offset: int, offset: int, operand: int = 0
    ) -> None:
        self._rows.append((wr_id, op, flags, 0, length, local_stag, stag, local_offset, offset, operand, 0, 0, 0))
        self._count += 1

    def _gather(self) -> None:
        if self._rows:
            self._arrays.append(np.array(self._rows, WORK_REQUEST))
            self._rows = []
