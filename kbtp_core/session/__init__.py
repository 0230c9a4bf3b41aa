"""KBTP over a fabric: a protocol machine on a queue pair. Threads, waits and the clock live here, in `target` and `initiator`."""

from __future__ import annotations

from kbtp_core.session.incarnation import process_incarnation
from kbtp_core.session.initiator import BUFFER_ACCESS, InitiatorSession, LoadBatch
from kbtp_core.session.initiator_core import InitiatorCore
from kbtp_core.session.stripe_batch import StripedBatch
from kbtp_core.session.stripe_region import StripedRegion
from kbtp_core.session.striped import StripedSession
from kbtp_core.session.target import TargetServer
from kbtp_core.session.target_core import PoolRegion, TargetCore

__all__ = [
    "BUFFER_ACCESS",
    "InitiatorCore",
    "InitiatorSession",
    "LoadBatch",
    "PoolRegion",
    "StripedBatch",
    "StripedRegion",
    "StripedSession",
    "TargetCore",
    "TargetServer",
    "process_incarnation",
]
