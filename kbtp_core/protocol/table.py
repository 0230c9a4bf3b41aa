"""The block table: handle -> block (draft section 3.2).

Entries are 16 octets, big-endian in memory, so that an RDMA Read of one means the same on every host. A native executor may
read them at any time from another thread, and write those that are its own just then; else only the target writes, one caller at a
time. Three rules:
1. Binding writes Data Length and Block Offset first; then Flags and Generation, together, as one 32-bit store.
2. The Generation advances by one, skipping zero, on every bind and on every clear, and at no other time. It starts at 1.
3. Clearing leaves Data Length and Block Offset as they are; without VALID they mean nothing to a reader.

Vector operations check everything before they change anything.
"""

from __future__ import annotations

import struct
import sys
import threading
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.protocol.constants import ENTRY_BYTES, GENERATION_LIMIT, EntryFlag, next_generation

ENTRY: Final = np.dtype([("flags", ">u2"), ("generation", ">u2"), ("data_length", ">u4"), ("block_offset", ">u8")])
"""One table entry as it lies in memory."""

_VALID, _SEALED = int(EntryFlag.VALID), int(EntryFlag.SEALED)
_entry = struct.Struct(">HHIQ")
_swap_words: Final = sys.byteorder == "little"
_fence_first, _fence_second = threading.Lock(), threading.Lock()


class Entry(NamedTuple):
    """A copy of one entry."""

    flags: int
    generation: int
    data_length: int
    block_offset: int

    @property
    def is_valid(self) -> bool:
        return bool(self.flags & _VALID)

    @property
    def is_sealed(self) -> bool:
        return bool(self.flags & _SEALED)


def memory_fence() -> None:
    """Order all stores before this call against all loads and stores after it.

    Taking and releasing a lock lets neighbours slip into the locked part from both sides; two locks in a row leave no way through.
    """
    with _fence_first:
        pass
    with _fence_second:
        pass


class BlockTable:
    """`entry_count` entries for the handles from `base_handle` on, in `memory` (dtype ENTRY, C-contiguous) or in memory of its own."""

    def __init__(self, entry_count: int, base_handle: int = 0, memory: NDArray[Any] | None = None) -> None:
        if not 0 < entry_count < 1 << 32 or not 0 <= base_handle <= (1 << 64) - entry_count:
            raise ValueError(f"a table of {entry_count} entries from handle {base_handle} does not fit the wire format")
        entries = np.zeros(entry_count, ENTRY) if memory is None else memory
        if entries.dtype != ENTRY or entries.shape != (entry_count,) or not entries.flags.c_contiguous or entries.ctypes.data % 8:
            raise ValueError(f"table memory must be {entry_count} aligned, contiguous entries of dtype ENTRY")
        self.base_handle = base_handle
        self.entry_count = entry_count
        self.entries = entries
        # Words in native byte order: only there is NumPy's assignment one 32-bit store.
        self._words: NDArray[np.uint32] = entries.view(np.uint32).reshape(entry_count, ENTRY_BYTES // 4)
        self._octets = entries.view(np.uint8).data
        self._generations: NDArray[np.uint16] = np.ones(entry_count, np.uint16)
        self._publish(np.arange(entry_count), np.zeros(entry_count, np.uint32), self._generations)

    @property
    def generations(self) -> NDArray[np.uint16]:
        """(n,) The generations in host byte order, writable: whoever writes an entry writes its generation here too."""
        return self._generations

    def index_of(self, handle: int) -> int | None:
        """Where the entry of `handle` is, or None if the handle is outside the table."""
        index = handle - self.base_handle
        return index if 0 <= index < self.entry_count else None

    def indexes_of(self, handles: ArrayLike) -> NDArray[np.intp]:
        """As `index_of` for many. Raises ValueError naming a handle outside the table."""
        wanted = np.atleast_1d(np.asarray(handles, np.uint64))
        indexes = wanted - np.uint64(self.base_handle)  # a handle below the base wraps to a huge index
        outside = indexes >= np.uint64(self.entry_count)
        if outside.any():
            raise ValueError(f"handle {int(wanted[outside][0])} is outside the table [{self.base_handle}, +{self.entry_count})")
        found: NDArray[np.intp] = indexes.astype(np.intp)
        return found

    def entry(self, index: int) -> Entry:
        return Entry._make(_entry.unpack_from(self._octets, index * ENTRY_BYTES))

    def lookup(self, handles: ArrayLike) -> NDArray[Any]:
        """Copies of the entries of `handles` (dtype ENTRY)."""
        found: NDArray[Any] = self.entries[self.indexes_of(handles)]
        return found

    def bind(self, handles: ArrayLike, offsets: ArrayLike, lengths: ArrayLike, sealed: bool) -> NDArray[np.uint16]:
        """Bind each handle to the block at its offset with `lengths` valid octets; returns the new generations.

        Raises ValueError, with nothing changed, if a handle is outside the table, bound already, or named twice.
        """
        indexes = self._indexes_with_valid(handles, False)
        self.entries["data_length"][indexes] = lengths
        self.entries["block_offset"][indexes] = offsets
        flags = EntryFlag.VALID | (EntryFlag.SEALED if sealed else 0)
        return self._advance(indexes, int(flags))

    def clear(self, handles: ArrayLike) -> NDArray[np.uint16]:
        """Unbind each handle; returns the new generations.

        Raises ValueError, with nothing changed, if a handle is outside the table, not bound, or named twice.
        """
        return self._advance(self._indexes_with_valid(handles, True), 0)

    def clear_indexes(self, indexes: NDArray[np.intp]) -> NDArray[np.uint16]:
        """`clear` for distinct entries that the caller knows to be bound; returns the new generations."""
        return self._advance(indexes, 0)

    def bind_one(self, index: int, offset: int, length: int, sealed: bool) -> int:
        """`bind` for one entry that the caller knows to be clear; returns the new generation."""
        self._store_word(index, 1, length)
        self.entries["block_offset"][index] = offset
        generation = next_generation(int(self._generations[index]))
        self._publish_one(index, _VALID | _SEALED if sealed else _VALID, generation)
        return generation

    def clear_one(self, index: int) -> int:
        """`clear` for one entry that the caller knows to be bound; returns the new generation."""
        generation = next_generation(int(self._generations[index]))
        self._publish_one(index, 0, generation)
        return generation

    def update_one(self, index: int, length: int, seal: bool) -> None:
        """After a store into a bound, unsealed block: its new length, and its seal. The generation stays."""
        self._store_word(index, 1, length)
        if seal:
            self._publish_one(index, _VALID | _SEALED, int(self._generations[index]))

    def valid_indexes(self, start: int, count: int) -> NDArray[np.intp]:
        """Which entries of [start, start + count) are bound."""
        found: NDArray[np.intp] = np.flatnonzero(self.entries["flags"][start : start + count] & EntryFlag.VALID) + start
        return found

    def check_integrity(self) -> None:
        """Assert what must hold between any two calls."""
        assert (self.entries["generation"] == self._generations).all(), "an entry was written by somebody else"
        assert (self._generations != 0).all(), "generation zero"
        flags = self.entries["flags"]
        assert ((flags & ~np.uint16(EntryFlag.VALID | EntryFlag.SEALED)) == 0).all(), "undefined entry flags"
        assert ((flags & EntryFlag.SEALED) <= (flags & EntryFlag.VALID) * 2).all(), "sealed without being valid"

    def _indexes_with_valid(self, handles: ArrayLike, is_valid: bool) -> NDArray[np.intp]:
        indexes = self.indexes_of(handles)
        if np.unique(indexes).size != indexes.size:
            raise ValueError("a handle is named twice in one call")
        wrong = ((self.entries["flags"][indexes] & EntryFlag.VALID) != 0) != is_valid
        if wrong.any():
            handle = int(indexes[wrong][0]) + self.base_handle
            raise ValueError(f"handle {handle} is {'not bound' if is_valid else 'bound already'}")
        return indexes

    def _advance(self, indexes: NDArray[np.intp], flags: int) -> NDArray[np.uint16]:
        generations: NDArray[np.uint16] = self._generations[indexes] % np.uint16(GENERATION_LIMIT) + np.uint16(1)
        self._publish(indexes, np.full(len(indexes), flags, np.uint32), generations)
        return generations

    def _publish(self, indexes: NDArray[np.intp], flags: NDArray[np.uint32], generations: NDArray[np.uint16]) -> None:
        """Rule 1: everything else of the entries is visible before this store is, and this store before what the caller does next."""
        words = flags << np.uint32(16) | generations.astype(np.uint32)
        self._generations[indexes] = generations
        memory_fence()
        self._words[indexes, 0] = words.byteswap() if _swap_words else words
        memory_fence()

    def _publish_one(self, index: int, flags: int, generation: int) -> None:
        self._generations[index] = generation
        memory_fence()
        self._store_word(index, 0, flags << 16 | generation)
        memory_fence()

    def _store_word(self, index: int, word: int, value: int) -> None:
        self._words[index, word] = int.from_bytes(value.to_bytes(4, "big"), sys.byteorder)
