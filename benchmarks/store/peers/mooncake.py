"""Mooncake Store over TCP: a master, a process that gives the memory, and this client, which has none of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mooncake.store import MooncakeDistributedStore, ReplicateConfig

from peers import Octets, free_port, start, stop

SEGMENT_BYTES = 2 << 30
BUFFER_BYTES = 512 << 20
SEGMENT = """
import sys, time
from mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
status = store.setup(f"127.0.0.1:{sys.argv[1]}", "P2PHANDSHAKE", int(sys.argv[3]), 16 << 20, "tcp", "", f"127.0.0.1:{sys.argv[2]}")
print("ready" if status == 0 else status, flush=True)
sys.stdin.read()
"""


class Peer:
    def __init__(self, folder: Path, largest_bytes: int) -> None:
        master, metrics = free_port(), free_port()
        command = [
            str(Path(sys.executable).parent / "mooncake_master"),
            f"--rpc_port={master}",
            "--rpc_address=127.0.0.1",
            f"--metrics_port={metrics}",
            "--default_kv_lease_ttl=1s",
            "--eviction_high_watermark_ratio=1.0",
        ]
        self._master = start(command, folder, master)
        self._segment = subprocess.Popen(
            [sys.executable, "-c", SEGMENT, str(free_port()), str(master), str(SEGMENT_BYTES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._segment.stdout is not None
        lines = iter(self._segment.stdout.readline, "")
        assert any(line.strip() == "ready" for line in lines), "the process that gives the memory did not start"
        self._store = MooncakeDistributedStore()
        status = self._store.setup(f"127.0.0.1:{free_port()}", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", f"127.0.0.1:{master}")
        assert status == 0, status
        self._replicas = ReplicateConfig()
        self._registered: dict[int, Octets] = {}
        self._scratch: Octets = np.zeros(32 * largest_bytes, np.uint8)
        self._register(self._scratch)

    def _register(self, array: Octets) -> None:
        base = array.base if isinstance(array.base, np.ndarray) else array
        if base.ctypes.data not in self._registered:
            assert self._store.register_buffer(base.ctypes.data, base.nbytes) == 0
            self._registered[base.ctypes.data] = base

    def put(self, keys: Sequence[str], values: Sequence[Octets]) -> None:
        self._register(values[0])
        addresses = [value.ctypes.data for value in values]
        sizes = [value.nbytes for value in values]
        if len(keys) == 1:
            assert self._store.put_from(keys[0], addresses[0], sizes[0]) == 0
        else:
            assert set(self._store.batch_put_from(list(keys), addresses, sizes)) == {0}

    def get(self, keys: Sequence[str], into: Sequence[Octets]) -> None:
        self._register(into[0])
        sizes = [array.nbytes for array in into]
        if len(keys) == 1:
            assert self._store.get_into(keys[0], into[0].ctypes.data, sizes[0]) == sizes[0]
        else:
            assert self._store.batch_get_into(list(keys), [array.ctypes.data for array in into], sizes) == sizes

    def octets(self, keys: Sequence[str]) -> list[bytes]:
        return [bytes(self._store.get(key)) for key in keys]

    def drop(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._store.remove(key, True)

    def close(self) -> None:
        self._store.close()
        assert self._segment.stdin is not None
        self._segment.stdin.close()
        stop(self._segment)  # type: ignore[arg-type]
        stop(self._master)
