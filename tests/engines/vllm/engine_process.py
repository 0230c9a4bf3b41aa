"""A real vLLM engine in a process of its own, steered over a Unix socket; started by `harness.Engine`.

Scheduler and worker run in this one process and step in this loop, so a test can look at the free blocks and can kill it at will.
Commands are tuples, word first (see `COMMANDS`), and come in lists that run with no engine step between. Each is answered
by `("answer", value)`, and every finished request is announced by `("finished", id, token ids, reason, kv_transfer_params)`.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Client, Connection
from typing import Any

from vllm import EngineArgs, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

TOTALS: dict[str, float] = {}


class Totals(StatLoggerBase):
    """Adds up what the connector reports to vLLM's metrics."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        pass

    def record(self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0) -> None:
        for name, value in ((scheduler_stats and scheduler_stats.kv_connector_stats) or {}).items():
            TOTALS[name] = TOTALS.get(name, 0) + value
        if iteration_stats is not None:
            TOTALS["preempted"] = TOTALS.get("preempted", 0) + iteration_stats.num_preempted_reqs

    def log_engine_initialized(self) -> None:
        pass


class EngineProcess:
    def __init__(self, arguments: dict[str, Any]) -> None:
        self.engine = LLMEngine.from_engine_args(EngineArgs(**arguments), stat_loggers=[Totals])
        self.scheduler = self.engine.engine_core.engine_core.scheduler

    def add(self, request_id: str, prompt: list[int], max_tokens: int, params: dict[str, Any] | None, salt: str | None = None) -> None:
        extra = {"kv_transfer_params": params} if params is not None else None
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, extra_args=extra)
        inputs: dict[str, Any] = {"prompt_token_ids": prompt} | ({"cache_salt": salt} if salt is not None else {})
        self.engine.add_request(request_id, inputs, sampling)

    def abort(self, request_id: str) -> None:
        self.engine.abort_request([request_id], internal=False)

    def free_blocks(self) -> int:
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def free_handles(self) -> int:
        ledger = self.scheduler.connector._pull._ledger
        return int(ledger.free_count) if ledger is not None else 0

    def leftovers(self) -> dict[str, int]:
        """What the connector still keeps of requests, by name; nothing once all are over."""
        connector = self.scheduler.connector
        kept = {
            f"{half.__class__.__name__}{name}": len(getattr(half, name))
            for half, names in (
                (connector._pull, ("_claims", "_loading", "_offered")),
                (connector._store, ("_known", "_hits", "_held", "_loads", "_saves")),
            )
            if half is not None
            for name in names
        }
        return {name: count for name, count in kept.items() if count}

    def live_requests(self) -> int:
        return len(self.scheduler.requests)

    def totals(self) -> dict[str, float]:
        return dict(TOTALS)

    def zero_blocks(self, block_ids: list[int]) -> None:
        """Overwrite KV in place, behind everybody's back."""
        self.engine.engine_core.engine_core.model_executor.collective_rpc(_zero_blocks, args=(block_ids,))

    def reset_prefix_cache(self) -> bool:
        return bool(self.engine.reset_prefix_cache())

    def reset_store(self) -> bool:
        """The local prefix cache, and what the store has of this engine's."""
        return bool(self.engine.reset_prefix_cache(reset_connector=True))

    def is_saving(self) -> bool:
        connector = self.scheduler.connector
        return connector is not None and bool(connector.has_pending_push_work())

    def step(self, connection: Connection) -> None:
        for output in self.engine.step():
            if output.finished:
                done = output.outputs[0]
                connection.send(("finished", output.request_id, list(done.token_ids), done.finish_reason, output.kv_transfer_params))


def _zero_blocks(worker: Any, block_ids: list[int]) -> None:
    for tensor in worker.model_runner.kv_caches:
        tensor[block_ids] = 0


COMMANDS = (
    "add",
    "abort",
    "free_blocks",
    "free_handles",
    "leftovers",
    "live_requests",
    "totals",
    "zero_blocks",
    "reset_prefix_cache",
    "reset_store",
    "is_saving",
)


def main(address: str) -> None:
    connection = Client(address, family="AF_UNIX")
    process = EngineProcess(connection.recv())
    connection.send(("answer", "ready"))
    while True:
        busy = process.scheduler.has_requests()
        while connection.poll(0 if busy else 0.05):
            for command, *values in connection.recv():
                if command == "stop":
                    process.engine.engine_core.shutdown()
                    return
                assert command in COMMANDS, command
                connection.send(("answer", getattr(process, command)(*values)))
        process.step(connection)
        if busy:
            time.sleep(0.001)


if __name__ == "__main__":
    main(sys.argv[1])
