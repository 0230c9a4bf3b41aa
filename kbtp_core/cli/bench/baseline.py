"""The baselines of the same run: plain TCP between the same two processes, and memory copied within one.

The loops are native (kbtp_core/native/baseline.cpp); here are their sockets, which have the product's settings: no delay,
the same congestion control, and a time limit, so that a dead peer ends the run.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _baseline
from kbtp_core.cli.bench.plan import BenchOp, Case

Service = Literal["stream", "load", "alloc_store", "echo"]
STREAM_WRITE_BYTES = 1 << 20
STREAM_REQUEST_BYTES = 128 << 20  # moved between two looks at the clock
SOCKET_TIMEOUT_S = 30
LARGEST_RUN = 2_000_000  # batches of one slice that can be recorded


class BaselineServer:
    """In the target's process: one listener and one thread a service."""

    def __init__(self, pool: NDArray[np.uint8], congestion_control: str) -> None:
        self._pool = pool
        self._congestion_control = congestion_control

    def open(self, service: Service, size: int = 0) -> int:
        """Serve one connection; returns the port to connect to. The service ends when the client closes. `size` is of an echo."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(SOCKET_TIMEOUT_S)
        threading.Thread(target=self._serve, args=(listener, service, size), name=f"baseline-{service}", daemon=True).start()
        return int(listener.getsockname()[1])

    def _serve(self, listener: socket.socket, service: Service, size: int) -> None:
        with listener:
            connection, _ = listener.accept()
        with connection:
            # Between two slices the client is silent for as long as the other sides take.
            _prepare(connection, self._congestion_control, receive_timeout_s=0)
            if service == "load":
                _baseline.serve_loads(connection.fileno(), self._pool)
            elif service == "alloc_store":
                _baseline.serve_stores(connection.fileno(), self._pool)
            elif service == "echo":
                _baseline.serve_echo(connection.fileno(), size)
            else:
                while request := connection.recv(8, socket.MSG_WAITALL):
                    _baseline.stream_send(connection.fileno(), self._pool, int.from_bytes(request, "big"), STREAM_WRITE_BYTES)


class RawStream:
    """Octets over plain TCP, as fast as they go."""

    def __init__(self, port: int, memory: NDArray[np.uint8], congestion_control: str) -> None:
        self._memory = memory
        self._socket = _connect(port, congestion_control)
        self.congestion_control = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()
        """What the kernel uses, which may not be what was asked for."""

    def run(self, seconds: float) -> tuple[int, float]:
        """Octets moved, and the seconds that it took, which are about `seconds`."""
        begun, octets = time.perf_counter(), 0
        while (elapsed := time.perf_counter() - begun) < seconds:
            self._socket.sendall(STREAM_REQUEST_BYTES.to_bytes(8, "big"))
            _baseline.stream_receive(self._socket.fileno(), self._memory, STREAM_REQUEST_BYTES, STREAM_WRITE_BYTES)
            octets += STREAM_REQUEST_BYTES
        return octets, elapsed

    def close(self) -> None:
        self._socket.close()


class Echo:
    """Messages of `size` octets there and back over plain TCP."""

    def __init__(self, port: int, size: int, congestion_control: str) -> None:
        self._size = size
        self._socket = _connect(port, congestion_control)
        self._times: NDArray[np.uint64] = np.empty(LARGEST_RUN, np.uint64)

    def run(self, seconds: float) -> NDArray[np.uint64]:
        """Nanoseconds of each round trip in about `seconds`."""
        count = _baseline.run_echo(self._socket.fileno(), self._size, seconds, self._times)
        return np.array(self._times[:count])

    def close(self) -> None:
        self._socket.close()


class NativeLoop:
    """Request → reply over plain TCP, with the case's operation, block size and batch."""

    def __init__(self, port: int, case: Case, memory: NDArray[np.uint8], congestion_control: str) -> None:
        self._case, self._memory = case, memory
        self._socket = _connect(port, congestion_control)
        self._times: NDArray[np.uint64] = np.empty(LARGEST_RUN, np.uint64)
        places = np.random.default_rng(7).permutation(memory.size // case.block_bytes)
        self._offsets = (places * case.block_bytes).astype(np.uint64)

    def run(self, seconds: float) -> NDArray[np.uint64]:
        """Nanoseconds of each batch in about `seconds`."""
        case, offsets, times = self._case, self._offsets, self._times
        if case.op is BenchOp.LOAD:
            count = _baseline.run_loads(self._socket.fileno(), self._memory, offsets, case.block_bytes, case.batch, seconds, times)
        else:
            count = _baseline.run_stores(self._socket.fileno(), self._memory, offsets, case.block_bytes, case.batch, seconds, times)
        return np.array(times[:count])

    def close(self) -> None:
        self._socket.close()


def copy_gib_per_s(source: NDArray[np.uint8], sink: NDArray[np.uint8], seconds: float) -> float:
    """Memory to memory, both walked through in steps of 1 MiB."""
    begun = time.perf_counter()
    octets = _baseline.copy(source, sink, 1 << 20, seconds)
    return octets / (time.perf_counter() - begun) / 2**30


def _connect(port: int, congestion_control: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=SOCKET_TIMEOUT_S)
    _prepare(connection, congestion_control, receive_timeout_s=SOCKET_TIMEOUT_S)
    return connection


def _prepare(connection: socket.socket, congestion_control: str, *, receive_timeout_s: int) -> None:
    connection.setblocking(True)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", receive_timeout_s, 0))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SOCKET_TIMEOUT_S, 0))
    if congestion_control:
        # As the software RNIC does it: what the kernel does not allow leaves its default in place.
        with contextlib.suppress(PermissionError, FileNotFoundError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion_control.encode())
