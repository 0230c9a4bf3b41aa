"""Several prefill and several decode servers behind one router, all real and on this machine's CPU.

    python xpyd.py [--prefills 2] [--decodes 2] [--router COMMAND] [--model DIRECTORY] [--logs DIRECTORY]

Without --router it starts `proxy.py`; `--router vllm-router` starts vLLM's own (`pip install vllm-router`), which knows the fields of our
answers by the names of vLLM's NIXL connector. It fails (exit status 1) if an answer differs from the one that a decode server gives by
itself, or if nothing was pulled. Needs about 1.5 GB of memory for each server.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from servers import Server, transfer_config, vllm_on_cpu

HERE = Path(__file__).resolve().parent
START_S = 600.0
MODEL = "served"
OPTIONS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048", "--block-size", "32", "--kv-cache-memory-bytes", "32M")
OPTIONS += ("--served-model-name", MODEL)
PROMPTS = [f"Request {number}: " + f"what moves is the cache of prompt {number}, block by block. " * 12 for number in range(8)]


def complete(url: str, prompt: str) -> str:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
    return text


def router_command(router: str | None, prefills: list[Server], decodes: list[Server]) -> list[str]:
    if router is None:
        command = [sys.executable, str(HERE / "proxy.py")]
    else:
        command = [router, "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy", "round_robin"]
    for server in prefills:
        command += ["--prefill", server.url]
    for server in decodes:
        command += ["--decode", server.url]
    return command


def pulled(decodes: list[Server]) -> list[int]:
    return [int(server.metrics("vllm:kbtp_").get("requests_pulled", 0)) for server in decodes]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefills", type=int, default=2)
    parser.add_argument("--decodes", type=int, default=2)
    parser.add_argument("--router", metavar="COMMAND")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.mkdtemp(prefix="kbtp-xpyd-")))
    chosen = parser.parse_args()
    model = chosen.model or chosen.logs / "model"
    if chosen.model is None:
        subprocess.run([sys.executable, str(HERE / "make_tiny_model.py"), str(model)], check=True, capture_output=True)
    with contextlib.ExitStack() as stack:
        kinds = [("kv_producer", chosen.prefills), ("kv_consumer", chosen.decodes)]
        prefills, decodes = (
            [
                vllm_on_cpu(f"{role}-{number}", model, chosen.logs, core=number, transfer=transfer_config(role), options=OPTIONS)
                for number in range(count)
            ]
            for role, count in kinds
        )
        for server in prefills + decodes:
            stack.callback(server.stop)
        for server in prefills + decodes:
            server.wait_ready(START_S)
        router = Server("router", router_command(chosen.router, prefills, decodes), chosen.logs / "router.log")
        stack.callback(router.stop)
        router.wait_ready(120)
        expected = [complete(decodes[0].url, prompt) for prompt in PROMPTS]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            # Twice, so that each decode server gets prompts that it has not computed.
            answers = [*pool.map(lambda prompt: complete(router.url, prompt), PROMPTS * 2)]
        deadline = time.monotonic() + 15
        while sum(pulled(decodes)) == 0 and time.monotonic() < deadline:  # vLLM publishes its counters now and then
            complete(decodes[0].url, "again")
            time.sleep(0.5)
        counts = pulled(decodes)
    is_right = answers == expected * 2
    print(f"{len(answers)} answers, {'all as expected' if is_right else 'NOT ALL AS EXPECTED'}; pulled by each decode server: {counts}")
    return 0 if is_right and sum(counts) else 1


if __name__ == "__main__":
    sys.exit(main())
