"""Engines that a whole test run shares: starting one takes half a minute."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm.harness import Engine, Prompt

MAKE_MODEL = Path(__file__).parents[3] / "examples" / "disagg_vllm" / "make_tiny_model.py"
LEASE_S = 10.0
LOAD_TIMEOUT_S = 10.0
SHARED = {"secret": "of these tests", "trust_domain": "tests"}


@dataclass(frozen=True)
class Pair:
    """A prefill engine and a decode engine that loads from it."""

    prefill: Engine
    decode: Engine


def make_model(directory: Path, kind: str) -> Path:
    subprocess.run([sys.executable, str(MAKE_MODEL), str(directory / kind), "--kind", kind], check=True, capture_output=True, timeout=120)
    return directory / kind


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines")


@pytest.fixture(scope="session")
def model(logs: Path) -> Path:
    return make_model(logs, "llama")


@pytest.fixture(scope="session")
def pair(model: Path, logs: Path) -> Iterator[Pair]:
    prefill = Engine("prefill", model, logs, role="kv_producer", core=0, extra=SHARED | {"lease_s": LEASE_S, "table_factor": 1})
    decode = Engine(
        "decode", model, logs, role="kv_consumer", core=1, extra=SHARED | {"load_timeout_s": LOAD_TIMEOUT_S}, kv_cache_memory_bytes=8 << 20
    )
    try:
        yield Pair(prefill.ready(), decode.ready())
    finally:
        decode.stop()
        prefill.stop()


@pytest.fixture(scope="session")
def plain(model: Path, logs: Path) -> Iterator[Engine]:
    """Without any connector: what it answers is right."""
    engine = Engine("plain", model, logs, role=None, core=0)
    yield engine.ready()
    engine.stop()


@pytest.fixture
def random_prompt(request: pytest.FixtureRequest) -> random.Random:
    """Draws prompts that differ from test to test and not from run to run."""
    return random.Random(request.node.name)


def prompt_of(draw: random.Random, tokens: int) -> Prompt:
    return [draw.randrange(3, 259) for _ in range(tokens)]
