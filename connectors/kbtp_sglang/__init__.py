"""SGLang's hierarchical cache over KBTP stores (docs/sglang.md). `KBTPHiCache` is the storage backend; importing it needs SGLang."""

from __future__ import annotations

from typing import Any

__all__ = ["KBTPHiCache"]


def __getattr__(name: str) -> Any:
    if name == "KBTPHiCache":
        from kbtp_sglang.storage import KBTPHiCache

        return KBTPHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
