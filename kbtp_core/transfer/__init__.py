"""Blocks between two engines: prefill offers the blocks of a finished request, decode pulls them (DESIGN, "Engines").

`memory`  an engine's paged KV memory, as blocks made of pages
`ledger`  the scheduler's book of handles, which foretells generations
`source`  prefill: a KBTP target whose pool is the engine's own memory
`sink`    decode: pulls straight into the engine's own memory
"""

from kbtp_core.transfer.ledger import HandleLedger
from kbtp_core.transfer.memory import PagedMemory
from kbtp_core.transfer.sink import FREE_ONLY, PullResult, PullSink
from kbtp_core.transfer.source import PullSource

__all__ = ["FREE_ONLY", "HandleLedger", "PagedMemory", "PullResult", "PullSink", "PullSource"]
