"""A `kbtp serve` as a process of its own, and what can be seen of it from outside."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parent.parent.parent
START_LIMIT_S = 60.0


class ServedStore:
    """Serves from construction until `stop`; `start` starts it again, at the addresses that it had.

    `program` is what is run in place of `kbtp serve`, with the same flags.
    """

    def __init__(
        self, folder: Path, *flags: str, drain_s: float = 10.0, program: tuple[str, ...] = ("-m", "kbtp_core.cli", "serve")
    ) -> None:
        self.log = folder / "serve.log"
        self.program = program
        self.flags = [*flags, "--drain-s", str(drain_s)]
        self._listen = [f"127.0.0.1:{port}" for port in free_ports(2)]
        self.start()

    def start(self, *flags: str, program: tuple[str, ...] | None = None) -> None:
        """With `flags` besides for this time."""
        listen, metrics = self._listen
        command = [sys.executable, *(program or self.program), "--listen", listen, "--metrics-listen", metrics, *self.flags, *flags]
        with self.log.open("ab") as out:
            out.write(b"\n--- start\n")
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"})
        deadline = time.monotonic() + START_LIMIT_S
        while " serving at " not in self.words():
            assert self.process.poll() is None, self.words()
            assert time.monotonic() < deadline, self.words()
            time.sleep(0.02)

    @property
    def address(self) -> str:
        return self._listen[0]

    def words(self) -> str:
        """What it has logged since it was started last."""
        return self.log.read_text().rpartition("\n--- start\n")[2]

    def page(self, path: str) -> tuple[int, str]:
        """(HTTP status, text) of /metrics, /readyz or /healthz."""
        try:
            with urllib.request.urlopen(f"http://{self._listen[1]}{path}", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metrics(self) -> dict[str, float]:
        """Each sample by its name, with the values of its labels behind slashes."""
        families = text_string_to_metric_families(self.page("/metrics")[1])
        return {"/".join((s.name, *s.labels.values())): s.value for family in families for s in family.samples}

    def memory_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def descriptors(self) -> Counter[str]:
        """Its open descriptors by what they are: `socket`, `anon_inode` with its kind, or a path."""
        found: Counter[str] = Counter()
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            try:
                name = str(link.readlink())
            except OSError:  # closed just now
                continue
            found["socket" if name.startswith("socket:") else name] += 1
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(60)


def total(metrics: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for key, value in metrics.items() if re.fullmatch(name + "(/.*)?", key))


def free_ports(count: int) -> list[int]:
    """Ports to keep over restarts: below those that the system gives to whoever asks for any."""
    lowest = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in random.SystemRandom().sample(range(10_000, max(lowest, 11_000)), 1000):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:  # somebody has it
            continue
        found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} ports between 10000 and {lowest} are free")
