"""A fabric around another one that spoils things by seeded rules: for tests, and for users who want to see what happens then.

    fabric = FaultyFabric(SoftRnic(), [Fault(FaultKind.KILL, probability=0.001)], seed=7)

Whatever it does, a peer or a network could do: the rules of `fabric.api` hold for the fabric that comes out.
1. DELAY: completions of a queue stay unpolled for a while, all of them, in order.
2. SWALLOW: from here on nothing that is posted on the queue pair is sent, as if the network ate it. The pair looks alive, and ends only
   when it is closed; then the swallowed requests complete as FLUSHED.
3. KILL: a part of the posted batch is sent, and the connection breaks.
4. TRUNCATE: one Send or Write of the batch leaves without its end, as from a peer that lies about a length.
5. CORRUPT: one octet of one Send or Write of the batch is another one on the way, unnoticed by the checksums of the transport.

Chance is drawn from one `random.Random(seed)`: at each poll for DELAY, at each post for the others.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import (
    COMPLETION,
    Access,
    Array,
    CompletionQueue,
    CompletionStatus,
    ConnectionRequest,
    Executor,
    Fabric,
    FabricError,
    Listener,
    Op,
    PoolState,
    ProtectionDomain,
    QueueFull,
    QueueLimits,
    QueuePair,
    Region,
    StoreGrant,
)


class FaultKind(Enum):
    DELAY = "delay"
    SWALLOW = "swallow"
    KILL = "kill"
    TRUNCATE = "truncate"
    CORRUPT = "corrupt"


@dataclass(frozen=True)
class Fault:
    """One rule. It strikes with `probability` a time, and not before it was asked `after` times."""

    kind: FaultKind
    probability: float = 1.0
    after: int = 0
    ops: frozenset[Op] | None = None
    """Only batches that hold one of these; TRUNCATE and CORRUPT spoil only such a request. DELAY asks for no batch."""
    delay_s: tuple[float, float] = (0.0, 0.01)


class _Chance:
    """The rules, and how often each was asked."""

    def __init__(self, faults: Sequence[Fault], seed: int, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._random = random.Random(seed)
        self._faults = list(faults)
        self._asked = [0] * len(self._faults)
        self._lock = threading.Lock()

    def strikes(self, kinds: frozenset[FaultKind], ops: frozenset[int] = frozenset()) -> Fault | None:
        """The first rule of these kinds that strikes now."""
        with self._lock:
            struck = None
            for at, fault in enumerate(self._faults):
                if fault.kind not in kinds or fault.ops is not None and not fault.ops & ops:
                    continue
                self._asked[at] += 1
                if struck is None and self._asked[at] > fault.after and self._random.random() < fault.probability:
                    struck = fault
            return struck

    def delay(self, fault: Fault) -> float:
        with self._lock:
            return self._random.uniform(*fault.delay_s)

    def part_of(self, count: int) -> int:
        with self._lock:
            return self._random.randint(0, count)

    def one_of(self, count: int) -> int:
        with self._lock:
            return self._random.randrange(count)


class FaultyDomain:
    """See `fabric.api.ProtectionDomain`. It knows where the octets of its regions are, so that a copy of them can be spoiled."""

    def __init__(self, inner: ProtectionDomain) -> None:
        self.inner = inner
        self._pages: dict[int, tuple[NDArray[np.uint64], int]] = {}  # by STag: addresses, octets of each

    def register(self, memory: Any, access: Access) -> Region:
        region = self.inner.register(memory, access)
        octets = np.frombuffer(memory, np.uint8)
        self._pages[region.stag] = np.array([octets.ctypes.data], np.uint64), octets.size
        return region

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, access: Access, owner: object) -> Region:
        region = self.inner.register_pages(addresses, page_bytes, access, owner)
        self._pages[region.stag] = addresses.reshape(-1), page_bytes
        return region

    def close(self) -> None:
        self.inner.close()

    def copy_of(self, stag: int, offset: int, length: int) -> NDArray[np.uint8]:
        """Those octets as they are now; zeros for a region that this domain does not know."""
        out = np.zeros(length, np.uint8)
        addresses, page_bytes = self._pages.get(stag, (np.empty(0, np.uint64), 1))
        for at in range(length if len(addresses) else 0):
            page, within = divmod(offset + at, page_bytes)
            out[at] = ctypes.c_uint8.from_address(int(addresses[page]) + within).value
        return out


_POSTING = frozenset((FaultKind.SWALLOW, FaultKind.KILL, FaultKind.TRUNCATE, FaultKind.CORRUPT))
_SPOILT = frozenset(map(int, (Op.SEND, Op.SEND_INVALIDATE, Op.SEND_SE, Op.SEND_SE_INVALIDATE, Op.WRITE)))
_POLLING = frozenset((FaultKind.DELAY,))


class FaultyCq:
    """See `fabric.api.CompletionQueue`. While it holds completions back they wait in the queue inside, and `fileno` is readable."""

    def __init__(self, inner: CompletionQueue, chance: _Chance) -> None:
        self.inner = inner
        self.pairs: dict[int, FaultyQp] = {}
        self._chance = chance
        self._held_until = 0.0
        self._woken = threading.Event()

    def poll(self, limit: int = 1024) -> Array:
        now = self._chance.clock()
        if now < self._held_until:
            return np.empty(0, COMPLETION)
        fault = self._chance.strikes(_POLLING)
        if fault is not None:
            self._held_until = now + self._chance.delay(fault)
            return np.empty(0, COMPLETION)
        rows = self.inner.poll(limit)
        ends = np.flatnonzero(rows["op"] == Op.DISCONNECTED).tolist()
        return self._with_swallowed(rows, ends) if ends else rows

    def _with_swallowed(self, rows: Array, ends: list[int]) -> Array:
        """Requests that were swallowed have failed before their pair's last word."""
        pieces, start = [], 0
        for end in ends:
            pair = self.pairs.pop(int(rows["qp"][end]), None)
            pieces.append(rows[start:end])
            if pair is not None:
                pieces.append(pair.take_swallowed())
            start = end
        return np.concatenate([*pieces, rows[start:]])

    def wait(self, timeout_s: float) -> bool:
        clock = self._chance.clock
        deadline = clock() + timeout_s
        held = min(self._held_until, deadline) - clock()
        if held > 0 and self._woken.wait(held) or self._woken.is_set():
            self._woken.clear()
            return False
        left = deadline - clock()
        return self.inner.wait(left) if left > 0 and clock() >= self._held_until else False

    def wake(self) -> None:
        if self._chance.clock() < self._held_until:
            self._woken.set()
        self.inner.wake()

    def fileno(self) -> int:
        return self.inner.fileno()

    def close(self) -> None:
        self.inner.close()


class FaultyQp:
    """See `fabric.api.QueuePair`."""

    def __init__(self, inner: QueuePair, domain: FaultyDomain, cq: FaultyCq, limits: QueueLimits, chance: _Chance) -> None:
        self.inner = inner
        self._domain = domain
        self._scratch: list[tuple[Region, NDArray[np.uint8]]] = []  # spoilt copies, which the pair may still be sending
        self._chance = chance
        self._send_depth = limits.send_depth
        self._swallowed: list[Array] | None = None
        cq.pairs[inner.number] = self

    @property
    def number(self) -> int:
        return self.inner.number

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def peer_private_data(self) -> bytes:
        return self.inner.peer_private_data

    def post_send(self, requests: Array) -> None:
        if self._swallowed is None:
            fault = self._chance.strikes(_POSTING, frozenset(requests["op"].tolist()))
            if fault is None or fault.kind in (FaultKind.TRUNCATE, FaultKind.CORRUPT):
                self.inner.post_send(requests if fault is None else self._spoil(requests, fault))
                return
            if fault.kind is FaultKind.KILL:
                part = self._chance.part_of(len(requests))
                self.inner.post_send(requests[:part])
                self._swallowed = [requests[part:].copy()]
                self.inner.abort()
                return
            self._swallowed = []
        self.inner.post_send(requests[:0])  # raises if the pair has ended
        if sum(map(len, self._swallowed)) + len(requests) > self._send_depth:
            raise QueueFull(f"{len(requests)} more requests pass the send_depth of {self._send_depth}")
        self._swallowed.append(requests.copy())

    def _spoil(self, requests: Array, fault: Fault) -> Array:
        """The batch with one of its requests cut short, or with one octet of its data changed."""
        ops = _SPOILT if fault.ops is None else _SPOILT & frozenset(map(int, fault.ops))
        at = [i for i, row in enumerate(requests) if row["length"] and row["op"] in ops]
        if not at:
            return requests
        spoilt: Array = requests.copy()
        which = at[self._chance.one_of(len(at))]
        length = int(spoilt["length"][which])
        if fault.kind is FaultKind.TRUNCATE:
            spoilt["length"][which] = self._chance.one_of(length)
            return spoilt
        octets = self._domain.copy_of(int(spoilt["local_stag"][which]), int(spoilt["local_offset"][which]), length)
        octets[self._chance.one_of(length)] ^= 1 + self._chance.one_of(255)
        region = self._domain.inner.register(octets, Access.NONE)
        self._scratch.append((region, octets))
        spoilt["local_stag"][which], spoilt["local_offset"][which] = region.stag, 0
        return spoilt

    def take_swallowed(self) -> Array:
        """The completions of what was swallowed."""
        requests = [] if self._swallowed is None else self._swallowed
        self._swallowed = None
        completions = np.zeros(sum(map(len, requests)), COMPLETION)
        if requests:
            swallowed = np.concatenate(requests)
            completions["wr_id"], completions["op"] = swallowed["wr_id"], swallowed["op"]
            completions["qp"], completions["status"] = self.number, CompletionStatus.FLUSHED
        return completions

    def connect(self, host: str, port: int, private_data: bytes = b"") -> None:
        self.inner.connect(host, port, private_data)

    def accept(self, private_data: bytes = b"") -> None:
        self.inner.accept(private_data)

    def post_receive(self, requests: Array) -> None:
        self.inner.post_receive(requests)

    def attach_executor(self, executor: Executor, pool: Region, grant: StoreGrant | None = None) -> None:
        self.inner.attach_executor(executor, pool, grant)

    def close(self, timeout_s: float = 2.0) -> None:
        self.inner.close(timeout_s)

    def abort(self) -> None:
        self.inner.abort()

    def stats(self) -> dict[str, int]:
        return self.inner.stats()


def own_pd(pd: ProtectionDomain) -> FaultyDomain:
    """The domain of a fabric with faults. Raises FabricError for any other."""
    if not isinstance(pd, FaultyDomain):
        raise FabricError("a queue pair with faults needs a protection domain of the same fabric")
    return pd


class FaultyRequest:
    """See `fabric.api.ConnectionRequest`."""

    def __init__(self, inner: ConnectionRequest, fabric: FaultyFabric) -> None:
        self.inner = inner
        self._fabric = fabric

    @property
    def peer(self) -> str:
        return self.inner.peer

    @property
    def private_data(self) -> bytes:
        return self.inner.private_data

    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueue, limits: QueueLimits = QueueLimits()) -> FaultyQp:
        domain, faulty = own_pd(pd), self._fabric.own_cq(cq)
        return FaultyQp(self.inner.create_qp(domain.inner, faulty.inner, limits), domain, faulty, limits, self._fabric.chance)

    def reject(self, private_data: bytes = b"") -> None:
        self.inner.reject(private_data)


class FaultyListener:
    """See `fabric.api.Listener`."""

    def __init__(self, inner: Listener, fabric: FaultyFabric) -> None:
        self.inner = inner
        self._fabric = fabric

    @property
    def address(self) -> tuple[str, int]:
        return self.inner.address

    def poll(self) -> list[ConnectionRequest]:
        return [FaultyRequest(request, self._fabric) for request in self.inner.poll()]

    def close(self) -> None:
        self.inner.close()


class FaultyFabric:
    """`inner`, with faults. `clock` is what delays are measured by; regions and executors are those of `inner`."""

    def __init__(self, inner: Fabric, faults: Sequence[Fault], seed: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.inner = inner
        self.chance = _Chance(faults, seed, clock)

    @property
    def name(self) -> str:
        return f"{self.inner.name} with faults"

    def own_cq(self, cq: CompletionQueue) -> FaultyCq:
        if not isinstance(cq, FaultyCq):
            raise FabricError("a queue pair with faults needs a completion queue of the same fabric")
        return cq

    def alloc_pd(self) -> ProtectionDomain:
        return FaultyDomain(self.inner.alloc_pd())

    def create_cq(self) -> FaultyCq:
        return FaultyCq(self.inner.create_cq(), self.chance)

    def create_qp(self, pd: ProtectionDomain, cq: CompletionQueue, limits: QueueLimits = QueueLimits()) -> FaultyQp:
        domain, faulty = own_pd(pd), self.own_cq(cq)
        return FaultyQp(self.inner.create_qp(domain.inner, faulty.inner, limits), domain, faulty, limits, self.chance)

    def listen(self, host: str, port: int, cq: CompletionQueue, *, startup_timeout_s: float = 5.0, backlog: int = 128) -> FaultyListener:
        inner = self.inner.listen(host, port, self.own_cq(cq).inner, startup_timeout_s=startup_timeout_s, backlog=backlog)
        return FaultyListener(inner, self)

    def create_executor(self, table: NDArray[Any], base_handle: int, block_bytes: int, pool: PoolState | None = None) -> Executor | None:
        return self.inner.create_executor(table, base_handle, block_bytes, pool)

    def close(self) -> None:
        self.inner.close()
