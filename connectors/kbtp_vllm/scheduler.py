"""The scheduler's half: decides what is offered and what is pulled; touches no memory and no socket.

Prefill: a finished request that asked for remote decode takes handles from the ledger, which foretells their generations, so that
the answer can name them before the workers have bound them. The request's blocks stay until every worker reports them released.

Decode: a request that names a remote prefill claims its whole prompt once. The claim ends when its blocks are allocated (they are
pulled), when the request ends first (the handles are freed) or when the load fails: vLLM then asks again, finds no claim, and computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from vllm.logger import init_logger
from vllm.v1.request import RequestStatus

from kbtp_core.transfer import HandleLedger
from kbtp_vllm.messages import FREE_ONLY, Offer, Pull, SourceShape, StepMetadata, WorkerAddress
from kbtp_vllm.params import NO_BLOCK, BadParameters, RemotePrefill, describe_prefill, parse_remote_prefill, prompt_fingerprint

logger = init_logger("vllm.kbtp.scheduler")

FINISHED_WELL = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


class PullScheduler:
    """One an engine; every method is called by vLLM's scheduler thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        transfer = vllm_config.kv_transfer_config
        self._engine_id: str = transfer.engine_id
        self._is_producer: bool = transfer.is_kv_producer
        self._is_consumer: bool = transfer.is_kv_consumer
        self._tp_size: int = vllm_config.parallel_config.tensor_parallel_size
        self._pp_size: int = vllm_config.parallel_config.pipeline_parallel_size
        self._kv = kv_cache_config
        self._block_tokens: list[int] = [group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups]
        self._workers: tuple[WorkerAddress, ...] = ()
        self._ledger: HandleLedger | None = None
        self._offer_limit = 0
        self._offered: dict[str, np.ndarray[Any, np.dtype[np.uint64]]] = {}  # request → handles, until all workers have released it
        self._claims: dict[str, RemotePrefill] = {}  # waiting requests whose prompt is claimed from a remote prefill
        self._loading: set[str] = set()  # requests in WAITING_FOR_REMOTE_KVS
        self._step = StepMetadata()

    def set_workers(self, ordered: Sequence[SourceShape]) -> None:
        """Learn where this engine's workers listen, in rank order; a consumer's do not listen."""
        if not ordered:
            return
        self._workers = tuple(source.address for source in ordered)
        first_handle = max(source.first_handle for source in ordered)
        self._ledger = HandleLedger(min(source.table_entries for source in ordered), first_handle)
        self._offer_limit = min(source.offer_limit for source in ordered)

    # Decode -------------------------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        """Check a remote prefill once, on arrival; a bad one is logged and not claimed."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        try:
            self._claims[request.request_id] = self._checked(parse_remote_prefill(params), request)
        except BadParameters as error:
            logger.warning("Request %s is computed here: %s", request.request_id, error)

    def _checked(self, remote: RemotePrefill, request: Any) -> RemotePrefill:
        if not self._is_consumer:
            raise BadParameters("this engine is a kv_producer; start it as kv_consumer or kv_both to load from a prefill engine.")
        if (remote.tp_size, remote.pp_size) != (self._tp_size, self._pp_size):
            raise BadParameters(
                f"prefill engine {remote.remote_engine_id} has tp_size {remote.tp_size} and pp_size {remote.pp_size}, this engine "
                f"{self._tp_size} and {self._pp_size}. Start both with the same --tensor-parallel-size and --pipeline-parallel-size."
            )
        if len(remote.kbtp_handles) != len(self._block_tokens):
            groups = len(self._block_tokens)
            raise BadParameters(f"kbtp_handles has {len(remote.kbtp_handles)} KV groups, this engine {groups}. Start both alike.")
        if remote.kbtp_prompt != prompt_fingerprint(request):
            raise BadParameters("kbtp_prompt names another prompt than this request's; send both engines the same prompt.")
        needed = [-(-request.num_prompt_tokens // tokens) for tokens in self._block_tokens]
        short = any(len(handles) < count for handles, count in zip(remote.kbtp_handles, needed, strict=True))
        if short or remote.remote_num_tokens < request.num_prompt_tokens:
            raise BadParameters(f"prefill holds {remote.remote_num_tokens} tokens, the prompt has {request.num_prompt_tokens}.")
        return remote

    def has_claim(self, request: Any) -> bool:
        """Whether the request's prompt is to be pulled."""
        return request.request_id in self._claims

    def matched_tokens(self, request: Any, computed_tokens: int) -> int:
        """How many prompt tokens beyond the local prefix hit the remote prefill holds; no side effects.

        The last prompt token is always computed here, so it alone is not worth a load.
        """
        if request.request_id not in self._claims:
            return 0
        count: int = request.num_prompt_tokens - computed_tokens
        return count if count > 1 else 0

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The request has its blocks: pull those that hold the last `external_tokens` of the prompt, free the others' handles."""
        remote = self._claims.pop(request.request_id, None)
        if remote is None:
            return
        if external_tokens == 0:  # the request is computed at once: nothing may be loaded into its blocks, the last one's rest neither
            self._release(request, remote)
            return
        first_token = request.num_prompt_tokens - external_tokens
        pull, missing = self._pull(request, remote, self._kv.select_transfer_block_ids(block_ids), first_token)
        self._loading.add(request.request_id)
        if missing:
            self._release(request, remote)
            self._step.refused[request.request_id] = f"prefill engine {remote.remote_engine_id} has already dropped {missing} of the blocks"
        else:
            self._step.pulls.append(pull)

    def _release(self, request: Any, remote: RemotePrefill) -> None:
        """Free all handles, load nothing."""
        release, _ = self._pull(request, remote, [()] * len(self._block_tokens), 0)
        if release.handles.size:
            self._step.releases.append(release)

    def _pull(self, request: Any, remote: RemotePrefill, block_ids: Sequence[Sequence[int]], first_token: int) -> tuple[Pull, int]:
        """Pair remote handles with local blocks by position in each group; also count blocks that are needed and not offered."""
        handles: list[int] = []
        generations: list[int] = []
        indexes: list[int] = []
        missing = 0
        for group, tokens in enumerate(self._block_tokens):
            wanted = range(first_token // tokens, -(-request.num_prompt_tokens // tokens))
            local = block_ids[group]
            for position, (handle, generation) in enumerate(zip(remote.kbtp_handles[group], remote.kbtp_generations[group], strict=True)):
                is_wanted = position in wanted and position < len(local) and local[position] != 0
                if handle == NO_BLOCK:
                    missing += is_wanted
                    continue
                handles.append(handle)
                generations.append(generation)
                indexes.append(group * self._kv.num_blocks + local[position] if is_wanted else FREE_ONLY)
        pull = Pull(
            request.request_id,
            remote.remote_engine_id,
            remote.workers(),
            np.array(handles, dtype=np.uint64),
            np.array(generations, dtype=np.uint16),
            np.array(indexes, dtype=np.int64),
        )
        return pull, missing

    # Prefill ------------------------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        """A request ended. Returns whether its blocks must stay, and the parameters for decode."""
        request_id = request.request_id
        remote = self._claims.pop(request_id, None)
        if remote is not None:  # it ended before it was scheduled: let prefill have its blocks back now
            self._release(request, remote)
        if request_id in self._loading:
            self._step.cancels.append(request_id)
        params = request.kv_transfer_params
        if not self._is_producer or not params or not params.get("do_remote_decode") or request.status not in FINISHED_WELL:
            return False, None
        return self._offer(request, self._kv.select_transfer_block_ids(block_ids))

    def _offer(self, request: Any, block_ids: Sequence[Sequence[int]]) -> tuple[bool, dict[str, Any] | None]:
        prompt = prompt_fingerprint(request)
        count = sum(block_id != 0 for group in block_ids for block_id in group)
        if prompt is None or count == 0 or request.num_computed_tokens < request.num_prompt_tokens:
            return False, None
        if count > self._offer_limit:
            logger.warning("Request %s is not offered: %d blocks do not fit into the stage; raise stage_mib.", request.request_id, count)
            return False, None
        if self._ledger is None or self._ledger.free_count < count:
            logger.warning(
                "Request %s is not offered: too few handles are free for its %d blocks; raise table_factor.", request.request_id, count
            )
            return False, None
        handles, generations = self._ledger.take(count)
        self._offered[request.request_id] = handles
        indexes = [number * self._kv.num_blocks + block_id for number, group in enumerate(block_ids) for block_id in group if block_id]
        self._step.offers.append(Offer(request.request_id, handles, generations, np.array(indexes, dtype=np.int64)))
        return True, describe_prefill(
            engine_id=self._engine_id,
            request_id=request.request_id,
            token_count=request.num_computed_tokens,
            block_tokens=self._block_tokens[0],
            tp_size=self._tp_size,
            pp_size=self._pp_size,
            prompt=prompt,
            workers=self._workers,
            block_ids=block_ids,
            handles=_by_position(block_ids, handles.tolist()),
            generations=_by_position(block_ids, generations.tolist()),
        )

    # Both ---------------------------------------------------------------------------------------------------------------

    def take_step(self) -> StepMetadata:
        step, self._step = self._step, StepMetadata()
        return step

    def workers_reported(self, finished_sending: set[str] | None, finished_recving: set[str] | None) -> None:
        """All workers are done with these requests; handles of released ones can be used again."""
        for request_id in finished_sending or ():
            if self._ledger is not None and request_id in self._offered:
                self._ledger.give_back(self._offered.pop(request_id))
        self._loading.difference_update(finished_recving or ())


def _by_position(block_ids: Sequence[Sequence[int]], values: list[int]) -> list[list[int]]:
    """One value for each real block, NO_BLOCK (and generation 0) for null blocks."""
    remaining = iter(values)
    return [[next(remaining) if block_id else NO_BLOCK for block_id in group] for group in block_ids]
