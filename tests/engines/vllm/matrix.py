"""Which engines the connector moves blocks for, cell by cell: `python -m tests.engines.vllm.matrix [OUT.md [WORD ...]]` writes the table.

A cell is one engine, prefill and decode at once, with a store besides. It answers a prompt of whole blocks without any transfer. Then
the prompt and the answer's first token are a prompt whose blocks are pulled (by the engine from itself) or loaded from the store: what is
left to compute is what it computed before, in the same shape, so the rest of the answer is to be the same whatever the type. (vLLM's own
answers depend on the shape: for MLA on the CPU, prefill and decode differ even in float32.) Both ways are then shown to matter: with blocks
that were overwritten the answer differs. A cell that can't be exact is refused when the engine starts, and the reason is in the table.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kbtp_core.client import Client
from kbtp_core.store.link import LinkOptions
from tests.engines.vllm.harness import Engine, Prompt
from tests.soak.served import ServedStore

MODELS = ("llama", "qwen3", "hybrid", "mla", "mamba")
TYPES = {"fp32": {"dtype": "float32"}, "bf16": {"dtype": "bfloat16"}, "fp8 KV": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"}}
BLOCKS = (32, 128)
SIZES = (1, 2)
ANSWER = 12
WORKER_FAILED = re.compile(r"Worker failed with error '(.*)', please check.*")
REFUSALS = re.compile(r"ConfigError: (.+)")


@dataclass(frozen=True)
class Cell:
    model: str
    tensor_parallel: int
    block_tokens: int
    type: str

    @property
    def name(self) -> str:
        return f"{self.model}, TP {self.tensor_parallel}, block {self.block_tokens}, {self.type}"


ALL = tuple(itertools.starmap(Cell, itertools.product(MODELS, SIZES, BLOCKS, TYPES)))


def run(cell: Cell, model: Path, folder: Path, store: ServedStore) -> str:
    """ "exact", or why the engine did not start. Raises AssertionError for an answer that is not right."""
    tenant = re.sub(r"\W+", "-", cell.name)
    engine = Engine(
        tenant,
        model,
        folder,
        role="kv_both",
        core=-1 if cell.tensor_parallel > 1 else 0,
        extra={"mode": "pull+store", "store": store.address, "tenant": tenant, "lease_s": 20, "save_timeout_s": 10},
        kv_cache_memory_bytes=64 << 20,
        block_size=cell.block_tokens,
        tensor_parallel_size=cell.tensor_parallel,
        **TYPES[cell.type],
    )
    try:
        engine.ready()
    except AssertionError:
        found = REFUSALS.findall(engine.log())
        return found[-1] if found else WORKER_FAILED.sub(r"\1", engine.last_error())
    draw = random.Random(cell.name)
    prompt = [draw.randrange(3, 259) for _ in range(4 * cell.block_tokens)]
    try:
        cold = engine.run("cold", prompt, 1 + ANSWER).tokens
    except AssertionError:  # nothing has been moved yet
        engine.kill()
        return f"vLLM itself fails: {engine.last_error()}"
    try:
        _run(engine, prompt, cold, tenant, store)
    finally:
        engine.stop()
    return "exact"


def _run(engine: Engine, prompt: Prompt, cold: list[int], tenant: str, store: ServedStore) -> None:
    first, *expected = cold
    prompt.append(first)
    engine.settle()
    assert engine.total("blocks_pulled") + engine.total("store_blocks_loaded") == 0, "something was transferred already"

    params = engine.run("offered", prompt, 1, {"do_remote_decode": True}).params
    assert _salted(engine, "pulled", prompt, params) == expected, "pulled"
    assert engine.total("blocks_pulled") > 0, "nothing was pulled"
    engine.settle()
    assert engine.ask("reset_prefix_cache")
    assert engine.run("stored", prompt, ANSWER).tokens == expected, "stored"
    assert engine.total("store_blocks_loaded") > 0, "nothing was loaded from the store"

    params = engine.run("spoiled", prompt, 1, {"do_remote_decode": True}).params
    assert params is not None
    engine.ask("zero_blocks", [block for group in params["remote_block_ids"] for block in group])
    assert _salted(engine, "wrong", prompt, params) != expected, "what was pulled was not used"
    engine.settle()
    assert engine.ask("reset_prefix_cache")
    (size,) = set(map(int, re.findall("keeps KV blocks of ([0-9]+) octets", engine.log())))
    spoil(store, tenant, size)
    assert engine.run("wrong too", prompt, ANSWER).tokens != expected, "what was loaded was not used"


def _salted(engine: Engine, name: str, prompt: Prompt, params: object) -> list[int]:
    """The salt keeps the engine from finding the blocks in its own cache and in the store."""
    engine.ask("add", name, prompt, ANSWER, params, name)
    return engine.wait(name).tokens


def spoil(store: ServedStore, tenant: str, block_bytes: int) -> int:
    """Every value of a tenant in the pool for such blocks gets other octets; how many."""
    with Client(store.address, tenant.encode(), options=LinkOptions(block_bytes=block_bytes)) as client:
        listed = list(client.list(whole_tenant=True))
        ids = np.frombuffer(b"".join(one.object_id for one in listed), np.uint8).reshape(-1, 16)
        assert client.remove(ids) == len(listed) > 0
        status = client.put(ids, [np.zeros(one.length, np.uint8) for one in listed])
        assert not status.any(), f"values could not be overwritten: {status}"
    return len(listed)


def table(results: dict[Cell, str]) -> str:
    """Markdown."""
    lines = ["| model | TP | block | " + " | ".join(TYPES) + " |", "| --- | --- | --- |" + " --- |" * len(TYPES)]
    notes: list[str] = []
    for model, size, block in itertools.product(MODELS, SIZES, BLOCKS):
        texts = []
        for kind in TYPES:
            result = results.get(Cell(model, size, block, kind), "")
            if result not in ("exact", "", *notes):
                notes.append(result)
            texts.append(result if result in ("exact", "") else f"no ({notes.index(result) + 1})")
        lines.append(f"| {model} | {size} | {block} | " + " | ".join(texts) + " |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for number, note in enumerate(notes, 1))])


def main() -> None:
    from tests.engines.vllm.conftest import make_model

    folder = Path(tempfile.mkdtemp(prefix="kbtp-matrix-"))
    store = ServedStore(folder, "--ram", str(1 << 30))
    results: dict[Cell, str] = {}
    models = {model: make_model(folder, model) for model in MODELS}
    chosen = [cell for cell in ALL if not sys.argv[2:] or any(word in cell.name for word in sys.argv[2:])]
    for cell in chosen:
        try:
            results[cell] = run(cell, models[cell.model], folder, store)
        except AssertionError as error:
            results[cell] = f"WRONG: {str(error).partition(chr(10))[0] or repr(error)}"
        print(f"{cell.name}: {results[cell]}", flush=True)
    store.stop()
    if sys.argv[1:]:
        page = Path(sys.argv[1])
        head = page.read_text().partition("| model |")[0] if page.exists() else ""
        page.write_text(head + table(results) + "\n")
    sys.exit(any(result.startswith("WRONG") for result in results.values()))


if __name__ == "__main__":
    main()
