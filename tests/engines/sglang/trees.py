"""SGLang's own cache tree, controller, storage threads and host pools, without a model, as a process of its own.

    python -m tests.engines.sglang.trees produce|consume FOLDER STORE

`produce` stamps pages on the "device", backs them up to the host and from there to the store, for each case in turn; `consume` has fresh
trees and pools, prefetches and loads back. Either leaves the bytes of every pool in FOLDER, and what else it saw as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import unittest
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"

import torch
from sgl_cpu_shim import activate

activate()

import sglang.test.kits.unified_radix_cache.fixtures as fixtures
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures

from tests.engines.sglang.cases import CASES, Case

_PAGE = 16
_FULL = CacheConfig(page_size=_PAGE, num_layers=4, full_attention_layer_ids=(0, 1, 2, 3), kv_size=1024, max_context_len=1024)
_SWA = CacheConfig(
    page_size=_PAGE,
    num_layers=4,
    full_attention_layer_ids=(1, 3),
    components=(ComponentType.FULL, ComponentType.SWA),
    sliding_window_size=32,
    kv_size=1024,
    max_context_len=1024,
)
_MAMBA = CacheConfig(
    page_size=1,
    num_layers=4,
    full_attention_layer_ids=(1, 3),
    components=(ComponentType.FULL, ComponentType.MAMBA),
    kv_size=1024,
    max_context_len=1024,
)
_CONFIGS = {"full": _FULL, "mla": _FULL, "swa": _SWA, "mamba": _MAMBA}


@dataclass
class World:
    cache: Any
    allocator: Any
    requests: Any


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """One case; SGLang's fixtures are methods of a TestCase."""

    def __init__(self, case: Case, store: str) -> None:
        super().__init__("runTest")
        self.case, self.store, self.cfg = case, store, _CONFIGS[case.model]
        self.seq = self._make_seq(1, 8 if self.cfg.page_size > 1 else 32)

    def runTest(self) -> None:
        """Not run as a test."""

    def world(self) -> World:
        """A fresh tree with fresh pools, attached to the store."""
        if self.case.model == "mla":
            patch = mock.patch.object(fixtures, "MHATokenToKVPool", _mla_pool)
            patch.start()
            self.addCleanup(patch.stop)
        cache, allocator, requests = fixtures.build_fixture(self.cfg, tree_core_backend="python")
        parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        parallel.__enter__()
        self.addCleanup(parallel.__exit__, None, None, None)
        extra = {"backend_name": "kbtp", "module_path": "kbtp_sglang", "class_name": "KBTPHiCache", "stores": self.store}
        extra |= {"interface_v1": int(self.case.interface == "v1"), "prefetch_threshold": 1, "timeout_s": 20, "batch_timeout_s": 20}
        extra["revision"] = self.case.name  # the same bytes would be shared by cases that differ in how they get to the host
        arguments = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend=self.case.io,
            hicache_mem_layout=self.case.layout,
            hicache_ratio=2.0,
            hicache_write_policy="write_through",
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy="wait_complete",
            hicache_storage_backend_extra_config=json.dumps(extra),
        )
        arguments._mamba_cache_chunk_size = max(fixtures.FLA_CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(arguments)
        cache.init_hicache(arguments, cache.cache_init_params)
        self.addCleanup(fixtures.drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.cache_controller.detach_storage_backend)
        cache.write_through_threshold, cache.load_back_threshold = 1 << 30, 0
        return World(cache, allocator, requests)

    def produce(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        world = self.world()
        cache = world.cache
        self._insert(cache, world.allocator, world.requests, self.seq)
        leaf = fixtures.match_prefix(cache, self.seq).last_device_node
        generator = torch.Generator().manual_seed(1 + CASES.index(self.case))
        for tensor in self._all_tensors(world):
            octets = torch.randint(0, 256, (tensor.numel() * tensor.element_size(),), generator=generator, dtype=torch.uint8)
            tensor.copy_(octets.view(tensor.dtype).reshape(tensor.shape))
        held = self.held(world, leaf)
        self._backup_tree(cache)
        self._write_path_to_l3(cache, leaf)
        self._flush_l3_backups(cache)
        backend = cache.cache_controller.storage_backend
        seen = {"tokens": len(self.seq), "counts": backend.counts(), "backup_pages": backend.get_stats().backup_pgs}
        self.doCleanups()
        return held, seen

    def consume(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        world = self.world()
        cache = world.cache
        assert fixtures.match_prefix(cache, self.seq).device_prefix_len == 0
        request = CacheRequestHandle("r1", 0)
        cache.prefetch_from_storage(request, cache.root_node_handle(), array("q", self.seq), None, None)
        self._run_prefetch_to_completion(cache, request)
        host_hit = fixtures.match_prefix(cache, self.seq).host_hit_length
        self._load_back_through_admission(cache, world.requests, self.seq)
        self._finish_pending_loads(cache)
        match = fixtures.match_prefix(cache, self.seq)
        held = self.held(world, match.last_device_node)
        backend = cache.cache_controller.storage_backend
        seen = {"host_hit": host_hit, "device_hit": match.device_prefix_len, "counts": backend.counts()}
        self._release_ongoing_load_back_locks(cache)
        self.doCleanups()
        return held, seen

    def held(self, world: World, leaf: Any) -> dict[str, torch.Tensor]:
        """Octets of the path's pages in every pool: of a window or a state, what the end of the path needs."""
        kv = world.allocator.get_kvcache()
        indices = world.cache.path_device_indices(leaf)
        found = {"kv": _rows(_buffers(getattr(kv, "full_kv_pool", kv)), indices)}
        if self.cfg.has_swa:
            window = indices[-self.cfg.sliding_window_size :]
            found["swa"] = _rows(_buffers(kv.swa_kv_pool), world.allocator.translate_loc_from_full_to_swa(window))
        if self.cfg.has_mamba:
            slots = fixtures.node_device_value(world.cache, leaf, ComponentType.MAMBA)
            found["mamba"] = _rows([layer for state in _states(world) for layer in state], slots)
        return found

    def _all_tensors(self, world: World) -> list[torch.Tensor]:
        kv = world.allocator.get_kvcache()
        pools = [getattr(kv, "full_kv_pool", kv), *([kv.swa_kv_pool] if self.cfg.has_swa else [])]
        return [buffer for pool in pools for buffer in _buffers(pool)] + (_states(world) if self.cfg.has_mamba else [])


def _mla_pool(**given: Any) -> MLATokenToKVPool:
    del given["head_num"], given["head_dim"]
    return MLATokenToKVPool(**given, kv_lora_rank=64, qk_rope_head_dim=16)


def _buffers(pool: Any) -> list[torch.Tensor]:
    return list(pool.kv_buffer) if hasattr(pool, "kv_buffer") else [*pool.k_buffer, *pool.v_buffer]


def _states(world: World) -> list[torch.Tensor]:
    cache = world.requests.mamba_pool.mamba_cache
    return [*cache.conv, cache.temporal]


def _rows(buffers: list[torch.Tensor], indices: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.cat([buffer[index].contiguous().view(torch.uint8).flatten() for buffer in buffers]) for index in indices])


def main(role: str, folder: Path, store: str) -> None:
    for case in CASES:
        try:
            held, seen = getattr(Trees(case, store), role)()
            torch.save(held, folder / f"{case.name}.{role}.pt")
        except Exception:
            seen = {"error": traceback.format_exc()}
        (folder / f"{case.name}.{role}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
