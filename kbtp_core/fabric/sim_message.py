"""What travels between two simulated queue pairs, and what is kept of a request until it completes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeAlias

from kbtp_core.fabric.api import CompletionStatus, Op
from kbtp_core.fabric.sim_memory import SimRegion

Row: TypeAlias = tuple[int, int, int, int, int, int, int, int, int, int, int, int, int]
"""A work request, in the order of WORK_REQUEST's fields."""

READ_RESPONSE: Final = 64
ATOMIC_RESPONSE: Final = 65
FIN: Final = 66

SENDS: Final = frozenset(map(int, (Op.SEND, Op.SEND_INVALIDATE, Op.SEND_SE, Op.SEND_SE_INVALIDATE)))
IMMEDIATES: Final = frozenset(map(int, (Op.IMMEDIATE, Op.IMMEDIATE_SE)))
ATOMICS: Final = frozenset(map(int, (Op.FETCH_ADD, Op.CMP_SWAP)))
SOURCED: Final = SENDS | {int(Op.WRITE)}
"""Requests that carry octets of local memory."""

POSTABLE: Final = SOURCED | IMMEDIATES | ATOMICS | {int(Op.READ)}
_NAMES: Final = {READ_RESPONSE: "READ_RESPONSE", ATOMIC_RESPONSE: "ATOMIC_RESPONSE", FIN: "FIN"}


@dataclass(eq=False, slots=True)
class Work:
    """A work request that has started and not completed."""

    wr_id: int
    op: int
    flags: int
    length: int
    is_done: bool = False
    status: int = CompletionStatus.OK
    value: int = 0
    sink_stag: int = 0
    sink_offset: int = 0


@dataclass(eq=False, slots=True)
class Message:
    """One message. `data` is None until its source, `length` octets at `offset` of `region`, has been read."""

    kind: int
    work: Work | None = None
    region: SimRegion | None = None
    offset: int = 0
    length: int = 0
    data: bytes | None = None
    stag: int = 0
    to: int = 0
    operands: tuple[int, int, int, int] = (0, 0, 0, 0)  # operand, mask, compare, compare mask
    is_placed: bool = False

    def __str__(self) -> str:
        name = _NAMES.get(self.kind) or Op(self.kind).name
        return f"{name}[{self.length}{'' if self.data is None else ' ' + self.data[:24].hex()} {self.stag:x}+{self.to:x}]"
