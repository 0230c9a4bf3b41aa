"""SGLang's host pools, of any layout, and the configuration that its controller hands to a backend."""

from __future__ import annotations

import functools
from typing import Any

import torch
from sgl_cpu_shim import activate

activate()

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kbtp_sglang import KBTPHiCache

PAGE = 16
TOKENS = 512


@functools.cache
def _device(kind: str, heads: int, dtype: torch.dtype) -> Any:
    common: dict[str, Any] = {
        "size": TOKENS,
        "page_size": PAGE,
        "dtype": dtype,
        "layer_num": 3,
        "device": "cpu",
        "enable_memory_saver": False,
    }
    if kind == "mla":
        return MLATokenToKVPool(**common, kv_lora_rank=64, qk_rope_head_dim=16)
    return MHATokenToKVPool(**common, head_num=heads, head_dim=32)


def host(layout: str, kind: str = "mha", *, heads: int = 4, dtype: torch.dtype = torch.bfloat16, seed: int | None = None) -> Any:
    """A host pool of its own; with a seed its octets are random."""
    device = _device(kind, heads, dtype)
    info = device.get_device_pool_infos()[0].buffer_info
    common: dict[str, Any] = {"page_size": PAGE, "layout": layout, "host_to_device_ratio": 2.0, "host_size": 0}
    common |= {"device_capacity_tokens": TOKENS, "start_layer": 0, "end_layer": 2}
    pool = MLATokenToKVPoolHost(info, **common, target_layer_num=3) if kind == "mla" else MHATokenToKVPoolHost(info, **common)
    octets = pool.kv_buffer.view(torch.uint8)
    octets.zero_()
    if seed is not None:
        octets.copy_(torch.randint(0, 256, octets.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return pool


def engine_config(extra: dict[str, Any], **changed: Any) -> HiCacheStorageConfig:
    values: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "tests/model",
    }
    return HiCacheStorageConfig(**(values | changed), extra_config=dict(extra))


def backend(address: str, pool: Any, extra: dict[str, Any] | None = None, **changed: Any) -> KBTPHiCache:
    """A backend as SGLang makes it, with its pool registered."""
    made = KBTPHiCache(engine_config({"stores": address, "timeout_s": 10, **(extra or {})}, **changed), {})
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def indices(*pages: int) -> torch.Tensor:
    """Host indices of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def octets(pool: Any, page: int) -> torch.Tensor:
    return pool.get_data_page(page * PAGE, flat=True).contiguous().view(torch.uint8).clone()
