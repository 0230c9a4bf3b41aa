"""Two real vLLM servers on this machine's CPU share one store: the second loads what the first has computed.

    python share.py [--model DIRECTORY] [--logs DIRECTORY]

Without --model it makes a tiny one with random weights. It fails (exit status 1) if the answers differ, or if the second server loaded
nothing. All servers listen on 127.0.0.1 and end with this program.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

HERE = Path(__file__).resolve().parent
DISAGG = HERE.parent / "disagg_vllm"
sys.path.insert(0, str(DISAGG))

from servers import Server, transfer_config, vllm_on_cpu  # noqa: E402 - the other example's

START_S = 400.0
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--block-size", "32", "--kv-cache-memory-bytes", "64M")
PROMPT = ("What one engine has computed, every engine may load. " * 60)[:3000]


def complete(server: Server, tokens: int) -> tuple[list[int], float]:
    """A completion's token ids, and the seconds that it took."""
    body = {"model": "shared", "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    begun = time.monotonic()
    with urllib.request.urlopen(request, timeout=120) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
    return found, time.monotonic() - begun


def counters(server: Server, name: str, at_least: int) -> int:
    """A counter of the connector, as soon as it has reached that; vLLM publishes them now and then."""
    deadline = time.monotonic() + 10
    while True:
        value = int(server.metrics("vllm:kbtp_store_").get(name, 0))
        if value >= at_least or time.monotonic() > deadline:
            return value
        complete(server, 1)
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp(prefix="kbtp-share-")))
    chosen = parser.parse_args()
    model = chosen.model or chosen.logs / "model"
    if chosen.model is None:
        subprocess.run([sys.executable, str(DISAGG / "make_tiny_model.py"), str(model)], check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        store = _serve(chosen.logs, stack)
        transfer = transfer_config("kv_both", mode="store", store=store)
        options = (*OPTIONS, "--served-model-name", "shared")
        servers = [vllm_on_cpu(name, model, chosen.logs, core=core, transfer=transfer, options=options) for core, name in enumerate("AB")]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready(START_S)
        answers = []
        for server, counter in zip(servers, ("blocks_saved", "blocks_loaded"), strict=True):
            tokens, seconds = complete(server, 32)
            answers.append(tokens)
            count = counters(server, counter, len(PROMPT) // 32 - 1)
            print(f"server {server.name}: {seconds:.2f} s, {count} {counter.replace('_', ' ')}")
    is_right = answers[0] == answers[1] and count >= len(PROMPT) // 32 - 1
    print("the answers are identical" if answers[0] == answers[1] else "THE ANSWERS DIFFER")
    return 0 if is_right else 1


def _serve(logs: Path, stack: contextlib.ExitStack) -> str:
    """Start a store; its address."""
    log = logs / "store.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "kbtp_core.cli", "serve", "--listen", "127.0.0.1:0", "--metrics-listen", "off", "--ram", "1GiB"]
        process = subprocess.Popen(command, stdout=out, stderr=out)
    stack.callback(process.wait, 15)
    stack.callback(process.terminate)
    deadline = time.monotonic() + 30
    while " serving at " not in log.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the store did not start:\n{log.read_text()}")
        time.sleep(0.05)
    return log.read_text().partition(" serving at ")[2].split()[0].rstrip(",")


if __name__ == "__main__":
    sys.exit(main())
