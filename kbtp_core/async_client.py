"""`kbtp_core.client.Client` for asyncio: the same calls, to be awaited.

    async with AsyncClient(Client("127.0.0.1:7400", b"my-namespace")) as client:
        await client.put([b"page-0"], [page])

A call that waits for a store waits in a thread of the client's own, without the GIL, so the event loop goes on. At most `calls_at_once` of
them wait at a time; further ones begin when one of them has ended. A call that is cancelled ends by itself, at its deadline at the latest,
and uses its buffers until then: keep them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.client import Client, GetResult, Keys, ListedValue
from kbtp_core.store.places import Places

_T = TypeVar("_T")


class AsyncClient:
    """Owns `client`, which it closes. Arguments and results of the calls are those of `Client`."""

    def __init__(self, client: Client, *, calls_at_once: int = 16) -> None:
        self.client = client
        self._threads = ThreadPoolExecutor(calls_at_once, thread_name_prefix="kbtp-async")

    async def put(
        self, keys: Keys, values: Sequence[Any], *, durable: bool = False, pin: bool = False, timeout_s: float | None = None
    ) -> NDArray[np.uint8]:
        return await self._run(partial(self.client.put, keys, values, durable=durable, pin=pin, timeout_s=timeout_s))

    async def get(self, keys: Keys, into: Sequence[Any], *, timeout_s: float | None = None) -> GetResult:
        return await self._run(partial(self.client.get, keys, into, timeout_s=timeout_s))

    async def put_from(
        self, keys: Keys, where: Places, *, durable: bool = False, pin: bool = False, timeout_s: float | None = None
    ) -> NDArray[np.uint8]:
        return await self._run(partial(self.client.put_from, keys, where, durable=durable, pin=pin, timeout_s=timeout_s))

    async def get_into(self, keys: Keys, where: Places, *, timeout_s: float | None = None) -> GetResult:
        return await self._run(partial(self.client.get_into, keys, where, timeout_s=timeout_s))

    async def lengths(self, keys: Keys, *, touch: bool = False, promote: bool = False, timeout_s: float | None = None) -> NDArray[np.int64]:
        return await self._run(partial(self.client.lengths, keys, touch=touch, promote=promote, timeout_s=timeout_s))

    async def exists(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.bool_]:
        return await self._run(partial(self.client.exists, keys, timeout_s=timeout_s))

    async def prefix(self, keys: Keys, *, promote: bool = True, timeout_s: float | None = None) -> int:
        return await self._run(partial(self.client.prefix, keys, promote=promote, timeout_s=timeout_s))

    async def touch(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.bool_]:
        return await self._run(partial(self.client.touch, keys, timeout_s=timeout_s))

    async def remove(self, keys: Keys, *, timeout_s: float | None = None) -> int:
        return await self._run(partial(self.client.remove, keys, timeout_s=timeout_s))

    async def pin(self, keys: Keys, *, lease_s: float = 60.0, timeout_s: float | None = None) -> NDArray[np.uint8]:
        return await self._run(partial(self.client.pin, keys, lease_s=lease_s, timeout_s=timeout_s))

    async def unpin(self, keys: Keys, *, timeout_s: float | None = None) -> NDArray[np.uint8]:
        return await self._run(partial(self.client.unpin, keys, timeout_s=timeout_s))

    async def remove_all(self, *, timeout_s: float | None = None) -> int:
        return await self._run(partial(self.client.remove_all, timeout_s=timeout_s))

    async def list(self, *, whole_tenant: bool = False, timeout_s: float | None = None) -> Sequence[ListedValue]:
        return await self._run(lambda: tuple(self.client.list(whole_tenant=whole_tenant, timeout_s=timeout_s)))

    async def close(self) -> None:
        """Wait for the calls that are under way, and end the connections. Idempotent."""
        await asyncio.get_running_loop().run_in_executor(None, self._close)

    def _close(self) -> None:
        self._threads.shutdown()
        self.client.close()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def _run(self, call: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)
