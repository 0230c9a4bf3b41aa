"""A worker's half of `store` mode: two threads, one that loads blocks from the store and one that saves blocks to it.

Rules:
1. A step costs two queue operations here, however many blocks it has. All else is done in the threads, a call of the client a batch.
2. Loads go first: between two batches the saver waits as long as something is to be loaded, but not for ever (`LOADS_FIRST_S`).
3. A load ends by `load_timeout_s` after it was asked for, and when its end is told nothing writes into its blocks any more.
4. A save reads its blocks only until its end is told. A store that was slow for one is left alone for a while (`Breaker`).
5. A KV cache that the RNIC can't reach goes through a stage in host memory, one for each thread, with the copies on a stream of the thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger

from kbtp_core.client import Client, ItemStatus
from kbtp_core.store import places
from kbtp_core.transfer import PagedMemory
from kbtp_vllm import geometry, store_keys
from kbtp_vllm.config import ConnectorConfig
from kbtp_vllm.messages import Load, Save, SaveReport
from kbtp_vllm.staging import HostStage
from kbtp_vllm.stats import KbtpStats
from kbtp_vllm.store_client import Breaker, Saving
from kbtp_vllm.threads import unpinned

logger = init_logger("vllm.kbtp.store")

BATCH_BYTES = 16 << 20  # of one save call: how long a load may have to wait for it
LOADS_FIRST_S = 1.0
CLOSE_S = 5.0

Blocks = NDArray[np.int64]


@dataclass(frozen=True)
class _Asked:
    load: Load
    at: float


@dataclass(frozen=True)
class Loaded:
    """The end of a load. `failed` has an entry for each of its blocks."""

    load: Load
    failed: NDArray[np.bool_]


class _Memory:
    """The blocks as the client reaches them, for one thread."""

    def __init__(self, tensors: Mapping[str, Any], kv_cache_config: Any, config: ConnectorConfig) -> None:
        groups = [group.layer_names for group in kv_cache_config.transfer_groups]
        device = next(iter(tensors.values())).device
        self._stage: HostStage | None = None
        if device.type == "cpu" and config.staging == "auto":
            self._paged: PagedMemory = geometry.paged_memory(tensors, groups, kv_cache_config.num_blocks)
        else:
            self._stage = HostStage(tensors, groups, kv_cache_config.num_blocks, config.stage_mib << 20)
            self._paged = self._stage.memory
        self._device = device

    @property
    def block_bytes(self) -> int:
        return self._paged.block_bytes

    def batches(self, count: int) -> Iterator[slice]:
        """Parts of a list of blocks that fit into one call."""
        most = max(1, BATCH_BYTES // self.block_bytes)
        if self._stage is not None:
            most = min(most, self._stage.block_count)
        for start in range(0, count, most):
            yield slice(start, min(start + most, count))

    def on_stream(self) -> Any:
        """What the thread does its copies in."""
        if self._device.type != "cuda":
            return nullcontext()
        import torch

        return torch.cuda.stream(torch.cuda.Stream(self._device))

    def read(self, blocks: Blocks, work: Callable[[places.Places], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """`work` with where the blocks' octets can be read."""
        if self._stage is None:
            return work(self._places(blocks))
        staged = self._stage.take(blocks)
        try:
            self._stage.copy_out(blocks, staged)
            return work(self._places(staged))
        finally:
            self._stage.give_back(staged)

    def write(self, blocks: Blocks, work: Callable[[places.Places], NDArray[np.bool_]]) -> NDArray[np.bool_]:
        """`work` with where the blocks' octets go; what it says is there is then in the blocks."""
        if self._stage is None:
            return work(self._places(blocks))
        staged = self._stage.take(blocks)
        try:
            is_there = work(self._places(staged))
            self._stage.copy_in(staged[is_there], blocks[is_there])
            if self._device.type == "cuda":
                import torch

                torch.cuda.current_stream().synchronize()
            return is_there
        finally:
            self._stage.give_back(staged)

    def _places(self, blocks: Blocks) -> places.Places:
        return places.of_addresses(self._paged.addresses[blocks], self._paged.page_bytes, self._paged.owner)


class StoreWorker:
    """One a worker process; every public method is called by vLLM's worker thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        geometry.check_movable(kv_cache_config, vllm_config.parallel_config)
        store_keys.store_groups(kv_cache_config)
        self._vllm_config = vllm_config
        self._kv = kv_cache_config
        self._config = config
        self.names: store_keys.StoreNames | None = None
        self._client: Client | None = None
        self._event: Callable[[], Any] | None = None
        self._loads: queue.SimpleQueue[_Asked | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Save, Any] | None] = queue.SimpleQueue()
        self._loaded: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._saved: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._no_loads = threading.Event()
        self._no_loads.set()
        self._loads_left = 0
        self._lock = threading.Lock()  # guards `_loads_left` with `_no_loads`, and `_stats`
        self._stats = KbtpStats()
        self._breaker = Breaker()
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    def register(self, tensors: Mapping[str, Any], rank: int) -> None:
        """The KV tensors exist: name their blocks and begin."""
        memories = [_Memory(tensors, self._kv, self._config) for _ in range(2)]
        size = memories[0].block_bytes
        self.names = store_keys.names(self._vllm_config, self._kv, tensors, tenant=self._config.tenant, block_bytes=size, tp_rank=rank)
        name = f"{self._vllm_config.kv_transfer_config.engine_id}/{rank}"
        if next(iter(tensors.values())).device.type == "cuda":
            import torch

            self._event = lambda: torch.cuda.current_stream().record_event()
        with unpinned():
            self._client = self._config.store_client(self.names.space, size, name)
            for work, memory in ((self._load_all, memories[0]), (self._save_all, memories[1])):
                thread = threading.Thread(target=work, args=(memory,), name=f"kbtp{work.__name__}", daemon=True)
                thread.start()
                self._threads.append(thread)
        logger.info("KBTP worker %s keeps KV blocks of %d octets in the store at %s.", name, size, ", ".join(self._config.store))

    # The engine's thread --------------------------------------------------------------------------------------------------

    def start_loads(self, loads: list[Load]) -> None:
        with self._lock:
            self._loads_left += len(loads)
            if loads:
                self._no_loads.clear()
        for load in loads:
            self._loads.put(_Asked(load, time.monotonic()))

    def start_saves(self, saves: list[Save]) -> None:
        """The step that computes these blocks is submitted."""
        for save in saves:
            self._saves.put((save, self._event() if self._event is not None else None))

    def take_loaded(self) -> list[Loaded]:
        return list(_drain(self._loaded))

    def take_report(self) -> SaveReport | None:
        ended = list(_drain(self._saved))
        return SaveReport(dict.fromkeys(ended, 1)) if ended else None

    def take_stats(self) -> KbtpStats | None:
        with self._lock:
            return self._stats.take()

    def close(self) -> None:
        self._is_closing = True
        self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join(CLOSE_S)
        if self._client is not None:
            self._client.close()

    # Loading ------------------------------------------------------------------------------------------------------------

    def _load_all(self, memory: _Memory) -> None:
        with memory.on_stream():
            while (asked := self._loads.get()) is not None:
                failed = np.ones(len(asked.load.block_indexes), np.bool_)
                try:
                    self._load(memory, asked, failed)
                except Exception:
                    logger.exception("Request %s is computed: loading it from the store failed.", asked.load.request_id)
                self._count_load(failed, time.monotonic() - asked.at, memory.block_bytes)
                self._loaded.put(Loaded(asked.load, failed))
                with self._lock:
                    self._loads_left -= 1
                    if not self._loads_left:
                        self._no_loads.set()

    def _load(self, memory: _Memory, asked: _Asked, failed: NDArray[np.bool_]) -> None:
        assert self._client is not None
        assert self.names is not None
        client, size = self._client, memory.block_bytes
        ids = store_keys.ids_of(self.names.groups, asked.load.keys)
        for part in memory.batches(len(ids)):
            left_s = asked.at + self._config.load_timeout_s - time.monotonic()
            if left_s <= 0 or self._is_closing:
                return

            def get(where: places.Places, part: slice = part, left_s: float = left_s) -> NDArray[np.bool_]:
                found = client.get_into(ids[part], where, timeout_s=left_s)
                return np.asarray(found.ok & (found.lengths == size))

            failed[part] = ~memory.write(asked.load.block_indexes[part], get)
            if failed[part].any():  # vLLM uses what is before the first missing block
                return

    def _count_load(self, failed: NDArray[np.bool_], seconds: float, size: int) -> None:
        count = len(failed) - int(np.count_nonzero(failed))
        with self._lock:
            self._stats.add("store_loads_failed" if failed.any() else "store_loads")
            self._stats.add("store_blocks_loaded", count)
            self._stats.add("store_bytes_loaded", count * size)
            self._stats.add("store_load_seconds", seconds)

    # Saving -------------------------------------------------------------------------------------------------------------

    def _save_all(self, memory: _Memory) -> None:
        with memory.on_stream():
            while (asked := self._saves.get()) is not None:
                save, computed = asked
                try:
                    self._save(memory, save, computed)
                except Exception:
                    logger.exception("%d blocks could not be saved to the store.", len(save.block_indexes))
                self._saved.put(save.number)

    def _save(self, memory: _Memory, save: Save, computed: Any) -> None:
        assert self.names is not None
        if computed is not None:
            computed.synchronize()
        keys = [some if is_first else [] for some, is_first in zip(save.keys, self.names.is_first, strict=True)]
        is_mine = np.repeat(self.names.is_first, [len(some) for some in save.keys])
        ids, blocks = store_keys.ids_of(self.names.groups, keys), save.block_indexes[is_mine]
        for part in memory.batches(len(ids)):
            self._no_loads.wait(LOADS_FIRST_S)
            if self._breaker.is_open or self._is_closing:
                with self._lock:
                    self._stats.add("store_blocks_unsaved", len(ids) - part.start)
                return
            self._save_batch(memory, ids[part], blocks[part])

    def _save_batch(self, memory: _Memory, ids: NDArray[np.uint8], blocks: Blocks) -> None:
        assert self._client is not None
        begun, limit_s = time.monotonic(), self._config.save_timeout_s
        saving = Saving(self._client, ids, limit_s)
        if len(saving.new):
            memory.read(blocks[saving.new], saving.put)
        self._breaker.report("save", time.monotonic() - begun, limit_s)
        status = saving.status
        saved, known = (int(np.count_nonzero(status == kind)) for kind in (ItemStatus.OK, ItemStatus.EXISTS))
        with self._lock:
            for name, count in (
                ("blocks_saved", saved),
                ("bytes_saved", saved * memory.block_bytes),
                ("blocks_known", known),
                ("blocks_unsaved", len(ids) - saved - known),
            ):
                if count:
                    self._stats.add(f"store_{name}", count)


def _drain(ended: queue.SimpleQueue[Any]) -> Iterator[Any]:
    while True:
        try:
            yield ended.get_nowait()
        except queue.Empty:
            return
