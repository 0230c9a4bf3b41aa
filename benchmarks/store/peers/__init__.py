"""What is compared: each peer starts its own server on this machine, talks to it over TCP on loopback, and moves values by key.

A peer is a module with a class `Peer`. All of them do the same for the same call:

    Peer(folder, largest_bytes)     start the server (its files under `folder`) and connect
    put(keys, values)               keep the arrays `values`; raise unless every value was kept
    get(keys, into)                 read the values, into the arrays `into` where the peer can do that; raise on a miss
    octets(keys)                    the values as bytes, to check that they are right
    drop(keys)                      forget the values
    close()                         end the server

Where a peer has a call for many keys, that is used; where it can read into and write from the caller's memory, that is used, with the
memory registered beforehand. A peer that answers with objects of its own is not charged for the copy into the caller's memory.
"""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Octets = NDArray[np.uint8]


class PeerLike(Protocol):
    def put(self, keys: Sequence[str], values: Sequence[Octets]) -> None: ...
    def get(self, keys: Sequence[str], into: Sequence[Octets]) -> None: ...
    def octets(self, keys: Sequence[str]) -> list[bytes]: ...
    def drop(self, keys: Sequence[str]) -> None: ...
    def close(self) -> None: ...


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(command: Sequence[str], folder: Path, port: int, timeout_s: float = 60.0) -> subprocess.Popen[bytes]:
    """Start a server and wait until `port` accepts connections. Raises RuntimeError with the end of its log."""
    log = folder / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=folder)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
            return process
        except OSError:
            time.sleep(0.05)
    stop(process)
    raise RuntimeError(f"{command[0]} does not serve port {port}:\n{log.read_text(errors='replace')[-2000:]}")


def stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
