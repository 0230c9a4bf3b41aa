"""A real LMCache engine on the CPU with our plugin, and KV caches that it stores and retrieves."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "WARNING")

import torch
from lmcache.utils import mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.metadata import LMCacheMetadata

LAYERS, HEADS, HEAD_SIZE, CHUNK, SLOTS = 4, 2, 32, 64, 2048
HIDDEN = HEADS * HEAD_SIZE
SHAPE = (LAYERS, 2, CHUNK, HEADS, HEAD_SIZE)


class HostKv(GPUConnectorInterface):
    """KV caches [2, SLOTS, HIDDEN] for each layer in host memory. LMCache itself has none that moves octets on the CPU."""

    def from_gpu(self, obj: Any, start: int, end: int, **known: Any) -> None:
        at = known["slot_mapping"][start:end]
        for layer, cache in enumerate(known["kvcaches"]):
            obj.tensor[:, layer] = cache[:, at]

    def to_gpu(self, obj: Any, start: int, end: int, **known: Any) -> None:
        at = known["slot_mapping"][start:end]
        for layer, cache in enumerate(known["kvcaches"]):
            cache[:, at] = obj.tensor[:, layer]

    def batched_from_gpu(self, objs: Any, starts: Any, ends: Any, **known: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self.from_gpu(obj, start, end, **known)

    def batched_to_gpu(self, objs: Any, starts: Any, ends: Any, **known: Any) -> None:
        for obj, start, end in zip(objs, starts, ends, strict=True):
            self.to_gpu(obj, start, end, **known)

    def get_shape(self, tokens: int) -> torch.Size:
        return torch.Size([2, LAYERS, tokens, HIDDEN])

    def initialize_kvcaches_ptr(self, **known: Any) -> None:
        pass


class Engine:
    """An engine named `name`; `settings` are those of the plugin."""

    def __init__(self, name: str, members: str, *, has_meta: bool = True, model: str = "test/model", settings: Any = None, **config: Any):
        own = {"module_path": "kbtp_lmcache", "class_name": "KbtpAdapter", "members": members} | (settings or {})
        extra = {"save_chunk_meta": has_meta} | {f"remote_storage_plugin.kbtp.{key}": value for key, value in own.items()}
        known = {"chunk_size": CHUNK, "local_cpu": False, "max_local_cpu_size": 0.1, "remote_storage_plugins": ["kbtp"]} | config
        self.name = name
        self.config = LMCacheEngineConfig.from_defaults(**known, extra_config=extra)
        self.metadata = LMCacheMetadata(
            model_name=model,
            world_size=1,
            local_world_size=1,
            worker_id=0,
            local_worker_id=0,
            kv_dtype=torch.bfloat16,
            kv_shape=SHAPE,
            role="worker",
            chunk_size=CHUNK,
        )
        self.engine = LMCacheEngineBuilder.get_or_create(
            name, self.config, self.metadata, HostKv(), mock_up_broadcast_fn, mock_up_broadcast_object_fn
        )
        self.engine.post_init()
        self.manager = self.engine.storage_manager
        self.local = self.manager.storage_backends["LocalCPUBackend"]
        self.backend = next((one for key, one in self.manager.storage_backends.items() if key.startswith("RemoteBackend")), None)

    @property
    def connector(self) -> Any:
        """Ours, without what LMCache measures around it."""
        return self.backend.connection.getWrappedConnector()

    def keys(self, tokens: torch.Tensor) -> list[Any]:
        return [key for _, _, key in self.engine.token_database.process_tokens(tokens=tokens)]

    def awaited(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.manager.loop).result(30)

    def store(self, tokens: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor, *, until: int) -> None:
        """Returns when `until` tokens are found."""
        self.engine.store(tokens, kvcaches=caches, slot_mapping=slots)
        deadline = time.monotonic() + 20
        while self.engine.lookup(tokens) < until:
            assert time.monotonic() < deadline, self.connector.faults.snapshot()
            time.sleep(0.005)
        self.local.clear()

    def retrieve(self, tokens: torch.Tensor, caches: list[torch.Tensor], slots: torch.Tensor) -> int:
        """How many tokens came."""
        return int(self.engine.retrieve(tokens, kvcaches=caches, slot_mapping=slots, req_id="r").sum())

    def objects(self, keys: list[Any], seed: int = 1, tokens: int = CHUNK) -> list[Any]:
        """Memory objects with random octets, one a key."""
        made = [self.local.allocate(self.metadata.get_shapes(tokens), self.metadata.get_dtypes()) for _ in keys]
        generator = torch.Generator().manual_seed(seed)
        for obj in made:
            obj.raw_data[: obj.get_size()] = torch.randint(0, 255, (obj.get_size(),), dtype=torch.uint8, generator=generator)
        return made

    def held(self) -> int:
        """Memory objects that are not given back."""
        self.local.clear()
        return int(self.local.memory_allocator.pin_allocator.num_active_allocations)

    def close(self) -> None:
        LMCacheEngineBuilder.destroy(self.name)


def caches(seed: int | None = None) -> list[torch.Tensor]:
    """Random ones, or without a seed empty ones."""
    if seed is None:
        return [torch.zeros(2, SLOTS, HIDDEN, dtype=torch.bfloat16) for _ in range(LAYERS)]
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, SLOTS, HIDDEN, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def request(seed: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, slots)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32000, (count,), generator=generator), torch.randperm(SLOTS, generator=generator)[:count]
