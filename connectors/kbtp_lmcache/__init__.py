"""KBTP for LMCache: chunks of KV cache in the stores of a KBTP cluster.

Two ways in, both thin over `kbtp_core.client.Client`, which moves every byte:
- `KbtpAdapter`, a remote storage plugin of the engine in the process (`remote_storage_plugins`);
- `KbtpL2Adapter`, an L2 adapter of LMCache's server (`--l2-adapter '{"type": "plugin", ...}'`).

A store that is down, slow or full is a miss for LMCache, never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbtp_lmcache.connector import KbtpAdapter
    from kbtp_lmcache.l2 import KbtpL2Adapter

__all__ = ["KbtpAdapter", "KbtpL2Adapter"]


def __getattr__(name: str) -> Any:
    """LMCache is imported with the class that needs it."""
    if name == "KbtpAdapter":
        from kbtp_lmcache.connector import KbtpAdapter

        return KbtpAdapter
    if name == "KbtpL2Adapter":
        from kbtp_lmcache.l2 import KbtpL2Adapter

        return KbtpL2Adapter
    raise AttributeError(f"module 'kbtp_lmcache' has no attribute {name!r}")
