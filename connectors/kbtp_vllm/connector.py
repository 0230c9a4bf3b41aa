"""KBTPConnector: vLLM's connector interface, a line for each call; the work is in the halves, two for each mode.

`pull` is `PullScheduler` and `PullWorker`, `store` is `StoreScheduler` and `StoreWorker`. With both modes a request that names a remote
prefill is pulled, and any other is looked up in the store; both are saved there.

vLLM makes two connectors: one in the scheduler's process and one in each worker's. A call of the other half's finds nothing to do.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kbtp_vllm import geometry
from kbtp_vllm.config import ConnectorConfig, exposed_secret, read_config
from kbtp_vllm.messages import Handshake, StepMetadata
from kbtp_vllm.scheduler import PullScheduler
from kbtp_vllm.stats import KbtpPromMetrics, KbtpStats, merged
from kbtp_vllm.store_scheduler import StoreScheduler
from kbtp_vllm.store_worker import Loaded, StoreWorker
from kbtp_vllm.worker import PullWorker

logger = init_logger("vllm.kbtp")


class KBTPConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Paged KV over KBTP: from prefill to decode (`pull`), and to and from a central store (`store`)."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        config = read_config(extra)
        self._has_pull = config.has_pull
        self._pull: PullScheduler | None = None
        self._store: StoreScheduler | None = None
        self._pull_worker: PullWorker | None = None
        self._store_worker: StoreWorker | None = None
        self._bad_blocks: set[int] = set()
        if role is KVConnectorRole.WORKER:
            self._pull_worker = PullWorker(vllm_config, kv_cache_config, config) if config.has_pull else None
            self._store_worker = StoreWorker(vllm_config, kv_cache_config, config) if config.has_store else None
            return
        geometry.check_movable(kv_cache_config, vllm_config.parallel_config)
        self._pull = PullScheduler(vllm_config, kv_cache_config) if config.has_pull else None
        self._store = StoreScheduler(vllm_config, kv_cache_config, config) if config.has_store else None
        self._warn(config, exposed_secret(extra))

    def _warn(self, config: ConnectorConfig, exposed: str | None) -> None:
        if exposed is not None:
            logger.warning(exposed)
        if self._kv_transfer_config.is_kv_consumer and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            lost = "whose prefill engine is lost" if config.mode == "pull" else "whose blocks are lost while they are loaded"
            logger.warning(
                'kv_load_failure_policy is "fail": a request %s fails. '
                'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config to compute it here instead.',
                lost,
            )
        if config.has_store and not self._vllm_config.cache_config.prefix_caching_hash_algo.startswith("sha256"):
            logger.warning(
                "prefix_caching_hash_algo is no cryptographic hash: whoever can choose prompts may get others' KV from the store."
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether a finished request's blocks are for somebody: a store is a cache, and what is not saved is computed again."""
        return self._has_pull and bool(self._kv_transfer_config.is_kv_producer)

    # Scheduler ----------------------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._store is not None:
            self._store.bind(kv_cache_manager)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        """Keys are (0, tp rank)."""
        ordered = [metadata[rank] for rank in sorted(metadata)]
        if self._pull is not None:
            self._pull.set_workers([one.source for one in ordered if one.source is not None])
        if self._store is not None:
            self._store.set_workers([one.names for one in ordered if one.names is not None])

    def on_new_request(self, request: Any) -> None:
        if self._pull is not None:
            self._pull.new_request(request)
        if self._store is not None:
            self._store.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        count: int | None = 0
        if self._pull is not None:
            count = self._pull.matched_tokens(request, num_computed_tokens)
        if self._store is not None and not (self._pull is not None and self._pull.has_claim(request)):
            count = self._store.matched_tokens(request, num_computed_tokens)
        return count, bool(count)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        config = self._kv_cache_config
        is_pulled = self._pull is not None and self._pull.has_claim(request)
        group_ids: tuple[int, ...] = config.transfer_group_ids if is_pulled else config.prefix_cacheable_group_ids
        return group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        block_ids = blocks.get_block_ids()
        is_pulled = self._pull is not None and self._pull.has_claim(request)
        if self._pull is not None:
            self._pull.allocated(request, block_ids, num_external_tokens)
        if self._store is not None:
            self._store.allocated(request, block_ids, 0 if is_pulled else num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[CacheHitSource, int]:
        if num_external_tokens == 0:
            return {}
        is_stored = self._store is not None and self._store.is_loading(request)
        return {CacheHitSource.EXTERNAL_UNSPECIFIED if is_stored else CacheHitSource.P2P: num_external_tokens}

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        step = self._pull.take_step() if self._pull is not None else StepMetadata()
        if self._store is not None:
            self._store.plan(scheduler_output, step)
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        if self._pull is not None:
            self._pull.workers_reported(connector_output.finished_sending, connector_output.finished_recving)
        if self._store is not None:
            self._store.reported(connector_output.kv_connector_worker_meta)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        if self._store is not None:
            self._store.finished(request, block_ids)
        return self._pull.finished(request, block_ids) if self._pull is not None else (False, None)

    def has_pending_push_work(self) -> bool:
        return self._store is not None and self._store.is_saving

    def has_pending_block_frees(self) -> bool:
        return self._store is not None and self._store.frees_blocks_soon

    def reset_cache(self) -> bool | None:
        return self._store.reset() if self._store is not None else True

    # Worker -------------------------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        rank = get_tp_group().rank_in_group
        if self._pull_worker is not None:
            self._pull_worker.register(kv_caches, rank)
        if self._store_worker is not None:
            self._store_worker.register(kv_caches, rank)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        source = self._pull_worker.source_shape if self._pull_worker is not None else None
        names = self._store_worker.names if self._store_worker is not None else None
        return None if source is None and names is None else Handshake(source, names)

    @property
    def _step(self) -> StepMetadata:
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        return step

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._pull_worker is not None:
            self._pull_worker.start(self._step)
        if self._store_worker is not None:
            self._store_worker.start_loads(self._step.loads)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: vLLM runs a request only after its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is done layer by layer: decode reads the engine's own memory, and the store gets whole blocks."""

    def wait_for_save(self) -> None:
        """The step is submitted; nothing is waited for, since the scheduler keeps the blocks until they are saved."""
        if self._store_worker is not None:
            self._store_worker.start_saves(self._step.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        results = self._pull_worker.results() if self._pull_worker is not None else KVConnectorTransferResults()
        for loaded in self._store_worker.take_loaded() if self._store_worker is not None else ():
            self._tell(loaded, results)
        return results

    def _tell(self, loaded: Loaded, results: KVConnectorTransferResults) -> None:
        """A load's end. vLLM goes on after the blocks before the first lost one, or computes all where there are several KV groups."""
        request_id = loaded.load.request_id
        results.finished_recving.add(request_id)
        lost = loaded.load.block_indexes[loaded.failed]
        if not len(lost):
            return
        logger.debug("%d of the %d blocks of request %s were not in the store any more.", len(lost), len(loaded.failed), request_id)
        if len(self._kv_cache_config.kv_cache_groups) == 1 and len(lost) < len(loaded.failed):
            self._bad_blocks.update(lost.tolist())
        else:
            results.failed_recving.add(request_id)

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad | self._pull_worker.failed_blocks() if self._pull_worker is not None else bad

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self._store_worker.take_report() if self._store_worker is not None else None

    # Both ---------------------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return merged(*(half.take_stats() for half in (self._pull_worker, self._store_worker, self._store) if half is not None))

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        for half in (self._pull_worker, self._store_worker, self._store):
            if half is not None:
                half.close()

    # Metrics ------------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KbtpStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return KbtpPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
