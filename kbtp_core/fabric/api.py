"""The provider interface: verbs, as a few classes (DESIGN, "The provider interface").

A NIC and the software RNIC are the same to everything above this module. Memory is named by (STag, tagged offset), never
by address. Everything that is posted comes in batches: one NumPy structured array is one native call, and completions
come back as one array, so that there is no Python object and no Python call per block.

Rules that every provider keeps:
1. What is posted on a queue pair starts in the order posted, and completes in that order.
2. Every posted request ends in exactly one completion if it is SIGNALED or fails; after DISCONNECTED there are none.
3. Once `Region.close` has returned, no packet changes or reads that memory, and once DISCONNECTED is polled, none of that queue pair does.
4. No wait without a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, IntFlag
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[Any]


class Access(IntFlag):
    """Rights on a region. Reading it for local sends needs none; each remote right is separate (RFC 5042, section 5.2)."""

    NONE = 0
    LOCAL_WRITE = 1  # receives and the sinks of RDMA Reads may land here
    REMOTE_READ = 2
    REMOTE_WRITE = 4
    REMOTE_ATOMIC = 8
    REMOTE_INVALIDATE = 16


class Op(IntEnum):
    """What a work request asks for, and what a completion reports."""

    SEND = 0
    SEND_INVALIDATE = 1  # remote_stag names the STag that the peer invalidates
    SEND_SE = 2
    SEND_SE_INVALIDATE = 3
    WRITE = 4
    READ = 5
    FETCH_ADD = 6
    CMP_SWAP = 7
    IMMEDIATE = 8  # `operand` is the 8 octets, as a big-endian number (RFC 7306, section 6)
    IMMEDIATE_SE = 9
    # Only in completions:
    RECEIVE = 16
    RECEIVE_IMMEDIATE = 17
    LOADS = 18  # a batch of `Requester.post` has all its answers; wr_id is its sequence
    # Events of a queue pair, in its completion queue; wr_id is zero.
    CONNECTED = 32  # `length` octets of private data wait in QueuePair.peer_private_data
    DISCONNECTED = 33  # the last word of a queue pair; `value` is a TerminateCode, or zero for an orderly end


class WrFlag(IntFlag):
    NONE = 0
    SIGNALED = 1  # a completion also on success
    FENCE = 2  # wait until all earlier Reads and atomics of this queue pair are done
    SNAPSHOT = 4  # the source may change while it is sent: copy it first, so that its CRC holds


class CompletionStatus(IntEnum):
    OK = 0
    FLUSHED = 1  # the connection ended first; whether the peer saw it is unknown
    LOCAL_PROTECTION = 2  # local STag unknown, of another protection domain, out of bounds or without LOCAL_WRITE
    REMOTE_ACCESS = 3  # the peer's Terminate named this Read or atomic
    CONNECT_FAILED = 4  # on DISCONNECTED: never connected


class CompletionFlag(IntFlag):
    SOLICITED = 1
    INVALIDATED = 2  # `stag` was invalidated by this Send
    REMOTE = 4  # on DISCONNECTED: the Terminate in `value` was received, not sent


WORK_REQUEST = np.dtype(
    [
        ("wr_id", "u8"),
        ("op", "u1"),  # Op
        ("flags", "u1"),  # WrFlag
        ("reserved", "u2"),
        ("length", "u4"),  # octets; for atomics and immediates ignored
        ("local_stag", "u4"),  # source of Send and Write, sink of Read; unused where length is zero
        ("remote_stag", "u4"),
        ("local_offset", "u8"),  # tagged offset in the local region
        ("remote_offset", "u8"),  # tagged offset in the peer's region
        ("operand", "u8"),  # add data, swap data, immediate
        ("mask", "u8"),  # add mask, swap mask
        ("compare", "u8"),
        ("compare_mask", "u8"),
    ]
)
"""One work request, 72 octets, host byte order."""

RECEIVE_REQUEST = np.dtype([("wr_id", "u8"), ("offset", "u8"), ("stag", "u4"), ("length", "u4")])
"""One posted receive buffer: `length` octets at tagged offset `offset` of the local region `stag`."""

COMPLETION = np.dtype(
    [
        ("wr_id", "u8"),
        ("qp", "u4"),  # QueuePair.number
        ("op", "u1"),  # Op
        ("status", "u1"),  # CompletionStatus
        ("flags", "u2"),  # CompletionFlag
        ("length", "u4"),  # octets received or moved
        ("stag", "u4"),  # invalidated STag
        ("value", "u8"),  # atomic: the value before; immediate: its 8 octets; DISCONNECTED: TerminateCode
    ]
)
"""One completion, 32 octets."""


def terminate_code(layer: int, kind: int, code: int) -> int:
    """Pack a Terminate's layer, error type and error code (RFC 5040, section 4.8) as COMPLETION.value has them.

    Bit 16 is set, so that 0/0/0 (local catastrophic) differs from an orderly end, which is zero.
    """
    return 1 << 16 | layer << 12 | kind << 8 | code


@dataclass(frozen=True)
class QueueLimits:
    """Hard limits of one queue pair."""

    send_depth: int = 4096  # work requests posted and not completed
    receive_depth: int = 1024  # receives posted and not consumed
    ird: int = 32  # inbound Reads and atomics that the peer may have outstanding
    ord: int = 32  # outbound Reads and atomics outstanding at once
    startup_timeout_s: float = 5.0  # TCP connect, MPA exchange and, passive side, the first FPDU


class FabricError(Exception):
    """A local mistake or a refused resource; the text says which value is wrong and what to do."""


class QueueFull(FabricError):
    """Posting would pass send_depth or receive_depth; nothing of the batch was posted."""


class QueuePairClosed(FabricError):
    """The queue pair has ended; nothing was posted."""


class Region(Protocol):
    """Registered memory, reachable at tagged offsets [base, base + length) under `stag`."""

    @property
    def stag(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def is_valid(self) -> bool:
        """False once closed, or invalidated by the peer."""

    def close(self) -> None:
        """Invalidate: waits until no transfer touches the memory, then forgets it. Idempotent."""


class ProtectionDomain(Protocol):
    """Only queue pairs of a domain can use its regions. One domain a session keeps sessions apart."""

    def register(self, memory: Any, access: Access) -> Region:
        """Register a C-contiguous buffer (writable if any right writes); tagged offsets start at 0. It is kept alive."""

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, access: Access, owner: object) -> Region:
        """Register equal pages scattered in memory as one run of tagged offsets: page i is [i * page_bytes, (i+1) * page_bytes).

        `owner` is kept alive as long as the region; the caller vouches for the addresses.
        """

    def close(self) -> None: ...


class CompletionQueue(Protocol):
    def poll(self, limit: int = 1024) -> Array:
        """Up to `limit` completions (dtype COMPLETION), oldest first; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Wait without the GIL until a completion is there (True) or the time is over (False)."""

    def wake(self) -> None:
        """Make one present or future `wait` return early, from any thread."""

    def fileno(self) -> int:
        """An eventfd that is readable while completions wait (it may also be readable when none do)."""

    def close(self) -> None: ...


class QueuePair(Protocol):
    @property
    def number(self) -> int: ...
    @property
    def peer(self) -> str:
        """host:port of the other side, for messages."""

    @property
    def peer_private_data(self) -> bytes: ...

    def connect(self, host: str, port: int, private_data: bytes = b"") -> None:
        """Active side: start connecting; ends in CONNECTED or in DISCONNECTED with CONNECT_FAILED, within startup_timeout_s."""

    def accept(self, private_data: bytes = b"") -> None:
        """Passive side, on a pair made by `ConnectionRequest.create_qp`: post receives first, then accept; ends as connect does."""

    def post_send(self, requests: Array) -> None:
        """Post a batch (dtype WORK_REQUEST), all or nothing. Raises QueueFull, QueuePairClosed."""

    def post_receive(self, requests: Array) -> None:
        """Post a batch (dtype RECEIVE_REQUEST), all or nothing. Raises QueueFull, QueuePairClosed."""

    def attach_executor(self, executor: Executor, pool: Region, grant: StoreGrant | None = None) -> None:
        """Let `executor` run this pair's requests on `pool`; Block Offsets are tagged offsets of that region.

        Without `grant` only LOADs are run. With it `pool` needs LOCAL_WRITE.
        """

    def close(self, timeout_s: float = 2.0) -> None:
        """Orderly end: what was posted is sent, then FIN. DISCONNECTED follows within `timeout_s`, by force if need be."""

    def abort(self) -> None:
        """End at once; outstanding requests are flushed. DISCONNECTED follows."""

    def stats(self) -> dict[str, int]: ...


@dataclass(frozen=True)
class PoolState:
    """A pool that its ring owns, as arrays that the target and its executor both write (n table entries, F blocks).

    An entry, and a block that a session owns, are written by whoever serves that session: the executor while none of its messages
    waits for the target, else the target. The ring is moved only by `SharesPool.allocate` and `give_back`.
    """

    memory: NDArray[np.uint8]
    """The blocks, F * block_bytes octets; block i has Block Offset base_offset + i * block_bytes."""
    base_offset: int
    block_states: NDArray[np.uint8]
    """(F,) 0 free, 1 taken, 2 bound, 3 draining."""
    entry_states: NDArray[np.uint8]
    """(n,) 0 idle, 1 bound, 2 draining, 4 reserved for a store."""
    owners: NDArray[np.uint64]
    """(n,) the session that bound the entry, or 0."""
    generations: NDArray[np.uint16]
    """(n,) as in the table, in host byte order."""
    slots: Array
    counters: NDArray[np.uint64]
    log2_slots: int
    is_masked: bool
    clears_blocks: bool
    """A freed block is zeroed before anybody else gets it."""


@dataclass(frozen=True)
class StoreGrant:
    """What a session may do beyond LOAD: its handles, its quota, and the cell (1,) that counts the blocks it owns."""

    owner: int
    handle_base: int
    handle_count: int
    inline_bytes: int
    quota: int
    usage: NDArray[np.uint64]
    keyed: Any = None
    """What an executor needs to run the session's keyed messages (`protocol.keyed_backend.KeyedPeer.native`), if STORE was granted."""


class Executor(Protocol):
    """Optional (draft section 8): runs plain KBTP requests without the interpreter.

    It runs a LOAD, and with a PoolState a STORE, an ALLOC_STORE or a FREE, of one segment that has no flag RECORD and passes every
    check. Anything else goes up as RECEIVE, and so does everything while an earlier message of that queue pair waits for its receive
    buffer to be posted again. What goes up comes after all that ran before it and that it could depend on.
    """

    def readers(self, entries: NDArray[np.uint64]) -> NDArray[np.uint32]:
        """How many reads of the block of each table entry (index, not handle) are under way.

        Clear the entry first, then ask: after that the count only falls, and at zero nothing reads the block any more.
        """

    def stop(self) -> None:
        """Run nothing that arrives from now on."""


@runtime_checkable
class SharesPool(Executor, Protocol):
    """An executor that was given a PoolState, seen from the target, which must do these two things through it."""

    def hold(self, entries: NDArray[np.uint64]) -> None:
        """Count one more reader of each entry. Look at the entries again afterwards: one may have been freed just before."""

    def let_go(self, entries: NDArray[np.uint64]) -> None:
        """Undo `hold`."""

    def allocate(self) -> int | None:
        """Take a Block Offset from the ring."""

    def give_back(self, block_offset: int) -> None:
        """Return a Block Offset to the ring."""


@runtime_checkable
class ReportsReaders(Protocol):
    """A queue pair that can say which blocks its executor still reads, so that a reader that never ends can be fenced."""

    def reading(self) -> NDArray[np.uint64]:
        """Table entries (indexes) whose native LOADs of this pair are not wholly sent; one may come several times."""


LOAD_RESULT = np.dtype(
    [("status", "u2"), ("generation", "u2"), ("data_length", "u4"), ("block_offset", "u8"), ("checksum", "u4"), ("reserved", "u4")]
)
"""What a LOAD was answered, 24 octets, host byte order; status 0xFFFF: no answer came."""


class LoadRequests(Protocol):
    """A batch of LOADs that a requester has taken."""

    @property
    def count(self) -> int: ...
    @property
    def failed_count(self) -> int:
        """Answers other than OK; for a batch whose LOADS completion was polled."""

    def results(self) -> Array:
        """A copy of the answers so far (dtype LOAD_RESULT)."""

    def abandon(self) -> None:
        """Send no more of it and report nothing: no LOADS completion follows. What is outstanding keeps its credit until answered."""


class Requester(Protocol):
    """Sends KBTP LOADs of one queue pair and matches their answers without the interpreter; the executor's counterpart."""

    def post(
        self,
        sequence: int,
        handles: ArrayLike,
        generations: ArrayLike,
        stag: int,
        offsets: ArrayLike,
        lengths: ArrayLike,
        flags: int,
    ) -> LoadRequests:
        """Post n LOADs with Request IDs `sequence << 32 | index`; they end in one LOADS completion. Raises QueuePairClosed.

        `handles` has shape (n,), the others too or they are numbers that stand for all n. Arrays of exactly the request's types
        (u8, u2, u8, u4) are read where they are. A COMPLETION that matches none of the LOADs goes up as RECEIVE.
        """

    @property
    def unsent_count(self) -> int:
        """LOADs that wait for credit."""


FIRST_MESSAGE = 0x8000_0000
"""Request IDs of a batch of messages are `sequence << 32 | FIRST_MESSAGE | index`."""

PUT_RESULT = np.dtype([("handle", "u8"), ("stored", "u2"), ("status", "u2"), ("generation", "u2"), ("reserved", "u2")])
"""What a put was answered, 16 octets, host byte order: ALLOC_STORE's status, PUBLISH's status, and where the store has the value.

Status 0xFFFF: no answer came.
"""


class MessageRequests(Protocol):
    """A batch of messages that a requester has taken."""

    @property
    def count(self) -> int: ...
    @property
    def failed_count(self) -> int:
        """COMPLETIONs other than OK; for a batch whose LOADS completion was polled."""

    def answers(self) -> list[bytes]:
        """Copies of the answers so far, in the order of the messages; empty where none came."""

    def abandon(self) -> None:
        """See `LoadRequests.abandon`."""


class PutRequests(MessageRequests, Protocol):
    def results(self) -> Array:
        """What the values were answered so far (dtype PUT_RESULT)."""


LOOKUP_RESULT = np.dtype([("handle", "u8"), ("generation", "u2"), ("tier", "u1"), ("flags", "u1"), ("data_length", "u4")])
"""What a LOOKUP found of one id, 16 octets, host byte order; see protocol.keyed."""


class LookupRequests(MessageRequests, Protocol):
    def results(self) -> Array:
        """What was found of each id so far (dtype LOOKUP_RESULT); absent where no answer came, and behind a prefix."""


class Puts(NamedTuple):
    """n values for a keyed store: ALLOC_STOREs into `handles`, and behind each `values_each` of them their PUBLISH.

    Value i is the memory at `addresses[i]` (`lengths[i]` octets; both of shape (n,) or (n, pieces)), which the caller vouches for. Up to
    `inline_bytes` it goes inside its message; a longer one is read by the target at `offsets[i]` of `stag`. All arrays are C-contiguous.
    """

    ids: NDArray[np.uint8]
    tenant: int
    handles: NDArray[np.uint64]
    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    offsets: NDArray[np.uint64] | int
    stag: int
    flags: int
    inline_bytes: int
    values_each: int


@runtime_checkable
class RunsMessages(Protocol):
    """A requester that sends other KBTP messages, too, and matches answers of any kind to them."""

    def post_messages(self, sequence: int, messages: Sequence[bytes]) -> MessageRequests:
        """Post messages whose Request IDs are as FIRST_MESSAGE says; they end in one LOADS completion. Raises QueuePairClosed."""

    def post_puts(self, sequence: int, puts: Puts) -> PutRequests:
        """Post values; their octets are copied before it returns, but for those that the target reads.

        Raises QueuePairClosed; ValueError for a long value without a region.
        """

    def post_lookups(self, sequence: int, tenant: int, flags: int, values_each: int, ids: NDArray[np.uint8]) -> LookupRequests:
        """Post LOOKUPs of `ids` (n, 16), `values_each` in one message. Raises QueuePairClosed."""

    def settle(self, answer: bytes) -> bool:
        """Take an answer that came as RECEIVE; False if it is none to a message of a batch."""


@runtime_checkable
class PollsLoads(Protocol):
    """A completion queue that can tell what requesters have finished without an array of completions."""

    @property
    def is_empty(self) -> bool:
        """Nothing to poll. Never waits."""

    def poll_loads(self) -> list[int]:
        """Take the LOADS completions with status OK that are next in the queue; their sequence numbers, in order."""


@runtime_checkable
class RunsLoads(Protocol):
    """A queue pair of a provider that has requesters."""

    def create_requester(self, credit: int) -> Requester:
        """At most one a queue pair; `credit` LOADs may be outstanding at once."""


class ConnectionRequest(Protocol):
    """A peer that has sent a valid MPA request."""

    @property
    def peer(self) -> str: ...
    @property
    def private_data(self) -> bytes: ...

    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueue, limits: QueueLimits = QueueLimits()) -> QueuePair: ...

    def reject(self, private_data: bytes = b"") -> None: ...


class Listener(Protocol):
    @property
    def address(self) -> tuple[str, int]: ...

    def poll(self) -> list[ConnectionRequest]:
        """Requests that arrived since the last call; never waits. They also wake the completion queue given to `listen`."""

    def close(self) -> None: ...


class Fabric(Protocol):
    """One device."""

    @property
    def name(self) -> str: ...
    def alloc_pd(self) -> ProtectionDomain: ...
    def create_cq(self) -> CompletionQueue: ...
    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueue, limits: QueueLimits = QueueLimits()) -> QueuePair: ...

    def listen(self, host: str, port: int, cq: CompletionQueue, *, startup_timeout_s: float = 5.0, backlog: int = 128) -> Listener:
        """Listen on host:port (port 0: any). Raises FabricError naming the address if it can't be bound."""

    def create_executor(self, table: Array, base_handle: int, block_bytes: int, pool: PoolState | None = None) -> Executor | None:
        """An executor over `table` (n entries of 16 octets, C-contiguous, kept alive), or None where the provider has none.

        With `pool` it also runs stores and frees, if it can: then it is a `SharesPool`.
        """

    def close(self) -> None: ...
