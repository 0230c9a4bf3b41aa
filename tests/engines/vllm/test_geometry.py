"""Blocks from strides: whatever layout an engine uses, page addresses name exactly the octets of one block."""

from __future__ import annotations

import ctypes
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kbtp_core.errors import ConfigError, GeometryMismatch
from kbtp_vllm import geometry

pytestmark = pytest.mark.vllm

BLOCKS, HEADS, TOKENS, CONTENT = 6, 2, 16, 32
LAYOUTS = {
    "blocks outermost, whole block contiguous": (0, 1, 2, 3),
    "tokens before heads": (0, 2, 1, 3),
    "heads outermost": (1, 0, 2, 3),
    "blocks innermost but one": (1, 2, 0, 3),
}


def tensor(order: tuple[int, ...], layers: int = 1) -> list[torch.Tensor]:
    """KV tensors of logical shape [blocks, heads, tokens, content], one storage, dimensions laid out in `order`."""
    sizes = (BLOCKS, HEADS, TOKENS, CONTENT)
    storage = torch.randn(layers, *(sizes[d] for d in order)).to(torch.bfloat16)
    return [storage[layer].permute(*(order.index(d) for d in range(4))) for layer in range(layers)]


def octets(memory: object, block: int) -> bytes:
    return b"".join(ctypes.string_at(int(address), memory.page_bytes) for address in memory.addresses[block])  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", LAYOUTS)
def test_pages_of_a_block_hold_its_octets_and_no_others(name: str) -> None:
    layers = {f"layer{number}": value for number, value in enumerate(tensor(LAYOUTS[name], layers=3))}
    memory = geometry.paged_memory(layers, [list(layers)], BLOCKS)

    assert memory.block_bytes == 3 * HEADS * TOKENS * CONTENT * 2
    pages = memory.addresses[:, :, None] + np.arange(memory.page_bytes, dtype=np.uint64)
    assert len(np.unique(pages)) == pages.size
    for block in range(BLOCKS):
        expected = sorted(value for layer in layers.values() for value in layer[block].reshape(-1).view(torch.int16).tolist())
        assert sorted(np.frombuffer(octets(memory, block), np.int16).tolist()) == expected


def test_a_block_of_two_kernel_blocks_is_both() -> None:
    (layer,) = tensor((0, 1, 2, 3))
    memory = geometry.paged_memory({"layer": layer}, [["layer"]], BLOCKS // 2)

    assert memory.block_count == BLOCKS // 2
    assert octets(memory, 1) == layer[2:4].contiguous().view(torch.int16).numpy().tobytes()


def test_layers_with_different_blocks_are_cut_into_common_pages() -> None:
    wide = torch.zeros(BLOCKS, 1, TOKENS, 96, dtype=torch.bfloat16)
    narrow = torch.zeros(BLOCKS, 1, TOKENS, 64, dtype=torch.bfloat16)
    memory = geometry.paged_memory({"wide": wide, "narrow": narrow}, [["wide", "narrow"]], BLOCKS)

    assert (memory.page_bytes, memory.block_bytes) == (TOKENS * 32 * 2, TOKENS * 160 * 2)


def test_layers_that_share_a_cache_are_moved_once() -> None:
    (layer,) = tensor((0, 1, 2, 3))
    memory = geometry.paged_memory({"own": layer, "shared": layer}, [["own", "shared"]], BLOCKS)

    assert memory.block_bytes == HEADS * TOKENS * CONTENT * 2


def test_groups_have_block_indexes_of_their_own() -> None:
    first, second = tensor((0, 1, 2, 3), layers=2)
    memory = geometry.paged_memory({"a": first, "b": second}, [["a"], ["b"]], BLOCKS)

    assert memory.block_count == 2 * BLOCKS
    assert octets(memory, BLOCKS + 3) == second[3].contiguous().view(torch.int16).numpy().tobytes()


def test_groups_of_unequal_blocks_are_refused_by_size() -> None:
    first, second = tensor((0, 1, 2, 3), layers=2)
    with pytest.raises(ConfigError, match=r"\[2048, 4096\] octets a block"):
        geometry.paged_memory({"a": first, "b": second, "c": first}, [["a", "b"], ["c"]], BLOCKS)


def test_a_cache_on_a_device_is_refused_by_layer() -> None:
    with pytest.raises(ConfigError, match="layer7 is on meta"):
        geometry.paged_memory({"layer7": torch.zeros(BLOCKS, 64, device="meta")}, [["layer7"]], BLOCKS)


FIELDS = {"format": 1, "dtype": "bfloat16", "kv_dtype": "auto", "block_tokens": [32], "group 0 layers": ["a", "b"]}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kv_dtype": "fp8"}, "at h:1 has kv_dtype 'fp8', this engine 'auto'. Start both with the same --kv-cache-dtype."),
        ({"block_tokens": [16]}, "at h:1 has block_tokens [16], this engine [32]. Start both with the same --block-size."),
        ({"group 0 layers": ["a"]}, "at h:1 has group 0 layers ['a'], this engine ['a', 'b']. Start both with the same vLLM version"),
        ({"new": 1}, "at h:1 has new 1, this engine None"),
    ],
)
def test_a_field_that_differs_is_named_with_both_values_and_the_way_out(change: dict[str, object], text: str) -> None:
    with pytest.raises(GeometryMismatch) as refusal:
        geometry.compare(FIELDS, geometry.encode(FIELDS | change), "h:1")
    assert text in str(refusal.value)


def test_equal_descriptors_agree() -> None:
    geometry.compare(FIELDS, geometry.encode(json.loads(geometry.encode(FIELDS))), "h:1")


@pytest.mark.parametrize("theirs", [b"\xff\x00", b"{", b"[1]", b""])
def test_a_descriptor_that_is_none_is_a_mismatch(theirs: bytes) -> None:
    with pytest.raises(GeometryMismatch, match="geometry"):
        geometry.compare(FIELDS, theirs, "h:1")


def test_a_configuration_that_changes_kv_and_no_shape_is_told_apart_and_where_it_came_from_is_not() -> None:
    def hash_of(**fields: object) -> str:
        return geometry._config_hash(SimpleNamespace(hf_text_config=SimpleNamespace(to_dict=lambda: fields)))

    base = {"rope_theta": 10_000.0, "_name_or_path": "/here", "transformers_version": "5.0"}
    assert hash_of(**base) == hash_of(**base | {"_name_or_path": "/there", "transformers_version": "5.1"})
    assert hash_of(**base) != hash_of(**base | {"rope_theta": 20_000.0})
