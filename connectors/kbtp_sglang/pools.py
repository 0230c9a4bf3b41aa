"""A host pool of SGLang as the store sees it: which pieces of memory a page is made of, and what its bytes depend on.

Rules:
1. A page that lies in the pool as whole pieces is moved from and to them, without a copy. Where the pool has no such pieces, or SGLang
   can't tell them, the page is copied once, through SGLang's own flat page.
2. Where the pieces of every page lie is derived once: they are as far from the first page's as its number says. That is checked against
   the pool when it is registered; a pool for which it does not hold is asked each time.
3. A page of a pool that is split by heads has several values, each with its own key, so that ranks of other parallel sizes find theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core.store import places
from kbtp_core.store.identity import LayoutValue, layout_fingerprint
from kbtp_core.store.places import Places

_SHAPE_FIELDS: Final = (
    "layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_cache_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "dtype",
    "index_head_dim",
    "indexer_dtype",
    "num_mamba_layers",
    "conv_state_shapes",
    "temporal_state_shape",
    "conv_dtype",
    "temporal_dtype",
    "compress_ratio",
    "storage_format_tag",
)
_DEVICE_FIELDS: Final = ("dtype", "store_dtype", "layer_num", "start_layer", "end_layer", "sliding_window_size")


@dataclass(frozen=True)
class _Line:
    """The pieces of page n are at `first + n * stride`."""

    first: NDArray[np.uint64]
    stride: NDArray[np.uint64]
    lengths: NDArray[np.uint32]


class PoolPages:
    """Pages of one pool. `parts` is into how many values a page is split by heads."""

    def __init__(self, name: str, pool: Any, parts: int = 1) -> None:
        self.name: Final = name
        self.pool: Final = pool
        self.page_size: Final = int(getattr(pool, "logical_page_size", 0) or getattr(pool, "page_size", 1) or 1)
        self.is_split_by_heads: Final = any(kind.__name__ == "MHATokenToKVPoolHost" for kind in type(pool).__mro__)
        """Tensor-parallel ranks hold different heads, whatever the pools beside it."""
        self.is_logical: Final = hasattr(pool, "kv_buffer") and pool.kv_buffer is None
        """The pool has no memory: its pages are always there."""
        self.parts: Final = parts if self._splits(parts) else 1
        pieces = None if self.is_logical else self._pieces_of_first()
        self.is_flat: Final = pieces is None
        self.page_bytes: Final = 0 if self.is_logical else _flat_bytes(pool) if pieces is None else int(pieces[1].sum())
        self.fingerprint: Final = self._fingerprint(pieces)
        self._line = None if pieces is None else self._derive(*pieces)

    @property
    def value_bytes(self) -> int:
        """Octets of the largest value."""
        return -(-self.page_bytes // self.parts)

    def places(self, host_indices: Any, count: int) -> Places:
        """Where the values of `count` pages are, those of a page one after the other. Raises ValueError for indices that don't fit."""
        starts = self.starts(host_indices, count)
        if self._line is not None:
            numbers = (starts // self.page_size).astype(np.uint64).reshape(-1, 1)
            addresses = self._line.first + numbers * self._line.stride
            lengths = np.broadcast_to(self._line.lengths, addresses.shape)
        else:
            addresses, lengths = self._ask(host_indices, count)
        shape = (count * self.parts, -1)
        return places.of_addresses(addresses.reshape(shape), np.ascontiguousarray(lengths).reshape(shape), self.pool)

    def starts(self, host_indices: Any, count: int) -> NDArray[np.int64]:
        """The index of each page's first token."""
        if host_indices is None or len(host_indices) != count * self.page_size:
            found = "no" if host_indices is None else len(host_indices)
            raise ValueError(f"{count} pages of {self.name} have {count * self.page_size} host indices, not {found}")
        return np.asarray(host_indices[:: self.page_size].cpu().numpy(), np.int64)

    def _splits(self, parts: int) -> bool:
        can = getattr(self.pool, "layout", None) == "page_head" and hasattr(self.pool, "get_split_heads_page_buffer_meta")
        return parts > 1 and can and self.pool.head_num % parts == 0

    def _ask(self, host_indices: Any, count: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        if self.parts > 1:
            addresses, lengths = self.pool.get_split_heads_page_buffer_meta(host_indices, self.parts)
        else:
            addresses, lengths = self.pool.get_page_buffer_meta(host_indices)
        return np.asarray(addresses, np.uint64).reshape(count, -1), np.asarray(lengths, np.uint32).reshape(count, -1)

    def _page(self, number: int) -> tuple[NDArray[np.uint64], NDArray[np.uint32]]:
        import torch

        return self._ask(torch.arange(number * self.page_size, (number + 1) * self.page_size), 1)

    def _pieces_of_first(self) -> tuple[NDArray[np.uint64], NDArray[np.uint32]] | None:
        """None: SGLang has none to give, which its pools say in each of these ways; such a page goes through SGLang's flat one."""
        try:
            addresses, lengths = self._page(0)
        except (AttributeError, NotImplementedError, ValueError, AssertionError):
            return None
        return (addresses, lengths) if addresses.size and int(lengths.min()) > 0 else None

    def _derive(self, first: NDArray[np.uint64], lengths: NDArray[np.uint32]) -> _Line | None:
        count = int(getattr(self.pool, "size", 0)) // self.page_size
        if count < 2:
            return None
        stride = self._page(1)[0] - first
        for number in (1, count // 2, count - 1):
            addresses, sizes = self._page(number)
            if not np.array_equal(addresses, first + np.uint64(number) * stride) or not np.array_equal(sizes, lengths):
                return None
        return _Line(first, stride, lengths)

    def _fingerprint(self, pieces: tuple[NDArray[np.uint64], NDArray[np.uint32]] | None) -> int:
        """Of the layout and all that shapes a value; the heads are those of a value, whatever the parallel size."""
        device = getattr(self.pool, "device_pool", None)
        fields: dict[str, LayoutValue] = {f"pool.{key}": _text(getattr(self.pool, key, None)) for key in _SHAPE_FIELDS}
        fields |= {f"device.{key}": _text(getattr(device, key, None)) for key in _DEVICE_FIELDS}
        if self.parts > 1:
            fields["pool.head_num"] = _text(self.pool.head_num // self.parts)
        lengths = [] if pieces is None else pieces[1].reshape(self.parts, -1)[0].tolist()
        fields |= {"class": type(self.pool).__name__, "page_size": self.page_size, "is_flat": self.is_flat}
        fields |= {"pieces": _text(lengths), "bytes": self.page_bytes // self.parts}
        return layout_fingerprint(f"sglang.hicache/1/{getattr(self.pool, 'layout', '')}", fields)


def _flat_bytes(pool: Any) -> int:
    page = pool.get_dummy_flat_data_page()
    return int(page.numel() * page.element_size())


def _text(value: Any) -> LayoutValue:
    """A value as text that is the same in every process."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Sequence):
        return "[" + ",".join(str(_text(each)) for each in value) + "]"
    return str(value)
