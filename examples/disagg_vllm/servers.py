"""Start real `vllm serve` processes on this machine's CPU and end them again; every wait is bounded and shows the log's end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LOG_TAIL_LINES = 40


class ServerFailed(Exception):
    """A server ended or did not become ready; the text holds the end of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def transfer_config(role: str, **extra: Any) -> dict[str, Any]:
    """vLLM's --kv-transfer-config for KBTP."""
    return {"kv_connector": "KBTPConnector", "kv_role": role, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


class Server:
    """One process that answers GET /health; it leads a process group, so that its children end with it."""

    def __init__(self, name: str, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.name = name
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(self.port)],
                stdout=output,
                stderr=output,
                env=os.environ | (environment or {}),
                start_new_session=True,
            )

    def wait_ready(self, timeout_s: float) -> None:
        """Raises ServerFailed."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise ServerFailed(f"{self.name} ended with status {self._process.returncode}.\n{self.log_tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=2) as answer:
                    if answer.status == 200:
                        return
            except OSError:
                time.sleep(0.2)
        raise ServerFailed(f"{self.name} was not ready after {timeout_s:.0f} s.\n{self.log_tail()}")

    def log_tail(self) -> str:
        lines = self._log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"The end of {self._log}:", *lines])

    def metrics(self, prefix: str) -> dict[str, float]:
        """Counters under /metrics whose name starts with `prefix` (without it and without `_total`), summed over labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for line in text.splitlines():
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if name.startswith(prefix) and name.endswith("_total"):
                name = name.removeprefix(prefix).removesuffix("_total")
                found[name] = found.get(name, 0.0) + float(value)
        return found

    def stop(self, timeout_s: float = 15.0) -> None:
        """SIGTERM; after `timeout_s` SIGKILL for whatever is left of its process group."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout_s)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return
        self._process.wait(5)


def vllm_on_cpu(
    name: str, model: Path, logs: Path, *, core: int, transfer: dict[str, Any] | None = None, options: Sequence[str] = ()
) -> Server:
    """`vllm serve` on one CPU core, offline, with a small KV cache."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *options]
    if transfer is not None:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_OMP_THREADS_BIND": str(sorted(os.sched_getaffinity(0))[core % len(os.sched_getaffinity(0))]),
    }
    return Server(name, command, logs / f"{name}.log", environment)
