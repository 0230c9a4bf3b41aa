"""KBTPConnector: vLLM's connector interface, a line for each call; the work is in `PullScheduler` and `PullWorker`.

vLLM makes two of these: one in the scheduler's process and one in each worker's. A call of the other half's is a mistake and fails.
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
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kbtp_vllm import geometry
from kbtp_vllm.config import exposed_secret, read_config
from kbtp_vllm.messages import Handshake, StepMetadata
from kbtp_vllm.scheduler import PullScheduler
from kbtp_vllm.stats import KbtpPromMetrics, KbtpStats
from kbtp_vllm.worker import PullWorker

logger = init_logger("vllm.kbtp")


class KBTPConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill → decode transfer of paged KV over KBTP, pulled by decode."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        config = read_config(extra)
        self._scheduler: PullScheduler | None = None
        self._worker: PullWorker | None = None
        if role is KVConnectorRole.WORKER:
            self._worker = PullWorker(vllm_config, kv_cache_config, config)
            return
        if (exposed := exposed_secret(extra)) is not None:
            logger.warning(exposed)
        geometry.check_movable(kv_cache_config, vllm_config.parallel_config)
        self._scheduler = PullScheduler(vllm_config, kv_cache_config)
        if self._kv_transfer_config.is_kv_consumer and self._kv_transfer_config.kv_load_failure_policy != "recompute":
            logger.warning(
                'kv_load_failure_policy is "fail": a request whose prefill engine is lost fails. '
                'Add "kv_load_failure_policy": "recompute" to --kv-transfer-config to compute it here instead.'
            )

    # Scheduler ----------------------------------------------------------------------------------------------------------

    @property
    def _on_scheduler(self) -> PullScheduler:
        assert self._scheduler is not None, "called on a worker's connector"
        return self._scheduler

    def on_new_request(self, request: Any) -> None:
        self._on_scheduler.new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        count = self._on_scheduler.matched_tokens(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002
        group_ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return group_ids

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._on_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ARG002
        return self._on_scheduler.take_step()

    def update_connector_output(self, connector_output: Any) -> None:
        self._on_scheduler.workers_reported(connector_output.finished_sending, connector_output.finished_recving)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.finished(request, block_ids)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Handshake]) -> None:
        self._on_scheduler.set_workers(metadata)

    # Worker -------------------------------------------------------------------------------------------------------------

    @property
    def _on_worker(self) -> PullWorker:
        assert self._worker is not None, "called on the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._on_worker.register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._on_worker.handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        step = self._get_connector_metadata()
        assert isinstance(step, StepMetadata)
        self._on_worker.start(step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: vLLM runs a request only after its blocks are there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: decode reads the engine's own memory."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        return self._on_worker.results()

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.failed_blocks()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._worker.take_stats() if self._worker is not None else None

    def take_events(self) -> Iterable[Any]:
        return ()

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()

    # Metrics ------------------------------------------------------------------------------------------------------------

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        return KbtpStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> KVConnectorPromMetrics:
        return KbtpPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)
