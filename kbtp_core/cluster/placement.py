"""Which node holds a key: client-side weighted Ketama (kbtp-store, "Placement").

Each node has 160 points times its weight on a circle of 2^32; a key belongs to the first point at or after its hash. There is no
replication: a lost node is a miss for its keys, and only for those. The hash of a key is taken from its object id, which holds the
namespace, so that two models do not pile up on the same nodes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

WEIGHT_LIMIT: Final = 1024
_HASHES_PER_WEIGHT: Final = 40  # each gives four points


class Placement:
    """Immutable; made anew when the members change. `members` maps names to weights of 1 … 1024."""

    def __init__(self, members: Mapping[str, int]) -> None:
        if not members:
            raise ValueError("a placement needs at least one member")
        for name, weight in members.items():
            if not 1 <= weight <= WEIGHT_LIMIT:
                raise ValueError(f"member {name} has weight {weight}: 1 to {WEIGHT_LIMIT} is allowed")
        self.names = tuple(sorted(members))
        points = np.concatenate([_points(name, members[name]) for name in self.names])
        owners = np.repeat(np.arange(len(self.names)), [4 * _HASHES_PER_WEIGHT * members[name] for name in self.names])
        order = np.argsort(points, kind="stable")  # a tie goes to the name that sorts first
        self._points: NDArray[np.uint32] = points[order]
        self._owners = owners[order]

    def owner(self, object_id: bytes) -> str:
        """The member that holds the value with this 16-octet id."""
        return self.names[int(self.owners(np.frombuffer(object_id, np.uint8).reshape(1, 16))[0])]

    def owners(self, object_ids: NDArray[np.uint8]) -> NDArray[np.int64]:
        """Indexes into `names` for ids of shape (n, 16)."""
        hashes = np.ascontiguousarray(object_ids[:, :4]).view("<u4")[:, 0]
        at = np.searchsorted(self._points, hashes, side="left") % self._points.size
        return np.asarray(self._owners[at], np.int64)

    def points(self) -> tuple[list[int], list[int]]:
        """The circle: each point in order, and the index of its owner."""
        return self._points.tolist(), self._owners.tolist()


def _points(name: str, weight: int) -> NDArray[np.uint32]:
    digests = b"".join(hashlib.md5(f"{name}-{i}".encode(), usedforsecurity=False).digest() for i in range(_HASHES_PER_WEIGHT * weight))
    return np.frombuffer(digests, "<u4").astype(np.uint32)
