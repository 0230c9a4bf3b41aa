"""LMCache's own server (`lm://`) and the connector that LMCache uses for it.

The server does not answer a put, so a put here ends when the server has answered that it has the last value. It has no remove: a value
put again replaces the one before.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import threading
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from lmcache.utils import CacheEngineKey
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from peers import Octets, free_port, start, stop

SHAPE = (1, 2, 16, 4, 64)


class Peer:
    def __init__(self, folder: Path, largest_bytes: int) -> None:  # noqa: ARG002
        port = free_port()
        self._server = start([sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port)], folder, port)
        config = LMCacheEngineConfig.from_defaults(chunk_size=16, local_cpu=False, max_local_cpu_size=1.0)
        metadata = LMCacheMetadata(
            model_name="bench",
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.uint8,
            kv_shape=SHAPE,
            chunk_size=16,
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._connector = LMCServerConnector("127.0.0.1", port, self._loop, LocalCPUBackend(config, metadata, "cpu"))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)

    def put(self, keys: Sequence[str], values: Sequence[Octets]) -> None:
        async def put() -> bool:
            for key, value in zip(keys, values, strict=True):
                await self._connector.put(_key(key), _wrap(value))
            return bool(await self._connector.exists(_key(keys[-1])))

        assert self._run(put())

    def get(self, keys: Sequence[str], into: Sequence[Octets]) -> None:  # noqa: ARG002
        async def get() -> None:
            for key in keys:
                found = await self._connector.get(_key(key))
                assert found is not None
                found.ref_count_down()

        self._run(get())

    def octets(self, keys: Sequence[str]) -> list[bytes]:
        found = []
        for key in keys:
            value = self._run(self._connector.get(_key(key)))
            found.append(bytes(value.byte_array))
            value.ref_count_down()
        return found

    def drop(self, keys: Sequence[str]) -> None:
        """There is no such thing; see the module."""

    def close(self) -> None:
        self._run(self._connector.close())
        stop(self._server)


def _key(name: str) -> CacheEngineKey:
    return CacheEngineKey("bench", 1, 0, int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big"), torch.uint8)


def _wrap(value: Octets) -> TensorMemoryObj:
    """A memory object over the array itself, so that nothing is copied for a put."""
    shape = torch.Size([1, 1, value.size])
    metadata = MemoryObjMetadata(shape, torch.uint8, value.ctypes.data, value.nbytes, 1, 0, MemoryFormat.KV_2LTD)
    return TensorMemoryObj(torch.from_numpy(value), metadata, None)
