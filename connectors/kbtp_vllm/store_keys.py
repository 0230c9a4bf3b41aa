"""How a KV block is named in the store: which engine geometry (a namespace), and which tokens (a key).

Rules:
1. Everything that changes a block's octets is in its name: model, revision and weights, dtypes, the layout in memory, layers, ranks,
   block size and vLLM's version by the namespace; tokens, LoRA, multimodal content and cache salt by vLLM's block hash, which is the key.
2. vLLM's hash of a block is chained over all tokens before it, so the hash at a block's end names the block whatever its size.
3. vLLM hashes an adapter by its name alone. The key of a block of an adapter has the adapter's folder and weights besides.
4. Workers that hold the same octets (MLA under tensor parallelism) have one name, and the first of them saves.
5. All names of an engine are values of one namespace in the store, the *space*, so that they can be removed together.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import ConfigError
from kbtp_core.store.identity import REPLICATED, Namespace, PoolKind, Ranks, layout_fingerprint, object_ids
from kbtp_vllm import geometry, weights

LAYOUT = "vllm-kv-blocks/1"
_OF_RANK = ("tp_rank", "block_tokens")  # of a geometry descriptor: named apart
_REPLICATED_KINDS = {"MLAAttentionSpec", "SlidingWindowMLASpec"}
_KINDS = {"MLAAttentionSpec": PoolKind.MLA, "SlidingWindowSpec": PoolKind.SLIDING_WINDOW, "SlidingWindowMLASpec": PoolKind.SLIDING_WINDOW}


@dataclass(frozen=True)
class StoreNames:
    """A worker's names, told to the scheduler at start."""

    space: bytes
    groups: tuple[bytes, ...]  # a namespace for each KV group that is stored
    is_first: tuple[bool, ...]  # for each: whether this worker is the one that saves it
    block_bytes: int


def store_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """Positions, among the groups that are moved, of those which vLLM can find again by hash. Raises ConfigError if there are none."""
    moved = kv_cache_config.transfer_group_ids
    found = tuple(moved.index(group_id) for group_id in kv_cache_config.prefix_cacheable_group_ids)
    if not found:
        raise ConfigError('mode: no KV group of this model can be found by its tokens, so a store is of no use; set mode to "pull".')
    return found


def names(vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], *, tenant: str, block_bytes: int, tp_rank: int) -> StoreNames:
    """What this worker's blocks are called."""
    fields = geometry.descriptor(vllm_config, kv_cache_config, tensors, block_bytes=block_bytes, tp_rank=tp_rank)
    fields["model"] = weights.model_name(fields["model"])
    fields["weights"] = weights.fingerprint(vllm_config.model_config.model)
    fields["hash"] = vllm_config.cache_config.prefix_caching_hash_algo
    flat = {name: _flat(value) for name, value in fields.items() if name not in _OF_RANK}
    size = vllm_config.parallel_config.tensor_parallel_size

    def namespace(group: int, *, kind: PoolKind, tokens: int, layers: int, tp: Ranks) -> bytes:
        return Namespace(
            tenant=tenant,
            model=str(fields["model"]),
            revision=str(fields["revision"]),
            kind=kind,
            pool=LAYOUT,
            dtype=str(fields["kv_dtype"]),
            fingerprint=layout_fingerprint(LAYOUT, flat),
            block_tokens=tokens,
            group=group,
            first_layer=0,
            layer_count=layers,
            tp=tp,
            dp=Ranks(1, REPLICATED),
        ).encode()

    groups, first = [], []
    for position in store_groups(kv_cache_config):
        group = kv_cache_config.transfer_groups[position]
        kind = type(group.kv_cache_spec).__name__
        is_replicated = kind in _REPLICATED_KINDS
        groups.append(
            namespace(
                position,
                kind=_KINDS.get(kind, PoolKind.ATTENTION),
                tokens=group.kv_cache_spec.block_size,
                layers=len(group.layer_names),
                tp=Ranks(size, REPLICATED if is_replicated else tp_rank),
            )
        )
        first.append(tp_rank == 0 or not is_replicated)
    space = namespace(0, kind=PoolKind.CUSTOM, tokens=0, layers=0, tp=Ranks(size, REPLICATED))
    return StoreNames(space, tuple(groups), tuple(first), block_bytes)


def _flat(value: Any) -> int | str | None:
    return value if isinstance(value, (int, str)) or value is None else json.dumps(value)


class BlockKeys:
    """The keys of a request's blocks, for groups whose blocks have so many hashes each."""

    def __init__(self, hashes_a_block: Sequence[int]) -> None:
        self._strides = tuple(hashes_a_block)

    def count(self, request: Any, group: int) -> int:
        """Blocks of a group whose tokens are all known."""
        return len(request.block_hashes) // self._strides[group]

    def of(self, request: Any, group: int, first: int, stop: int) -> list[bytes]:
        """Of the blocks at positions `first` up to `stop`."""
        stride = self._strides[group]
        found: list[bytes] = request.block_hashes[(first + 1) * stride - 1 : stop * stride : stride]
        lora = request.lora_request
        if lora is None:
            return found
        suffix = _adapter(lora.lora_name, lora.lora_path)
        return [key + suffix for key in found]


@functools.lru_cache(256)
def _adapter(name: str, path: str) -> bytes:
    return hashlib.sha256(f"{name}\0{path}\0{weights.fingerprint(path)}".encode()).digest()


def ids_of(namespaces: Sequence[bytes], keys: Sequence[Sequence[bytes]]) -> NDArray[np.uint8]:
    """Object ids, shape (n, 16): those of the first group's keys, then the next one's."""
    parts = [object_ids(space, list(some)) for space, some in zip(namespaces, keys, strict=True) if some]
    return np.concatenate(parts) if parts else np.empty((0, 16), np.uint8)
