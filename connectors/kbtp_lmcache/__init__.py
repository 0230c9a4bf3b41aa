"""KBTP for LMCache: chunks of KV cache in the stores of a KBTP cluster.

`KbtpAdapter` is a remote storage plugin of LMCache's engine (`remote_storage_plugins`), thin over `kbtp_core.client.Client`, which moves
every byte. A store that is down, slow or full is a miss for LMCache, never an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kbtp_lmcache.connector import KbtpAdapter

__all__ = ["KbtpAdapter"]


def __getattr__(name: str) -> Any:
    """LMCache is imported with the class that needs it."""
    if name == "KbtpAdapter":
        from kbtp_lmcache.connector import KbtpAdapter

        return KbtpAdapter
    raise AttributeError(f"module 'kbtp_lmcache' has no attribute {name!r}")
