"""Put and get by key. Today over a store in this process; a client of a server speaks the same calls.

    with Client.embedded(b"my-namespace", ram_bytes=1 << 30, block_bytes=1 << 20) as client:
        client.put([b"page-0"], [page])
        lengths = client.get([b"page-0"], [buffer])

Calls take batches and answer with one array: a failure of one item is in its place in the array, never an exception.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kbtp_core.store.embedded import EmbeddedStore
from kbtp_core.store.identity import object_id

MISSING = -1
"""In the result of `get`: the value is not there."""
TOO_LARGE = -2
"""In the result of `get`: the value does not fit into its buffer."""


class Client:
    """Values of one namespace. Any thread."""

    def __init__(self, namespace: bytes, store: EmbeddedStore) -> None:
        if not namespace:
            raise ValueError("a client needs a namespace: kbtp_core.store.identity.Namespace makes one from an engine's geometry")
        self._namespace = namespace
        self._store = store

    @classmethod
    def embedded(cls, namespace: bytes, *, ram_bytes: int, block_bytes: int) -> Client:
        """A client with a store of its own, in this process."""
        return cls(namespace, EmbeddedStore(ram_bytes, block_bytes))

    def put(self, keys: Sequence[bytes], values: Sequence[Any]) -> NDArray[np.bool_]:
        """Keep the buffers `values` under `keys`; True where this call stored it, False where the key was there already.

        Raises ValueError if the lists differ in length, or for a value that is empty or larger than a block; items before it are stored.
        """
        _same_length(keys, values)
        return np.fromiter((self._store.put(self._id(key), memoryview(value)) for key, value in zip(keys, values, strict=True)), np.bool_)

    def get(self, keys: Sequence[bytes], into: Sequence[Any]) -> NDArray[np.int64]:
        """Copy values into writable buffers; their lengths in octets, or MISSING, or TOO_LARGE."""
        _same_length(keys, into)
        lengths = np.full(len(keys), MISSING, np.int64)
        for i, (key, buffer) in enumerate(zip(keys, into, strict=True)):
            try:
                lengths[i] = self._store.get_into(self._id(key), memoryview(buffer))
            except ValueError:
                lengths[i] = TOO_LARGE
        return lengths

    def exists(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Which keys have a value. Keeps nothing from being evicted."""
        return np.fromiter((self._store.has(self._id(key)) for key in keys), np.bool_)

    def remove(self, keys: Sequence[bytes]) -> NDArray[np.bool_]:
        """Forget values; which of them were there."""
        return np.fromiter((self._store.remove(self._id(key)) for key in keys), np.bool_)

    def close(self) -> None:
        """Nothing to give back for an embedded store; here so that `with` works for every client."""

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _id(self, key: bytes) -> bytes:
        return object_id(self._namespace, key)


def _same_length(keys: Sequence[bytes], buffers: Sequence[Any]) -> None:
    if len(keys) != len(buffers):
        raise ValueError(f"{len(keys)} keys, but {len(buffers)} buffers")
