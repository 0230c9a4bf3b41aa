"""What a page is called: everything that changes its bytes is in its namespace or its key.

SGLang's page hashes know the tokens before and in a page, and the request's salt; nothing else. So the namespace says the engine (model,
quantization, overrides, page size), and a key says pool, the fingerprint of its layout, hash, and which ranks hold these bytes. Ranks that
hold the same bytes (MLA, data parallelism) have the same keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any, Final

from kbtp_core.store.identity import REPLICATED, Namespace, ObjectKey, PoolKind, Ranks, layout_fingerprint
from kbtp_sglang.config import HiCacheConfig
from kbtp_sglang.pools import PoolPages

_SHARDED: Final = frozenset({"mamba"})
"""Pools that differ by tensor-parallel rank even where the model's KV does not."""
_SERVER_FIELDS: Final = (
    "revision",
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "quantization_param_path",
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_model_quantization",
)


class Naming:
    """Names of an engine's pages; `engine` is SGLang's HiCacheStorageConfig."""

    def __init__(self, config: HiCacheConfig, engine: Any) -> None:
        self._engine = engine
        self._model = config.model or engine.model_name or ""
        self._revision = config.revision
        self._tenant = config.tenant
        self._server = server_fields()

    def namespace(self, page_size: int) -> Namespace:
        """Of all pages of all pools of the engine, on whatever rank."""
        revision = json.dumps([self._revision, self._server], sort_keys=True)
        return Namespace(
            tenant=self._tenant,
            model=self._model or "-",
            revision=hashlib.sha256(revision.encode()).hexdigest()[:32],
            kind=PoolKind.MLA if self._engine.is_mla_model else PoolKind.ATTENTION,
            pool="sglang.hicache/1",
            dtype=str(self._server.get("kv_cache_dtype") or "auto"),
            fingerprint=layout_fingerprint("sglang.hicache/1", {"page_size": page_size, "is_replicated": self._engine.is_mla_model}),
            block_tokens=page_size,
            group=0,
            first_layer=0,
            layer_count=0,
        )

    def is_replicated(self, pages: PoolPages) -> bool:
        """Whether every tensor-parallel rank holds the same bytes of the pool."""
        return bool(self._engine.is_mla_model) and pages.name not in _SHARDED and not pages.is_split_by_heads

    def is_written_here(self, pages: PoolPages) -> bool:
        """Of ranks that hold the same bytes, one writes them."""
        return not self.is_replicated(pages) or bool(self._engine.is_storage_writer)

    def keys(self, pages: PoolPages, hashes: Sequence[str]) -> list[bytes]:
        """The keys of each page's values, one page after the other. Raises ValueError for a hash that can't be a part of a key."""
        return _framed(hashes, [self._frame(pages, part, pages.parts, pages.is_flat) for part in range(pages.parts)])

    def flat_keys(self, pages: PoolPages, hashes: Sequence[str]) -> list[bytes]:
        """The key of each page as a flat tensor. Raises as `keys` does."""
        return _framed(hashes, [self._frame(pages, 0, 1, True)])

    def _frame(self, pages: PoolPages, part: int, parts: int, is_flat: bool) -> tuple[bytes, bytes]:
        """What stands before and after the hash in the key of a page's part."""
        engine = self._engine
        tp = Ranks(1, REPLICATED) if self.is_replicated(pages) else Ranks(engine.tp_size * parts, engine.tp_rank * parts + part)
        mark = "\x00"
        key = ObjectKey(
            pool=f"{pages.name}:{pages.fingerprint:016x}",
            content_hash=mark,
            tp=tp,
            pcp=Ranks(engine.attn_cp_size, engine.attn_cp_rank),
            dcp=Ranks(engine.dcp_size, engine.dcp_rank),
            pp=Ranks(engine.pp_size, engine.pp_rank),
            component="flat" if is_flat else "kv",
        )
        before, _, after = key.encode().partition(mark.encode())
        return before, after


def _framed(hashes: Sequence[str], frames: list[tuple[bytes, bytes]]) -> list[bytes]:
    for text in hashes:
        if not text or "|" in text:
            raise ValueError(f"{text!r} is no page hash: it is empty or holds '|'")
    return [before + text.encode() + after for text in hashes for before, after in frames]


def server_fields() -> dict[str, str | None]:
    """What SGLang's arguments say about the bytes that it computes; none of it outside of an engine."""
    try:
        from sglang.srt.runtime_context import get_server_args

        arguments = get_server_args()
    except (ImportError, ValueError, AssertionError, RuntimeError):
        return {}
    values = {name: getattr(arguments, name, None) for name in _SERVER_FIELDS}
    return {name: None if value is None else str(value) for name, value in values.items()}
