"""The client for asyncio."""

from __future__ import annotations

import asyncio
import time

import numpy as np

from kbtp_core.async_client import AsyncClient
from kbtp_core.client import Client, ItemStatus
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.session import TargetServer
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.ram import RamStore

BLOCK = 4096


def test_all_calls_can_be_awaited_many_at_once_and_the_loop_goes_on() -> None:
    store = RamStore(BLOCK, 256 * BLOCK)
    fabric = SoftRnic()
    server = TargetServer(fabric, store.target, store.pool_region)

    async def one(client: AsyncClient, number: int) -> None:
        keys = [f"{number}/{at}" for at in range(4)]
        values = [np.full(BLOCK - at, number, np.uint8) for at in range(4)]
        assert (await client.put(keys, values) == ItemStatus.OK).all()
        buffers = [np.zeros(BLOCK, np.uint8) for _ in keys]
        found = await client.get(keys, buffers)
        assert found.lengths.tolist() == [value.size for value in values]
        assert all((buffer[: value.size] == number).all() for buffer, value in zip(buffers, values, strict=True))
        assert await client.prefix([*keys, "none"]) == 4
        assert (await client.exists([keys[0], "none"])).tolist() == [True, False]
        assert (await client.pin(keys[:1]) == ItemStatus.OK).all()
        assert (await client.unpin(keys[:1]) == ItemStatus.OK).all()
        assert await client.remove(keys[2:]) == 2

    async def main() -> None:
        address = "{}:{}".format(*server.address)
        async with AsyncClient(Client(address, b"ns", fabric=fabric, options=LinkOptions(quota=32))) as client:
            await asyncio.gather(*(one(client, number) for number in range(24)))
            assert len(await client.list()) == 48
            with server._lock:  # the store answers nothing
                waiting = asyncio.ensure_future(client.get(["none"], [bytearray(1)], timeout_s=0.5))
                begun = time.monotonic()
                await asyncio.sleep(0.01)
                assert time.monotonic() - begun < 0.3
                await waiting
            assert await client.remove_all() == 48

    asyncio.run(main())
    server.close(1.0)
    server.check_integrity()
    fabric.close()
