"""LMCache's memory objects as places of a batch, and back.

A value is the chunk's octets, all groups behind one another; with metadata kept, LMCache's own header (`RemoteMetadata`) is a first piece
before them. A load goes straight into a memory object of a full chunk, which is then narrowed to what came: a partial chunk, a
layer, a compressed one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat, MemoryObj
from lmcache.v1.protocol import RemoteMetadata
from numpy.typing import NDArray

from kbtp_core.store import places
from kbtp_core.store.places import Places

if TYPE_CHECKING:
    import torch

_BINARY = (MemoryFormat.BINARY, MemoryFormat.BINARY_BUFFER)


@dataclass(frozen=True)
class Layout:
    """What a memory object holds: for each group a shape and a type."""

    shapes: list[torch.Size]
    dtypes: list[torch.dtype]
    fmt: MemoryFormat

    @property
    def size(self) -> int:
        return sum(int(shape.numel()) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))


def places_of(objects: Sequence[MemoryObj], headers: NDArray[np.uint8] | None) -> Places:
    """The octets of objects, each with its row of `headers` before them."""
    kept, addresses, lengths = [], [], []
    for obj in objects:
        if isinstance(obj, BytesBufferMemoryObj):  # read-only, and so without a data_ptr
            octets = np.frombuffer(obj.byte_array, np.uint8)
            kept.append(octets)
            addresses.append(octets.ctypes.data)
        else:
            addresses.append(obj.data_ptr)
        lengths.append(obj.get_size())
    owner = (objects, kept, headers)
    if headers is None:
        return places.of_addresses(addresses, lengths, owner)
    first = headers.ctypes.data + np.arange(len(headers), dtype=np.uint64) * np.uint64(headers.shape[1])
    where = np.stack([first, np.asarray(addresses, np.uint64)], axis=1)
    sizes = np.stack([np.full(len(headers), headers.shape[1]), np.asarray(lengths)], axis=1)
    return places.of_addresses(where, sizes, owner)


def headers_of(objects: Sequence[MemoryObj], header_bytes: int) -> NDArray[np.uint8]:
    """LMCache's header of each object, shape (n, header_bytes)."""
    packed = [RemoteMetadata(obj.get_size(), obj.get_shapes(), obj.get_dtypes(), obj.get_memory_format()).serialize() for obj in objects]
    for octets in packed:
        if len(octets) != header_bytes:
            raise ValueError(f"LMCache's header has {len(octets)} octets, not {header_bytes}")
    return np.frombuffer(b"".join(packed), np.uint8).reshape(-1, header_bytes)


def layout_in(header: NDArray[np.uint8]) -> tuple[Layout, int]:
    """(layout, octets behind the header). Raises ValueError."""
    try:
        found = RemoteMetadata.deserialize(header.tobytes())
    except (KeyError, ValueError) as error:
        raise ValueError(f"no header of LMCache: {error}") from None
    return Layout(found.shapes, found.dtypes, found.fmt), found.length


def narrowed(obj: Any, layout: Layout, length: int) -> MemoryObj:
    """`obj`, as one of `layout`. For a compressed chunk an object of its own; `obj` is given back. Raises ValueError if it does not fit."""
    if layout.fmt in _BINARY:
        if length > obj.get_size():
            raise ValueError(f"{length} octets do not fit into {obj.get_size()}")
        octets = bytes(obj.byte_array[:length])
        obj.ref_count_down()
        return BytesBufferMemoryObj(octets)
    if layout.size != length or length > obj.get_size():
        raise ValueError(f"{length} octets are not a chunk of {[tuple(shape) for shape in layout.shapes]}")
    meta = obj.meta
    meta.shape, meta.dtype, meta.fmt = layout.shapes[0], layout.dtypes[0], layout.fmt
    meta.shapes, meta.dtypes = layout.shapes, layout.dtypes
    obj.raw_data = obj.raw_data[:length]
    obj.group_prefix_sum = [0]
    for shape, dtype in zip(layout.shapes, layout.dtypes, strict=True):
        obj.group_prefix_sum.append(obj.group_prefix_sum[-1] + int(shape.numel()) * dtype.itemsize)
    return obj
