"""Messages of the keyed extension as octets (docs/store-protocol.md): values named by (tenant, object id) over KBTP's blocks.

All carry the common header and count their items, so a message is as long as its count says, or it is malformed. Items are the
big-endian dtypes below: a message with hundreds of ids is a few NumPy calls.

`parse_keyed` takes what an initiator may send, `parse_keyed_answer` what a target may answer; both raise `errors.Malformed` and
nothing else. Reserved fields are dropped on receipt, undefined flags are refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol.constants import DESCRIPTOR_BYTES, HEADER_BYTES, VERSION
from kbtp_core.protocol.wire import DataDescriptor, Header, Load

ID_BYTES: Final = 16
MESSAGE_SPARE_BYTES: Final = 64
"""A keyed message has at most the granted inline length and this."""
MESSAGE_LEAST_BYTES: Final = 128
"""But so many are taken, whatever was granted: one item of any kind fits."""
FIRST_KEYED: Final = 0x80
"""Opcodes of the extension are this and above."""
ANY_NAMESPACE: Final = 0
"""As the namespace of a LIST: all of the tenant's."""
NO_HANDLE: Final = 0xFFFF_FFFF_FFFF_FFFF
"""In results: the value has no handle now, because it is on disk alone or not there."""


class KeyedOpcode(IntEnum):
    LOOKUP = 0x80
    LOOKUP_RESULT = 0x81
    PUBLISH = 0x82
    PUBLISH_RESULT = 0x83
    REMOVE = 0x84
    PIN = 0x86
    PIN_RESULT = 0x87
    LOAD_RANGE = 0x88
    NAMESPACE = 0x8A
    REMOVE_NAMESPACE = 0x8C
    LIST = 0x8D
    LIST_RESULT = 0x8E
    GET = 0x90
    GET_RESULT = 0x91


class LookupFlag(IntFlag):
    NONE = 0
    PROMOTE = 1  # read what is only on disk into a block
    PREFIX = 2  # the answer ends with the first id that is absent
    TOUCH = 4  # count as a read for eviction


class PublishFlag(IntFlag):
    NONE = 0
    DURABLE = 1  # answer after the disk commit
    PIN = 2  # with a lease of the target's default length


class PinFlag(IntFlag):
    UNPIN = 0
    PIN = 1


class Tier(IntEnum):
    ABSENT = 0
    RAM = 1
    DISK = 2
    PROMOTING = 3


class ValueFlag(IntFlag):
    """What a LOOKUP or a LIST says of a value."""

    NONE = 0
    DIRTY = 1  # not on disk yet
    PINNED = 2
    WRITTEN = 4  # of a GET: the value was written to its place before this answer


LOOKUP_ITEM: Final = np.dtype([("handle", ">u8"), ("generation", ">u2"), ("tier", "u1"), ("flags", "u1"), ("data_length", ">u4")])
"""Of a LOOKUP_RESULT, 16 octets an id."""
GET_ITEM: Final = np.dtype([("id", "u1", ID_BYTES), ("offset", ">u8"), ("room", ">u4"), ("reserved", ">u4")])
"""Of a GET, 32 octets a value: its id, the tagged offset that it goes to, and how many octets have room there."""
PUBLISH_ITEM: Final = np.dtype([("id", "u1", ID_BYTES), ("handle", ">u8"), ("generation", ">u2"), ("reserved", ">u2"), ("crc", ">u4")])
"""Of a PUBLISH, 32 octets a value: its id, and the block that this session bound and sealed; `crc` is the CRC-32C of its data."""
PUBLISH_RESULT: Final = np.dtype([("status", ">u2"), ("generation", ">u2"), ("handle", ">u8")])
"""Of a PUBLISH_RESULT, 12 octets a value: where the store has it."""
PIN_ITEM: Final = np.dtype([("handle", ">u8"), ("generation", ">u2")])
LIST_ITEM: Final = np.dtype(
    [("id", "u1", ID_BYTES), ("data_length", ">u4"), ("tier", "u1"), ("flags", "u1"), ("reserved", ">u2"), ("ttl_s", ">u4")]
)
"""Of a LIST_RESULT, 28 octets a value; `ttl_s` is what is left of its time, zero if it has no end."""
_STATUS: Final = np.dtype(">u2")

_request = struct.Struct(">QII")  # tenant, flags, count; then items
_get = struct.Struct(">QIIII")  # tenant, flags, count, STag, reserved
_remove = struct.Struct(">QI")
_pin = struct.Struct(">III")
_range = struct.Struct(">II")
_descriptor = struct.Struct(">IQI")
_namespace = struct.Struct(">QQII")
_remove_namespace = struct.Struct(">QQ")
_list = struct.Struct(">QQQI")
_count = struct.Struct(">I")
_cursor = struct.Struct(">QI")

Ids: TypeAlias = NDArray[np.uint8]
"""(n, 16) octets."""


def namespace_id(namespace: bytes) -> int:
    """The 64-bit id of a namespace, by which its values are listed and removed. Raises ValueError for an empty one."""
    if not namespace:
        raise ValueError("a namespace must not be empty")
    framed = b"KBTPNS1" + len(namespace).to_bytes(8, "little") + namespace
    return int.from_bytes(hashlib.sha256(framed).digest()[:8], "big")


@dataclass(frozen=True, eq=False)
class Lookup:
    """Where are these values?"""

    request_id: int
    tenant: int
    flags: int
    ids: Ids

    def encode(self) -> bytes:
        return _head(KeyedOpcode.LOOKUP, self) + _request.pack(self.tenant, self.flags, len(self.ids)) + self.ids.tobytes()


@dataclass(frozen=True, eq=False)
class LookupResult:
    request_id: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        return _head(KeyedOpcode.LOOKUP_RESULT, self) + _items(self.items, LOOKUP_ITEM)


@dataclass(frozen=True, eq=False)
class Get:
    """A LOOKUP that says where each value goes (GET_ITEM): what is in memory and fits may be written there before the answer."""

    request_id: int
    tenant: int
    flags: int
    stag: int
    items: NDArray[Any]

    @property
    def ids(self) -> Ids:
        return np.ascontiguousarray(self.items["id"])

    def encode(self) -> bytes:
        items = np.ascontiguousarray(self.items, GET_ITEM)
        return _head(KeyedOpcode.GET, self) + _get.pack(self.tenant, self.flags, len(items), self.stag, 0) + items.tobytes()


@dataclass(frozen=True, eq=False)
class GetResult:
    request_id: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        return _head(KeyedOpcode.GET_RESULT, self) + _items(self.items, LOOKUP_ITEM)


@dataclass(frozen=True, eq=False)
class Publish:
    """Give blocks to the store, under these ids."""

    request_id: int
    tenant: int
    flags: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        items = np.ascontiguousarray(self.items, PUBLISH_ITEM)
        return _head(KeyedOpcode.PUBLISH, self) + _request.pack(self.tenant, self.flags, len(items)) + items.tobytes()


@dataclass(frozen=True, eq=False)
class PublishResult:
    request_id: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        return _head(KeyedOpcode.PUBLISH_RESULT, self) + _items(self.items, PUBLISH_RESULT)


@dataclass(frozen=True, eq=False)
class Remove:
    """Forget values; the COMPLETION's Data Length says how many were there."""

    request_id: int
    tenant: int
    ids: Ids

    def encode(self) -> bytes:
        return _head(KeyedOpcode.REMOVE, self) + _remove.pack(self.tenant, len(self.ids)) + self.ids.tobytes()


@dataclass(frozen=True, eq=False)
class Pin:
    """Keep blocks of the store for `lease_ms`, or let them go; zero is the target's default."""

    request_id: int
    flags: int
    lease_ms: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        items = np.ascontiguousarray(self.items, PIN_ITEM)
        return _head(KeyedOpcode.PIN, self) + _pin.pack(self.flags, self.lease_ms, len(items)) + items.tobytes()


@dataclass(frozen=True, eq=False)
class PinResult:
    request_id: int
    statuses: NDArray[Any]

    def encode(self) -> bytes:
        return _head(KeyedOpcode.PIN_RESULT, self) + _items(self.statuses, _STATUS)


@dataclass(frozen=True)
class LoadRange(Load):
    """As LOAD, of `length` octets at `offset` of the value; length zero is the rest, and an oversized one is cut."""

    offset: int = 0
    length: int = 0

    def encode(self) -> bytes:
        head = Header(KeyedOpcode.LOAD_RANGE, self.request_id, self.handle, self.generation).encode()
        return head + _range.pack(self.offset, self.length) + self.data.encode()


@dataclass(frozen=True)
class SetNamespace:
    """What this session publishes from now on belongs to `namespace` (an id) and is forgotten after `ttl_s`; zero is never."""

    request_id: int
    tenant: int
    namespace: int
    ttl_s: int = 0

    def encode(self) -> bytes:
        return _head(KeyedOpcode.NAMESPACE, self) + _namespace.pack(self.tenant, self.namespace, self.ttl_s, 0)


@dataclass(frozen=True)
class RemoveNamespace:
    """Forget all values of a namespace; the COMPLETION's Data Length says how many were there."""

    request_id: int
    tenant: int
    namespace: int

    def encode(self) -> bytes:
        return _head(KeyedOpcode.REMOVE_NAMESPACE, self) + _remove_namespace.pack(self.tenant, self.namespace)


@dataclass(frozen=True)
class List:
    """Up to `limit` values of a namespace, or of the tenant's all, from `cursor` on; the first cursor is zero."""

    request_id: int
    tenant: int
    namespace: int
    cursor: int
    limit: int

    def encode(self) -> bytes:
        return _head(KeyedOpcode.LIST, self) + _list.pack(self.tenant, self.namespace, self.cursor, self.limit)


@dataclass(frozen=True, eq=False)
class ListResult:
    """`cursor` is where to go on, zero at the end. A page may have fewer values than wanted, even none, and yet not be the last."""

    request_id: int
    cursor: int
    items: NDArray[Any]

    def encode(self) -> bytes:
        items = np.ascontiguousarray(self.items, LIST_ITEM)
        return _head(KeyedOpcode.LIST_RESULT, self) + _cursor.pack(self.cursor, len(items)) + items.tobytes()


KeyedRequest: TypeAlias = Lookup | Get | Publish | Remove | Pin | LoadRange | SetNamespace | RemoveNamespace | List
KeyedAnswer: TypeAlias = LookupResult | GetResult | PublishResult | PinResult | ListResult

LOOKUP_FIXED_BYTES: Final = HEADER_BYTES + _request.size
PUBLISH_FIXED_BYTES: Final = HEADER_BYTES + _request.size
REMOVE_FIXED_BYTES: Final = HEADER_BYTES + _remove.size
PIN_FIXED_BYTES: Final = HEADER_BYTES + _pin.size
LIST_RESULT_FIXED_BYTES: Final = HEADER_BYTES + _cursor.size

_SIZES: Final = {
    KeyedOpcode.LOOKUP: (LOOKUP_FIXED_BYTES, ID_BYTES),
    KeyedOpcode.GET: (HEADER_BYTES + _get.size, GET_ITEM.itemsize),
    KeyedOpcode.PUBLISH: (PUBLISH_FIXED_BYTES, PUBLISH_ITEM.itemsize),
    KeyedOpcode.REMOVE: (REMOVE_FIXED_BYTES, ID_BYTES),
    KeyedOpcode.PIN: (PIN_FIXED_BYTES, PIN_ITEM.itemsize),
    KeyedOpcode.LIST: (LIST_RESULT_FIXED_BYTES, LIST_ITEM.itemsize),  # bound by its answer
}


def message_limit(inline_bytes: int) -> int:
    """The longest keyed message of a session that was granted this inline length."""
    return max(inline_bytes + MESSAGE_SPARE_BYTES, MESSAGE_LEAST_BYTES)


@cache
def items_limit(opcode: KeyedOpcode, inline_bytes: int) -> int:
    """How many items one message of that kind, and its answer, may have."""
    fixed, size = _SIZES[opcode]
    return (message_limit(inline_bytes) - fixed) // size


def is_keyed(opcode: int) -> bool:
    return FIRST_KEYED <= opcode <= 0x9F


def parse_keyed(data: bytes) -> KeyedRequest:
    """The request that `data` is, whole; its header is known to be there. Raises Malformed for anything else."""
    header = Header.of_prefix(data)
    parser = _REQUESTS.get(header.opcode)
    if parser is None:
        raise Malformed(f"no request has opcode {header.opcode:#04x}")
    return parser(_checked(header), data)


def parse_keyed_answer(data: bytes) -> KeyedAnswer:
    """The answer that `data` is, whole. Raises Malformed for anything else."""
    header = Header.of_prefix(data)
    parser = _ANSWERS.get(header.opcode)
    if parser is None or len(data) < HEADER_BYTES:
        raise Malformed(f"no answer has opcode {header.opcode:#04x} and {len(data)} octets")
    return parser(_checked(header), data)


# Inside ------------------------------------------------------------------------------------------------------------------


def _head(opcode: KeyedOpcode, message: Any) -> bytes:
    return Header(opcode, message.request_id).encode()


def _items(items: NDArray[Any], kind: np.dtype[Any]) -> bytes:
    octets = np.ascontiguousarray(items, kind)
    return _count.pack(len(octets)) + octets.tobytes()


def _checked(header: Header) -> Header:
    if header.version != VERSION or header.flags:
        raise Malformed(f"opcode {header.opcode:#04x} of version {header.version} with flags {header.flags:#06x}")
    return header


def _fixed(header: Header, data: bytes, layout: struct.Struct) -> tuple[Any, ...]:
    if len(data) < HEADER_BYTES + layout.size:
        raise Malformed(f"{KeyedOpcode(header.opcode).name} of {len(data)} octets is shorter than its fixed part")
    return layout.unpack_from(data, HEADER_BYTES)


def _whole(header: Header, data: bytes, layout: struct.Struct) -> tuple[Any, ...]:
    fields = _fixed(header, data, layout)
    if len(data) != HEADER_BYTES + layout.size:
        raise Malformed(f"{KeyedOpcode(header.opcode).name} of {len(data)} octets, expected {HEADER_BYTES + layout.size}")
    return fields


def _counted(header: Header, data: bytes, fixed: int, count: int, kind: np.dtype[Any]) -> NDArray[Any]:
    start = HEADER_BYTES + fixed
    if len(data) != start + count * kind.itemsize:
        name = KeyedOpcode(header.opcode).name
        raise Malformed(f"{name} of {len(data)} octets, expected {start + count * kind.itemsize} for {count} items")
    return np.frombuffer(data, kind, count, start) if count else np.zeros(0, kind)


def _ids(header: Header, data: bytes, fixed: int, count: int) -> Ids:
    return _counted(header, data, fixed, count, np.dtype(f"V{ID_BYTES}")).view(np.uint8).reshape(-1, ID_BYTES)


def _defined(header: Header, flags: int, known: type[IntFlag]) -> int:
    if flags & ~sum(known):
        raise Malformed(f"{KeyedOpcode(header.opcode).name} with undefined flags {flags:#x}")
    return flags


def _tiered(header: Header, items: NDArray[Any]) -> NDArray[Any]:
    if np.count_nonzero(items["tier"] > max(Tier)):
        raise Malformed(f"{KeyedOpcode(header.opcode).name} with a value in tier {items['tier'].max()}, which there is not")
    return items


def _parse_lookup(header: Header, data: bytes) -> Lookup:
    tenant, flags, count = _fixed(header, data, _request)
    return Lookup(header.request_id, tenant, _defined(header, flags, LookupFlag), _ids(header, data, _request.size, count))


def _parse_get(header: Header, data: bytes) -> Get:
    tenant, flags, count, stag, _ = _fixed(header, data, _get)
    if flags & LookupFlag.PREFIX:
        raise Malformed("GET with PREFIX")
    return Get(header.request_id, tenant, _defined(header, flags, LookupFlag), stag, _counted(header, data, _get.size, count, GET_ITEM))


def _parse_publish(header: Header, data: bytes) -> Publish:
    tenant, flags, count = _fixed(header, data, _request)
    items = _counted(header, data, _request.size, count, PUBLISH_ITEM)
    return Publish(header.request_id, tenant, _defined(header, flags, PublishFlag), items)


def _parse_remove(header: Header, data: bytes) -> Remove:
    tenant, count = _fixed(header, data, _remove)
    return Remove(header.request_id, tenant, _ids(header, data, _remove.size, count))


def _parse_pin(header: Header, data: bytes) -> Pin:
    flags, lease_ms, count = _fixed(header, data, _pin)
    items = _counted(header, data, _pin.size, count, PIN_ITEM)
    return Pin(header.request_id, _defined(header, flags, PinFlag), lease_ms, items)


def _parse_load_range(header: Header, data: bytes) -> LoadRange:
    if len(data) != HEADER_BYTES + _range.size + DESCRIPTOR_BYTES:
        raise Malformed(f"LOAD_RANGE of {len(data)} octets, expected {HEADER_BYTES + _range.size + DESCRIPTOR_BYTES}")
    offset, length = _range.unpack_from(data, HEADER_BYTES)
    descriptor = DataDescriptor(*_descriptor.unpack_from(data, HEADER_BYTES + _range.size))
    return LoadRange(header.request_id, header.handle, header.generation, descriptor, offset=offset, length=length)


def _parse_namespace(header: Header, data: bytes) -> SetNamespace:
    tenant, namespace, ttl_s, _ = _whole(header, data, _namespace)
    return SetNamespace(header.request_id, tenant, namespace, ttl_s)


def _parse_remove_namespace(header: Header, data: bytes) -> RemoveNamespace:
    return RemoveNamespace(header.request_id, *_whole(header, data, _remove_namespace))


def _parse_list(header: Header, data: bytes) -> List:
    return List(header.request_id, *_whole(header, data, _list))


def _parse_lookup_result(header: Header, data: bytes) -> LookupResult:
    (count,) = _fixed(header, data, _count)
    return LookupResult(header.request_id, _tiered(header, _counted(header, data, _count.size, count, LOOKUP_ITEM)))


def _parse_get_result(header: Header, data: bytes) -> GetResult:
    (count,) = _fixed(header, data, _count)
    return GetResult(header.request_id, _counted(header, data, _count.size, count, LOOKUP_ITEM))


def _parse_publish_result(header: Header, data: bytes) -> PublishResult:
    (count,) = _fixed(header, data, _count)
    return PublishResult(header.request_id, _counted(header, data, _count.size, count, PUBLISH_RESULT))


def _parse_pin_result(header: Header, data: bytes) -> PinResult:
    (count,) = _fixed(header, data, _count)
    return PinResult(header.request_id, _counted(header, data, _count.size, count, _STATUS))


def _parse_list_result(header: Header, data: bytes) -> ListResult:
    cursor, count = _fixed(header, data, _cursor)
    return ListResult(header.request_id, cursor, _tiered(header, _counted(header, data, _cursor.size, count, LIST_ITEM)))


_REQUESTS: Final[dict[int, Callable[[Header, bytes], KeyedRequest]]] = {
    KeyedOpcode.LOOKUP: _parse_lookup,
    KeyedOpcode.GET: _parse_get,
    KeyedOpcode.PUBLISH: _parse_publish,
    KeyedOpcode.REMOVE: _parse_remove,
    KeyedOpcode.PIN: _parse_pin,
    KeyedOpcode.LOAD_RANGE: _parse_load_range,
    KeyedOpcode.NAMESPACE: _parse_namespace,
    KeyedOpcode.REMOVE_NAMESPACE: _parse_remove_namespace,
    KeyedOpcode.LIST: _parse_list,
}
_ANSWERS: Final[dict[int, Callable[[Header, bytes], KeyedAnswer]]] = {
    KeyedOpcode.LOOKUP_RESULT: _parse_lookup_result,
    KeyedOpcode.GET_RESULT: _parse_get_result,
    KeyedOpcode.PUBLISH_RESULT: _parse_publish_result,
    KeyedOpcode.PIN_RESULT: _parse_pin_result,
    KeyedOpcode.LIST_RESULT: _parse_list_result,
}
