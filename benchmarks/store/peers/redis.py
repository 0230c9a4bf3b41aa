"""Redis over redis-py with hiredis; persistence off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis as client

from peers import Octets, free_port, start, stop


class Peer:
    def __init__(self, folder: Path, largest_bytes: int) -> None:  # noqa: ARG002
        port = free_port()
        options = {"port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "io-threads": 1, "maxmemory": "3gb"}
        command = ["redis-server", *(word for name, value in options.items() for word in (f"--{name}", str(value)))]
        self._server = start(command, folder, port)
        self._redis = client.Redis(port=port)
        from redis.utils import HIREDIS_AVAILABLE

        assert HIREDIS_AVAILABLE, "redis-py must use hiredis"

    def put(self, keys: Sequence[str], values: Sequence[Octets]) -> None:
        if len(keys) == 1:
            assert self._redis.set(keys[0], memoryview(values[0]))
            return
        pipeline = self._redis.pipeline(transaction=False)
        for key, value in zip(keys, values, strict=True):
            pipeline.set(key, memoryview(value))
        assert all(pipeline.execute())

    def get(self, keys: Sequence[str], into: Sequence[Octets]) -> None:  # noqa: ARG002
        found = [self._redis.get(keys[0])] if len(keys) == 1 else self._redis.mget(keys)
        assert None not in found

    def octets(self, keys: Sequence[str]) -> list[bytes]:
        return list(self._redis.mget(keys))

    def drop(self, keys: Sequence[str]) -> None:
        self._redis.delete(*keys)

    def close(self) -> None:
        self._redis.close()
        stop(self._server)
