"""SGLang's hierarchical cache over KBTP stores (docs/sglang.md). `KBTPHiCache` is the storage backend; importing it needs SGLang.

Where this package is installed, SGLang's plugins make the name enough: of `--hicache-storage-backend dynamic`, `"backend_name": "kbtp"`
stands for the module and the class.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KBTPHiCache", "register"]


def register() -> None:
    """SGLang's plugin `kbtp`: the backend by its name."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.mem_cache.storage.backend_factory.StorageBackendFactory._create_dynamic_backend"
    HookRegistry.register(target, _name_class, HookType.BEFORE)


def _name_class(*arguments: Any, **_: Any) -> None:
    for one in arguments:
        if isinstance(one, dict) and one.get("backend_name") == "kbtp":
            one.setdefault("module_path", "kbtp_sglang")
            one.setdefault("class_name", "KBTPHiCache")


def __getattr__(name: str) -> Any:
    if name == "KBTPHiCache":
        from kbtp_sglang.storage import KBTPHiCache

        return KBTPHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
