"""A worker's half: hands offers to the pull source and pulls to the pull sink, and reports what became of them.

Everything that moves bytes runs in `kbtp_core.transfer`'s own threads; a step costs a few calls here and never waits.
A load that fails is reported to vLLM for recomputation: per block where vLLM can take it (one KV group), else the whole request.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

from kbtp_core.transfer import PagedMemory, PullResult, PullSink, PullSource
from kbtp_vllm import geometry
from kbtp_vllm.config import ConnectorConfig
from kbtp_vllm.messages import Offer, Pull, SourceShape, StepMetadata, WorkerAddress
from kbtp_vllm.staging import TRANSFER_ERRORS, HostStage, StagedSink, StagedSource
from kbtp_vllm.stats import KbtpStats
from kbtp_vllm.threads import unpinned

logger = init_logger("vllm.kbtp.worker")

RESERVED_ENTRIES = 64
"""Room in the handle table for the geometry descriptor."""


class PullWorker:
    """One a worker process; every method is called by vLLM's worker thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        geometry.check_movable(kv_cache_config, vllm_config.parallel_config)
        self._vllm_config = vllm_config
        self._kv = kv_cache_config
        self._config = config
        self._source: PullSource | StagedSource | None = None
        self._sink: PullSink | StagedSink | None = None
        self.source_shape: SourceShape | None = None
        """Where this worker listens; None for a consumer."""
        self._rank = 0
        self._loading: dict[str, Pull] = {}  # requests that vLLM waits for
        self._refused: set[str] = set()
        self._unoffered: set[str] = set()
        self._releases = 0
        self._bad_blocks: set[int] = set()
        self._said: set[str] = set()  # failures that the log has named already
        self._leases_expired = 0
        self._stats = KbtpStats()

    def register(self, tensors: dict[str, Any], rank: int) -> None:
        """The KV tensors exist: describe them as blocks, then listen (prefill) and be ready to load (decode)."""
        transfer = self._vllm_config.kv_transfer_config
        self._rank = rank
        for is_wanted, start in ((transfer.is_kv_producer, self._start_source), (transfer.is_kv_consumer, self._start_sink)):
            if is_wanted:
                memory, stage = self._memory(tensors)
                fields = geometry.descriptor(self._vllm_config, self._kv, tensors, block_bytes=memory.block_bytes, tp_rank=self._rank)
                with unpinned():
                    start(memory, stage, fields)

    def _memory(self, tensors: dict[str, Any]) -> tuple[PagedMemory, HostStage | None]:
        """The blocks that are moved: the KV tensors' own, or a stage's if the RNIC can't reach those."""
        groups = [group.layer_names for group in self._kv.transfer_groups]
        is_reachable = all(tensors[layer].device.type == "cpu" for group in groups for layer in group)
        if is_reachable and self._config.staging == "auto":
            return geometry.paged_memory(tensors, groups, self._kv.num_blocks), None
        stage = HostStage(tensors, groups, self._kv.num_blocks, self._config.stage_mib << 20)
        return stage.memory, stage

    def _start_source(self, memory: PagedMemory, stage: HostStage | None, fields: dict[str, Any]) -> None:
        parallel, config = self._vllm_config.parallel_config, self._config
        table_entries = config.table_factor * memory.block_count + RESERVED_ENTRIES
        source = PullSource(
            memory,
            descriptor=geometry.encode(fields),
            host=config.host or get_ip(),
            port=config.port and config.port + parallel.data_parallel_index * parallel.tensor_parallel_size + self._rank,
            table_entries=table_entries,
            lease_s=config.lease_s,
            secret=config.secret_bytes(),
            trust_domain=config.trust_domain,
            name=self._name,
        )
        self._source = source if stage is None else StagedSource(stage, source)
        address = WorkerAddress(*source.address, source.incarnation)
        self.source_shape = SourceShape(address, source.first_handle, table_entries, table_entries if stage is None else stage.block_count)
        how = "KV blocks" if stage is None else "staged KV blocks"
        logger.info(
            "KBTP worker %s serves %d %s of %d octets at %s:%d.", self._name, memory.block_count, how, memory.block_bytes, *source.address
        )

    def _start_sink(self, memory: PagedMemory, stage: HostStage | None, fields: dict[str, Any]) -> None:
        sink = PullSink(
            memory,
            check_descriptor=lambda theirs, peer: geometry.compare(fields, theirs, peer),
            secret=self._config.secret_bytes(),
            trust_domain=self._config.trust_domain,
            name=self._name,
        )
        self._sink = sink if stage is None else StagedSink(stage, sink)

    @property
    def _name(self) -> str:
        return f"{self._vllm_config.kv_transfer_config.engine_id}/{self._rank}"

    def start(self, step: StepMetadata) -> None:
        """Begin what the scheduler asked for in this step; returns at once."""
        if self._source is not None:
            for offer in step.offers:
                self._offer(self._source, offer)
        if self._sink is None:
            return
        for pull in step.pulls:
            self._load(self._sink, pull)
        for pull in step.releases:
            self._release(self._sink, pull)
        for request_id, reason in step.refused.items():
            self._refuse(request_id, reason)
        for request_id in step.cancels:
            if request_id in self._loading:
                self._sink.cancel(request_id)

    def _offer(self, source: PullSource | StagedSource, offer: Offer) -> None:
        """An offer that can't be made is reported as released, or vLLM would keep the request's blocks for ever."""
        try:
            source.offer(offer.request_id, offer.handles, offer.generations, offer.block_indexes)
        except TRANSFER_ERRORS:
            logger.exception("Request %s could not be offered: decode will compute it.", offer.request_id)
            self._unoffered.add(offer.request_id)
        else:
            self._count_request("requests_offered")

    def _load(self, sink: PullSink | StagedSink, pull: Pull) -> None:
        try:
            self._begin(sink, pull)
        except TRANSFER_ERRORS as error:
            self._loading.pop(pull.request_id, None)  # of an earlier request of this id: vLLM is told one end, not two
            self._refuse(pull.request_id, str(error))
        else:
            self._loading[pull.request_id] = pull

    def _release(self, sink: PullSink | StagedSink, pull: Pull) -> None:
        """Under an id of its own, since vLLM may be waiting for a load of the same request id."""
        self._releases += 1
        try:
            self._begin(sink, replace(pull, request_id=f"release {self._releases} of {pull.request_id}"))
        except TRANSFER_ERRORS as error:
            logger.warning("Handles of request %s stay until prefill's lease ends, they could not be freed: %s", pull.request_id, error)

    def _begin(self, sink: PullSink | StagedSink, pull: Pull) -> None:
        peer = pull.workers[self._rank]
        sink.pull(
            pull.request_id,
            peer.host,
            peer.port,
            peer.incarnation,
            pull.handles,
            pull.generations,
            pull.block_indexes,
            timeout_s=self._config.load_timeout_s,
        )

    def _refuse(self, request_id: str, reason: str) -> None:
        self._refused.add(request_id)
        self._count_request("requests_failed")
        self._say(request_id, "a prefill engine", reason)

    def results(self) -> KVConnectorTransferResults:
        """What ended since the last step; call `failed_blocks` right after."""
        results = KVConnectorTransferResults(finished_recving=set(self._refused), failed_recving=self._refused)
        self._refused = set()
        if self._source is not None:
            results.finished_sending.update(self._source.take_released())
            self._stats_of_source(len(results.finished_sending))
            results.finished_sending.update(self._unoffered)
            self._unoffered = set()
        for result in self._sink.take_finished() if self._sink is not None else ():
            pull = self._loading.pop(result.request_id, None)
            if pull is None:
                continue  # a release: vLLM does not wait for it
            results.finished_recving.add(result.request_id)
            if result.ok:
                self._stats_of(result)
            else:
                self._failed(pull, result, results.failed_recving)
        return results

    def _failed(self, pull: Pull, result: PullResult, failed_requests: set[str]) -> None:
        self._count_request("requests_failed")
        self._say(pull.request_id, f"prefill engine {pull.remote_engine}", result.error)
        wanted = pull.block_indexes >= 0
        lost = pull.block_indexes[wanted & result.failed]
        if len(self._kv.kv_cache_groups) == 1 and 0 < len(lost) < np.count_nonzero(wanted):
            self._bad_blocks.update(lost.tolist())
        else:
            failed_requests.add(pull.request_id)

    def _say(self, request_id: str, peer: str, reason: str) -> None:
        """Name each cause once in the log; the same again is only for debugging."""
        log = logger.debug if reason in self._said else logger.warning
        if len(self._said) < 1000:
            self._said.add(reason)
        log("Request %s is computed here, its KV could not be loaded from %s: %s", request_id, peer, reason)

    def _stats_of(self, result: PullResult) -> None:
        self._count_request("requests_pulled")
        self._stats.add("blocks_pulled", result.blocks)
        self._stats.add("bytes_pulled", result.bytes)
        self._stats.add("pull_seconds", result.seconds)

    def _stats_of_source(self, released: int) -> None:
        if self._source is None or not released:
            return
        self._count_request("requests_released", released)
        expired = self._source.stats()["leases_expired"]
        if expired > self._leases_expired:
            self._count_request("leases_expired", expired - self._leases_expired)
            self._leases_expired = expired

    def _count_request(self, name: str, count: int = 1) -> None:
        """All workers do the same requests; the first one counts them."""
        if self._rank == 0:
            self._stats.add(name, count)

    def failed_blocks(self) -> set[int]:
        bad, self._bad_blocks = self._bad_blocks, set()
        return bad

    def take_stats(self) -> KbtpStats | None:
        return self._stats.take()

    def close(self) -> None:
        for end in (self._sink, self._source):
            if end is not None:
                end.close()
        self._sink = self._source = None
