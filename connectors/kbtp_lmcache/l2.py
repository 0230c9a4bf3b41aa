"""KBTPL2Adapter: the stores of a cluster as L2 of LMCache's multi-process server.

    lmcache server --l2-adapter '{"type": "plugin", "module_path": "kbtp_lmcache.l2", "class_name": "KBTPL2Adapter",
                                  "adapter_params": {"members": "10.0.0.4:7400"}}'

LMCache's own bridge for native clients (`NativeConnectorL2Adapter`) keeps task ids, event descriptors, locks, usage and listeners. The
client that it drives is `StoreCalls`: batches in, completions out.

Rules:
1. A batch is one call of the client, in a thread of a pool; nothing of it touches LMCache's memory after its completion was told.
2. A chunk is one value, named by LMCache's ObjectKey (model, rank, group, hash, salt) in the namespace of tenant and revision.
3. A value of another length than the chunk that waits for it is a miss. A store of which a part failed is a failed store.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter import NativeConnectorL2Adapter
from numpy.typing import NDArray

from kbtp_core.client import Client, ItemStatus
from kbtp_core.store import places
from kbtp_core.store.identity import Namespace, PoolKind
from kbtp_lmcache.config import LmcacheConfig, read_settings
from kbtp_lmcache.faults import Faults

WHERE = "l2-adapter: adapter_params"
_POOL = "lmcache-l2"

_Completion = tuple[int, bool, str, list[bool] | None]


def namespace_of(tenant: str, revision: str) -> Namespace:
    """Of all chunks of a tenant; the model and what else changes the octets is in LMCache's keys."""
    return Namespace(
        tenant=tenant,
        model=_POOL,
        revision=revision,
        kind=PoolKind.CUSTOM,
        pool=_POOL,
        dtype="bytes",
        fingerprint=0,
        block_tokens=0,
        group=0,
        first_layer=0,
        layer_count=0,
    )


class StoreCalls:
    """What LMCache's bridge asks of a native client. No method waits but `close`."""

    def __init__(self, client: Client, calls_at_once: int, faults: Faults) -> None:
        self._client = client
        self._faults = faults
        self._pool = ThreadPoolExecutor(calls_at_once, thread_name_prefix="kbtp-l2")
        self._ended: queue.SimpleQueue[_Completion] = queue.SimpleQueue()
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        self._number = 0

    def event_fd(self) -> int:
        return self._descriptor

    def submit_batch_set(self, keys: Sequence[str], views: Sequence[Any]) -> int:
        return self._submit("put", len(keys), lambda: self._put(keys, views), is_whole=True)

    def submit_batch_get(self, keys: Sequence[str], views: Sequence[Any]) -> int:
        return self._submit("get", len(keys), lambda: self._get(keys, views))

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        return self._submit("exists", len(keys), lambda: self._client.lengths(keys, touch=True, promote=True) > 0)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        return self._submit("remove", len(keys), lambda: self._remove(keys))

    def drain_completions(self) -> list[_Completion]:
        """(number, went well, why not, for each key whether it did)."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)
        return [self._ended.get_nowait() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        self._pool.shutdown()
        self._client.close()
        os.close(self._descriptor)

    def _submit(self, operation: str, count: int, work: Callable[[], NDArray[np.bool_]], *, is_whole: bool = False) -> int:
        with self._lock:
            self._number += 1
            number = self._number

        def run() -> None:
            try:
                found = work().tolist()
            except Exception as error:  # noqa: BLE001 - LMCache is told
                self._faults.unforeseen(operation, error)
                self._ended.put((number, False, str(error), [False] * count))
            else:
                ok = all(found) if is_whole else True
                self._ended.put((number, ok, "" if ok else "a part was not stored", None if is_whole else found))
            os.eventfd_write(self._descriptor, 1)

        self._pool.submit(run)
        return number

    def _put(self, keys: Sequence[str], views: Sequence[Any]) -> NDArray[np.bool_]:
        status = self._client.put_from(list(keys), places.of_buffers(views, writable=False))
        self._faults.note("put", status)
        return np.asarray(np.isin(status, (ItemStatus.OK, ItemStatus.EXISTS)))

    def _get(self, keys: Sequence[str], views: Sequence[Any]) -> NDArray[np.bool_]:
        found = self._client.get_into(list(keys), places.of_buffers(views, writable=True))
        self._faults.note("get", found.status)
        return np.asarray(found.ok & (found.lengths == [view.nbytes for view in views]))

    def _remove(self, keys: Sequence[str]) -> NDArray[np.bool_]:
        is_there = self._client.lengths(list(keys)) > 0
        self._client.remove(list(keys))
        return is_there


class KBTPL2AdapterConfig(L2AdapterConfigBase):  # type: ignore[misc]
    """`adapter_params`: the settings of `LmcacheConfig`. LMCache finds this class by its name."""

    def __init__(self, settings: LmcacheConfig) -> None:
        self.settings = settings

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> KBTPL2AdapterConfig:
        """Raises ConfigError, which names the setting."""
        return cls(read_settings(d, WHERE))

    @classmethod
    def help(cls) -> str:
        return "\n".join(f"- {name}: {field.description}" for name, field in LmcacheConfig.model_fields.items())


class KBTPL2Adapter(NativeConnectorL2Adapter):  # type: ignore[misc]
    """See the module. The whole L1 arena is host memory that the client reads and writes in place."""

    def __init__(self, config: KBTPL2AdapterConfig, l1_memory_desc: Any = None) -> None:  # noqa: ARG002 - LMCache gives it
        settings = config.settings
        self.faults = Faults("kbtp l2")
        client = settings.client(namespace_of(settings.tenant, settings.revision), WHERE)
        super().__init__(StoreCalls(client, settings.calls_at_once, self.faults), type_name="kbtp")

    def report_status(self) -> dict[str, Any]:
        return {**super().report_status(), "faults": self.faults.snapshot()}
