"""KBTP's store: `kbtp serve` as it comes, RAM only unless a folder is given, and two clients of it.

One client puts and the other one gets, so that the reader knows nothing of a value before it asks for it: its first get of a key is a
lookup and a load, later ones are a load.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kbtp_core.client import Client
from kbtp_core.store.link import LinkOptions
from peers import Octets, free_port, start, stop

RAM = "2GiB"
BLOCKS = ("4KiB", "64KiB", "1MiB", "2816KiB")


class Peer:
    def __init__(self, folder: Path, largest_bytes: int) -> None:  # noqa: ARG002
        self._port = free_port()
        command = [sys.executable, "-m", "kbtp_core.cli", "serve", "--listen", f"127.0.0.1:{self._port}", "--metrics-listen", "off"]
        command += ["--commit-ram", "start"]  # as Mooncake does
        command += [word for block in BLOCKS for word in ("--block", block)]
        self._server: subprocess.Popen[bytes] = start([*command, "--ram", RAM], folder, self._port)
        deadline = time.monotonic() + 120
        while "all of the RAM is there" not in (folder / "server.log").read_text():
            assert time.monotonic() < deadline, "the server has not got its memory"
            time.sleep(0.1)
        self._clients: dict[int, tuple[Client, Client]] = {}

    def _of(self, size: int) -> tuple[Client, Client]:
        """Clients of the pool whose blocks have the size of the values, as an engine's have."""
        if size not in self._clients:
            options = LinkOptions(block_bytes=size)
            writer, reader = (Client(f"127.0.0.1:{self._port}", b"bench", options=options, timeout_s=30.0) for _ in range(2))
            self._clients[size] = writer, reader
        return self._clients[size]

    def put(self, keys: Sequence[str], values: Sequence[Octets]) -> None:
        status = self._of(values[0].size)[0].put(keys, values)
        assert not status.any(), status

    def get(self, keys: Sequence[str], into: Sequence[Octets]) -> None:
        status = self._of(into[0].size)[1].get(keys, into).status
        assert not status.any(), status

    def octets(self, keys: Sequence[str]) -> list[bytes]:
        size = int(keys[0].split("/")[1])
        buffers = [np.zeros(size, np.uint8) for _ in keys]
        found = self._of(size)[0].get(keys, buffers)
        assert found.ok.all(), found
        return [buffer[:length].tobytes() for buffer, length in zip(buffers, found.lengths.tolist(), strict=True)]

    def drop(self, keys: Sequence[str]) -> None:
        self._of(int(keys[0].split("/")[1]))[0].remove(keys)

    def close(self) -> None:
        for pair in self._clients.values():
            for client in pair:
                client.close()
        stop(self._server)
