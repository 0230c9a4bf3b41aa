"""Steers real vLLM engines (`engine_process.py`) from a test: every wait has a deadline and fails with the engine's log."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

START_S = 240.0
BLOCK_TOKENS = 32
Prompt = list[int]


@dataclass(frozen=True)
class Finished:
    tokens: list[int]
    reason: str
    params: dict[str, Any] | None


def environment(core: int) -> dict[str, str]:
    """vLLM on one CPU core, or two workers on two for -1; without network access."""
    return os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # A worker each gets a core of its own where there are several.
        "VLLM_CPU_OMP_THREADS_BIND": str(core % (os.cpu_count() or 1)) if core >= 0 else "0|1",
    }


class Engine:
    """One engine process. `ready()` before first use; `kill()` is SIGKILL, `stop()` is orderly. Without a role it has no connector."""

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        *,
        role: str | None,
        core: int = 0,
        extra: dict[str, Any] | None = None,
        connector: str = "KBTPConnector",
        **arguments: Any,
    ):
        self.name = name
        self._log_path = directory / f"{name}.log"
        self._directory = tempfile.TemporaryDirectory(prefix="kbtp-")  # short: a socket's path has 108 octets
        self._listener = Listener(f"{self._directory.name}/s", family="AF_UNIX")
        self._finished: dict[str, Finished] = {}
        self._posted = 0
        self._arguments = {
            "model": str(model),
            "enforce_eager": True,
            "max_model_len": 2048,
            "block_size": BLOCK_TOKENS,
            "dtype": "float32",  # in bfloat16 vLLM's own answers depend on what else is in the batch
            "kv_cache_memory_bytes": 16 << 20,
            "disable_log_stats": False,
            "kv_transfer_config": role
            and {
                "kv_connector": connector,
                "kv_role": role,
                "engine_id": name,
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": extra or {},
            },
            **arguments,
        }
        with self._log_path.open("wb") as log:
            command = [sys.executable, str(Path(__file__).with_name("engine_process.py")), str(self._listener.address)]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment(core))
        self._connection: Any = None

    def ready(self) -> Engine:
        """Wait until the engine is loaded."""
        if self._connection is None:
            self._listener._listener._socket.settimeout(START_S)  # type: ignore[attr-defined]
            try:
                self._connection = self._listener.accept()
            except TimeoutError:
                self._fail("did not connect")
            self._connection.send(self._arguments)
            assert self._receive(START_S) == ("answer", "ready")
        return self

    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def total(self, name: str) -> int:
        """What the connector has counted under this name."""
        return int(self.ask("totals").get(name, 0))

    def last_error(self) -> str:
        """The last line of its log that names an error."""
        lines = [line for line in self.log().splitlines() if "Error: " in line]
        return lines[-1].partition("Error: ")[2] if lines else self.log()[-300:]

    def _fail(self, what: str) -> None:
        raise AssertionError(f"engine {self.name} {what}; the end of its log:\n{self.log()[-3000:]}")

    def _receive(self, timeout_s: float) -> Any:
        try:
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            self._fail(f"ended with status {self.process.poll()}")
        self._fail(f"said nothing for {timeout_s:.0f} s")
        return None

    def _note(self, message: Any) -> None:
        """A request's end, or the answer to a posted command."""
        if message[0] == "answer":
            assert self._posted, f"engine {self.name} answers what it was not asked: {message[1]!r}"
            self._posted -= 1
            return
        _, request_id, tokens, reason, params = message
        self._finished[request_id] = Finished(tokens, reason, params)

    def ask(self, command: str, *values: Any) -> Any:
        return self.ask_all((command, *values))[0]

    def ask_all(self, *commands: tuple[Any, ...]) -> list[Any]:
        """Run commands with no engine step between them; their answers."""
        self._connection.send(commands)
        answers: list[Any] = []
        while len(answers) < len(commands):
            message = self._receive(30.0)
            if message[0] == "answer" and not self._posted:
                answers.append(message[1])
            else:
                self._note(message)
        return answers

    def post(self, command: str, *values: Any) -> None:
        """Ask without waiting for the answer, which is dropped."""
        self._connection.send([(command, *values)])
        self._posted += 1

    def take_finished(self) -> dict[str, Finished]:
        """Requests that ended and that nobody has waited for, as far as the engine has told already."""
        while self._connection.poll(0):
            self._note(self._receive(0))
        finished, self._finished = self._finished, {}
        return finished

    def wait(self, request_id: str, timeout_s: float = 60.0) -> Finished:
        deadline = time.monotonic() + timeout_s
        while request_id not in self._finished:
            self._note(self._receive(deadline - time.monotonic()))
        return self._finished.pop(request_id)

    def run(self, request_id: str, prompt: Prompt, max_tokens: int, params: dict[str, Any] | None = None) -> Finished:
        self.ask("add", request_id, prompt, max_tokens, params)
        return self.wait(request_id)

    def alone(self, prompt: Prompt, max_tokens: int) -> list[int]:
        """What this engine answers on its own, without anybody's cache."""
        self.ask("reset_prefix_cache")
        tokens = self.run(f"alone.{time.monotonic_ns()}", prompt, max_tokens).tokens
        self.ask("reset_prefix_cache")
        return tokens

    def settle(self, timeout_s: float = 30.0) -> int:
        """Wait until no request is left and nothing is being saved; the number of free blocks then."""
        deadline = time.monotonic() + timeout_s
        while self.ask("live_requests") or self.ask("is_saving"):
            if time.monotonic() > deadline:
                self._fail(f"still has {self.ask('live_requests')} requests after {timeout_s:.0f} s")
            time.sleep(0.02)
        return int(self.ask("free_blocks"))

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        if self.process.poll() is None and self._connection is not None:
            self._connection.send([("stop",)])
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
        elif self.process.poll() is None:
            self.kill()
        self._listener.close()
        self._directory.cleanup()


def prefill(engine: Engine, request_id: str, prompt: Prompt) -> dict[str, Any]:
    """Compute the prompt there, as a router asks for it; the parameters for decode."""
    params = engine.run(request_id, prompt, 1, {"do_remote_decode": True}).params
    assert params is not None, f"engine {engine.name} offered nothing; the end of its log:\n{engine.log()[-3000:]}"
    return params
