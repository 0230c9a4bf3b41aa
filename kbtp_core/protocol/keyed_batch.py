"""Keyed messages of an initiator, as batches: thousands of ids in one call, split into messages as long as was granted.

A batch has one Request ID a message, and keeps the answer to each message as it came; the functions at the end read results out of
them. A message that was refused as a whole has a COMPLETION for an answer, and its status is that of each of its items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol import keyed
from kbtp_core.protocol.constants import COMPLETION_BYTES, NO_STATUS, Opcode, Status
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.keyed import Ids, KeyedOpcode
from kbtp_core.protocol.wire import COMPLETION, Header

Encode: TypeAlias = Callable[[int], list[bytes]]
"""The messages of a batch, given the Request ID of the first; the others count on from there."""

FOUND: Final = keyed.LOOKUP_ITEM.newbyteorder("=")
PUBLISHED: Final = keyed.PUBLISH_RESULT.newbyteorder("=")
LISTED: Final = keyed.LIST_ITEM.newbyteorder("=")


class KeyedBatch(Batch):
    """n keyed messages. Where one has an answer of its own its status is OK, and `answers` has the octets."""

    takes_records = False

    def __init__(self, sequence: int, messages: Sequence[bytes]) -> None:
        lengths = np.fromiter(map(len, messages), np.uint32, len(messages))
        rows = np.zeros((len(messages), int(lengths.max())), np.uint8)
        for row, octets in zip(rows, messages, strict=True):
            row[: len(octets)] = np.frombuffer(octets, np.uint8)
        super().__init__(sequence, rows, lengths)
        self.answers: list[bytes] = [b""] * len(messages)

    def settle(self, indexes: NDArray[np.intp], completions: NDArray[Any]) -> bool:
        if not super().settle(indexes, completions):
            return False
        for index, completion in zip(indexes.tolist(), completions, strict=True):
            self.answers[index] = completion.tobytes()
        return True

    def settle_answer(self, index: int, header: Header, message: bytes) -> bool:
        """Take the answer to message `index`; False if it is none of its kind, or not outstanding."""
        if index >= self.count or header.opcode != int(self.messages[index, 1]) + 1:
            return False
        completion = np.zeros(1, COMPLETION)
        completion["request_id"] = header.request_id
        if not super().settle(np.array([index]), completion):
            return False
        self.answers[index] = message
        return True


def split(count: int, opcode: KeyedOpcode, inline_bytes: int) -> Iterator[slice]:
    """The items of each message, in order."""
    limit = keyed.items_limit(opcode, inline_bytes)
    return (slice(start, min(start + limit, count)) for start in range(0, count, limit))


def lookups(ids: Ids, tenant: int, flags: int, inline_bytes: int) -> Encode:
    parts = list(split(len(ids), KeyedOpcode.LOOKUP, inline_bytes))
    return lambda first: [keyed.Lookup(first + at, tenant, flags, ids[part]).encode() for at, part in enumerate(parts)]


def publishes(items: NDArray[Any], tenant: int, flags: int, inline_bytes: int) -> Encode:
    parts = list(split(len(items), KeyedOpcode.PUBLISH, inline_bytes))
    return lambda first: [keyed.Publish(first + at, tenant, flags, items[part]).encode() for at, part in enumerate(parts)]


def removes(ids: Ids, tenant: int, inline_bytes: int) -> Encode:
    parts = list(split(len(ids), KeyedOpcode.REMOVE, inline_bytes))
    return lambda first: [keyed.Remove(first + at, tenant, ids[part]).encode() for at, part in enumerate(parts)]


def pins(items: NDArray[Any], flags: int, lease_ms: int, inline_bytes: int) -> Encode:
    parts = list(split(len(items), KeyedOpcode.PIN, inline_bytes))
    return lambda first: [keyed.Pin(first + at, flags, lease_ms, items[part]).encode() for at, part in enumerate(parts)]


# Results -----------------------------------------------------------------------------------------------------------------


def found(answers: Sequence[bytes], count: int, inline_bytes: int, *, is_prefix: bool) -> NDArray[Any]:
    """(n,) What LOOKUPs of n ids found (FOUND); absent where nothing was answered, and behind the first absent id of a prefix."""
    out = np.zeros(count, FOUND)
    out["handle"] = keyed.NO_HANDLE
    for answer, part in zip(answers, split(count, KeyedOpcode.LOOKUP, inline_bytes), strict=True):
        items = np.zeros(0, keyed.LOOKUP_ITEM) if is_completion(answer) else _items(answer, keyed.LookupResult)
        if len(items) > part.stop - part.start:
            raise Malformed(f"{len(items)} answers to {part.stop - part.start} ids")
        out[part.start : part.start + len(items)] = items
        is_whole = len(items) == part.stop - part.start and not np.count_nonzero(items["tier"] == keyed.Tier.ABSENT)
        if is_prefix and not is_whole:
            break
    return out


def published(answers: Sequence[bytes], count: int, inline_bytes: int) -> NDArray[Any]:
    """(n,) What became of n values (PUBLISHED)."""
    out = np.zeros(count, PUBLISHED)
    out["handle"], out["status"] = keyed.NO_HANDLE, NO_STATUS
    for answer, part in zip(answers, split(count, KeyedOpcode.PUBLISH, inline_bytes), strict=True):
        if is_completion(answer):
            out["status"][part] = completion_status(answer)
        else:
            out[part] = _whole(_items(answer, keyed.PublishResult), part)
    return out


def pinned(answers: Sequence[bytes], count: int, inline_bytes: int) -> NDArray[np.uint16]:
    """(n,) The status of each."""
    out = np.full(count, NO_STATUS, np.uint16)
    for answer, part in zip(answers, split(count, KeyedOpcode.PIN, inline_bytes), strict=True):
        if is_completion(answer):
            out[part] = completion_status(answer)
        else:
            message = keyed.parse_keyed_answer(answer)
            assert isinstance(message, keyed.PinResult)
            out[part] = _whole(message.statuses, part)
    return out


def counted(answers: Sequence[bytes]) -> tuple[int, int]:
    """(The sum of the COMPLETIONs' Data Lengths, the first status that is not OK, or OK)."""
    completions = [np.frombuffer(answer, COMPLETION)[0] for answer in answers if len(answer) == COMPLETION_BYTES]
    failed = [int(one["status"]) for one in completions if one["status"] != Status.OK]
    missing = [NO_STATUS] if len(completions) < len(answers) else []
    return sum(int(one["data_length"]) for one in completions), (failed + missing + [int(Status.OK)])[0]


def listed(answer: bytes) -> tuple[int, NDArray[Any], int]:
    """(Where to go on, values as LISTED, status)."""
    if is_completion(answer):
        return 0, np.zeros(0, LISTED), completion_status(answer)
    message = keyed.parse_keyed_answer(answer)
    assert isinstance(message, keyed.ListResult)
    return message.cursor, message.items.astype(LISTED), int(Status.OK)


def adopted_count(answer: bytes) -> int:
    """How many blocks left their session by a PUBLISH, given the answer to it; zero for other answers. Raises Malformed."""
    if len(answer) < 2 or answer[1] != KeyedOpcode.PUBLISH_RESULT:
        return 0
    status = _items(answer, keyed.PublishResult)["status"]
    return int(np.count_nonzero((status == Status.OK) | (status == Status.ALREADY_BOUND)))


def is_completion(answer: bytes) -> bool:
    """Whether the message was refused as a whole, or not answered at all."""
    return len(answer) < 2 or answer[1] == Opcode.COMPLETION


def completion_status(answer: bytes) -> int:
    return Header.of_prefix(answer).status if answer else NO_STATUS


def _items(answer: bytes, kind: type[keyed.LookupResult] | type[keyed.PublishResult]) -> NDArray[Any]:
    message = keyed.parse_keyed_answer(answer)
    if not isinstance(message, kind):
        raise Malformed(f"an answer of opcode {answer[1]:#04x} where {kind.__name__} belongs")
    return message.items


def _whole(items: NDArray[Any], part: slice) -> NDArray[Any]:
    if len(items) != part.stop - part.start:
        raise Malformed(f"{len(items)} results for {part.stop - part.start} items")
    return items
