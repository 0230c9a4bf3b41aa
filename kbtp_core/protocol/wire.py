"""Messages of KBTP as octets (draft section 5, completion page "Sizes" and "Opcodes").

Two ways in and out, over the same formats:
1. One message: `parse` gives a frozen dataclass, `encode` gives octets. `parse` is exact: for any octets it returns a message `m` with
   `parse(m.encode()) == m`, or raises `errors.Malformed` and nothing else. Reserved fields are dropped on receipt.
2. Many messages: the big-endian dtypes below, so that thousands of requests or completions are a few NumPy calls.

An opcode or a version that this module doesn't know becomes `Unknown`, so that it can be answered with its Request ID.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import Malformed
from kbtp_core.protocol.constants import (
    ALLOWED_FLAGS,
    BIND_BYTES,
    COMPLETION_BYTES,
    DESCRIPTOR_BYTES,
    HEADER_BYTES,
    RECORD_BYTES,
    REQUEST_BYTES,
    VERSION,
    Flag,
    Opcode,
)
from kbtp_core.protocol.hello import Hello, HelloAck

_HEADER_FIELDS: Final[list[tuple[str, str]]] = [
    ("version", "u1"),
    ("opcode", "u1"),
    ("flags", ">u2"),
    ("request_id", ">u8"),
    ("handle", ">u8"),
    ("generation", ">u2"),
    ("status", ">u2"),
]
HEADER: Final = np.dtype(_HEADER_FIELDS)
"""The common header, 24 octets."""

REQUEST: Final = np.dtype([*_HEADER_FIELDS, ("stag", ">u4"), ("offset", ">u8"), ("length", ">u4")])
"""LOAD, STORE and ALLOC_STORE with their Data Descriptor, 40 octets."""

BIND: Final = np.dtype([*_HEADER_FIELDS, ("ticket", ">u4"), ("data_length", ">u4"), ("block_offset", ">u8")])
"""BIND, 40 octets."""

COMPLETION: Final = np.dtype([*_HEADER_FIELDS, ("data_length", ">u4"), ("checksum", ">u4"), ("block_offset", ">u8")])
"""COMPLETION, 40 octets. `checksum` is reserved unless CHECKSUM was granted."""

RECORD: Final = np.dtype([("request_id", ">u8"), ("status", ">u2"), ("generation", ">u2"), ("data_length", ">u4"), ("block_offset", ">u8")])
"""A completion record, 24 octets (draft section 6.5)."""

_header = struct.Struct(">BBHQQHH")
_descriptor = struct.Struct(">IQI")
_INLINE, _RECORD, _INVALIDATE = int(Flag.INLINE), int(Flag.RECORD), int(Flag.INVALIDATE)  # plain numbers are far quicker than flags
_STORE = int(Opcode.STORE)
_ALLOWED = {int(opcode): int(flags) for opcode, flags in ALLOWED_FLAGS.items()}
_COMPLETION_WORD: Final = np.frombuffer(bytes([VERSION, Opcode.COMPLETION, 0, 0]), np.uint32)[0]  # version, opcode and no flags
_record_fields = struct.Struct(">QHHIQ")
_tail = struct.Struct(">IIQ")  # COMPLETION and BIND share this shape


@dataclass(frozen=True)
class Header:
    """The common header, 24 octets."""

    opcode: int
    request_id: int
    handle: int = 0
    generation: int = 0
    flags: int = 0
    status: int = 0
    version: int = VERSION

    def encode(self) -> bytes:
        return _header.pack(self.version, self.opcode, self.flags, self.request_id, self.handle, self.generation, self.status)

    @classmethod
    def of_prefix(cls, data: bytes) -> Header:
        """The header at the start of `data`; octets that are missing count as zero. For answers to malformed messages."""
        version, opcode, flags, request_id, handle, generation, status = _header.unpack(data[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"))
        return cls(opcode, request_id, handle, generation, flags, status, version)


@dataclass(frozen=True)
class DataDescriptor:
    """A buffer of the initiator: `length` octets at `offset` of `stag`."""

    stag: int
    offset: int
    length: int

    def encode(self) -> bytes:
        return _descriptor.pack(self.stag, self.offset, self.length)


@dataclass(frozen=True)
class CompletionDescriptor:
    """Where a completion record goes: 24 octets at `offset` of `stag`."""

    stag: int
    offset: int

    def encode(self) -> bytes:
        return _descriptor.pack(self.stag, self.offset, 0)


@dataclass(frozen=True)
class Load:
    """Write the block of `handle` into `data`. `generation` zero accepts any."""

    request_id: int
    handle: int
    generation: int
    data: DataDescriptor
    flags: int = 0
    record: CompletionDescriptor | None = None

    def encode(self) -> bytes:
        return _encode_request(Opcode.LOAD, self, self.data.encode() + _record(self))


@dataclass(frozen=True)
class Store:
    """Write into the block that `handle` is bound to; with INLINE the octets are `inline` and `data` names only their length."""

    request_id: int
    handle: int
    generation: int
    data: DataDescriptor
    flags: int = 0
    record: CompletionDescriptor | None = None
    inline: bytes = b""

    def encode(self) -> bytes:
        return _encode_request(Opcode.STORE, self, self.data.encode() + _record(self) + self.inline)


@dataclass(frozen=True)
class AllocStore(Store):
    """As Store, into a block that the target takes from its ring and binds to `handle`."""

    def encode(self) -> bytes:
        return _encode_request(Opcode.ALLOC_STORE, self, self.data.encode() + _record(self) + self.inline)


@dataclass(frozen=True)
class Free:
    """Unbind `handle` and give its block back."""

    request_id: int
    handle: int
    generation: int
    flags: int = 0
    record: CompletionDescriptor | None = None

    def encode(self) -> bytes:
        return _encode_request(Opcode.FREE, self, _record(self))


@dataclass(frozen=True)
class Bind:
    """Bind the block of a ticket that the initiator took itself (DIRECT_ALLOC)."""

    request_id: int
    handle: int
    generation: int
    ticket: int
    data_length: int
    block_offset: int
    flags: int = 0

    def encode(self) -> bytes:
        return _encode_request(Opcode.BIND, self, _tail.pack(self.ticket, self.data_length, self.block_offset))


@dataclass(frozen=True)
class Completion:
    """The answer to a request. `generation` is the entry's current one, or zero where the handle has no entry."""

    request_id: int
    handle: int
    generation: int
    status: int
    data_length: int = 0
    block_offset: int = 0
    checksum: int = 0

    def encode(self) -> bytes:
        head = _header.pack(VERSION, Opcode.COMPLETION, 0, self.request_id, self.handle, self.generation, self.status)
        return head + _tail.pack(self.data_length, self.checksum, self.block_offset)


@dataclass(frozen=True)
class Goodbye:
    """No new request follows; `status` says why."""

    request_id: int = 0
    status: int = 0

    def encode(self) -> bytes:
        return Header(Opcode.GOODBYE, self.request_id, status=self.status).encode()


@dataclass(frozen=True)
class Unknown:
    """A message of an opcode or a version that is not known here; `body` is what follows its header."""

    header: Header
    body: bytes = b""

    def encode(self) -> bytes:
        return self.header.encode() + self.body


Request: TypeAlias = Load | Store | AllocStore | Free | Bind
Message: TypeAlias = Hello | HelloAck | Load | Store | AllocStore | Free | Bind | Completion | Goodbye | Unknown


def _record(message: Load | Store | Free) -> bytes:
    return b"" if message.record is None else message.record.encode()


def _encode_request(opcode: Opcode, message: Request, body: bytes) -> bytes:
    if not isinstance(message, Bind) and bool(message.flags & _RECORD) != (message.record is not None):
        raise ValueError(f"{opcode.name} {message.request_id}: the RECORD flag and a completion descriptor go together")
    return _header.pack(VERSION, opcode, message.flags, message.request_id, message.handle, message.generation, 0) + body


def parse(data: bytes) -> Message:
    """The message that `data` is, whole. Raises Malformed for anything else."""
    if len(data) < HEADER_BYTES:
        raise Malformed(f"a message of {len(data)} octets is shorter than the header of {HEADER_BYTES}")
    header = Header.of_prefix(data)
    parser = _PARSERS.get(header.opcode)
    if parser is None or header.version != VERSION:
        return Unknown(header, bytes(data[HEADER_BYTES:]))
    undefined = header.flags & ~_ALLOWED.get(header.opcode, 0)
    if undefined:
        raise Malformed(f"{Opcode(header.opcode).name} with undefined flags {undefined:#06x}")
    return parser(header, bytes(data))


def _expect_length(header: Header, data: bytes, length: int) -> None:
    if len(data) != length:
        raise Malformed(f"{Opcode(header.opcode).name} of {len(data)} octets, expected {length}")


def _parse_record(header: Header, data: bytes, at: int) -> tuple[CompletionDescriptor | None, int]:
    """The Completion Descriptor at `at` if the flags say that there is one, and where the message goes on."""
    if not header.flags & _RECORD:
        return None, at
    if len(data) < at + DESCRIPTOR_BYTES:
        raise Malformed(f"{Opcode(header.opcode).name} of {len(data)} octets has no room for its completion descriptor")
    stag, offset, _ = _descriptor.unpack_from(data, at)
    return CompletionDescriptor(stag, offset), at + DESCRIPTOR_BYTES


def _parse_data(header: Header, data: bytes) -> DataDescriptor:
    if len(data) < REQUEST_BYTES:
        raise Malformed(f"{Opcode(header.opcode).name} of {len(data)} octets is shorter than {REQUEST_BYTES}")
    return DataDescriptor(*_descriptor.unpack_from(data, HEADER_BYTES))


def _parse_load(header: Header, data: bytes) -> Load:
    descriptor = _parse_data(header, data)
    record, end = _parse_record(header, data, REQUEST_BYTES)
    _expect_length(header, data, end)
    return Load(header.request_id, header.handle, header.generation, descriptor, header.flags, record)


def _parse_store(header: Header, data: bytes) -> Store:
    descriptor = _parse_data(header, data)
    record, end = _parse_record(header, data, REQUEST_BYTES)
    inline = b""
    if header.flags & _INLINE:
        if header.flags & _INVALIDATE:
            raise Malformed("an inline store names no STag that INVALIDATE could mean")
        if descriptor.stag or descriptor.offset:
            raise Malformed("an inline store must have a zero STag and a zero Tagged Offset")
        inline = data[end:]
        if len(inline) != descriptor.length:
            raise Malformed(f"inline length {descriptor.length}, but {len(inline)} octets arrived")
    else:
        _expect_length(header, data, end)
    kind = Store if header.opcode == _STORE else AllocStore
    return kind(header.request_id, header.handle, header.generation, descriptor, header.flags, record, inline)


def _parse_free(header: Header, data: bytes) -> Free:
    record, end = _parse_record(header, data, HEADER_BYTES)
    _expect_length(header, data, end)
    return Free(header.request_id, header.handle, header.generation, header.flags, record)


def _parse_bind(header: Header, data: bytes) -> Bind:
    _expect_length(header, data, BIND_BYTES)
    ticket, data_length, block_offset = _tail.unpack_from(data, HEADER_BYTES)
    return Bind(header.request_id, header.handle, header.generation, ticket, data_length, block_offset, header.flags)


def _parse_completion(header: Header, data: bytes) -> Completion:
    _expect_length(header, data, COMPLETION_BYTES)
    data_length, checksum, block_offset = _tail.unpack_from(data, HEADER_BYTES)
    return Completion(header.request_id, header.handle, header.generation, header.status, data_length, block_offset, checksum)


def _parse_goodbye(header: Header, data: bytes) -> Goodbye:
    _expect_length(header, data, HEADER_BYTES)
    return Goodbye(header.request_id, header.status)


_PARSERS: Final[dict[int, Callable[[Header, bytes], Message]]] = {
    Opcode.HELLO: lambda header, data: Hello.decode(header.request_id, data),
    Opcode.HELLO_ACK: lambda header, data: HelloAck.decode(header.request_id, header.status, data),
    Opcode.LOAD: _parse_load,
    Opcode.STORE: _parse_store,
    Opcode.ALLOC_STORE: _parse_store,
    Opcode.FREE: _parse_free,
    Opcode.BIND: _parse_bind,
    Opcode.COMPLETION: _parse_completion,
    Opcode.GOODBYE: _parse_goodbye,
}


def encode_requests(
    opcode: Opcode,
    request_ids: NDArray[np.uint64],
    handles: NDArray[np.uint64],
    generations: NDArray[np.uint16] | int,
    stags: NDArray[np.uint32] | int,
    offsets: NDArray[np.uint64] | int,
    lengths: NDArray[np.uint32] | int,
    flags: int,
) -> NDArray[np.uint8]:
    """n requests with their Data Descriptors as (n, 40) octets; scalars stand for all n."""
    out = np.zeros(len(request_ids), REQUEST)
    out["version"], out["opcode"], out["flags"] = VERSION, opcode, flags
    out["request_id"], out["handle"], out["generation"] = request_ids, handles, generations
    out["stag"], out["offset"], out["length"] = stags, offsets, lengths
    return out.view(np.uint8).reshape(-1, REQUEST_BYTES)


def encode_frees(request_ids: NDArray[np.uint64], handles: NDArray[np.uint64], generations: NDArray[np.uint16] | int) -> NDArray[np.uint8]:
    """n FREE requests as (n, 24) octets."""
    out = np.zeros(len(request_ids), HEADER)
    out["version"], out["opcode"] = VERSION, Opcode.FREE
    out["request_id"], out["handle"], out["generation"] = request_ids, handles, generations
    return out.view(np.uint8).reshape(-1, HEADER_BYTES)


def encode_binds(
    request_ids: NDArray[np.uint64],
    handles: NDArray[np.uint64],
    generations: NDArray[np.uint16] | int,
    tickets: NDArray[np.uint32],
    lengths: NDArray[np.uint32] | int,
    block_offsets: NDArray[np.uint64],
    flags: int,
) -> NDArray[np.uint8]:
    """n BIND requests as (n, 40) octets."""
    out = np.zeros(len(request_ids), BIND)
    out["version"], out["opcode"], out["flags"] = VERSION, Opcode.BIND, flags
    out["request_id"], out["handle"], out["generation"] = request_ids, handles, generations
    out["ticket"], out["data_length"], out["block_offset"] = tickets, lengths, block_offsets
    return out.view(np.uint8).reshape(-1, BIND_BYTES)


def encode_record(completion: Completion) -> bytes:
    """The completion record that says what `completion` says (draft section 6.5)."""
    c = completion
    return _record_fields.pack(c.request_id, c.status, c.generation, c.data_length, c.block_offset)


def decode_records(raw: NDArray[np.uint8]) -> NDArray[Any]:
    """(n, 24) octets of completion records as an array of dtype COMPLETION; a record names no handle and has no checksum."""
    if raw.shape[1] != RECORD_BYTES:
        raise Malformed(f"completion records of {raw.shape[1]} octets, expected {RECORD_BYTES}")
    records = np.ascontiguousarray(raw).view(RECORD)[:, 0]
    out = np.zeros(len(records), COMPLETION)
    for name in ("request_id", "status", "generation", "data_length", "block_offset"):
        out[name] = records[name]
    return out


def decode_completions(raw: NDArray[np.uint8]) -> NDArray[Any]:
    """(n, 40) octets as an array of dtype COMPLETION. Raises Malformed if one of them is no COMPLETION."""
    octets = np.ascontiguousarray(raw)
    if octets.shape[1] != COMPLETION_BYTES:
        raise Malformed(f"messages of {octets.shape[1]} octets, expected {COMPLETION_BYTES}")
    wrong = octets.view(np.uint32)[:, 0] != _COMPLETION_WORD
    if np.count_nonzero(wrong):
        raise Malformed(f"message {int(np.flatnonzero(wrong)[0])} of {len(octets)} is no COMPLETION of version {VERSION}")
    return octets.view(COMPLETION)[:, 0]
