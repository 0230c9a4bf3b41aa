"""HELLO and HELLO_ACK: what a session agrees on (completion page, same names).

Both end in length-prefixed strings, the Proof last, so that everything before it can be proved (`auth`). A HELLO_ACK that
refuses has a zeroed body, but for the Nonce where the status is UNAUTHENTICATED.
"""

from __future__ import annotations

import struct
from dataclasses import astuple, dataclass, field
from typing import Final

from kbtp_core.errors import Malformed
from kbtp_core.protocol.constants import (
    HEADER_BYTES,
    HELLO_ACK_FIXED_BYTES,
    HELLO_FIXED_BYTES,
    NAME_LIMIT_BYTES,
    NONCE_BYTES,
    PROOF_BYTES,
    VERSION,
    Opcode,
    Status,
)

NO_NONCE: Final = bytes(NONCE_BYTES)

_header = struct.Struct(">BBHQQHH")
_hello = struct.Struct(">IIIIIIQ16s")
_ack = struct.Struct(">IIII QI QI II Q I IQ IQ I IQI IQ 16s")
_ACK_GRANTS: Final = (
    "capabilities",
    "block_bytes",
    "block_count",
    "quota",
    "handle_base",
    "handle_count",
    "table_base",
    "table_count",
    "outstanding",
    "inline_bytes",
    "incarnation",
)
assert _hello.size == HELLO_FIXED_BYTES
assert _ack.size == HELLO_ACK_FIXED_BYTES


@dataclass(frozen=True)
class Hello:
    """The initiator's wishes. Sizes are in octets, counts in blocks, handles or requests; `block_bytes` zero is the default pool."""

    request_id: int
    incarnation: int
    capabilities: int = 0
    block_bytes: int = 0
    quota: int = 0
    handle_count: int = 0
    outstanding: int = 0
    inline_bytes: int = 0
    nonce: bytes = NO_NONCE
    client_name: str = ""
    trust_domain: str = ""
    proof: bytes = b""

    def encode_unproved(self) -> bytes:
        """The message up to the Proof field: what a proof is made over."""
        fixed = _hello.pack(
            self.capabilities,
            self.block_bytes,
            self.quota,
            self.handle_count,
            self.outstanding,
            self.inline_bytes,
            self.incarnation,
            self.nonce,
        )
        head = _header.pack(VERSION, Opcode.HELLO, 0, self.request_id, 0, 0, 0)
        return head + fixed + _pack_string(self.client_name.encode()) + _pack_string(self.trust_domain.encode())

    def encode(self) -> bytes:
        return self.encode_unproved() + _pack_proof(self.proof)

    @classmethod
    def decode(cls, request_id: int, data: bytes) -> Hello:
        """Parse a whole message whose header is known to be a HELLO's. Raises Malformed."""
        if len(data) < HEADER_BYTES + HELLO_FIXED_BYTES:
            raise Malformed(f"HELLO of {len(data)} octets is shorter than its fixed part")
        capabilities, block_bytes, quota, handles, outstanding, inline_bytes, incarnation, nonce = _hello.unpack_from(data, HEADER_BYTES)
        if incarnation == 0:
            raise Malformed("HELLO with incarnation zero")
        client, at = _take_name(data, HEADER_BYTES + HELLO_FIXED_BYTES, "client name")
        domain, at = _take_name(data, at, "trust domain")
        proof = _take_proof(data, at)
        return cls(
            request_id, incarnation, capabilities, block_bytes, quota, handles, outstanding, inline_bytes, nonce, client, domain, proof
        )


@dataclass(frozen=True)
class DirectAccess:
    """What the direct modes need: STags with offsets, zero where not granted (completion page, HELLO_ACK)."""

    ticket_timeout_ms: int = 0
    table_stag: int = 0
    table_offset: int = 0
    pool_stag: int = 0
    pool_offset: int = 0
    partition_stag: int = 0
    ring_stag: int = 0
    ring_offset: int = 0
    ring_log2_slots: int = 0
    head_stag: int = 0
    head_offset: int = 0


@dataclass(frozen=True)
class HelloAck:
    """What the target grants. A `status` other than OK refuses, and everything else but `nonce` is then zero."""

    request_id: int
    status: int = Status.OK
    capabilities: int = 0
    block_bytes: int = 0
    block_count: int = 0
    quota: int = 0
    handle_base: int = 0
    handle_count: int = 0
    table_base: int = 0
    table_count: int = 0
    outstanding: int = 0
    inline_bytes: int = 0
    incarnation: int = 0
    direct: DirectAccess = field(default_factory=DirectAccess)
    nonce: bytes = NO_NONCE
    target_name: str = ""
    proof: bytes = b""

    def encode_unproved(self) -> bytes:
        """The message up to the Proof field: what a proof is made over."""
        grants = [getattr(self, name) for name in _ACK_GRANTS]
        fixed = _ack.pack(*grants, *astuple(self.direct), self.nonce)
        head = _header.pack(VERSION, Opcode.HELLO_ACK, 0, self.request_id, 0, 0, self.status)
        return head + fixed + _pack_string(self.target_name.encode())

    def encode(self) -> bytes:
        return self.encode_unproved() + _pack_proof(self.proof)

    @classmethod
    def decode(cls, request_id: int, status: int, data: bytes) -> HelloAck:
        """Parse a whole message whose header is known to be a HELLO_ACK's. Raises Malformed."""
        if len(data) < HEADER_BYTES + HELLO_ACK_FIXED_BYTES:
            raise Malformed(f"HELLO_ACK of {len(data)} octets is shorter than its fixed part")
        fields = _ack.unpack_from(data, HEADER_BYTES)
        name, at = _take_name(data, HEADER_BYTES + HELLO_ACK_FIXED_BYTES, "target name")
        proof = _take_proof(data, at)
        granted = dict(zip(_ACK_GRANTS, fields[: len(_ACK_GRANTS)], strict=True))
        direct = DirectAccess(*fields[len(_ACK_GRANTS) : -1])
        return cls(request_id, status, direct=direct, nonce=fields[-1], target_name=name, proof=proof, **granted)


def _pack_string(octets: bytes) -> bytes:
    if len(octets) > NAME_LIMIT_BYTES:
        raise ValueError(f"a name of {len(octets)} octets is longer than {NAME_LIMIT_BYTES}: {octets[:40]!r}...")
    return len(octets).to_bytes(2, "big") + octets


def _pack_proof(proof: bytes) -> bytes:
    if len(proof) not in (0, PROOF_BYTES):
        raise ValueError(f"a proof has 0 or {PROOF_BYTES} octets, not {len(proof)}")
    return len(proof).to_bytes(2, "big") + proof


def _take_octets(data: bytes, at: int, what: str) -> tuple[bytes, int]:
    if len(data) < at + 2:
        raise Malformed(f"the message ends before the length of its {what}")
    end = at + 2 + int.from_bytes(data[at : at + 2], "big")
    if len(data) < end:
        raise Malformed(f"the message ends inside its {what}")
    return data[at + 2 : end], end


def _take_name(data: bytes, at: int, what: str) -> tuple[str, int]:
    octets, end = _take_octets(data, at, what)
    if len(octets) > NAME_LIMIT_BYTES:
        raise Malformed(f"a {what} of {len(octets)} octets is longer than {NAME_LIMIT_BYTES}")
    try:
        return octets.decode("utf-8"), end
    except UnicodeDecodeError as error:
        raise Malformed(f"the {what} is no UTF-8: {error}") from error


def _take_proof(data: bytes, at: int) -> bytes:
    proof, end = _take_octets(data, at, "proof")
    if len(proof) not in (0, PROOF_BYTES):
        raise Malformed(f"a proof of {len(proof)} octets, expected 0 or {PROOF_BYTES}")
    if end != len(data):
        raise Malformed(f"{len(data) - end} octets after the proof")
    return proof
