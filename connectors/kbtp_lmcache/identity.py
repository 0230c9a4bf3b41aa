"""What a chunk is called in the store.

The namespace holds what is the same for every chunk of an engine: model, revision, dtype, shape of the KV cache, chunk size, how LMCache
writes a chunk (serialisation, whether its metadata goes before it, whether it is cut by layers) and how it hashes tokens. The key holds
the rest: LMCache's own text of it (model, world size, worker, hash, dtype, tags, layer). Two rules:

1. Rank and world size are the key's alone. LMCache changes both there: ranks that hold the same bytes share rank 0's.
2. Only what the scheduler's process knows as well as the worker's is in the namespace: it asks for what the workers have stored.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from kbtp_core.store.identity import Namespace, PoolKind, layout_fingerprint

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.metadata import LMCacheMetadata

_POOL: Final = "lmcache"


def namespace_of(config: LMCacheEngineConfig, metadata: LMCacheMetadata, *, tenant: str, revision: str, has_meta: bool) -> Namespace:
    """Of an engine's chunks."""
    layers, kv, _, heads, head_size = (int(size) for size in metadata.kv_shape)
    fingerprint = layout_fingerprint(
        _POOL,
        {
            "kv": kv,
            "heads": heads,
            "head_size": head_size,
            "mla": bool(metadata.use_mla),
            "serde": str(config.remote_serde),
            "meta": has_meta,
            "layerwise": bool(config.use_layerwise),
            "blending": bool(config.enable_blending),
            "hash": str(config.pre_caching_hash_algorithm),
        },
    )
    return Namespace(
        tenant=tenant,
        model=str(metadata.model_name),
        revision=revision,
        kind=PoolKind.MLA if metadata.use_mla else PoolKind.ATTENTION,
        pool=_POOL,
        dtype=str(metadata.kv_dtype).removeprefix("torch."),
        fingerprint=fingerprint,
        block_tokens=int(metadata.chunk_size),
        group=0,
        first_layer=0,
        layer_count=layers,
    )


def key_of(key: CacheEngineKey) -> str:
    """Everything in an engine's key that changes the bytes."""
    return str(key.to_string())


def seed_warning(config: LMCacheEngineConfig) -> str | None:
    """What to tell the user whose engine gives the same tokens other keys than the next engine, or than itself after a restart."""
    if str(config.pre_caching_hash_algorithm) != "builtin" or os.environ.get("PYTHONHASHSEED", "random") != "random":
        return None
    return (
        "pre_caching_hash_algorithm is 'builtin' and PYTHONHASHSEED is not set: every process may hash the same tokens to other keys. "
        "Then nothing that this engine stores is found by another one, nor by itself after a restart. "
        "Start all engines with PYTHONHASHSEED=0 (or another number, the same for all), or set pre_caching_hash_algorithm to sha256_cbor."
    )
