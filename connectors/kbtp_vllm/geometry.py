"""Where each block's bytes lie in vLLM's KV tensors, and how two engines find out that they agree about it.

Rules:
1. Addresses come from the tensors' strides, never from a layout's name.
2. One KBTP block is everything that one vLLM block id means in one KV group: all layers' pieces, in layer order. The pieces of all layers
   are cut into equal pages. Block index = group * blocks + block id; groups may share storage, only the ids keep them apart.
3. Two engines exchange the whole descriptor and compare it field by field; a field that one side lacks differs too.
4. What this connector can't move is refused at start, by name.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.errors import ConfigError, GeometryMismatch
from kbtp_core.transfer import PagedMemory

FORMAT = 1
SMALLEST_PAGE_BYTES = 64
MOVABLE = {"FullAttentionSpec", "MLAAttentionSpec", "SlidingWindowSpec", "SlidingWindowMLASpec", "SinkFullAttentionSpec"}

WAY_OUT = {
    "model": "--model",
    "revision": "--revision",
    "commit": "--revision",
    "model_config": "--hf-overrides",
    "dtype": "--dtype",
    "kv_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "block_tokens": "--block-size",
    "tp_size": "--tensor-parallel-size",
    "pp_size": "--pipeline-parallel-size",
}
"""Which flag sets a field."""


def page_runs(shape: Sequence[int], strides: Sequence[int], block_count: int) -> tuple[NDArray[np.int64], int, int]:
    """Contiguous runs of one block in a tensor whose first dimension is blocks (or equal parts of blocks).

    Returns the run starts within block 0, the run length and the distance of two blocks, all in elements. Raises ValueError.
    """
    if not shape or shape[0] % block_count:
        raise ValueError(f"first dimension of shape {tuple(shape)} is no multiple of the {block_count} blocks")
    parts = shape[0] // block_count
    dimensions = sorted((stride, size) for size, stride in zip([parts, *shape[1:]], strides, strict=True) if size > 1)
    run = span = 1
    outer: list[range] = []
    for stride, size in dimensions:
        if stride < span:
            raise ValueError(f"strides {tuple(strides)} of shape {tuple(shape)} overlap")
        if stride == run and not outer:
            run *= size
        else:
            outer.append(range(0, stride * size, stride))
        span = stride * size
    starts = np.array([sum(offsets) for offsets in itertools.product(*reversed(outer))], dtype=np.int64)
    return starts, run, parts * strides[0]


def paged_memory(tensors: Mapping[str, Any], groups: Sequence[Sequence[str]], block_count: int) -> PagedMemory:
    """Describe the KV tensors of `groups` (layer names each) as KBTP blocks. Raises ConfigError, which names the layer."""
    pieces = [_group_pieces(tensors, layers, block_count) for layers in groups]
    page_bytes = math.gcd(*(run for group in pieces for _, run in group))
    if page_bytes < SMALLEST_PAGE_BYTES:
        raise ConfigError(f"KV layers have no common page of {SMALLEST_PAGE_BYTES} octets or more; use another KV cache layout.")
    tables = [_cut_into_pages(group, page_bytes) for group in pieces]
    widths = {table.shape[1] for table in tables}
    if len(widths) > 1:
        raise ConfigError(
            f"KV groups hold {sorted(width * page_bytes for width in widths)} octets a block; KBTPConnector needs one size. "
            "Start vLLM with --disable-hybrid-kv-cache-manager."
        )
    return PagedMemory(np.concatenate(tables), page_bytes, list(tensors.values()))


def _group_pieces(tensors: Mapping[str, Any], layers: Sequence[str], block_count: int) -> list[tuple[NDArray[np.uint64], int]]:
    """For each distinct layer: addresses of its runs, shape (blocks, runs), and the run length in octets."""
    pieces: list[tuple[NDArray[np.uint64], int]] = []
    seen: set[int] = set()
    for layer in layers:
        tensor = tensors[layer]
        if isinstance(tensor, (list, tuple)):
            raise ConfigError(f"KV cache of layer {layer} is a list of tensors (state-space layer); KBTPConnector moves attention KV only.")
        if tensor.device.type != "cpu":
            raise ConfigError(f'KV cache of layer {layer} is on {tensor.device}, which the RNIC can\'t reach. Set staging to "auto".')
        if tensor.data_ptr() in seen:
            continue  # layers that share one KV cache
        seen.add(tensor.data_ptr())
        try:
            starts, run, step = page_runs(tuple(tensor.shape), tuple(tensor.stride()), block_count)
        except ValueError as error:
            raise ConfigError(f"KV cache of layer {layer} can't be cut into blocks: {error}.") from error
        offsets = (np.arange(block_count, dtype=np.int64)[:, None] * step + starts[None, :]) * tensor.element_size()
        pieces.append((np.uint64(tensor.data_ptr()) + offsets.astype(np.uint64), run * tensor.element_size()))
    if not pieces:
        raise ConfigError("a KV group has no layers with a KV cache on this worker.")
    return pieces


def _cut_into_pages(pieces: list[tuple[NDArray[np.uint64], int]], page_bytes: int) -> NDArray[np.uint64]:
    cut = [
        (addresses[:, :, None] + np.arange(0, run, page_bytes, dtype=np.uint64)[None, None, :]).reshape(len(addresses), -1)
        for addresses, run in pieces
    ]
    return np.ascontiguousarray(np.concatenate(cut, axis=1))


def check_movable(kv_cache_config: Any, parallel_config: Any) -> None:
    """Refuse what the connector can't move. Raises ConfigError."""
    for group in kv_cache_config.transfer_groups:
        kind = type(group.kv_cache_spec).__name__
        if kind not in MOVABLE or group.host_resident:
            names = ", ".join(group.layer_names[:2])
            raise ConfigError(f"KV layers {names}, ... hold {kind}; KBTPConnector moves {', '.join(sorted(MOVABLE))}.")
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel_config, name, 1) != 1:
            raise ConfigError(f"{name} is {getattr(parallel_config, name)}; KBTPConnector needs 1.")


def descriptor(vllm_config: Any, kv_cache_config: Any, tensors: Mapping[str, Any], *, block_bytes: int, tp_rank: int) -> dict[str, Any]:
    """Everything that gives the bytes of this worker's blocks their meaning, as flat JSON fields."""
    from vllm import __version__ as vllm_version

    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    fields: dict[str, Any] = {
        "format": FORMAT,
        "engine": "vllm",
        "engine_version": vllm_version,
        "model": model.model,
        "revision": model.revision or "",
        "commit": getattr(model.hf_config, "_commit_hash", None) or "",
        "model_config": _config_hash(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": model.quantization or "",
        "kv_dtype": str(cache.cache_dtype),
        "byte_order": sys.byteorder,
        "tp_size": parallel.tensor_parallel_size,
        "tp_rank": tp_rank,
        "pp_size": parallel.pipeline_parallel_size,
        "block_tokens": [group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups],
    }
    for number, group in enumerate(kv_cache_config.transfer_groups):
        spec = group.kv_cache_spec
        fields[f"group {number} kind"] = type(spec).__name__
        fields[f"group {number} layers"] = list(group.layer_names)
        fields[f"group {number} heads"] = spec.num_kv_heads
        fields[f"group {number} head size"] = [spec.head_size, spec.head_size_v]
        fields[f"group {number} window"] = getattr(spec, "sliding_window", None)
        fields[f"group {number} layout"] = sorted({layout(tensors[layer], kv_cache_config.num_blocks) for layer in group.layer_names})
    return fields | {"block_bytes": block_bytes}


def _config_hash(model: Any) -> str:
    """Of the model's configuration with what the user has overridden: rotary embedding, say, changes KV and no shape."""
    fields = model.hf_text_config.to_dict()
    kept = {name: value for name, value in fields.items() if not name.startswith("_") and name != "transformers_version"}
    return hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()[:16]


def layout(tensor: Any, block_count: int) -> str:
    """In which order a block's octets come: dimension:size from the outermost in memory to the innermost, and the type.

    For example `1:2 2:32 3:64 bfloat16`; dimension 0 is there only if a block is several rows of it. The number of
    blocks does not matter.
    """
    sizes = [tensor.shape[0] // block_count, *tensor.shape[1:]]
    order = sorted(range(len(sizes)), key=tensor.stride, reverse=True)
    inside = [f"{dimension}:{sizes[dimension]}" for dimension in order if sizes[dimension] > 1]
    return " ".join([*inside, str(tensor.dtype).removeprefix("torch.")])


def encode(fields: Mapping[str, Any]) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def compare(mine: Mapping[str, Any], theirs: bytes, peer: str) -> None:
    """Raises GeometryMismatch that names the first field which differs, both values and the way out."""
    try:
        fields = json.loads(theirs)
    except ValueError as error:
        raise GeometryMismatch(f"prefill engine at {peer} sent no JSON as its geometry. Start both with the same KBTP version.") from error
    if not isinstance(fields, dict):
        raise GeometryMismatch(f"prefill engine at {peer} sent no object as its geometry. Start both with the same KBTP version.")
    for name in [*mine, *(name for name in fields if name not in mine)]:
        here, there = mine.get(name), fields.get(name)
        if here != there:
            flag = WAY_OUT.get(name)
            way = f"the same {flag}" if flag else "the same vLLM version, model and settings"
            raise GeometryMismatch(f"prefill engine at {peer} has {name} {there!r}, this engine {here!r}. Start both with {way}.")
