"""A worker's half: hands offers to the pull source and pulls to the pull sink, and reports what became of them.

Everything that moves bytes runs in `kbtp_core.transfer`'s own threads; a step costs a few calls here and never waits.
A load that fails is reported to vLLM for recomputation: per block where vLLM can take it (one KV group), else the whole request.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.logger import init_logger
from vllm.utils.network_utils import get_ip

from kbtp_core.errors import KbtpError
from kbtp_core.transfer import PagedMemory, PullResult, PullSink, PullSource
from kbtp_vllm import geometry
from kbtp_vllm.config import ConnectorConfig
from kbtp_vllm.messages import Handshake, Pull, StepMetadata, WorkerAddress
from kbtp_vllm.stats import KbtpStats

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
        self._source: PullSource | None = None
        self._sink: PullSink | None = None
        self._rank = 0
        self._table_entries = 0
        self._loading: dict[str, Pull] = {}  # requests that vLLM waits for
        self._refused: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._said: set[str] = set()  # failures that the log has named already
        self._leases_expired = 0
        self._stats = KbtpStats()

    def register(self, tensors: dict[str, Any]) -> None:
        """The KV tensors exist: describe them as blocks, then listen (prefill) and be ready to load (decode)."""
        parallel, transfer = self._vllm_config.parallel_config, self._vllm_config.kv_transfer_config
        tp_rank, pp_rank = get_tp_group().rank_in_group, get_pp_group().rank_in_group
        self._rank = pp_rank * parallel.tensor_parallel_size + tp_rank
        groups = [group.layer_names for group in self._kv.transfer_groups]
        memory = geometry.paged_memory(tensors, groups, self._kv.num_blocks)
        fields = geometry.descriptor(self._vllm_config, self._kv, tensors, memory, tp_rank=tp_rank, pp_rank=pp_rank)
        name = f"{transfer.engine_id}/{self._rank}"
        secret, domain = self._config.secret_bytes(), self._config.trust_domain
        if transfer.is_kv_producer:
            self._source = self._listen(memory, geometry.encode(fields), name, secret)
        if transfer.is_kv_consumer:
            self._sink = PullSink(
                memory,
                check_descriptor=lambda theirs, peer: geometry.compare(fields, theirs, peer),
                secret=secret,
                trust_domain=domain,
                name=name,
            )

    def _listen(self, memory: PagedMemory, descriptor: bytes, name: str, secret: bytes | None) -> PullSource:
        parallel = self._vllm_config.parallel_config
        port = self._config.port
        if port:
            port += parallel.data_parallel_index * parallel.tensor_parallel_size * parallel.pipeline_parallel_size + self._rank
        self._table_entries = self._config.table_factor * memory.block_count + RESERVED_ENTRIES
        source = PullSource(
            memory,
            descriptor=descriptor,
            host=self._config.host or get_ip(),
            port=port,
            table_entries=self._table_entries,
            lease_s=self._config.lease_s,
            secret=secret,
            trust_domain=self._config.trust_domain,
            name=name,
        )
        logger.info("KBTP worker %s serves %d blocks of %d octets at %s:%d.", name, memory.block_count, memory.block_bytes, *source.address)
        return source

    def handshake(self) -> Handshake | None:
        if self._source is None:
            return None
        host, port = self._source.address
        return Handshake(WorkerAddress(host, port, self._source.incarnation), self._source.first_handle, self._table_entries)

    def start(self, step: StepMetadata) -> None:
        """Begin what the scheduler asked for in this step; returns at once."""
        if self._source is not None:
            for offer in step.offers:
                self._source.offer(offer.request_id, offer.handles, offer.generations, offer.block_indexes)
                self._stats.add("requests_offered")
        if self._sink is None:
            return
        for pull in step.pulls:
            self._loading[pull.request_id] = pull
            self._begin(self._sink, pull)
        for pull in step.releases:
            self._begin(self._sink, pull)
        for request_id, reason in step.refused.items():
            self._refuse(request_id, reason)
        for request_id in step.cancels:
            if request_id in self._loading:
                self._sink.cancel(request_id)

    def _begin(self, sink: PullSink, pull: Pull) -> None:
        peer = pull.workers[self._rank]
        try:
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
        except (KbtpError, OSError, ValueError) as error:
            if self._loading.pop(pull.request_id, None) is not None:
                self._refuse(pull.request_id, str(error))

    def _refuse(self, request_id: str, reason: str) -> None:
        self._refused.add(request_id)
        self._stats.add("requests_failed")
        self._say(request_id, "a prefill engine", reason)

    def results(self) -> KVConnectorTransferResults:
        """What ended since the last step; call `failed_blocks` right after."""
        results = KVConnectorTransferResults(finished_recving=set(self._refused), failed_recving=self._refused)
        self._refused = set()
        if self._source is not None:
            results.finished_sending.update(self._source.take_released())
            self._stats_of_source(len(results.finished_sending))
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
        self._stats.add("requests_failed")
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
        self._stats.add("requests_pulled")
        self._stats.add("blocks_pulled", result.blocks)
        self._stats.add("bytes_pulled", result.bytes)
        self._stats.add("pull_seconds", result.seconds)

    def _stats_of_source(self, released: int) -> None:
        if self._source is None or not released:
            return
        self._stats.add("requests_released", released)
        expired = int(self._source.stats().get("leases_expired", 0))
        if expired > self._leases_expired:
            self._stats.add("leases_expired", expired - self._leases_expired)
            self._leases_expired = expired

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
