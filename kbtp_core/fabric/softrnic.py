"""The software RNIC: iWARP (RFC 5040, 5041, 5044, 6581, 7306) in user space over ordinary TCP, for any machine.

The work is native (`kbtp_core/native`): progress threads, one a device unless it is told to have more, move data between registered
memory and sockets without the GIL. This module gives it the shape of `fabric.api` and keeps alive what must outlive a transfer.

Rules:
1. A `Region` keeps its memory alive until it is closed; closing waits until no transfer touches it.
2. A device runs until `close`, or until nothing made from it is in use any more; closing ends all its queue pairs.
3. A queue pair with an executor ends with its object at the latest, for what the executor works on is not kept alive any longer.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core import _native
from kbtp_core.errors import ConfigError
from kbtp_core.fabric.api import (
    COMPLETION,
    LOAD_RESULT,
    LOOKUP_RESULT,
    PUT_RESULT,
    RECEIVE_REQUEST,
    WORK_REQUEST,
    Access,
    Array,
    FabricError,
    PoolState,
    Puts,
    QueueFull,
    QueueLimits,
    QueuePairClosed,
    StoreGrant,
)
from kbtp_core.fabric.api import CompletionQueue as CompletionQueueLike
from kbtp_core.fabric.api import ConnectionRequest as ConnectionRequestLike
from kbtp_core.fabric.api import Executor as ExecutorLike
from kbtp_core.fabric.api import ProtectionDomain as ProtectionDomainLike
from kbtp_core.fabric.api import Region as RegionLike
from kbtp_core.fabric.capture import Capture, wanted_by_environment
from kbtp_core.fabric.client_calls import ClientCalls
from kbtp_core.fabric.executor import NativeExecutor, create_executor
from kbtp_core.fabric.rnic_settings import RnicSettings, say_what_is_missing

MAX_PRIVATE_DATA = 252
"""Octets that fit into a start-up frame which every known iWARP stack accepts (256 with the enhanced data)."""

_PREFIX = 2  # of LOOKUP's flags


class Region:
    """Registered memory; see `fabric.api.Region`."""

    def __init__(self, device: _native.Device, native: _native.Region, owner: object) -> None:
        self.native = native
        self.stag: int = native.stag
        self.length: int = native.length
        self._owner: object = owner
        self._close = weakref.finalize(self, device.invalidate, native)

    @property
    def is_valid(self) -> bool:
        return bool(self.native.is_valid)

    def close(self) -> None:
        self._close()
        self._owner = None


class ProtectionDomain:
    """See `fabric.api.ProtectionDomain`."""

    def __init__(self, device: _native.Device, rnic: SoftRnic) -> None:
        self._device = device
        self._rnic = rnic  # a domain's regions and queue pairs need the device to run
        self.number: int = device.alloc_pd()

    def register(self, memory: Any, access: Access) -> Region:
        view = memoryview(memory)
        if not view.c_contiguous:
            raise FabricError("only C-contiguous memory can be registered: pass a contiguous array, or its pages with register_pages")
        try:
            native = self._device.register(self.number, int(access), memory)
        except (BufferError, ValueError) as error:
            raise FabricError(f"cannot register {type(memory).__name__} of {view.nbytes} octets for {access!r}: {error}") from None
        return Region(self._device, native, memory)

    def register_pages(self, addresses: NDArray[np.uint64], page_bytes: int, access: Access, owner: object) -> Region:
        pages = np.ascontiguousarray(addresses, dtype=np.uint64).reshape(-1)
        if pages.size == 0 or page_bytes <= 0:
            raise FabricError(
                f"cannot register {pages.size} pages of {page_bytes} octets: at least one page of at least one octet is needed"
            )
        return Region(self._device, self._device.register_pages(self.number, int(access), pages, page_bytes), owner)

    def close(self) -> None:
        """Invalidate every region of the domain that is still valid."""
        self._device.close_pd(self.number)


class CompletionQueue:
    """See `fabric.api.CompletionQueue`."""

    def __init__(self) -> None:
        self.native = _native.CompletionQueue()
        self.poll_loads = self.native.poll_loads

    def poll(self, limit: int = 1024) -> Array:
        if self.native.is_empty:
            return _NOTHING
        return np.frombuffer(self.native.poll(limit), COMPLETION)

    @property
    def is_empty(self) -> bool:
        return self.native.is_empty

    def wait(self, timeout_s: float) -> bool:
        return bool(self.native.wait(timeout_s))

    def wake(self) -> None:
        self.native.wake()

    def fileno(self) -> int:
        return int(self.native.fileno())

    def close(self) -> None:
        """Nothing to do: the native queue goes when its last queue pair does."""


class LoadRequests:
    """See `fabric.api.LoadRequests`."""

    __slots__ = ("_native", "_qp")

    def __init__(self, qp: _native.QueuePair, native: _native.LoadBatch) -> None:
        self._qp = qp
        self._native = native

    @property
    def count(self) -> int:
        return self._native.count

    @property
    def failed_count(self) -> int:
        return self._native.failed_count

    def results(self) -> Array:
        return np.frombuffer(self._qp.load_results(self._native), LOAD_RESULT)

    def abandon(self) -> None:
        self._qp.abandon_batch(self._native)


class MessageRequests:
    """See `fabric.api.MessageRequests`."""

    __slots__ = ("_native", "_qp")

    def __init__(self, qp: _native.QueuePair, native: _native.MessageBatch) -> None:
        self._qp = qp
        self._native = native

    @property
    def count(self) -> int:
        return self._native.count

    @property
    def failed_count(self) -> int:
        return self._native.failed_count

    def answers(self) -> list[bytes]:
        return _native.answers(self._qp, self._native)

    def abandon(self) -> None:
        self._qp.abandon_batch(self._native)


class PutRequests(MessageRequests):
    """See `fabric.api.PutRequests`."""

    __slots__ = ("_value_count", "_values_each")

    def __init__(self, qp: _native.QueuePair, native: _native.MessageBatch, value_count: int, values_each: int) -> None:
        super().__init__(qp, native)
        self._value_count = value_count
        self._values_each = values_each

    def results(self) -> Array:
        return np.frombuffer(_native.put_results(self._qp, self._native, self._value_count, self._values_each), PUT_RESULT)


class LookupRequests(MessageRequests):
    """See `fabric.api.LookupRequests`."""

    __slots__ = ("_arguments",)

    def __init__(self, qp: _native.QueuePair, native: _native.MessageBatch, count: int, values_each: int, is_prefix: bool) -> None:
        super().__init__(qp, native)
        self._arguments = count, values_each, is_prefix

    def results(self) -> Array:
        return np.frombuffer(_native.lookup_results(self._qp, self._native, *self._arguments), LOOKUP_RESULT)


class LoadCall:
    """See `fabric.client_calls.LoadCall`."""

    __slots__ = ("_native", "_qp", "begin", "give_up", "resume")

    def __init__(self, qp: _native.QueuePair, sequence: int) -> None:
        self._qp = qp
        self._native = _native.LoadCall(qp, sequence & 0x3FFF_FFFF)
        self.begin = self._native.begin
        self.resume = self._native.resume
        self.give_up = self._native.give_up

    @property
    def requests(self) -> LoadRequests:
        return LoadRequests(self._qp, self._native.batch)


class Requester:
    """See `fabric.api.Requester`, `RunsMessages` and `RunsLoadCalls`."""

    def __init__(self, qp: _native.QueuePair) -> None:
        self._qp = qp

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
        try:
            native = self._qp.post_loads(sequence, handles, generations, stag, offsets, lengths, flags)
        except TypeError:  # not all are numbers and arrays of the request's own types
            wanted = np.atleast_1d(np.asarray(handles, np.uint64))
            columns = [_column(values, kind, wanted.size) for values, kind in ((generations, "u2"), (offsets, "u8"), (lengths, "u4"))]
            native = self._qp.post_loads(sequence, np.ascontiguousarray(wanted), columns[0], stag, columns[1], columns[2], flags)
        if native is None:
            raise QueuePairClosed(f"the queue pair to {self._qp.peer} has ended: nothing was posted")
        return LoadRequests(self._qp, native)

    def create_load_call(self, sequence: int) -> LoadCall:
        return LoadCall(self._qp, sequence)

    @property
    def unsent_count(self) -> int:
        return self._qp.unsent_loads()

    def post_messages(self, sequence: int, messages: Sequence[bytes]) -> MessageRequests:
        lengths = np.fromiter(map(len, messages), np.uint32, len(messages))
        return MessageRequests(self._qp, self._posted(_native.post_messages(self._qp, sequence, b"".join(messages), lengths)))

    def post_puts(self, sequence: int, puts: Puts) -> PutRequests:
        native = self._posted(_native.post_puts(self._qp, sequence, puts))
        return PutRequests(self._qp, native, len(puts.handles), puts.values_each)

    def post_lookups(self, sequence: int, tenant: int, flags: int, values_each: int, ids: NDArray[np.uint8]) -> LookupRequests:
        native = self._posted(_native.post_lookups(self._qp, sequence, tenant, flags, values_each, ids))
        return LookupRequests(self._qp, native, len(ids), values_each, bool(flags & _PREFIX))

    def settle(self, answer: bytes) -> bool:
        return _native.settle(self._qp, answer)

    def _posted(self, native: _native.MessageBatch | None) -> _native.MessageBatch:
        if native is None:
            raise QueuePairClosed(f"the queue pair to {self._qp.peer} has ended: nothing was posted")
        return native


class QueuePair:
    """See `fabric.api.QueuePair`."""

    def __init__(self, native: _native.QueuePair, pd: ProtectionDomain, cq: CompletionQueue, limits: QueueLimits) -> None:
        self.native = native
        self.number: int = native.number
        self.limits = limits
        self._keep: list[object] = [pd, cq]

    @property
    def peer(self) -> str:
        return str(self.native.peer)

    @property
    def peer_private_data(self) -> bytes:
        return bytes(self.native.peer_private_data)

    def connect(self, host: str, port: int, private_data: bytes = b"") -> None:
        _check_private_data(private_data)
        try:
            self.native.connect(host, port, private_data)
        except (ValueError, RuntimeError) as error:
            raise FabricError(f"cannot connect to {host}:{port}: {error}") from None

    def accept(self, private_data: bytes = b"") -> None:
        _check_private_data(private_data)
        self.native.accept(private_data)

    def post_send(self, requests: Array) -> None:
        self._check(self.native.post_send(_records(requests, WORK_REQUEST)), "send", len(requests), self.limits.send_depth)

    def post_receive(self, requests: Array) -> None:
        self._check(self.native.post_receive(_records(requests, RECEIVE_REQUEST)), "receive", len(requests), self.limits.receive_depth)

    def _check(self, result: int, queue: str, count: int, depth: int) -> None:
        if result == 1:
            wanted = f"{count} more requests do not fit into the {queue} queue of {depth} to {self.peer}"
            raise QueueFull(f"{wanted}: wait for completions, or raise {queue}_depth")
        if result == 2:
            raise QueuePairClosed(f"the queue pair to {self.peer} has ended: nothing was posted")
        if result == 3:
            raise FabricError("the batch has an `op` that can't be posted: pass SEND to IMMEDIATE_SE of fabric.api.Op")
        if result == 4:
            raise FabricError(f"{self.peer} serves no RDMA Reads and no atomics (its IRD is 0): use Sends and Writes")

    def attach_executor(self, executor: ExecutorLike, pool: RegionLike, grant: StoreGrant | None = None) -> None:
        if not isinstance(executor, NativeExecutor) or not isinstance(pool, Region):
            raise FabricError("the executor and the pool region must come from this device")
        try:
            self.native.attach_executor(executor.native, pool.native, grant)
        except ValueError as error:
            raise FabricError(str(error)) from None
        weakref.finalize(self, _end, self.native, executor, pool, grant)

    def reading(self) -> NDArray[np.uint64]:
        return np.array(self.native.reading(), np.uint64)

    def create_requester(self, credit: int) -> Requester:
        self.native.enable_loads(credit)
        return Requester(self.native)

    def create_client_calls(
        self,
        cache: Any,
        prefix: bytes,
        tenant: int,
        inline_bytes: int,
        block_bytes: int,
        publish_items: int,
        get_items: int,
        lookup_items: int,
        handles: NDArray[np.uint64],
    ) -> ClientCalls:
        return _native.ClientCalls(
            self.native, cache, prefix, tenant, inline_bytes, block_bytes, publish_items, get_items, lookup_items, handles
        )

    def close(self, timeout_s: float = 2.0) -> None:
        self.native.close(timeout_s)

    def abort(self) -> None:
        self.native.abort()

    def stats(self) -> dict[str, int]:
        return dict(self.native.stats())


class ConnectionRequest:
    """See `fabric.api.ConnectionRequest`."""

    def __init__(self, native: _native.ConnectionRequest) -> None:
        self._native = native
        self.peer: str = native.peer
        self.private_data: bytes = native.private_data

    def create_qp(self, pd: ProtectionDomainLike, cq: CompletionQueueLike, limits: QueueLimits = QueueLimits()) -> QueuePair:
        own_pd, own_cq = _own(pd, cq)
        native = self._native.create_qp(own_pd.number, own_cq.native, *_limits(limits))
        if native is None:
            raise QueuePairClosed(f"{self.peer} has given up, or its request was answered already")
        return QueuePair(native, own_pd, own_cq, limits)

    def reject(self, private_data: bytes = b"") -> None:
        _check_private_data(private_data)
        self._native.reject(private_data)


class Listener:
    """See `fabric.api.Listener`."""

    def __init__(self, native: _native.Listener, rnic: SoftRnic) -> None:
        self._native = native
        self._rnic = rnic
        self.address: tuple[str, int] = (native.host, native.port)

    def poll(self) -> list[ConnectionRequestLike]:
        return [ConnectionRequest(request) for request in self._native.poll()]

    def close(self) -> None:
        self._native.close()


class SoftRnic:
    """A software RNIC device.

    `mulpdu` is the largest ULPDU sent, in octets. Without `wants_crc` frames go unchecked to and from peers that do not want CRCs
    either: only for links that something else protects end to end (RFC 5044, section 4.4). With `peer_to_peer` a connection that it
    makes opens with an empty frame of its own, so that the passive side may speak first (RFC 6581, section 9.2). `stags` and
    `first_atomic_id` fix what is otherwise drawn, for frames that tests know by heart.

    The other options are those of `RnicSettings`; the environment decides about what is None. So it does about `capture`, a pcap file for
    all that the device's connections carry (`fabric.capture`). Raises FabricError for values that make no sense.
    """

    name = "softrnic"

    def __init__(
        self,
        *,
        mulpdu: int = 61440 + 18,
        wants_crc: bool = True,
        peer_to_peer: bool = False,
        first_atomic_id: int = 1,
        stags: Sequence[int] = (),
        progress_threads: int | None = None,
        spin_s: float | None = None,
        keepalive_s: int | None = None,
        congestion_local: str | None = None,
        congestion_remote: str | None = None,
        congestion_peers: str | None = None,
        capture: str | os.PathLike[str] | Capture | None = None,
    ) -> None:
        if not 64 <= mulpdu <= 64768:
            raise FabricError(f"mulpdu is {mulpdu}: it must be between 64 and 64768 octets (RFC 5044, section 5.1)")
        self.settings = _settings(
            progress_threads=progress_threads,
            spin_s=spin_s,
            keepalive_s=keepalive_s,
            congestion_local=congestion_local,
            congestion_remote=congestion_remote,
            congestion_peers=congestion_peers,
        )
        self.capture = _capture(capture)
        self._device = _open(self.settings, self.capture, (mulpdu, first_atomic_id, list(stags), wants_crc, peer_to_peer))
        self._close = weakref.finalize(self, self._device.close)

    def alloc_pd(self) -> ProtectionDomain:
        return ProtectionDomain(self._device, self)

    def create_cq(self) -> CompletionQueue:
        return CompletionQueue()

    def create_qp(self, pd: ProtectionDomainLike, cq: CompletionQueueLike, limits: QueueLimits = QueueLimits()) -> QueuePair:
        own_pd, own_cq = _own(pd, cq)
        return QueuePair(self._device.create_qp(own_pd.number, own_cq.native, *_limits(limits)), own_pd, own_cq, limits)

    def listen(self, host: str, port: int, cq: CompletionQueueLike, *, startup_timeout_s: float = 5.0, backlog: int = 128) -> Listener:
        if not isinstance(cq, CompletionQueue):
            raise FabricError("the completion queue must come from this device")
        try:
            return Listener(self._device.listen(host, port, cq.native, startup_timeout_s, backlog), self)
        except (ValueError, RuntimeError, OSError) as error:
            raise FabricError(f"{error}: choose another host or port, or end what holds it") from None

    def create_executor(self, table: Array, base_handle: int, block_bytes: int, pool: PoolState | None = None) -> NativeExecutor:
        return create_executor(table, base_handle, block_bytes, pool)

    def stats(self) -> dict[str, int]:
        """The counters of `fabric.counters`, summed over all queue pairs that the device has and had; also after `close`."""
        return self._device.stats()

    def close(self) -> None:
        self._close()


_NOTHING: Array = np.empty(0, COMPLETION)


def _end(pair: _native.QueuePair, *kept: object) -> None:
    pair.end()
    del kept  # what its executor worked on


def _column(values: ArrayLike, kind: str, count: int) -> Array:
    array = np.asarray(values, kind)
    if array.ndim == 0:
        return np.full(count, array)
    if array.shape != (count,):
        raise ValueError(f"{array.size} values for {count} handles: a batch of LOADs has as many handles as other values")
    return np.ascontiguousarray(array)


def _own(pd: ProtectionDomainLike, cq: CompletionQueueLike) -> tuple[ProtectionDomain, CompletionQueue]:
    if not isinstance(pd, ProtectionDomain) or not isinstance(cq, CompletionQueue):
        raise FabricError("the protection domain and the completion queue must come from a software RNIC")
    return pd, cq


def _settings(**options: object) -> RnicSettings:
    try:
        return RnicSettings.read({name: value for name, value in options.items() if value is not None}, "the software RNIC")
    except ConfigError as error:
        raise FabricError(str(error)) from None


def _open(settings: RnicSettings, capture: Capture | None, wire: tuple[int, int, list[int], bool, bool]) -> _native.Device:
    say_what_is_missing(settings)
    tcp = (settings.keepalive_s, settings.congestion_local, settings.congestion_remote, settings.networks)
    file = (None, 0, False) if capture is None else (str(capture.path), capture.limit_bytes, capture.checksums)
    try:
        return _native.open_device(*wire, settings.spin_s, settings.progress_threads, *tcp, *file)
    except (RuntimeError, OSError) as error:
        raise FabricError(f"cannot open a software RNIC: {error}") from None


def _capture(wanted: str | os.PathLike[str] | Capture | None) -> Capture | None:
    if wanted is None:
        return wanted_by_environment()
    return wanted if isinstance(wanted, Capture) else Capture(Path(wanted))


def _limits(limits: QueueLimits) -> tuple[int, int, int, int, float]:
    return limits.send_depth, limits.receive_depth, limits.ird, limits.ord, limits.startup_timeout_s


def _records(requests: Array, dtype: np.dtype[Any]) -> Array:
    if requests.dtype != dtype:
        raise FabricError(f"the batch has dtype {requests.dtype}; it must be {dtype}")
    return np.ascontiguousarray(requests)


def _check_private_data(private_data: bytes) -> None:
    if len(private_data) > MAX_PRIVATE_DATA:
        raise FabricError(
            f"private data has {len(private_data)} octets: at most {MAX_PRIVATE_DATA} fit into a start-up frame that every stack accepts"
        )
