"""The numbers of KBTP, each declared once: opcodes, statuses, flags, capabilities and sizes.

Everything that needs one of them (parsers, both state machines, native code generators, documentation) takes it from here.
"""

from __future__ import annotations

from enum import IntEnum, IntFlag
from typing import Final

VERSION: Final = 1

HEADER_BYTES: Final = 24
DESCRIPTOR_BYTES: Final = 16
REQUEST_BYTES: Final = HEADER_BYTES + DESCRIPTOR_BYTES
COMPLETION_BYTES: Final = 40
BIND_BYTES: Final = 40
RECORD_BYTES: Final = 24
ENTRY_BYTES: Final = 16
SLOT_BYTES: Final = 16

HELLO_FIXED_BYTES: Final = 48  # after the header, before the strings
HELLO_ACK_FIXED_BYTES: Final = 132
NAME_LIMIT_BYTES: Final = 255  # of a client, target or trust domain name, in UTF-8
PROOF_BYTES: Final = 32
NONCE_BYTES: Final = 16
HELLO_LIMIT_BYTES: Final = HEADER_BYTES + HELLO_FIXED_BYTES + 2 * (2 + NAME_LIMIT_BYTES) + 2 + PROOF_BYTES
HELLO_ACK_LIMIT_BYTES: Final = HEADER_BYTES + HELLO_ACK_FIXED_BYTES + 2 + NAME_LIMIT_BYTES + 2 + PROOF_BYTES

GENERATION_LIMIT: Final = 0xFFFF  # generations run 1 ... 65535 and then 1 again
EMPTY_SLOT: Final = 0xFFFF_FFFF_FFFF_FFFF  # Block Offset of a consumed ring slot
NO_STATUS: Final = 0xFFFF  # in result arrays only, never on the wire: not answered


class Opcode(IntEnum):
    HELLO = 1
    HELLO_ACK = 2
    LOAD = 3
    STORE = 4
    ALLOC_STORE = 5
    FREE = 6
    BIND = 7
    COMPLETION = 8
    GOODBYE = 9


class Status(IntEnum):
    OK = 0
    MALFORMED = 1
    UNSUPPORTED = 2
    NOT_PERMITTED = 3
    NOT_BOUND = 4
    ALREADY_BOUND = 5
    NOT_SEALED = 6
    SEALED = 7
    STALE_GENERATION = 8
    LENGTH = 9
    NO_SPACE = 10
    TICKET_ABANDONED = 11
    TICKET_INVALID = 12
    ACCESS = 13
    BUSY = 14
    SHUTTING_DOWN = 15
    UNAUTHENTICATED = 16
    VERSION = 17
    DATA_CORRUPT = 18


class Flag(IntFlag):
    """Flags of a request (draft section 5.1)."""

    NONE = 0
    INLINE = 0x0001
    SEAL = 0x0002
    RECORD = 0x0004
    INVALIDATE = 0x0008
    ALLOW_UNSEALED = 0x0010


class EntryFlag(IntFlag):
    """Flags of a block table entry (draft section 3.2)."""

    NONE = 0
    VALID = 0x0001
    SEALED = 0x0002


class Capability(IntFlag):
    NONE = 0
    RECORD_COMPLETION = 0x01
    DIRECT_LOAD = 0x02
    DIRECT_ALLOC = 0x04
    MASKED_ATOMICS = 0x08
    STORE = 0x10
    CHECKSUM = 0x20


ALLOWED_FLAGS: Final[dict[int, int]] = {
    Opcode.LOAD: Flag.RECORD | Flag.INVALIDATE | Flag.ALLOW_UNSEALED,
    Opcode.STORE: Flag.INLINE | Flag.SEAL | Flag.RECORD | Flag.INVALIDATE,
    Opcode.ALLOC_STORE: Flag.INLINE | Flag.SEAL | Flag.RECORD | Flag.INVALIDATE,
    Opcode.FREE: Flag.RECORD,
    Opcode.BIND: Flag.SEAL,
}
"""What an opcode defines; any other flag makes the message malformed, and opcodes that are not here define none.

INVALIDATE names the STag of a Data Descriptor, so FREE, which has none, and inline stores, whose STag is zero, can't have it.
"""


def status_name(status: int) -> str:
    """A status for people: its name, or its number where this version knows none."""
    try:
        return Status(status).name
    except ValueError:
        return "no answer" if status == NO_STATUS else f"status {status}"


def next_generation(generation: int) -> int:
    """The generation after `generation`: one more, skipping zero."""
    return generation % GENERATION_LIMIT + 1
