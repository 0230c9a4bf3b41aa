"""SGLang's own HTTP server on the CPU, as a process of its own."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

START_LIMIT_S = 240.0
_ADMIN = "key-of-these-tests"
_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-overlap-schedule"),
    *("--skip-server-warmup", "--page-size", "16", "--max-total-tokens", "2048", "--context-length", "2048"),
    *("--max-running-requests", "4", "--enable-hierarchical-cache", "--hicache-ratio", "2", "--enable-metrics", "--enable-cache-report"),
    *("--admin-api-key", _ADMIN, "--host", "127.0.0.1", "--hicache-storage-prefetch-policy", "wait_complete"),
)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    log_probabilities: list[float]
    stored: int
    """Prompt tokens that came from the store."""
    cached: int


class ServedEngine:
    """Starts at construction; `ready` waits for it."""

    def __init__(self, name: str, model: Path, folder: Path, *flags: str, environment: dict[str, str] | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        self.log = folder / f"{name}.log"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(self.port), *_FLAGS, *flags]
        given = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", **(environment or {})}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(command, stdout=out, stderr=out, env={**os.environ, **given}, start_new_session=True)

    def ready(self) -> ServedEngine:
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < deadline, self.log.read_text()[-4000:]
            try:
                if self.call("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.2)

    def generate(self, prompt: list[int], count: int = 8) -> Answer:
        """Greedy."""
        sampling = {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}
        _, text = self.call("POST", "/generate", {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True})
        found = json.loads(text)
        about = found["meta_info"]
        details = about.get("cached_tokens_details") or {}
        chances = [float(one[0]) for one in about["output_token_logprobs"]]
        return Answer(found["output_ids"], chances, int(details.get("storage") or 0), int(about["cached_tokens"]))

    def flush(self) -> None:
        """Drop what the device and the host hold; not what the store holds."""
        deadline = time.monotonic() + 30
        while self.call("POST", "/flush_cache")[0] != 200:
            assert time.monotonic() < deadline, "the engine is never idle"
            time.sleep(0.1)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {_ADMIN}"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def metric(self, name: str) -> float:
        """The sum over its labels."""
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", self.call("GET", "/metrics")[1], re.M)
        return sum(map(float, found))

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
