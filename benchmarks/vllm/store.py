"""What vLLM pays for `store` mode, and what it gets: `python benchmarks/vllm/store.py [--model DIRECTORY] [--json FILE]`.

In an environment with vLLM, KBTP and pytest's needs (`nox -s vllm` leaves one). Three measurements, on this machine's CPU:

1. Throughput without a single hit: rounds of new prompts, by a plain engine and by one with a store, in the order A B B A.
2. Time to the first token of a prompt that the store has whole, against computing it, and against vLLM's ExampleConnector over a RAM disk.
3. What the scheduler's thread spends on a request of 4,096 tokens: the connector's calls alone, timed in this process.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.engines.vllm.harness import Engine  # noqa: E402 - the repository is on the path only now
from tests.soak.served import ServedStore  # noqa: E402

ROUNDS, PROMPTS, TOKENS, ANSWER = 4, 24, 480, 16
LONG, REPEATS = 3968, 7
BLOCK = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kbtp-bench-"))
    model = chosen.model or folder / "model"
    if chosen.model is None:
        make = ROOT / "examples" / "disagg_vllm" / "make_tiny_model.py"
        subprocess.run([sys.executable, str(make), str(model), "--layers", "8"], check=True, capture_output=True)
    store = ServedStore(folder, "--ram", str(1 << 30))
    try:
        found = {"scheduler_us": scheduler_us(store.address)} | engines(model, folder, store.address)
    finally:
        store.stop()
    print(json.dumps(found, indent=2))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(found, indent=2) + "\n")


def engines(model: Path, folder: Path, address: str) -> dict[str, Any]:
    common: dict[str, Any] = {"max_model_len": 4096, "max_num_batched_tokens": 4096, "kv_cache_memory_bytes": 64 << 20, "core": 0}
    example = {"shared_storage_path": "/dev/shm/kbtp-bench"}
    sides = {
        "plain": Engine("plain", model, folder, role=None, **common),
        "store": Engine("store", model, folder, role="kv_both", extra={"mode": "store", "store": address}, **common),
        "example": Engine("example", model, folder, role="kv_both", extra=example, connector="ExampleConnector", **common),
    }
    try:
        for side in sides.values():
            side.ready()
        return {"throughput": throughput(sides["plain"], sides["store"]), "first_token_ms": first_token(sides)}
    finally:
        for side in sides.values():
            side.stop()


def throughput(plain: Engine, stored: Engine) -> dict[str, Any]:
    """Tokens computed a second; medians of the rounds, and the median of the ratios of neighbours."""
    draw = random.Random(1)
    order = [plain, stored, stored, plain] * ROUNDS
    for side in (plain, stored):
        round_of(side, draw, -1)
    rates: dict[str, list[float]] = {"plain": [], "store": []}
    for number, side in enumerate(order):
        rates[side.name].append(round_of(side, draw, number))
    pairs = [stored_rate / plain_rate for plain_rate, stored_rate in zip(rates["plain"], rates["store"], strict=True)]
    return {name: round(statistics.median(some)) for name, some in rates.items()} | {
        "ratio": round(statistics.median(pairs), 3),
        "ratios": [round(pair, 3) for pair in pairs],
        "blocks_loaded": stored.total("store_blocks_loaded"),
        "blocks_saved": stored.total("store_blocks_saved"),
        "blocks_unsaved": stored.total("store_blocks_unsaved"),
    }


def round_of(side: Engine, draw: random.Random, number: int) -> float:
    prompts = [[draw.randrange(3, 259) for _ in range(TOKENS)] for _ in range(PROMPTS)]
    begun = time.monotonic()
    for at, prompt in enumerate(prompts):
        side.ask("add", f"r{number}.{at}", prompt, ANSWER, None)
    for at in range(PROMPTS):
        side.wait(f"r{number}.{at}", 300)
    seconds = time.monotonic() - begun
    side.settle()
    side.ask("reset_prefix_cache")
    return PROMPTS * (TOKENS + ANSWER) / seconds


def first_token(sides: dict[str, Engine]) -> dict[str, Any]:
    """Milliseconds of a prompt of LONG tokens and one more: computed, and with all of it but the last token outside."""
    draw = random.Random(2)
    times: dict[str, list[float]] = {"computed": [], "store": [], "example": []}
    for number in range(REPEATS):
        prompt = [draw.randrange(3, 259) for _ in range(LONG + 1)]
        for name, side in sides.items():
            seconds = 0.0
            for turn in range(2 if name != "plain" else 1):
                begun = time.monotonic()
                side.run(f"t{number}.{turn}", prompt, 1)
                seconds = time.monotonic() - begun
                side.settle()
                side.ask("reset_prefix_cache")
            times["computed" if name == "plain" else name].append(seconds * 1000)
    return {name: round(statistics.median(some), 1) for name, some in times.items()} | {
        "blocks_loaded": sides["store"].total("store_blocks_loaded"),
        "blocks_asked": REPEATS * (LONG // BLOCK),
    }


def scheduler_us(address: str) -> dict[str, Any]:
    """The connector's calls for a request of 4,096 tokens that the store does not have, and with all of it there."""
    import numpy as np

    from kbtp_core.client import Client
    from kbtp_core.store.link import LinkOptions
    from kbtp_vllm.config import read_config
    from kbtp_vllm.messages import SaveReport, StepMetadata
    from kbtp_vllm.store_keys import StoreNames, ids_of
    from kbtp_vllm.store_scheduler import StoreScheduler

    blocks, size = 4096 // BLOCK, 4096
    spec = SimpleNamespace(block_size=BLOCK, prefix_cacheable=True)
    kv = SimpleNamespace(
        transfer_group_ids=(0,),
        prefix_cacheable_group_ids=(0,),
        transfer_groups=[SimpleNamespace(kv_cache_spec=spec)],
        kv_cache_groups=[SimpleNamespace(kv_cache_spec=SimpleNamespace(dcp_sharded=False))],
        num_blocks=10_000,
        select_transfer_block_ids=lambda ids: ids,
    )
    vllm = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(is_kv_producer=True, is_kv_consumer=True),
        cache_config=SimpleNamespace(block_size=BLOCK, prefix_match_unit=None, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )
    scheduler = StoreScheduler(vllm, kv, read_config({"mode": "store", "store": address, "store_timeout_s": 5.0}))
    scheduler.set_workers([StoreNames(b"space", (b"group",), (True,), size)])
    pool = SimpleNamespace(blocks=list(range(10_000)), touch=lambda _: None, free_blocks=lambda some: list(some))
    ids = [list(range(1, blocks + 1))]
    scheduler.bind(SimpleNamespace(block_pool=pool, get_block_ids=lambda _: ids))
    draw = random.Random(3)
    result: dict[str, Any] = {}
    with Client(address, b"space", options=LinkOptions(block_bytes=size)) as client:
        for kind in ("miss", "hit"):
            spent = []
            for number in range(60):
                hashes = [draw.randbytes(32) for _ in range(blocks)]
                if kind == "hit":
                    client.put(ids_of([b"group"], [hashes]), [np.ones(size, np.uint8)] * blocks)
                request = SimpleNamespace(
                    request_id=f"{kind}{number}", block_hashes=hashes, lora_request=None, num_tokens=4097, num_prompt_tokens=4097,
                    num_preemptions=0, num_computed_tokens=0, status=None,
                )  # fmt: skip
                spent.append(_one(scheduler, request, ids, StepMetadata, SaveReport))
            result[kind] = {"median": round(statistics.median(spent), 1), "most": round(max(spent), 1)}
    scheduler.close()
    return result


def _one(scheduler: Any, request: Any, ids: Any, step_kind: Any, report_kind: Any) -> float:
    """Microseconds of the calls for one request; between them the lookup has its time, as it has in an engine."""
    begun = time.perf_counter()
    scheduler.new_request(request)
    spent = time.perf_counter() - begun
    known = scheduler._known[request.request_id]
    known.lookup.done.wait(5)
    begun = time.perf_counter()
    external = scheduler.matched_tokens(request, 0)
    scheduler.allocated(request, ids, external)
    step = step_kind()
    request.num_computed_tokens = external
    scheduler.plan(SimpleNamespace(num_scheduled_tokens={request.request_id: 4097 - external}), step)
    scheduler.finished(request, ids)
    spent += time.perf_counter() - begun
    scheduler.reported(report_kind({save.number: 1 for save in step.saves}))
    return spent * 1e6


if __name__ == "__main__":
    main()
