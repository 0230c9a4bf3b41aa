"""KBTPTier: a store as a secondary tier of vLLM's OffloadingConnector, behind its tier in host memory.

    {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {
       "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 10737418240,
       "secondary_tiers": [{"type": "KBTPTier", "module_path": "kbtp_vllm.tier", "store": "10.0.0.5:7400"}]}}

Rules:
1. All methods run in the scheduler's thread and wait for nothing, `drain_jobs` and `shutdown` but: a thread answers lookups (vLLM's own
   AsyncLookupManager), and loads and stores have one each. A load never waits for a store.
2. A chunk is one value. What changes its octets is in the namespace (model, weights, types, groups, sizes, layout, vLLM's version) or in
   the key (vLLM's OffloadKey: the block's chained hash and its group). vLLM does not tell a tier the revision: weights are told apart
   by their files where the model is a local folder, else give each revision a `tenant`.
3. A job that can't be done is a failed job: vLLM computes. A key that a load did not find is a miss for its request from then on.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_settings import SettingsConfigDict
from vllm import __version__ as vllm_version
from vllm.logger import init_logger
from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, RequestOffloadingContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from kbtp_core.client import Client, ItemStatus
from kbtp_core.config import Settings, secret_of
from kbtp_core.store import places
from kbtp_core.store.identity import REPLICATED, Namespace, PoolKind, Ranks, layout_fingerprint, object_ids
from kbtp_vllm import weights
from kbtp_vllm.config import Members
from kbtp_vllm.store_client import Breaker, Saving, options

logger = init_logger("vllm.kbtp.tier")

WHERE = "secondary_tiers: KBTPTier"
LAYOUT = "vllm-offload-chunks/1"
BATCH_BYTES = 32 << 20


class TierConfig(Settings):
    """What an entry of `secondary_tiers` may say besides `type`, `module_path` and `backpressure`."""

    model_config = SettingsConfigDict(env_prefix="")

    store: Members = Field(description="Stores as host:port, a list or separated by commas.", min_length=1)
    tenant: str = Field("vllm", min_length=1, max_length=255, description="Whose values these are in the store.")
    timeout_s: float = Field(10.0, gt=0, description="Seconds that a batch of a load or a store may take.")
    lookup_timeout_s: float = Field(0.5, gt=0, description="Seconds that a lookup may take.")
    ttl_s: int = Field(0, ge=0, description="Seconds that chunks live; 0: until the store evicts them.")
    stripes: int = Field(1, ge=1, le=16, description="Connections to each store.")
    secret_file: Path | None = Field(None, description="A file that holds the secret of the trust domain.")
    trust_domain: str = Field("", max_length=255, description="Name of the secret.")
    locality: str | None = Field(None, description="vLLM's own: where the tier is.")

    def secret(self) -> bytes | None:
        return secret_of(None, self.secret_file, WHERE)


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """Asks the store, in vLLM's thread for it."""

    def __init__(self, tier_type: str, client: Client, space: bytes, chunk_bytes: int, limit_s: float) -> None:
        self._client, self._space, self._chunk_bytes, self._limit_s = client, space, chunk_bytes, limit_s
        self._breaker = Breaker()
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:  # noqa: ARG002
        if self._breaker.is_open:
            return [False] * len(keys)
        begun = time.monotonic()
        found = self._client.lengths(object_ids(self._space, keys), touch=True, promote=True, timeout_s=self._limit_s)
        self._breaker.report("lookup", time.monotonic() - begun, self._limit_s)
        answers: list[bool] = (found == self._chunk_bytes).tolist()
        return answers


class KBTPTier(SecondaryTierManager):  # type: ignore[misc]
    """See the module. Raises ConfigError for a setting that is wrong."""

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None, **settings: Any
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self._config = TierConfig.read(settings, WHERE)
        self.locality = self._config.locality
        self._memory = np.asarray(primary_kv_view)  # (chunks, octets)
        self._chunk_bytes = int(np.prod(self._memory.shape[1:])) * self._memory.itemsize
        self._space = namespace(offloading_spec, self._config.tenant, self._chunk_bytes)
        how = options(
            self._chunk_bytes,
            "tier",
            secret=self._config.secret(),
            trust_domain=self._config.trust_domain,
            stripes=self._config.stripes,
        )
        self._client = Client(self._config.store, self._space, timeout_s=self._config.timeout_s, ttl_s=self._config.ttl_s, options=how)
        self._lookups = _Lookups(tier_type, self._client, self._space, self._chunk_bytes, self._config.lookup_timeout_s)
        self._breaker = Breaker()
        self._ended: queue.SimpleQueue[tuple[TransferJob, JobResult]] = queue.SimpleQueue()
        self._waiting: dict[int, TransferJob] = {}  # jobs that vLLM has not been told the end of
        self._results: list[JobResult] = []
        self._loads, self._stores = self._start(self._load), self._start(self._store)

    def _start(self, work: Callable[[TransferJob], JobResult]) -> queue.SimpleQueue[TransferJob | None]:
        jobs: queue.SimpleQueue[TransferJob | None] = queue.SimpleQueue()

        def run() -> None:
            while (job := jobs.get()) is not None:
                try:
                    result = work(job)
                except Exception:
                    logger.exception("Job %d of the offloading tier failed.", job.job_id)
                    result = JobResult(job.job_id, success=False, successful_keys=())
                self._ended.put((job, result))

        threading.Thread(target=run, name=f"kbtp-tier-{work.__name__}", daemon=True).start()
        return jobs

    # vLLM's scheduler -----------------------------------------------------------------------------------------------------

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        return LookupResult.RETRY if found is None else LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        self._submit(self._stores, job_metadata)

    def submit_load(self, job_metadata: TransferJob) -> None:
        self._submit(self._loads, job_metadata)

    def _submit(self, jobs: queue.SimpleQueue[TransferJob | None], job: TransferJob) -> None:
        self._waiting[job.job_id] = job
        jobs.put(job)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        self._collect(wait_s=None)
        results, self._results = self._results, []
        return results

    def _collect(self, wait_s: float | None) -> None:
        """Take the jobs that have ended; with `wait_s`, wait so long for one."""
        while True:
            try:
                job, result = self._ended.get_nowait() if wait_s is None else self._ended.get(timeout=wait_s)
            except queue.Empty:
                return
            wait_s = None
            del self._waiting[job.job_id]
            if job.is_promotion and not result.success:
                self._lookups.mark_miss(set(job.keys) - set(result.successful_keys or ()))
            self._results.append(result)

    def has_pending_work(self) -> bool:
        return bool(self._waiting)

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:  # noqa: ARG002
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:  # noqa: ARG002
        self._lookups.flush()

    def drain_jobs(self) -> None:
        while self._waiting:  # each ends by its deadlines
            self._collect(wait_s=1.0)

    def shutdown(self) -> None:
        self.drain_jobs()
        for jobs in (self._loads, self._stores):
            jobs.put(None)
        self._lookups.shutdown()
        self._client.close()

    # The threads ------------------------------------------------------------------------------------------------------------

    def _places(self, chunk_ids: NDArray[Any]) -> places.Places:
        addresses = np.uint64(self._memory.ctypes.data) + np.asarray(chunk_ids, np.uint64) * np.uint64(self._memory.strides[0])
        return places.of_addresses(addresses, self._chunk_bytes, self._memory)

    def _batches(self, keys: Collection[OffloadKey]) -> list[slice]:
        step = max(1, BATCH_BYTES // self._chunk_bytes)
        return [slice(at, at + step) for at in range(0, len(keys), step)]

    def _load(self, job: TransferJob) -> JobResult:
        begun, keys = time.monotonic(), list(job.keys)
        ids = object_ids(self._space, keys)
        is_there: NDArray[np.bool_] = np.zeros(len(keys), np.bool_)
        for part in self._batches(keys):
            found = self._client.get_into(ids[part], self._places(job.chunk_ids[part]))
            is_there[part] = found.ok & (found.lengths == self._chunk_bytes)
        there = [keys[at] for at in np.flatnonzero(is_there)]
        return JobResult(job.job_id, len(there) == len(keys), there, time.monotonic() - begun, len(there) * self._chunk_bytes)

    def _store(self, job: TransferJob) -> JobResult:
        begun, ids = time.monotonic(), object_ids(self._space, list(job.keys))
        octets, is_stored = 0, True
        for part in self._batches(job.keys):
            if self._breaker.is_open:
                return JobResult(job.job_id, success=False)
            asked = time.monotonic()
            saving = Saving(self._client, ids[part], self._config.timeout_s)
            if len(saving.new):
                octets += int(np.count_nonzero(saving.put(self._places(job.chunk_ids[part][saving.new])))) * self._chunk_bytes
            self._breaker.report("store", time.monotonic() - asked, self._config.timeout_s)
            is_stored &= bool(np.isin(saving.status, (ItemStatus.OK, ItemStatus.EXISTS)).all())
        return JobResult(job.job_id, is_stored, None, time.monotonic() - begun, octets)


def namespace(spec: Any, tenant: str, chunk_bytes: int) -> bytes:
    """Everything about the engine that changes a chunk's octets."""
    config = spec.config
    parallel = config.parallel
    fields: dict[str, Any] = {
        "engine_version": vllm_version,
        "weights": weights.fingerprint(config.model.name),
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "world_size": parallel.world_size,
        "pcp_size": parallel.pcp_size,
        "dcp_size": parallel.dcp_size,
        "replicated": bool(config.replicated_layout),
        "canonical": bool(config.canonical_layout),
        "layout": config.kv_cache_layout,
    }
    for group in config.groups:
        fields[f"group {group.group_id}"] = f"{group.tokens_per_block}: {', '.join(group.layer_names)}"
    return Namespace(
        tenant=tenant,
        model=weights.model_name(config.model.name),
        revision="",
        kind=PoolKind.CUSTOM,
        pool=LAYOUT,
        dtype=config.model.dtype,
        fingerprint=layout_fingerprint(LAYOUT, fields),
        block_tokens=config.cache.tokens_per_hash * config.cache.blocks_per_chunk,
        group=0,
        first_layer=0,
        layer_count=sum(len(group.layer_names) for group in config.groups),
        tp=Ranks(parallel.tp_size, REPLICATED),
        dp=Ranks(1, REPLICATED),
        pp=Ranks(parallel.pp_size, REPLICATED),
    ).encode()
