"""Octets of MPA, DDP and RDMAP, written apart from the product: the oracle of the software RNIC's tests.

Three rules:
1. Nothing here imports the product, so that an error has to be made twice to go unseen.
2. Every field can be set, right or wrong: a test that needs a broken frame builds it by naming the field.
3. What is decoded and encoded again gives the same octets.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

REQUEST_KEY = b"MPA ID Req Frame"
REPLY_KEY = b"MPA ID Rep Frame"
ALL_ONES = (1 << 64) - 1


class WireError(Exception):
    """Octets that are no valid frame."""


class Opcode(IntEnum):
    WRITE = 0
    READ_REQUEST = 1
    READ_RESPONSE = 2
    SEND = 3
    SEND_INVALIDATE = 4
    SEND_SE = 5
    SEND_SE_INVALIDATE = 6
    TERMINATE = 7
    IMMEDIATE = 8
    IMMEDIATE_SE = 9
    ATOMIC_REQUEST = 10
    ATOMIC_RESPONSE = 11


QUEUE_OF: dict[int, int] = {
    Opcode.READ_REQUEST: 1,
    Opcode.ATOMIC_REQUEST: 1,
    Opcode.TERMINATE: 2,
    Opcode.ATOMIC_RESPONSE: 3,
}
"""Queue numbers of untagged messages; all others go to queue 0."""


# CRC-32C and framing ----------------------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for octet in range(256):
        for _ in range(8):
            octet = octet >> 1 ^ (0x82F63B78 if octet & 1 else 0)
        table.append(octet)
    return table


_TABLE = _crc_table()


def crc32c(octets: bytes) -> int:
    """The Castagnoli CRC as MPA and iSCSI use it."""
    crc, table = 0xFFFFFFFF, _TABLE
    for octet in octets:
        crc = crc >> 8 ^ table[(crc ^ octet) & 0xFF]
    return crc ^ 0xFFFFFFFF


def crc_field(octets: bytes) -> bytes:
    """The CRC as it stands on the wire: least significant octet first."""
    return struct.pack("<I", crc32c(octets))


def pad_bytes(ulpdu_bytes: int) -> int:
    return -(2 + ulpdu_bytes) % 4


def frame(ulpdu: bytes) -> bytes:
    """One FPDU without markers."""
    covered = struct.pack(">H", len(ulpdu)) + ulpdu + bytes(pad_bytes(len(ulpdu)))
    return covered + crc_field(covered)


def unframe(octets: bytes) -> bytes:
    """The ULPDU of one whole FPDU without markers."""
    (length,) = struct.unpack_from(">H", octets)
    covered = octets[:-4]
    if len(octets) != 6 + length + pad_bytes(length):
        raise WireError(f"an FPDU of {len(octets)} octets says that its ULPDU has {length}")
    if octets[-4:] != crc_field(covered):
        raise WireError(f"CRC field {octets[-4:].hex()}, expected {crc_field(covered).hex()}")
    if any(covered[2 + length :]):
        raise WireError(f"pad octets {covered[2 + length :].hex()} are not zero")
    return octets[2 : 2 + length]


# MPA start-up -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Enhanced:
    """The four octets of RFC 6581: flags A, B, C, D and the read depths."""

    ird: int
    ord: int
    is_peer_to_peer: bool = False
    offers_send: bool = False
    offers_write: bool = False
    offers_read: bool = False

    def encode(self) -> bytes:
        first = self.is_peer_to_peer << 15 | self.offers_send << 14 | self.ird
        second = self.offers_write << 15 | self.offers_read << 14 | self.ord
        return struct.pack(">HH", first, second)

    @classmethod
    def decode(cls, octets: bytes) -> Enhanced:
        first, second = struct.unpack(">HH", octets)
        return cls(
            ird=first & 0x3FFF,
            ord=second & 0x3FFF,
            is_peer_to_peer=bool(first & 0x8000),
            offers_send=bool(first & 0x4000),
            offers_write=bool(second & 0x8000),
            offers_read=bool(second & 0x4000),
        )


@dataclass(frozen=True)
class StartUp:
    """A Request or Reply frame; `private_data` is what remains after the enhanced octets."""

    is_reply: bool = False
    enhanced: Enhanced | None = Enhanced(16, 16)
    private_data: bytes = b""
    revision: int = 2
    wants_markers: bool = False
    wants_crc: bool = True
    is_rejected: bool = False
    key: bytes | None = None
    stated_bytes: int | None = None

    def encode(self) -> bytes:
        key = self.key or (REPLY_KEY if self.is_reply else REQUEST_KEY)
        flags = self.wants_markers << 7 | self.wants_crc << 6 | self.is_rejected << 5 | (self.enhanced is not None) << 4
        data = (self.enhanced.encode() if self.enhanced else b"") + self.private_data
        stated = len(data) if self.stated_bytes is None else self.stated_bytes
        return key + struct.pack(">BBH", flags, self.revision, stated) + data

    @classmethod
    def decode(cls, octets: bytes) -> StartUp:
        key, (flags, revision, length) = octets[:16], struct.unpack_from(">BBH", octets, 16)
        if key not in (REQUEST_KEY, REPLY_KEY):
            raise WireError(f"start-up key {key!r}")
        if flags & 0x0F or length != len(octets) - 20:
            raise WireError(f"start-up flags {flags:#x}, length {length} with {len(octets) - 20} octets of data")
        data = octets[20:]
        return cls(
            is_reply=key == REPLY_KEY,
            enhanced=Enhanced.decode(data[:4]) if flags & 0x10 else None,
            private_data=data[4:] if flags & 0x10 else data,
            revision=revision,
            wants_markers=bool(flags & 0x80),
            wants_crc=bool(flags & 0x40),
            is_rejected=bool(flags & 0x20),
        )


# DDP segments -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tagged:
    """A tagged DDP segment; `is_tagged` False writes the T bit wrong."""

    opcode: int
    stag: int
    offset: int
    payload: bytes = b""
    is_last: bool = True
    ddp_version: int = 1
    rdmap_version: int = 1
    is_tagged: bool = True

    def header(self) -> bytes:
        control = self.is_tagged << 7 | self.is_last << 6 | self.ddp_version
        return struct.pack(">BBIQ", control, self.rdmap_version << 6 | self.opcode, self.stag, self.offset)

    def ulpdu(self) -> bytes:
        return self.header() + self.payload

    def frame(self) -> bytes:
        return frame(self.ulpdu())


@dataclass(frozen=True)
class Untagged:
    """An untagged DDP segment; `queue` None takes the queue of the opcode, `is_tagged` True writes the T bit wrong."""

    opcode: int
    msn: int = 1
    payload: bytes = b""
    offset: int = 0
    invalidate_stag: int = 0
    is_last: bool = True
    queue: int | None = None
    ddp_version: int = 1
    rdmap_version: int = 1
    is_tagged: bool = False

    def header(self) -> bytes:
        control = self.is_tagged << 7 | self.is_last << 6 | self.ddp_version
        queue = QUEUE_OF.get(self.opcode, 0) if self.queue is None else self.queue
        rdmap = self.rdmap_version << 6 | self.opcode
        return struct.pack(">BBIIII", control, rdmap, self.invalidate_stag, queue, self.msn, self.offset)

    def ulpdu(self) -> bytes:
        return self.header() + self.payload

    def frame(self) -> bytes:
        return frame(self.ulpdu())


Segment = Tagged | Untagged


def decode_segment(ulpdu: bytes) -> Segment:
    """The fields of a ULPDU whose versions are right and whose reserved bits are zero."""
    ddp, rdmap = ulpdu[0], ulpdu[1]
    if ddp & 0x3F != 1 or rdmap & 0xF0 != 0x40:
        raise WireError(f"control octets {ddp:#04x} {rdmap:#04x}")
    opcode, is_last = rdmap & 0x0F, bool(ddp & 0x40)
    if ddp & 0x80:
        stag, offset = struct.unpack_from(">IQ", ulpdu, 2)
        return Tagged(opcode, stag, offset, ulpdu[14:], is_last)
    stag, queue, msn, message_offset = struct.unpack_from(">IIII", ulpdu, 2)
    if queue != QUEUE_OF.get(opcode, 0):
        raise WireError(f"opcode {opcode} on queue {queue}")
    return Untagged(opcode, msn, ulpdu[18:], message_offset, stag, is_last)


# RDMAP headers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadRequest:
    """Data sink, size and data source of an RDMA Read."""

    sink_stag: int
    sink_offset: int
    length: int
    source_stag: int
    source_offset: int

    def encode(self) -> bytes:
        return struct.pack(">IQIIQ", self.sink_stag, self.sink_offset, self.length, self.source_stag, self.source_offset)

    @classmethod
    def decode(cls, octets: bytes) -> ReadRequest:
        return cls(*struct.unpack(">IQIIQ", octets))

    def segment(self, msn: int = 1) -> Untagged:
        return Untagged(Opcode.READ_REQUEST, msn, self.encode())


@dataclass(frozen=True)
class AtomicRequest:
    """FetchAdd (operation 0) or CmpSwap (operation 2), RFC 7306."""

    operation: int
    identifier: int
    stag: int
    offset: int
    data: int
    mask: int = 0
    compare: int = 0
    compare_mask: int = ALL_ONES

    def encode(self) -> bytes:
        words = (self.operation, self.identifier, self.stag, self.offset)
        return struct.pack(">IIIQQQQQ", *words, self.data, self.mask, self.compare, self.compare_mask)

    @classmethod
    def decode(cls, octets: bytes) -> AtomicRequest:
        return cls(*struct.unpack(">IIIQQQQQ", octets))

    def segment(self, msn: int = 1) -> Untagged:
        return Untagged(Opcode.ATOMIC_REQUEST, msn, self.encode())


@dataclass(frozen=True)
class AtomicResponse:
    identifier: int
    value: int

    def encode(self) -> bytes:
        return struct.pack(">IQ", self.identifier, self.value)

    @classmethod
    def decode(cls, octets: bytes) -> AtomicResponse:
        return cls(*struct.unpack(">IQ", octets))

    def segment(self, msn: int = 1) -> Untagged:
        return Untagged(Opcode.ATOMIC_RESPONSE, msn, self.encode())


@dataclass(frozen=True)
class Terminate:
    """A Terminate: `segment_length` None clears M, an empty header clears its bit D or R."""

    layer: int
    kind: int
    code: int
    segment_length: int | None = None
    ddp_header: bytes = b""
    rdma_header: bytes = b""

    @classmethod
    def about(cls, culprit: Segment, layer: int, kind: int, code: int, *, with_rdma: bool = False) -> Terminate:
        """What must be said of `culprit`: the length handed up by DDP and its headers as they came."""
        return cls(layer, kind, code, len(culprit.ulpdu()), culprit.header(), culprit.payload[:28] if with_rdma else b"")

    def encode(self) -> bytes:
        flags = (self.segment_length is not None) << 15 | bool(self.ddp_header) << 14 | bool(self.rdma_header) << 13
        octets = struct.pack(">BBH", self.layer << 4 | self.kind, self.code, flags)
        if self.ddp_header:
            octets += struct.pack(">H", self.segment_length or 0) + self.ddp_header
        return octets + self.rdma_header

    @classmethod
    def decode(cls, octets: bytes) -> Terminate:
        kind, code, flags = struct.unpack_from(">BBH", octets)
        has_length, has_ddp, has_rdma = (bool(flags >> bit & 1) for bit in (15, 14, 13))
        if flags & 0x1FFF or len(octets) > 4 and not has_ddp:
            raise WireError(f"Terminate control {flags:#06x} with {len(octets)} octets")
        ddp_bytes = (14 if octets[6] & 0x80 else 18) if has_ddp else 0
        end = 6 + ddp_bytes if has_ddp else 4
        if len(octets) != end + (28 if has_rdma else 0):
            raise WireError(f"Terminate control {flags:#06x} with {len(octets)} octets")
        length = struct.unpack_from(">H", octets, 4)[0] if has_length and has_ddp else None
        return cls(kind >> 4, kind & 0x0F, code, length, octets[6:end] if has_ddp else b"", octets[end:])

    def segment(self) -> Untagged:
        return Untagged(Opcode.TERMINATE, 1, self.encode())


# Short names for the messages that tests send most ----------------------------------------------------------------


def send(payload: bytes, msn: int = 1) -> Untagged:
    return Untagged(Opcode.SEND, msn, payload)


def write(stag: int, offset: int, payload: bytes) -> Tagged:
    return Tagged(Opcode.WRITE, stag, offset, payload)


def read_response(stag: int, offset: int, payload: bytes, *, is_last: bool = True) -> Tagged:
    return Tagged(Opcode.READ_RESPONSE, stag, offset, payload, is_last)
