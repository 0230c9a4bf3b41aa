"""Chaos: prefill, decode or the store is killed, stopped and restarted during traffic. No wrong answer, no hang, and soon all as before.

KBTP_CHAOS=all in the environment runs all 20 events (some three minutes on two free cores), else one or two of each kind come.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.engines.vllm.conftest import prompt_of
from tests.engines.vllm.harness import START_S, Engine, Prompt
from tests.engines.vllm.traffic import Job, Traffic
from tests.soak.served import ServedStore, free_ports

pytestmark = pytest.mark.vllm

RECOVERY_S = 5.0  # from a peer's return to the next block that is pulled from it, or loaded from the store
DEADLINE_S = 30.0  # of one request, whatever happens to the engine that has it
LEASE_S = 5.0
PROMPTS, PROMPT_TOKENS = 60, 200  # 7 blocks each with their answers: three times what an engine's cache holds
ANSWER = 4


@dataclass(frozen=True)
class Event:
    peer: str
    is_killed: bool  # else stopped
    down_s: float


EVENTS = [
    *(Event("store", True, down_s) for down_s in (0.0, 0.0, 0.5, 1.0, 2.0, 11.0)),
    *(Event("store", False, down_s) for down_s in (0.1, 0.5, 1.0, 2.0, 4.0, 11.0)),
    *(Event("prefill", False, down_s) for down_s in (0.2, 1.0, 3.0)),
    *(Event("decode", False, down_s) for down_s in (0.2, 2.0)),
    Event("prefill", True, 0.0),
    Event("prefill", True, 1.0),
    Event("decode", True, 0.0),
]


SOME = [
    Event("store", True, 0.5),
    Event("store", True, 2.0),
    Event("store", False, 1.0),
    Event("store", False, 4.0),
    Event("prefill", False, 1.0),
    Event("decode", False, 2.0),
    Event("prefill", True, 1.0),
    Event("decode", True, 0.0),
]


class Scene:
    """The three peers, each at an address that it keeps, and how they go and come."""

    def __init__(self, model: Path, logs: Path, store: ServedStore) -> None:
        self._model, self._logs, self._store = model, logs, store
        self._ports = dict(zip(("prefill", "decode"), free_ports(2), strict=True))
        self._starts = itertools.count()
        self.engines = {name: self._start(name) for name in self._ports}
        for engine in self.engines.values():
            engine.ready()

    def _start(self, name: str) -> Engine:
        extra = {"mode": "pull+store", "store": self._store.address, "port": self._ports[name], "lease_s": LEASE_S, "load_timeout_s": 3.0}
        return Engine(
            f"{name}{next(self._starts)}",
            self._model,
            self._logs,
            role="kv_both",
            core=0 if name == "prefill" else 1,
            extra=extra,
            max_model_len=1024,
            kv_cache_memory_bytes=8 << 20,
        )

    def down(self, event: Event) -> None:
        if event.peer == "store":
            self._store.stop(signal.SIGKILL) if event.is_killed else self._store.process.send_signal(signal.SIGSTOP)
        elif event.is_killed:
            self.engines[event.peer].kill()
            self.engines[event.peer].stop()
        else:
            self.engines[event.peer].process.send_signal(signal.SIGSTOP)

    def up(self, event: Event) -> None:
        """After its time, and until it can be used again."""
        time.sleep(event.down_s)
        if event.peer == "store":
            self._store.start() if event.is_killed else self._store.process.send_signal(signal.SIGCONT)
        elif event.is_killed:
            self.engines[event.peer] = self._start(event.peer).ready()
        else:
            self.engines[event.peer].process.send_signal(signal.SIGCONT)

    def used(self, peer: str) -> int:
        """How many blocks have come from or through this peer."""
        if peer == "store":
            return sum(engine.total("store_blocks_loaded") for engine in self.engines.values())
        return self.engines["decode"].total("blocks_pulled")

    def stop(self) -> None:
        for engine in self.engines.values():
            engine.process.send_signal(signal.SIGCONT)
            engine.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ServedStore]:
    store = ServedStore(tmp_path, "--ram", str(256 << 20), "--data-dir", str(tmp_path / "data"), "--disk", str(512 << 20))
    yield store
    store.stop(signal.SIGKILL)


@pytest.fixture
def scene(model: Path, logs: Path, store: ServedStore) -> Iterator[Scene]:
    scene = Scene(model, logs, store)
    yield scene
    scene.stop()


def endless(prompts: list[Prompt]) -> Iterator[Job]:
    """Prefill saves a prompt and decode loads it a little later; another one goes through both."""
    for number in itertools.count():
        yield Job(prompts[number % PROMPTS], ANSWER, "prefill")
        yield Job(prompts[(number - 2) % PROMPTS], ANSWER, "decode")
        yield Job(prompts[(number + PROMPTS // 2) % PROMPTS], ANSWER)


def come_back(scene: Scene, traffic: Traffic, event: Event, in_background: ThreadPoolExecutor) -> float:
    """One event, with traffic all the time; how long after the peer's return it was of use."""
    if event.peer != "store" and event.is_killed:
        traffic.lost(scene.engines[event.peer])
    scene.down(event)
    returning = in_background.submit(scene.up, event)
    assert traffic.run(returning.done, START_S)
    returning.result()
    traffic.prefill, traffic.decode = scene.engines["prefill"], scene.engines["decode"]
    before, begin = scene.used(event.peer), time.monotonic()
    traffic.run(lambda: scene.used(event.peer) > before, 4 * RECOVERY_S)
    return time.monotonic() - begin


@pytest.mark.timeout(600)
def test_kills_and_stops_of_prefill_decode_and_store_cost_no_answer_and_no_more_than_5_s(
    plain: Engine, scene: Scene, random_prompt: random.Random
) -> None:
    prompts = [prompt_of(random_prompt, PROMPT_TOKENS) for _ in range(PROMPTS)]
    expected = {tuple(prompt): plain.alone(prompt, ANSWER) for prompt in prompts}
    free = {name: engine.settle() for name, engine in scene.engines.items()}
    events = EVENTS if os.environ.get("KBTP_CHAOS") == "all" else SOME
    events = random_prompt.sample(events, len(events))
    traffic = Traffic(scene.engines["prefill"], scene.engines["decode"], endless(prompts), concurrency=6)
    slow = []
    with ThreadPoolExecutor(1) as in_background:
        for event in events:
            seconds = come_back(scene, traffic, event, in_background)
            if seconds > RECOVERY_S:
                slow.append((event, round(seconds, 1)))
    traffic.finish(DEADLINE_S)

    assert not slow
    for one in traffic.outcomes:
        assert one.tokens == expected[tuple(one.job.prompt)]
    assert max(one.seconds for one in traffic.outcomes) < DEADLINE_S
    for name, engine in scene.engines.items():
        assert engine.settle(LEASE_S + 5) == free[name]
        assert engine.ask("leftovers") == {}
