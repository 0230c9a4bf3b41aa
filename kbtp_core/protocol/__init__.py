"""KBTP without sockets and without a clock: wire formats, block table, free ring, pool, and both sides' state machines.

Bytes and events go in with `now`; messages and effects come out. Nothing here knows a fabric.
"""

from __future__ import annotations

from kbtp_core.protocol.constants import NO_STATUS, Capability, EntryFlag, Flag, Opcode, Status, next_generation, status_name
from kbtp_core.protocol.effects import Close, Effect, Read, Send, Write
from kbtp_core.protocol.hello import Hello, HelloAck
from kbtp_core.protocol.initiator import HelloParameters, Initiator, InitiatorState
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.partition import DirectPolicy
from kbtp_core.protocol.pool import BlockPool, BlockState, LentPool
from kbtp_core.protocol.ring import FreeRing
from kbtp_core.protocol.table import ENTRY, BlockTable, Entry
from kbtp_core.protocol.target import EntryState, Target, TargetLimits
from kbtp_core.protocol.target_session import TargetSession, TargetState
from kbtp_core.protocol.wire import parse

__all__ = [
    "ENTRY",
    "NO_STATUS",
    "Batch",
    "BlockPool",
    "BlockState",
    "BlockTable",
    "Capability",
    "Close",
    "DirectPolicy",
    "Effect",
    "Entry",
    "EntryFlag",
    "EntryState",
    "Flag",
    "FreeRing",
    "Hello",
    "HelloAck",
    "HelloParameters",
    "Initiator",
    "InitiatorState",
    "LentPool",
    "Opcode",
    "Read",
    "Send",
    "Status",
    "Target",
    "TargetLimits",
    "TargetSession",
    "TargetState",
    "Write",
    "next_generation",
    "parse",
    "status_name",
]
