"""Prefill and decode in two real vLLM servers on this machine's CPU, their KV cache moved by KBTP, checked against a plain vLLM.

    python demo.py [--model DIRECTORY] [--tokens 32] [--logs DIRECTORY]

Without --model it makes a tiny one with random weights. It fails (exit status 1) if an answer differs from the plain
server's, or if no block moved. All servers listen on 127.0.0.1 and end with this program.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from aiohttp import ClientError, ClientSession, ClientTimeout
from rich.console import Console
from rich.table import Table
from servers import Server, ServerFailed, transfer_config, vllm_on_cpu

HERE = Path(__file__).resolve().parent
START_S = 400.0
REQUEST_S = 120.0
COUNTERS_S = 10.0
BLOCK_TOKENS = 32
# float32: in bfloat16 vLLM's own answers depend on what else is in the batch.
OPTIONS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--max-model-len",
    "4096",
    "--block-size",
    str(BLOCK_TOKENS),
    "--kv-cache-memory-bytes",
    "64M",
)
METRICS = "vllm:kbtp_"
STORY = "A block that is named by a handle and a generation can be moved by one message and one-sided copies. "


@dataclass(frozen=True)
class Case:
    name: str
    prompts: list[str]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    ttft_s: float


@dataclass(frozen=True)
class Row:
    case: Case
    blocks: int
    octets: int
    seconds: float
    with_kbtp: list[Answer]
    alone: list[Answer]

    @property
    def is_identical(self) -> bool:
        return [answer.tokens for answer in self.with_kbtp] == [answer.tokens for answer in self.alone]


def cases() -> list[Case]:
    """The tiny model's tokens are octets, so a prompt has as many tokens as its text."""
    return [
        Case("short, less than a block", ["Hello, who is there?"]),
        Case("long", [(STORY * 40)[:3000]]),
        Case("eight at once", [f"Request {number}. {(STORY * 12)[: 300 + 90 * number]}" for number in range(8)]),
    ]


async def ask(session: ClientSession, url: str, prompt: str, tokens: int) -> Answer:
    """One streaming completion: its token ids, and the seconds until the first of them."""
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    begun = time.monotonic()
    first = 0.0
    found: list[int] = []
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ServerFailed(f"{url} answered {answer.status}: {await answer.text()}")
        async for line in answer.content:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            event = json.loads(data)
            if "choices" not in event:
                raise ServerFailed(f"{url} answered {data}")
            new = [token for choice in event["choices"] for token in choice.get("token_ids") or ()]
            if new and not found:
                first = time.monotonic() - begun
            found += new
    return Answer(found, first)


async def ask_all(url: str, prompts: list[str], tokens: int) -> list[Answer]:
    async with ClientSession(timeout=ClientTimeout(total=REQUEST_S)) as session:
        return list(await asyncio.gather(*(ask(session, url, prompt, tokens) for prompt in prompts)))


def counters(decode: Server, requests: int) -> dict[str, float]:
    """Decode's counters once it has accounted for `requests` loads (vLLM publishes them a step later)."""
    deadline = time.monotonic() + COUNTERS_S
    while True:
        found = decode.metrics(METRICS)
        if found.get("requests_pulled", 0) + found.get("requests_failed", 0) >= requests or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def run_case(case: Case, proxy: Server, decode: Server, plain: Server, tokens: int) -> Row:
    before = decode.metrics(METRICS)
    with_kbtp = asyncio.run(ask_all(proxy.url, case.prompts, tokens))
    done = before.get("requests_pulled", 0) + before.get("requests_failed", 0)
    after = counters(decode, int(done) + len(case.prompts))
    alone = asyncio.run(ask_all(plain.url, case.prompts, tokens))
    moved = {name: after.get(name, 0) - before.get(name, 0) for name in ("blocks_pulled", "bytes_pulled", "pull_seconds")}
    return Row(case, int(moved["blocks_pulled"]), int(moved["bytes_pulled"]), moved["pull_seconds"], with_kbtp, alone)


def milliseconds(answers: list[Answer]) -> str:
    values = sorted(answer.ttft_s * 1e3 for answer in answers)
    return f"{values[0]:.0f}" if len(values) == 1 else f"{values[0]:.0f} to {values[-1]:.0f}"


def table_of(rows: list[Row]) -> Table:
    table = Table(title="Prefill in one vLLM, decode in another, KV cache over KBTP")
    table.add_column("prompt")
    for heading in ("tokens", "blocks moved", "KiB moved", "GiB/s", "TTFT with, ms", "TTFT plain, ms"):
        table.add_column(heading, justify="right")
    table.add_column("identical")
    for row in rows:
        lengths = sorted(len(prompt) for prompt in row.case.prompts)
        table.add_row(
            row.case.name,
            f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]} to {lengths[-1]}",
            f"{row.blocks}",
            f"{row.octets / 1024:.0f}",
            f"{row.octets / row.seconds / 2**30:.2f}" if row.seconds else "-",
            milliseconds(row.with_kbtp),
            milliseconds(row.alone),
            "[green]yes" if row.is_identical else "[red]no",
        )
    return table


@contextlib.contextmanager
def world(model: Path, logs: Path, console: Console) -> Iterator[tuple[Server, Server, Server]]:
    """Proxy, decode and plain server, ready and warm; all servers end with the block."""
    servers: list[Server] = []
    begun = time.monotonic()
    named = ("--served-model-name", "demo", *OPTIONS)
    try:
        prefill = vllm_on_cpu("prefill", model, logs, core=0, transfer=transfer_config("kv_producer"), options=named)
        servers.append(prefill)
        decode = vllm_on_cpu("decode", model, logs, core=1, transfer=transfer_config("kv_consumer"), options=named)
        servers.append(decode)
        plain = vllm_on_cpu("plain", model, logs, core=1, options=named)
        servers.append(plain)
        command = [sys.executable, str(HERE / "proxy.py"), "--prefill", prefill.url, "--decode", decode.url]
        servers.append(Server("proxy", command, logs / "proxy.log"))
        console.print(f"[{0:3.0f} s] starting vLLM three times: prefill, decode, and a plain one to compare with; logs in {logs}")
        for server in servers:
            server.wait_ready(START_S)
            console.print(f"[{time.monotonic() - begun:3.0f} s] {server.name} is ready")
        proxy = servers[-1]
        for url in (proxy.url, plain.url):  # the first request of a server pays for what is compiled then
            asyncio.run(ask_all(url, ["warm up " * 8], 4))
        yield proxy, decode, plain
    except (ClientError, TimeoutError) as error:
        raise ServerFailed(
            "\n".join([f"A request failed: {error or type(error).__name__}", *(server.log_tail() for server in servers)])
        ) from error
    finally:
        for server in reversed(servers):
            server.stop()


def run(model: Path, logs: Path, tokens: int, console: Console) -> bool:
    """Whether every answer was the plain server's and blocks moved in every case."""
    with world(model, logs, console) as (proxy, decode, plain):
        rows = []
        for case in cases():
            console.print(f"      {case.name}: {len(case.prompts)} prompt(s)")
            rows.append(run_case(case, proxy, decode, plain, tokens))
    console.print(table_of(rows))
    console.print(
        "GiB/s is octets over the summed time from asking for a request's blocks to having them; loads at once share the machine."
    )
    is_good = True
    for row in rows:
        if not row.is_identical:
            is_good = False
            console.print(f"[red]{row.case.name}: an answer differs from the plain server's.")
        if not row.blocks:
            is_good = False
            console.print(f"[red]{row.case.name}: no block moved over KBTP.\n{decode.log_tail()}", markup=True)
    if is_good:
        console.print("[green]Every answer is the plain server's, token by token.")
    return is_good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model's directory; default: a tiny one that is made now")
    parser.add_argument("--tokens", type=int, default=32, help="tokens to generate for each prompt")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here; default: a temporary directory")
    chosen = parser.parse_args()
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a log file: no need to break lines at 80
    with contextlib.ExitStack() as stack:
        logs = chosen.logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kbtp-demo-")))
        logs.mkdir(parents=True, exist_ok=True)
        model = chosen.model
        if model is None:
            model = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kbtp-model-")))
            subprocess.run([sys.executable, str(HERE / "make_tiny_model.py"), str(model)], check=True, capture_output=True, timeout=180)
        try:
            return 0 if run(model, logs, chosen.tokens, console) else 1
        except ServerFailed as error:
            console.print(str(error), style="red", markup=False, highlight=False)
            return 1


if __name__ == "__main__":
    sys.exit(main())
