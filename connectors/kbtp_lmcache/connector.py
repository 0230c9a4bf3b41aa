"""The engine's plugin: LMCache's `RemoteConnector` over a cluster of stores.

Rules:
1. A batch of LMCache is one call of the client. Waiting is done in threads of the connector's own, so LMCache's loop goes on.
2. Octets move between the store and LMCache's memory objects, with no copy between. An object is held (`ref_count_up`) by the thread that
   moves it, until the call is over: a future that LMCache cancels ends nothing of that. What a cancelled load brought is given back.
3. Nothing is raised into LMCache. What can't be had is a miss, what can't be stored is not stored; `faults` counts both.

Settings that are wrong are an error in LMCache's log at start, with a text that says which; LMCache then runs without the plugin.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from lmcache.v1.exceptions import IrrecoverableException
from lmcache.v1.memory_management import MemoryFormat, MemoryObj
from lmcache.v1.storage_backend.connector import ConnectorAdapter, ConnectorContext, extract_plugin_type
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector

from kbtp_core.errors import ConfigError
from kbtp_core.store.item_status import ItemStatus
from kbtp_lmcache.config import SCHEME, LmcacheConfig, plugin_settings
from kbtp_lmcache.faults import Faults
from kbtp_lmcache.identity import key_of, namespace_of, seed_warning
from kbtp_lmcache.values import Layout, headers_of, layout_in, narrowed, places_of

if TYPE_CHECKING:
    from lmcache.utils import CacheEngineKey

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_SHARE_OF_LIMIT = 0.8  # of the time after which LMCache gives a load up


class KbtpAdapter(ConnectorAdapter):  # type: ignore[misc]
    """What `remote_storage_plugin.kbtp.class_name` names."""

    def __init__(self) -> None:
        super().__init__(SCHEME)

    def can_parse(self, url: str) -> bool:
        return url.startswith(SCHEME) or (url.startswith("plugin://") and extract_plugin_type(url[len("plugin://") :]) == "kbtp")

    def create_connector(self, context: ConnectorContext) -> RemoteConnector:
        """Raises IrrecoverableException, which LMCache does not try again, for wrong settings."""
        try:
            extra = context.config.extra_config if context.config is not None else None
            settings, where = plugin_settings(context.url, context.plugin_name, extra)
            return KbtpConnector(context, settings, where)
        except ConfigError as error:
            raise IrrecoverableException(str(error)) from error


class KbtpConnector(RemoteConnector):  # type: ignore[misc]
    """See the module."""

    def __init__(self, context: ConnectorContext, settings: LmcacheConfig, where: str) -> None:
        config, metadata = context.config, context.metadata
        super().__init__(config, metadata)
        self._memory = context.local_cpu_backend
        self._is_layerwise = bool(config.use_layerwise)
        space = namespace_of(config, metadata, tenant=settings.tenant, revision=settings.revision, has_meta=self.save_chunk_meta)
        limit_s = float(config.blocking_timeout_secs) * _SHARE_OF_LIMIT
        self._client = settings.client(space, where, timeout_s=min(settings.timeout_s, limit_s))
        self._threads = ThreadPoolExecutor(settings.calls_at_once, thread_name_prefix="kbtp-lmcache")
        self._metadata = metadata
        self._member_count = len(settings.addresses())
        self.faults = Faults(f"kbtp ({settings.members})")
        warning = seed_warning(config)
        if warning:
            _log.warning("%s", warning)

    # Which there are -------------------------------------------------------------------------------------------------

    async def exists(self, key: CacheEngineKey) -> bool:
        return bool(await self._in_thread(self.exists_sync, key))

    def exists_sync(self, key: CacheEngineKey) -> bool:
        return self.batched_contains([key]) == 1

    def support_batched_contains(self) -> bool:
        return True

    def batched_contains(self, keys: Sequence[CacheEngineKey]) -> int:
        return self._guarded("lookup", 0, lambda: self._client.prefix([key_of(key) for key in keys]) if keys else 0)

    async def batched_async_contains(self, lookup_id: str, keys: list[CacheEngineKey], pin: bool = False) -> int:  # noqa: ARG002
        return int(await self._in_thread(self.batched_contains, keys) or 0)

    # Store -----------------------------------------------------------------------------------------------------------

    async def put(self, key: CacheEngineKey, memory_obj: MemoryObj) -> None:
        await self.batched_put([key], [memory_obj])

    def support_batched_put(self) -> bool:
        return True

    async def batched_put(self, keys: Sequence[CacheEngineKey], memory_objs: Sequence[MemoryObj]) -> None:
        """LMCache counts the objects down itself when this returns or is cancelled."""
        objects = list(memory_objs)
        for obj in objects:
            obj.ref_count_up()
        try:
            future = self._threads.submit(self._guarded, "put", None, lambda: self._put(keys, objects))
        except RuntimeError:  # closed
            _give_back(objects)
            return
        future.add_done_callback(lambda _: _give_back(objects))  # also of one that is cancelled before it began
        await asyncio.wrap_future(future)

    def _put(self, keys: Sequence[CacheEngineKey], objects: list[MemoryObj]) -> None:
        headers = headers_of(objects, self.remote_metadata_bytes) if self.save_chunk_meta else None
        self.faults.note("put", self._client.put_from([key_of(key) for key in keys], places_of(objects, headers)))

    # Load ------------------------------------------------------------------------------------------------------------

    async def get(self, key: CacheEngineKey) -> MemoryObj | None:
        return (await self.batched_get([key]))[0]

    def support_batched_get(self) -> bool:
        return True

    async def batched_get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """As many as keys, None for a miss."""
        nothing: list[MemoryObj | None] = [None] * len(keys)
        try:
            future: Future[list[MemoryObj | None]] = self._threads.submit(self._guarded, "get", nothing, lambda: self._get(keys))
        except RuntimeError:  # closed
            return nothing
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            future.add_done_callback(_give_back_result)
            raise

    async def batched_get_non_blocking(self, lookup_id: str, keys: list[CacheEngineKey]) -> list[MemoryObj]:  # noqa: ARG002
        """Those before the first miss."""
        found = await self.batched_get(keys)
        count = next((at for at, obj in enumerate(found) if obj is None), len(found))
        _give_back([obj for obj in found[count:] if obj is not None])
        return [obj for obj in found[:count] if obj is not None]

    def _get(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        objects = self._allocate(keys)
        result: list[MemoryObj | None] = [None] * len(keys)
        at = [index for index, obj in enumerate(objects) if obj is not None]
        held = [objects[index] for index in at]
        try:
            if not at:
                return result
            headers = np.zeros((len(at), self.remote_metadata_bytes), np.uint8) if self.save_chunk_meta else None
            found = self._client.get_into([key_of(keys[index]) for index in at], places_of(held, headers))
            self.faults.note("get", found.status)
            for row, index in enumerate(at):
                if found.status[row] == ItemStatus.OK:
                    result[index] = self._fitted(held[row], None if headers is None else headers[row], int(found.lengths[row]))
                    held[row] = None if result[index] is not None else held[row]
            return result
        finally:
            _give_back([obj for obj in held if obj is not None])

    def _fitted(self, obj: MemoryObj, header: Any, length: int) -> MemoryObj | None:
        """The object as what came; None, and `obj` stays the caller's, if that is not a chunk of this engine."""
        try:
            if header is not None:
                layout, body = layout_in(header)
                if body != length - len(header):
                    raise ValueError(f"its header says {body} octets, but it has {length - len(header)}")
                return narrowed(obj, layout, body)
            tokens, rest = divmod(length, self.single_token_size)
            if rest or not tokens:
                raise ValueError(f"{length} octets are no whole number of tokens of {self.single_token_size}")
            return narrowed(obj, Layout(self._metadata.get_shapes(tokens), self.meta_dtypes, self.meta_fmt), length)
        except ValueError as error:
            self.faults.misfit("get", f"a value is not what this engine stores: {error}")
            return None

    def _allocate(self, keys: Sequence[CacheEngineKey]) -> list[MemoryObj | None]:
        """Room for a full chunk, or one layer of it, for each key; None where LMCache has no memory."""
        import torch

        shapes, dtypes, fmt = self.meta_shapes, self.meta_dtypes, self.meta_fmt
        if self._is_layerwise:
            shape = self.meta_shapes[0]
            shapes, fmt = [torch.Size([shape[2], shape[0], shape[3]])], MemoryFormat.KV_T2D
        objects: list[MemoryObj | None] = []
        for _ in keys:
            objects.append(self._memory.allocate(shapes, dtypes, fmt, busy_loop=False))
            if objects[-1] is None:
                self.faults.misfit("memory", f"LMCache has no memory for {len(keys)} chunks at a time: raise max_local_cpu_size")
                break
        return objects + [None] * (len(keys) - len(objects))

    # The rest --------------------------------------------------------------------------------------------------------

    def support_ping(self) -> bool:
        return True

    async def ping(self) -> int:
        """0 while any of the stores answers: the keys of the others are misses."""
        code = await self._in_thread(self._guarded, "ping", int(ItemStatus.UNAVAILABLE), self._ping)
        return int(ItemStatus.UNAVAILABLE) if code is None else code

    def _ping(self) -> int:
        keys = [f"ping-{at}" for at in range(1 if self._member_count == 1 else 8 * self._member_count)]
        status = self._client.get(keys, [np.empty(1, np.uint8) for _ in keys]).status
        self.faults.note("ping", status)
        return 0 if np.isin(status, (ItemStatus.OK, ItemStatus.MISSING, ItemStatus.TOO_LARGE)).any() else int(status[0])

    def remove_sync(self, key: CacheEngineKey) -> bool:
        return self._guarded("remove", 0, lambda: self._client.remove([key_of(key)])) == 1

    async def list(self) -> list[str]:
        """Object ids in hex: the store keeps no keys."""
        return await self._in_thread(self._guarded, "list", [], lambda: [one.object_id.hex() for one in self._client.list()]) or []

    async def close(self) -> None:
        """Wait for what is under way, and end the connections. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        self._client.close()

    async def _in_thread(self, call: Callable[..., _T], *arguments: Any) -> _T | None:
        """None once it is closed."""
        try:
            future = self._threads.submit(call, *arguments)
        except RuntimeError:
            return None
        return await asyncio.wrap_future(future)

    def _guarded(self, operation: str, otherwise: _T, work: Callable[[], _T]) -> _T:
        try:
            return work()
        except Exception as error:  # noqa: BLE001  LMCache gets misses; the log gets the error
            self.faults.unforeseen(operation, error)
            return otherwise


def _give_back(objects: Sequence[MemoryObj]) -> None:
    for obj in objects:
        obj.ref_count_down()


def _give_back_result(future: Future[list[MemoryObj | None]]) -> None:
    if not future.cancelled():
        _give_back([obj for obj in future.result() if obj is not None])
