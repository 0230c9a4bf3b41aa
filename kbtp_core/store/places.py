"""Where the values of a batch are in memory: addresses and lengths, made of whatever holds octets.

A value may lie in several pieces, as many as each other value of its call: then a get fills them in order, and a put sends them in order.
Nothing is copied here; whoever makes a `Places` keeps what it names alive until the call is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core import _native


@dataclass(frozen=True)
class Places:
    """n values in p pieces: `addresses` and `lengths` (octets) have shape (n, p); `owner` keeps the memory alive."""

    addresses: NDArray[np.uint64]
    lengths: NDArray[np.uint32]
    owner: object

    def __len__(self) -> int:
        return len(self.addresses)

    @property
    def totals(self) -> NDArray[np.uint32]:
        """Octets of each value."""
        if self.lengths.shape[1] == 1:
            return self.lengths.reshape(-1)
        return np.asarray(self.lengths.sum(axis=1, dtype=np.uint32))

    def part(self, at: NDArray[np.intp] | slice) -> Places:
        """Some of the values."""
        return Places(self.addresses[at], self.lengths[at], self.owner)


def of_buffers(buffers: Sequence[Any], *, writable: bool) -> Places:
    """One piece for each array, tensor, bytearray, memoryview and so on. Raises ValueError naming one that can't be used."""
    addresses: NDArray[np.uint64] = np.empty((len(buffers), 1), np.uint64)
    lengths: NDArray[np.uint32] = np.empty((len(buffers), 1), np.uint32)
    if all(type(buffer) is np.ndarray for buffer in buffers) and _native.places_of(buffers, writable, addresses, lengths):
        return Places(addresses, lengths, buffers)
    kept = []
    for at, buffer in enumerate(buffers):
        array = buffer if isinstance(buffer, np.ndarray) else _array_over(buffer, at)
        if not array.flags.c_contiguous or (writable and not array.flags.writeable):
            raise ValueError(f"buffer {at} ({type(buffer).__name__}) is {'not contiguous' if array.flags.writeable else 'read-only'}")
        if array.nbytes >> 32:
            raise ValueError(f"buffer {at} has {array.nbytes} octets; a value has less than 4 GiB")
        addresses[at] = array.ctypes.data if array.nbytes else 0
        lengths[at] = array.nbytes
        kept.append(array)
    return Places(addresses, lengths, kept)


def of_addresses(addresses: ArrayLike, lengths: ArrayLike, owner: object) -> Places:
    """(n,) or (n, p) addresses and as many lengths, or lengths that stand for all. Raises ValueError."""
    where = np.ascontiguousarray(addresses, np.uint64)
    if where.ndim not in (1, 2):
        raise ValueError(f"addresses have the shape (values,) or (values, pieces), not {where.shape}")
    sizes = np.broadcast_to(np.asarray(lengths), where.shape)
    if sizes.size and (sizes.min() < 0 or int(sizes.max()) >> 32):
        raise ValueError("a length is negative or 4 GiB or more")
    shape = (len(where), -1) if where.size else (len(where), 1)
    return Places(where.reshape(shape), np.ascontiguousarray(sizes, np.uint32).reshape(shape), owner)


def _array_over(buffer: Any, at: int) -> NDArray[Any]:
    """An array over the memory of `buffer`."""
    try:
        if hasattr(buffer, "data_ptr"):  # a torch tensor, of whatever type numpy may not know
            return np.asarray(_tensor_octets(buffer))
        return np.frombuffer(buffer, np.uint8)
    except (TypeError, BufferError, RuntimeError, ValueError) as error:
        raise ValueError(f"buffer {at} ({type(buffer).__name__}) is no contiguous memory of this host: {error}") from None


def _tensor_octets(tensor: Any) -> NDArray[np.uint8]:
    if not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"it is on {tensor.device} or not contiguous; give a contiguous tensor on the CPU")
    return np.asarray(tensor.detach().view(_torch_uint8(tensor)).numpy()).reshape(-1)


def _torch_uint8(tensor: Any) -> Any:
    import sys

    return sys.modules[type(tensor).__module__.partition(".")[0]].uint8
