"""KBTPHiCache: the storage backend of SGLang's hierarchical cache over KBTP stores.

Each method of SGLang's is a few lines here: `naming` says what pages are called, `pools` where they lie, `traffic` moves them.
Nothing is raised for a page, whatever happens to the store; what SGLang is told is what is so:

- batch_exists: how many leading pages there are;
- batch_get_v1, batch_get_v2: for each page, whether the pool holds all of its bytes now;
- batch_set_v1, batch_set_v2: for each page, whether the store has it now, from this call or from before;
- the generic get and set: the same, over flat page tensors. They have keys of their own: the octets of a flat page may be in another order.

SGLang calls from four threads of its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult

from kbtp_core.errors import ConfigError, KbtpError
from kbtp_core.store import places
from kbtp_sglang import hits
from kbtp_sglang.config import WHERE, read_config
from kbtp_sglang.naming import Naming
from kbtp_sglang.pools import PoolPages
from kbtp_sglang.stats import Stats
from kbtp_sglang.stores import Stores
from kbtp_sglang.traffic import buffers_of

_log = logging.getLogger(__name__)
_KV: Final = "kv"


class KBTPHiCache(HiCacheStorage):  # type: ignore[misc]
    """See the module. `engine` is SGLang's HiCacheStorageConfig. Raises ConfigError."""

    def __init__(self, engine: Any, kwargs: Any = None) -> None:  # noqa: ARG002 - SGLang gives it
        extra = {} if engine.extra_config is None else engine.extra_config
        self.config: Final = read_config(extra)
        # SGLang looks for it in its mapping when the backend is made; what the user says stays.
        self._is_zero_copy = bool(extra.setdefault("interface_v1", 1))
        self._parts = engine.tp_lcm_size // engine.tp_size if engine.should_split_heads else 1
        self._naming = Naming(self.config, engine)
        self._pools: dict[str, PoolPages] = {}
        self._lock = threading.Lock()  # guards what follows
        self._stores: Stores | None = None
        self._is_closed = False
        self._stats = Stats()

    # Pools -----------------------------------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of KV pages, before all others."""
        super().register_mem_pool_host(mem_pool_host)
        self._add(_KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it, or the same again under its name."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._add(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """All pools are known that there are at start."""
        self._known_stores()

    def _add(self, name: str, pool: Any) -> None:
        known = self._pools.get(name)
        if known is None or known.pool is not pool:
            self._pools[name] = PoolPages(name, pool, self._parts)

    def _known_stores(self) -> Stores:
        """Made when it is first needed. Raises KbtpError."""
        with self._lock:
            if self._is_closed:
                raise KbtpError("the backend is closed")
            if self._stores is None:
                if _KV not in self._pools:
                    raise ConfigError(f"{WHERE}: SGLang registered no host pool before it used the backend.")
                self._stores = Stores(self.config, self._naming.namespace(self._pools[_KV].page_size))
            return self._stores

    # KV, zero copy -----------------------------------------------------------------------------------------------------

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._get(self._pools[_KV], keys, host_indices)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        return self._set(self._pools[_KV], keys, host_indices)

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002
        return hits.leading(self._exists(self._pools[_KV], keys, is_flat=not self._is_zero_copy))

    # All pools -----------------------------------------------------------------------------------------------------------

    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return self._each(transfers, self._get)

    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[str, list[bool]]:  # noqa: ARG002
        return self._each(transfers, self._set)

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Sequence[Any] | None = None, extra_info: Any = None) -> Any:
        """How long a prefix all pools have what they need for; for each pool, how long it alone would let it be."""
        kv_pages = self.batch_exists(keys, extra_info)
        found: dict[str, int] = {_KV: kv_pages} if kv_pages else {}
        restorable: NDArray[np.bool_] = np.ones(kv_pages, np.bool_)
        for transfer in pool_transfers or []:
            if not kv_pages:
                break
            pages = self._pools.get(str(transfer.name))
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                wanted = list(transfer.keys or [])
                is_there = self._exists(pages, wanted)
                found[transfer.name] = min(kv_pages, hits.pages_in_groups(is_there, transfer.block_pages, transfer.group_pages))
                continue
            is_there = self._exists(pages, list(keys)[:kv_pages])
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                own = hits.with_trailing(is_there, len(transfer.keys or ()))
            else:
                own = hits.with_all(is_there)
            if own.any():
                found[transfer.name] = hits.longest(own)
            restorable &= own
        return PoolTransferResult(hits.longest(restorable), found, (np.flatnonzero(restorable) + 1).tolist())

    def _each(self, transfers: Sequence[Any], move: Callable[[PoolPages | None, Sequence[str], Any], list[bool]]) -> dict[str, list[bool]]:
        pools = self._pools
        return {transfer.name: move(pools.get(str(transfer.name)), transfer.keys or [], transfer.host_indices) for transfer in transfers}

    # Flat pages ------------------------------------------------------------------------------------------------------

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:  # noqa: ARG002
        return None if target_location is None else self.batch_get([key], [target_location])[0]

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        given = value if value is not None else target_location
        return given is not None and self.batch_set([key], [given])

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:  # noqa: ARG002
        """The tensors that were given, filled; None for a page that there is not."""
        tensors = list(target_locations or [])
        if len(tensors) != len(keys) or not all(tensor.is_contiguous() for tensor in tensors):
            return [None] * len(keys)
        ok = self._flat(keys, tensors, is_get=True)
        return [tensor if is_there else None for tensor, is_there in zip(tensors, ok.tolist(), strict=True)]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        tensors = list(values if values is not None else target_locations or [])
        if len(tensors) != len(keys):
            return False
        return not self._naming.is_written_here(self._pools[_KV]) or bool(self._flat(keys, tensors, is_get=False).all())

    def _flat(self, keys: Sequence[str], tensors: list[Any], *, is_get: bool) -> NDArray[np.bool_]:
        pages = self._pools[_KV]
        if pages.is_logical:
            return np.ones(len(keys), np.bool_)

        def move() -> NDArray[np.bool_]:
            where = places.of_buffers(buffers_of(tensors), writable=is_get)
            return self._move(self._naming.flat_keys(pages, keys), where, is_get=is_get)

        return self._guarded("get" if is_get else "put", len(keys), move)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _exists(self, pages: PoolPages | None, keys: Sequence[str], *, is_flat: bool = False) -> NDArray[np.bool_]:
        """Which pages are there, each with all of its values."""
        if pages is None or not keys:
            return np.zeros(len(keys), np.bool_)
        if pages.is_logical:
            return np.ones(len(keys), np.bool_)

        def look() -> NDArray[np.bool_]:
            names = self._naming.flat_keys(pages, keys) if is_flat else self._naming.keys(pages, keys)
            value_bytes = pages.page_bytes if is_flat else pages.value_bytes
            return np.asarray((self._known_stores().of(value_bytes).lengths(names) == value_bytes).reshape(len(keys), -1).all(axis=1))

        return self._guarded("exists", len(keys), look)

    def _get(self, pages: PoolPages | None, keys: Sequence[str], host_indices: Any) -> list[bool]:
        return self._pages(pages, keys, host_indices, is_get=True)

    def _set(self, pages: PoolPages | None, keys: Sequence[str], host_indices: Any) -> list[bool]:
        if pages is not None and not self._naming.is_written_here(pages):
            return [True] * len(keys)  # by another rank
        return self._pages(pages, keys, host_indices, is_get=False)

    def _pages(self, pages: PoolPages | None, keys: Sequence[str], host_indices: Any, *, is_get: bool) -> list[bool]:
        if pages is None or not keys:
            return [False] * len(keys)
        if pages.is_logical:
            return [True] * len(keys)
        ok = self._guarded("get" if is_get else "put", len(keys), lambda: self._move_pages(pages, keys, host_indices, is_get))
        return [bool(one) for one in ok]

    def _move_pages(self, pages: PoolPages, keys: Sequence[str], host_indices: Any, is_get: bool) -> NDArray[np.bool_]:
        names = self._naming.keys(pages, keys)
        if pages.is_flat:
            return self._copied(pages, names, host_indices, is_get=is_get)
        return self._move(names, pages.places(host_indices, len(keys)), is_get=is_get, page_count=len(keys))

    def _copied(self, pages: PoolPages, names: list[bytes], host_indices: Any, *, is_get: bool) -> NDArray[np.bool_]:
        """Pages that have no pieces, by way of SGLang's flat page."""
        pool, starts = pages.pool, pages.starts(host_indices, len(names)).tolist()
        tensors = [pool.get_dummy_flat_data_page() if is_get else pool.get_data_page(start, flat=True) for start in starts]
        ok = self._move(names, places.of_buffers(buffers_of(tensors), writable=is_get), is_get=is_get)
        if is_get:
            for at in np.flatnonzero(ok).tolist():
                pool.set_from_flat_data_page(starts[at], tensors[at])
        return ok

    def _move(self, names: list[bytes], where: places.Places, *, is_get: bool, page_count: int = 0) -> NDArray[np.bool_]:
        """Which pages were moved whole; each has as many values as another. Without `page_count` each has one."""
        carrier, begun = self._known_stores().of(int(where.totals.max())), time.monotonic()
        ok = carrier.get(names, where) if is_get else carrier.put(names, where)
        seconds, octets = time.monotonic() - begun, int(where.totals[ok].sum())
        pages = np.asarray(ok.reshape(page_count or len(names), -1).all(axis=1))
        self._stats.add(is_get=is_get, page_count=int(pages.sum()), octets=octets, seconds=seconds)
        return pages

    def _guarded(self, operation: str, count: int, work: Callable[[], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """What `work` finds; nothing where it can't be done."""
        if not count or (self._stores is not None and self._stores.breaker.is_open):
            return np.zeros(count, np.bool_)
        try:
            return work()
        except (KbtpError, ValueError, RuntimeError) as error:
            self._stats.failed(operation, count)
            _log.warning("%s of %d pages: %s", operation, count, error)
            return np.zeros(count, np.bool_)

    # The whole -------------------------------------------------------------------------------------------------------

    def clear(self) -> bool:
        """Forget all pages of this model's, of every rank; whether the store did."""
        try:
            sizes = [size for pages in self._pools.values() for size in (pages.value_bytes, pages.page_bytes) if size]
            _log.info("%d pages were removed from the store", self._known_stores().remove_all(sizes))
        except KbtpError as error:
            _log.warning("the store could not be cleared: %s", error)
            return False
        return True

    def get_stats(self) -> Any:
        """What was moved since the last call, for SGLang's histograms."""
        return self._stats.take()

    def counts(self) -> dict[str, int]:
        """Values by "operation/what became of them", since the start."""
        stores = self._stores
        return {**(stores.counts() if stores is not None else {}), **self._stats.failures()}

    def close(self) -> None:
        """End the connections. Idempotent."""
        with self._lock:
            self._is_closed = True
            stores, self._stores = self._stores, None
        if stores is not None:
            _log.info("closed: %s", stores.counts())
            stores.close()
