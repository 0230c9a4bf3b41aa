"""How a value is named (kbtp-store, "Identity"). Pure functions; every octet of their results is fixed by golden vectors.

A value is (namespace, object key), both binary. Whatever changes the bytes of a KV page must change one of the two: the
namespace says model, revision, dtype, layout and ranks; the key says pool, content hash and coordinates. Two rules:

1. Every part is length-framed or typed before it is hashed, so that no two different inputs run together into the same octets.
2. Hashes are SHA-256, cut to no less than 128 bits for a value's identity.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native

REPLICATED: Final = -1
"""As a rank: every rank holds the same bytes."""

_DESCRIPTOR_MAGIC: Final = b"DFKVNS\x00\x02"

LayoutValue = int | bool | str | bytes | None


class PoolKind(IntEnum):
    ATTENTION = 1
    MLA = 2
    MAMBA = 3
    SLIDING_WINDOW = 4
    INDEXER = 5
    DRAFT_ATTENTION = 6
    DRAFT_MLA = 7
    DRAFT_OTHER = 8
    CUSTOM = 0xFFFF


def object_id(namespace: bytes, key: bytes) -> bytes:
    """The 16 octets that name (namespace, key). Raises ValueError if either is empty."""
    if not namespace or not key:
        raise ValueError("a value needs a namespace and a key, neither of them empty")
    return hashlib.sha256(b"DFKVKEY2" + _framed64(namespace) + _framed64(key)).digest()[:16]


def id_prefix(namespace: bytes) -> bytes:
    """What is hashed before a key. Raises ValueError if the namespace is empty."""
    if not namespace:
        raise ValueError("a value needs a namespace that is not empty")
    return b"DFKVKEY2" + _framed64(namespace)


def object_ids(namespace: bytes, keys: Sequence[bytes | str]) -> NDArray[np.uint8]:
    """`object_id` of each key, shape (n, 16); a str stands for its UTF-8. Raises ValueError if the namespace or a key is empty."""
    ids = _native.object_ids(id_prefix(namespace), keys)
    return np.frombuffer(ids, np.uint8).reshape(-1, 16)


def tenant_of(namespace: bytes) -> bytes:
    """The tenant that a namespace belongs to: the first field of a canonical descriptor, else the whole namespace."""
    start = len(_DESCRIPTOR_MAGIC)
    if namespace.startswith(_DESCRIPTOR_MAGIC) and len(namespace) >= start + 4:
        (length,) = struct.unpack_from("<I", namespace, start)
        if 0 < length <= len(namespace) - start - 4:
            return namespace[start + 4 : start + 4 + length]
    return namespace


def tenant_id(tenant: bytes) -> int:
    """The 64-bit id of a tenant. Raises ValueError for an empty one."""
    if not tenant:
        raise ValueError("a tenant must not be empty")
    return int.from_bytes(hashlib.sha256(b"DFKVTENANT1" + _framed64(tenant)).digest()[:8], "big")


def layout_fingerprint(layout_id: str, fields: Mapping[str, LayoutValue]) -> int:
    """A 64-bit fingerprint of a raw layout and everything that shapes it; never zero."""
    digest = hashlib.sha256(b"DFKVLAYOUT1" + _field(layout_id.encode()))
    for name in sorted(fields):
        digest.update(_field(name.encode()) + _field(_value_text(fields[name])))
    return int.from_bytes(digest.digest()[:8], "little") or 1


@dataclass(frozen=True)
class Ranks:
    """How wide a parallel dimension is, and where in it the bytes come from (REPLICATED: anywhere)."""

    size: int = 1
    rank: int = 0


@dataclass(frozen=True)
class Namespace:
    """Everything about an engine that changes its KV bytes; `encode` is the canonical namespace."""

    tenant: str
    model: str
    revision: str
    kind: PoolKind | int
    pool: str  # the raw-layout id, or the pool's name
    dtype: str
    fingerprint: int
    block_tokens: int
    group: int
    first_layer: int
    layer_count: int
    tp: Ranks = Ranks()
    dp: Ranks = Ranks()
    pp: Ranks = Ranks()

    def encode(self) -> bytes:
        """The descriptor's octets. Raises ValueError naming a field that is out of range."""
        if not self.tenant or not self.model:
            raise ValueError("a namespace needs a tenant and a model")
        try:
            return b"".join(
                (
                    _DESCRIPTOR_MAGIC,
                    *(_field(text.encode()) for text in (self.tenant, self.model, self.revision)),
                    struct.pack("<H", self.kind),
                    *(_field(text.encode()) for text in (self.pool, self.dtype)),
                    struct.pack("<QIIII", self.fingerprint, self.block_tokens, self.group, self.first_layer, self.layer_count),
                    *(struct.pack("<Ii", ranks.size, ranks.rank) for ranks in (self.tp, self.dp, self.pp)),
                )
            )
        except struct.error as error:
            raise ValueError(f"a number of {self} does not fit into its field: {error}") from None


@dataclass(frozen=True)
class ObjectKey:
    """One page of one pool, with its parallel coordinates; `encode` is the canonical text."""

    pool: str
    content_hash: str
    dp: Ranks = Ranks()
    tp: Ranks = Ranks()
    pcp: Ranks = Ranks()
    dcp: Ranks = Ranks()
    pp: Ranks = Ranks()
    group: int = 0
    component: str = "kv"
    scatter: tuple[int, int] | None = None
    """(width, group) of a value that is stored in parts."""

    def encode(self) -> bytes:
        """The key's text. Raises ValueError for a part that holds the separator."""
        for part in (self.pool, self.content_hash, self.component):
            if not part or "|" in part:
                raise ValueError(f"{part!r} can't be part of an object key: it is empty or holds '|'")
        coordinates = "|".join(f"{name}={ranks.size}:{ranks.rank}" for name, ranks in self._coordinates())
        tail = "" if self.scatter is None else f"|sg={self.scatter[0]}:{self.scatter[1]}"
        head = f"dfkv/pool/v2|pool={self.pool}|hash={self.content_hash}"
        return f"{head}|{coordinates}|group={self.group}|component={self.component}{tail}".encode()

    def _coordinates(self) -> tuple[tuple[str, Ranks], ...]:
        return (("dp", self.dp), ("tp", self.tp), ("pcp", self.pcp), ("dcp", self.dcp), ("pp", self.pp))


def _framed64(octets: bytes) -> bytes:
    return struct.pack("<Q", len(octets)) + octets


def _field(octets: bytes) -> bytes:
    return struct.pack("<I", len(octets)) + octets


def _value_text(value: LayoutValue) -> bytes:
    match value:
        case None:
            return b"none:"
        case bool():
            return b"bool:1" if value else b"bool:0"
        case int():
            return f"int:{value}".encode()
        case str():
            return b"str:" + value.encode()
        case bytes():
            return b"bytes:" + value
