"""A fabric inside one process: copies instead of packets, done at once, under one lock.

It keeps the rules of `fabric.api` that a session depends on, and is strict where a network would be: a Send without a posted receive,
a wrong STag or a missing right ends the connection; depths are enforced; protection domains are kept apart.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import (
    COMPLETION,
    Access,
    Array,
    CompletionFlag,
    CompletionStatus,
    FabricError,
    Op,
    QueueFull,
    QueueLimits,
    QueuePairClosed,
    WrFlag,
    terminate_code,
)
from kbtp_core.protocol.ring import fetch_add

WRITE_WITH_IMMEDIATE = 10  # as InfiniBand has it: the immediate comes after the data, and takes a receive


class LoopbackRegion:
    def __init__(self, domain: LoopbackDomain, stag: int, pages: list[NDArray[np.uint8]], page_bytes: int, access: Access) -> None:
        self.domain, self.stag, self.access = domain, stag, access
        self.length = page_bytes * len(pages)
        self._pages, self._page_bytes = pages, page_bytes
        self.is_valid = True

    def close(self) -> None:
        with self.domain.fabric.lock:
            self.is_valid = False
            self.domain.fabric.regions.pop(self.stag, None)

    def contains(self, offset: int, length: int) -> bool:
        return offset + length <= self.length

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(piece.tobytes() for piece in self._pieces(offset, length))

    def write(self, offset: int, data: bytes) -> None:
        at = 0
        for piece in self._pieces(offset, len(data)):
            piece[:] = np.frombuffer(data[at : at + len(piece)], np.uint8)
            at += len(piece)

    def _pieces(self, offset: int, length: int) -> list[NDArray[np.uint8]]:
        pieces = []
        while length:
            page, start = divmod(offset, self._page_bytes)
            size = min(length, self._page_bytes - start)
            pieces.append(self._pages[page][start : start + size])
            offset, length = offset + size, length - size
        return pieces


class LoopbackDomain:
    def __init__(self, fabric: LoopbackFabric) -> None:
        self.fabric = fabric

    def register(self, memory: Any, access: Access) -> LoopbackRegion:
        octets = np.frombuffer(memory, np.uint8) if not isinstance(memory, np.ndarray) else memory.reshape(-1).view(np.uint8)
        return self.fabric.add_region(self, [octets], octets.size, access)

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, access: Access, owner: object) -> LoopbackRegion:
        pages = [np.frombuffer(memoryview((ctypes.c_uint8 * page_bytes).from_address(int(a))), np.uint8) for a in addresses.reshape(-1)]
        return self.fabric.add_region(self, pages, page_bytes, access)

    def close(self) -> None:
        for region in [region for region in self.fabric.regions.values() if region.domain is self]:
            region.close()


class LoopbackCq:
    def __init__(self) -> None:
        self._items: deque[tuple[Any, ...]] = deque()
        self._changed = threading.Condition()
        self._woken = False
        self._event = os.eventfd(0, os.EFD_NONBLOCK)

    def push(self, completion: tuple[Any, ...]) -> None:
        with self._changed:
            self._items.append(completion)
            os.eventfd_write(self._event, 1)
            self._changed.notify_all()

    def poll(self, limit: int = 1024) -> Array:
        with self._changed:
            taken = [self._items.popleft() for _ in range(min(limit, len(self._items)))]
            return np.array(taken, COMPLETION)

    def wait(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._items or self._woken, timeout_s)
            self._woken = False
            return bool(self._items)

    def wake(self) -> None:
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def fileno(self) -> int:
        return self._event

    def close(self) -> None:
        if self._event >= 0:
            os.close(self._event)
            self._event = -1


@dataclass(eq=False)
class LoopbackQp:
    fabric: LoopbackFabric
    domain: LoopbackDomain
    cq: LoopbackCq
    limits: QueueLimits
    number: int
    peer: str = ""
    peer_private_data: bytes = b""
    other: LoopbackQp | None = None
    is_up: bool = False
    is_dead: bool = False
    receives: deque[tuple[int, int, int, int]] = field(default_factory=deque)

    def connect(self, host: str, port: int, private_data: bytes = b"") -> None:
        with self.fabric.lock:
            listener = self.fabric.listeners.get((host, port))
            if listener is None:
                self.end(0, CompletionStatus.CONNECT_FAILED)
            else:
                self.peer = f"{host}:{port}"
                listener.requests.append(LoopbackRequest(self, private_data))
                listener.cq.wake()

    def accept(self, private_data: bytes = b"") -> None:
        with self.fabric.lock:
            if self.other is None or self.other.is_dead:
                self.end(0, CompletionStatus.CONNECT_FAILED)
                return
            for qp in (self, self.other):
                qp.is_up = True
                qp.cq.push((0, qp.number, Op.CONNECTED, 0, 0, 0, 0, 0))

    def post_receive(self, requests: Array) -> None:
        with self.fabric.lock:
            if self.is_dead:
                raise QueuePairClosed(f"{self.peer} is gone")
            if len(self.receives) + len(requests) > self.limits.receive_depth:
                raise QueueFull(f"receive_depth is {self.limits.receive_depth}")
            self.receives.extend(requests.tolist())

    def post_send(self, requests: Array) -> None:
        with self.fabric.lock:
            if not self.is_up:
                raise QueuePairClosed(f"{self.peer} is gone")
            if len(requests) > self.limits.send_depth:
                raise QueueFull(f"send_depth is {self.limits.send_depth}")
            for request in requests.tolist():
                if self.is_up:
                    self._execute(*request[:11])

    def _execute(
        self,
        wr_id: int,
        op: int,
        flags: int,
        reserved: int,
        length: int,
        local_stag: int,
        stag: int,
        local_offset: int,
        offset: int,
        operand: int,
        mask: int,
    ) -> None:
        other = self.other
        assert other is not None
        value = 0
        local = self.fabric.region(local_stag, self.domain, local_offset, length, Access.LOCAL_WRITE if op == Op.READ else Access.NONE)
        if local is None and length and op != Op.FETCH_ADD:
            self.cq.push((wr_id, self.number, op, CompletionStatus.LOCAL_PROTECTION, 0, 0, 0, 0))
            self.terminate(0)
            return
        match op:
            case Op.WRITE | Op.READ | 10 if length:  # 10: WRITE_WITH_IMMEDIATE
                right = Access.REMOTE_READ if op == Op.READ else Access.REMOTE_WRITE
                remote = self.fabric.region(stag, other.domain, offset, length, right)
                if remote is None or local is None:
                    other.terminate(terminate_code(0, 1, 0))
                    return
                if op in (Op.WRITE, WRITE_WITH_IMMEDIATE):
                    remote.write(offset, local.read(local_offset, length))
                else:
                    local.write(local_offset, remote.read(offset, length))
                if op == WRITE_WITH_IMMEDIATE and not other.announce(operand):
                    return
            case Op.FETCH_ADD:
                remote = self.fabric.region(stag, other.domain, offset, 8, Access.REMOTE_ATOMIC)
                if remote is None:
                    other.terminate(terminate_code(0, 1, 0))
                    return
                value = int.from_bytes(remote.read(offset, 8), sys.byteorder)
                remote.write(offset, fetch_add(value, operand, mask).to_bytes(8, sys.byteorder))
            case Op.SEND | Op.SEND_INVALIDATE:
                data = b"" if local is None else local.read(local_offset, length)
                if not other.deliver(data, stag if op == Op.SEND_INVALIDATE else None):
                    return
        if flags & WrFlag.SIGNALED:
            self.cq.push((wr_id, self.number, op, CompletionStatus.OK, 0, length, 0, value))

    def deliver(self, data: bytes, invalidate: int | None) -> bool:
        """Take a Send of the peer; False if it ended the connection."""
        if not self.receives:
            self.terminate(terminate_code(1, 2, 2))
            return False
        wr_id, offset, stag, length = self.receives.popleft()
        buffer = self.fabric.region(stag, self.domain, offset, len(data), Access.LOCAL_WRITE)
        if len(data) > length or buffer is None:
            self.terminate(terminate_code(1, 2, 5))
            return False
        buffer.write(offset, data)
        flags = 0
        if invalidate is not None:
            region = self.fabric.region(invalidate, self.domain, 0, 0, Access.REMOTE_INVALIDATE)
            if region is None:
                self.terminate(terminate_code(0, 1, 9))
                return False
            region.close()
            flags = CompletionFlag.INVALIDATED
        self.cq.push((wr_id, self.number, Op.RECEIVE, CompletionStatus.OK, flags, len(data), invalidate or 0, 0))
        return True

    def announce(self, immediate: int) -> bool:
        """Take the immediate of a Write of the peer; False if it ended the connection."""
        if not self.receives:
            self.terminate(terminate_code(1, 2, 2))
            return False
        wr_id, *_ = self.receives.popleft()
        self.cq.push((wr_id, self.number, Op.RECEIVE_IMMEDIATE, CompletionStatus.OK, 0, 0, 0, immediate))
        return True

    def attach_executor(self, executor: object, pool: object, grant: object = None) -> None:
        raise FabricError("the loopback fabric has no executor")

    def close(self, timeout_s: float = 2.0) -> None:
        self.terminate(0)

    def abort(self) -> None:
        self.terminate(0)

    def terminate(self, value: int) -> None:
        with self.fabric.lock:
            other = self.other
            self.end(value, CompletionStatus.OK)
            if other is not None:
                other.end(value, CompletionStatus.OK)

    def end(self, value: int, status: CompletionStatus) -> None:
        if self.is_dead:
            return
        self.is_up, self.is_dead = False, True
        for wr_id, *_ in self.receives:
            self.cq.push((wr_id, self.number, Op.RECEIVE, CompletionStatus.FLUSHED, 0, 0, 0, 0))
        self.cq.push((0, self.number, Op.DISCONNECTED, status, 0, 0, 0, value))

    def stats(self) -> dict[str, int]:
        return {}


@dataclass
class LoopbackRequest:
    active: LoopbackQp
    private_data: bytes

    @property
    def peer(self) -> str:
        return f"loopback:{self.active.number}"

    def create_qp(self, pd: LoopbackDomain, cq: LoopbackCq, limits: QueueLimits = QueueLimits()) -> LoopbackQp:
        fabric = self.active.fabric
        with fabric.lock:
            if self.active.is_dead:
                raise QueuePairClosed(f"{self.peer} has given up")
            qp = fabric.create_qp(pd, cq, limits)
            qp.peer, qp.peer_private_data = self.peer, self.private_data
            qp.other, self.active.other = self.active, qp
            return qp

    def reject(self, private_data: bytes = b"") -> None:
        with self.active.fabric.lock:
            self.active.end(0, CompletionStatus.CONNECT_FAILED)


@dataclass
class LoopbackListener:
    fabric: LoopbackFabric
    address: tuple[str, int]
    cq: LoopbackCq
    requests: list[LoopbackRequest] = field(default_factory=list)

    def poll(self) -> list[LoopbackRequest]:
        with self.fabric.lock:
            requests, self.requests = self.requests, []
            return requests

    def close(self) -> None:
        with self.fabric.lock:
            self.fabric.listeners.pop(self.address, None)
            for request in self.poll():
                request.reject()


class LoopbackFabric:
    name = "loopback"

    def __init__(self, *, write_with_immediate: int | None = None) -> None:
        self.write_with_immediate = write_with_immediate
        self.lock = threading.RLock()
        self.regions: dict[int, LoopbackRegion] = {}
        self.listeners: dict[tuple[str, int], LoopbackListener] = {}
        self._numbers = itertools.count(1)
        self._stags = itertools.count(0x1000, 7)

    def add_region(self, domain: LoopbackDomain, pages: list[NDArray[np.uint8]], page_bytes: int, access: Access) -> LoopbackRegion:
        with self.lock:
            region = LoopbackRegion(domain, next(self._stags), pages, page_bytes, access)
            self.regions[region.stag] = region
            return region

    def region(self, stag: int, domain: LoopbackDomain, offset: int, length: int, right: Access) -> LoopbackRegion | None:
        """The region if it may be used so, else None."""
        region = self.regions.get(stag)
        if region is None or region.domain is not domain or not region.contains(offset, length) or right & ~region.access:
            return None
        return region

    def alloc_pd(self) -> LoopbackDomain:
        return LoopbackDomain(self)

    def create_cq(self) -> LoopbackCq:
        return LoopbackCq()

    def create_qp(self, pd: LoopbackDomain, cq: LoopbackCq, limits: QueueLimits = QueueLimits()) -> LoopbackQp:
        return LoopbackQp(self, pd, cq, limits, next(self._numbers))

    def listen(self, host: str, port: int, cq: LoopbackCq, *, startup_timeout_s: float = 5.0, backlog: int = 128) -> LoopbackListener:
        with self.lock:
            port = port or 40000 + next(self._numbers)
            if (host, port) in self.listeners:
                raise FabricError(f"{host}:{port} is in use")
            listener = LoopbackListener(self, (host, port), cq)
            self.listeners[host, port] = listener
            return listener

    def create_executor(self, table: Array, base_handle: int, block_bytes: int, pool: object = None) -> None:
        return None

    def close(self) -> None:
        with self.lock:
            for listener in list(self.listeners.values()):
                listener.close()
