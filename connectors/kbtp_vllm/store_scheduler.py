"""The scheduler's half of `store` mode: what is loaded from the store, what is saved to it, and which blocks wait for that.

Rules:
1. A request is looked up when it arrives, beside the scheduler. It claims the longest prefix that the store holds, but for its last token,
   and only once for each time that it is started: after a load that failed vLLM asks again, and then the request is computed.
2. A block is saved once all of its tokens are known and the step that computes the last of them is planned. The worker reads it after that
   step. From planning until every worker has reported, the block has one more reference in vLLM's own pool: neither the end of its request,
   nor an abort or a preemption, lets anybody overwrite what is still being read.
3. Blocks that wait for being saved are at most a share of the KV cache (`save_share`). What comes on top is saved in a later step of its
   request, or not at all if the request is over before.
4. After a reset nothing that was computed before it may be found: the space is removed at once, and again when the last save that was
   under way then has ended. In between nothing is found and nothing is saved, and what goes on from earlier blocks is not saved later.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from kbtp_core.client import Client
from kbtp_core.errors import KbtpError
from kbtp_vllm.config import ConnectorConfig
from kbtp_vllm.messages import Load, Save, SaveReport, StepMetadata
from kbtp_vllm.scheduler import FINISHED_WELL
from kbtp_vllm.stats import KbtpStats
from kbtp_vllm.store_hits import GroupShape, HitRule
from kbtp_vllm.store_keys import BlockKeys, StoreNames, store_groups
from kbtp_vllm.store_lookup import Lookup, LookupThread
from kbtp_vllm.threads import unpinned

logger = init_logger("vllm.kbtp.store")

FIRST_WAIT_S = 0.001  # for a lookup that a request's first turn finds under way
FRESH_S = 2.0  # an older answer is asked for again: the request has waited that long
FREES_SOON_S = 0.1  # a save that is older is no reason to wait for its blocks


@dataclass
class _Known:
    """A request, from its arrival to its end."""

    request: Any
    lookup: Lookup | None = None
    wait_s: float = 0.0  # what the next turn may wait for the lookup
    tried: int = -1  # how often it had been preempted when it was loaded last
    done: list[int] = field(default_factory=list)  # for each group: blocks from the first on that are saved, or need not be
    outdated: int = -1  # how often it had been preempted at a reset that found it computed in part


@dataclass
class _Held:
    """A save's blocks."""

    blocks: list[Any]
    reports_due: int
    since: float


class StoreScheduler:
    """One an engine; every method is called by vLLM's scheduler thread."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, config: ConnectorConfig) -> None:
        transfer = vllm_config.kv_transfer_config
        self._config = config
        self._kv = kv_cache_config
        self._is_saving: bool = transfer.is_kv_producer and config.save != "none"
        self._is_loading: bool = transfer.is_kv_consumer
        self._groups = store_groups(kv_cache_config)
        specs = [kv_cache_config.transfer_groups[position].kv_cache_spec for position in self._groups]
        _, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
        self._shapes = [GroupShape(spec.block_size, getattr(spec, "sliding_window", None)) for spec in specs]
        self._keys = BlockKeys([shape.block_tokens // hash_tokens for shape in self._shapes])
        self._hash_tokens = hash_tokens
        self._rule = HitRule(self._shapes)
        self._blocks_a_step = sum(self._rule.step // shape.block_tokens for shape in self._shapes)
        self._worker_count = 0
        self._client: Client | None = None
        self._lookups: LookupThread | None = None
        self._manager: Any = None
        self._known: dict[str, _Known] = {}
        self._hits: dict[str, tuple[int, int]] = {}  # request → tokens that it claims: from, to
        self._loads: list[Load] = []
        self._saves: list[Save] = []
        self._held: dict[int, _Held] = {}
        self._held_count = 0
        self._save_limit = max(1, int(config.save_share * kv_cache_config.num_blocks))
        self._save_number = 0
        self._resetting: set[int] | None = None  # saves that were under way at the last reset
        self._stats = KbtpStats()

    def set_workers(self, names: Sequence[StoreNames]) -> None:
        """Learn what the workers call their blocks; from here on the store is asked."""
        self._worker_count = len(names)
        with unpinned():
            self._client = self._config.store_client(names[0].space, names[0].block_bytes, "scheduler")
            if self._is_loading:
                self._lookups = LookupThread(
                    self._client, [one.groups for one in names], names[0].block_bytes, self._config.store_timeout_s
                )

    def bind(self, kv_cache_manager: Any) -> None:
        self._manager = kv_cache_manager

    # Loading ------------------------------------------------------------------------------------------------------------

    def new_request(self, request: Any) -> None:
        known = self._known[request.request_id] = _Known(request, done=[0] * len(self._groups))
        self._look_up(known)

    def _look_up(self, known: _Known) -> Lookup | None:
        if self._lookups is None or self._resetting is not None:
            return None
        request = known.request
        known.lookup = self._lookups.start(
            [self._keys.of(request, group, 0, self._keys.count(request, group)) for group in range(len(self._groups))]
        )
        known.wait_s = FIRST_WAIT_S
        self._stats.add("store_lookups")
        return known.lookup

    def matched_tokens(self, request: Any, computed_tokens: int) -> int | None:
        """How many tokens beyond the local prefix hit the store holds; None: not known yet."""
        known = self._known.get(request.request_id)
        if known is None or self._resetting is not None or known.tried == request.num_preemptions:
            return 0
        lookup = known.lookup
        if lookup is None or self._is_old(lookup, request):
            lookup = self._look_up(known)
        if lookup is None:
            return 0
        if not lookup.done.is_set():
            wait_s, known.wait_s = known.wait_s, 0.0
            if not lookup.done.wait(wait_s):
                return None
        # The last token is always computed here: its output is what is wanted.
        hit = self._rule.tokens(lookup.present, request.num_tokens - 1) if lookup.is_answered else 0
        self._hits[request.request_id] = computed_tokens, hit
        return max(0, hit - computed_tokens)

    def _is_old(self, lookup: Lookup, request: Any) -> bool:
        if not lookup.done.is_set():
            return False
        is_longer = len(lookup.keys[0]) < self._keys.count(request, 0)
        return is_longer or (lookup.is_answered and time.monotonic() - lookup.asked_at > FRESH_S)

    def allocated(self, request: Any, block_ids: Sequence[Sequence[int]], external_tokens: int) -> None:
        """The request has its blocks: load what it claimed. Without a claim nothing is to be done."""
        known = self._known.get(request.request_id)
        first_token, end = self._hits.pop(request.request_id, (0, 0))
        if known is None:
            return
        if known.lookup is not None and known.lookup.done.is_set():
            self._note(known, known.lookup)
        if external_tokens <= 0:
            return
        end = min(end, first_token + external_tokens)
        moved = self._kv.select_transfer_block_ids(block_ids)
        keys: list[list[bytes]] = []
        blocks: list[Sequence[int]] = []
        for number, (position, shape) in enumerate(zip(self._groups, self._shapes, strict=True)):
            start = max(first_token // shape.block_tokens, shape.first_needed(end))
            stop = end // shape.block_tokens
            keys.append(self._keys.of(request, number, start, stop))
            blocks.append(moved[position][start:stop])
        known.tried = request.num_preemptions
        self._loads.append(Load(request.request_id, keys, self._indexes(blocks)))

    def is_loading(self, request: Any) -> bool:
        """Whether a load of the request is in this step."""
        return any(load.request_id == request.request_id for load in self._loads)

    def _note(self, known: _Known, lookup: Lookup) -> None:
        """What the store has at the beginning of each group need not be saved."""
        known.lookup = None
        for number, row in enumerate(lookup.present):
            first_missing = int(row.argmin()) if len(row) else 0
            is_whole = len(row) > 0 and bool(row[first_missing])
            known.done[number] = max(known.done[number], len(row) if is_whole else first_missing)
        self._stats.add("store_lookup_seconds", lookup.seconds)
        if lookup.keys[0] and not lookup.is_answered:
            self._stats.add("store_lookups_failed")

    # Saving -------------------------------------------------------------------------------------------------------------

    def plan(self, scheduler_output: Any, step: StepMetadata) -> None:
        """Add this step's loads, and saves of the blocks that its computation completes."""
        step.loads, self._loads = self._loads, []
        for request_id, count in scheduler_output.num_scheduled_tokens.items():
            known = self._known.get(request_id)
            if known is not None:
                self._plan(known, known.request.num_computed_tokens + count, None)
        step.saves, self._saves = self._saves, []

    def _plan(self, known: _Known, computed: int, block_ids: Sequence[Sequence[int]] | None) -> None:
        """Save what a request has computed and is not saved, as far as there is room; the rest's turn comes later."""
        stops = self._to_save(known, computed)
        if stops is None:
            return
        request = known.request
        ids = self._kv.select_transfer_block_ids(block_ids if block_ids is not None else self._manager.get_block_ids(request.request_id))
        keys: list[list[bytes]] = []
        blocks: list[list[int]] = []
        for number, (position, stop) in enumerate(zip(self._groups, stops, strict=True)):
            first, known.done[number] = known.done[number], max(stop, known.done[number])
            some = ids[position][first:stop]
            named = self._keys.of(request, number, first, first + len(some))
            if 0 in some:  # out of its window already
                kept = [(key, block) for key, block in zip(named, some, strict=False) if block]
                named, some = [key for key, _ in kept], [block for _, block in kept]
            keys.append(named)
            blocks.append(some)
        if any(blocks):
            self._hold(keys, blocks)

    def _to_save(self, known: _Known, computed: int) -> list[int] | None:
        """Up to which block of each group the request is saved now; None: there is nothing to save, or no room."""
        tokens = self._complete(known, computed)
        for _ in range(2):
            stops = [tokens // shape.block_tokens for shape in self._shapes]
            count = sum(max(0, stop - done) for stop, done in zip(stops, known.done, strict=True))
            room = self._save_limit - self._held_count
            if count <= room:
                return stops if count else None
            tokens -= -(-(count - room) // self._blocks_a_step) * self._rule.step
        return None

    def _complete(self, known: _Known, computed: int) -> int:
        """Tokens from the first on whose KV is to be saved, once so many are computed."""
        request = known.request
        if not self._is_saving or not self._worker_count or self._resetting is not None or known.outdated == request.num_preemptions:
            return 0
        # What is hashed is confirmed: drafts of speculative decoding and tokens that are still being sampled are not.
        tokens: int = min(computed, len(request.block_hashes) * self._hash_tokens)
        return min(tokens, request.num_prompt_tokens) if self._config.save == "prompt" else tokens

    def _hold(self, keys: list[list[bytes]], blocks: list[list[int]]) -> None:
        """Nobody overwrites these blocks until the workers have reported the save."""
        pool = self._manager.block_pool
        everywhere = pool.blocks
        held = [everywhere[block] for some in blocks for block in some]
        pool.touch(held)
        self._save_number += 1
        self._held[self._save_number] = _Held(held, self._worker_count, time.monotonic())
        self._held_count += len(held)
        self._saves.append(Save(self._save_number, keys, self._indexes(blocks)))

    def _indexes(self, blocks: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Block indexes of vLLM's block ids, a list for each group that is stored."""
        parts = [np.array(some, np.int64) + position * self._kv.num_blocks for position, some in zip(self._groups, blocks, strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def reported(self, report: SaveReport | None) -> None:
        """Workers have ended these saves; the last one's report gives the blocks back."""
        for number, count in (report.ended if report is not None else {}).items():
            held = self._held.get(number)
            if held is None:
                continue
            held.reports_due -= count
            if held.reports_due <= 0:
                del self._held[number]
                self._held_count -= len(held.blocks)
                self._manager.block_pool.free_blocks(reversed(held.blocks))
        if self._resetting is not None and not self._resetting & self._held.keys():
            self._remove_all()
            self._resetting = None

    @property
    def is_saving(self) -> bool:
        """Whether blocks wait for being saved: the engine has to go on stepping to hear of their end."""
        return bool(self._held)

    @property
    def frees_blocks_soon(self) -> bool:
        """Whether to wait for blocks that are being saved is better than to preempt a request."""
        return bool(self._held) and time.monotonic() - next(iter(self._held.values())).since < FREES_SOON_S

    # Both ---------------------------------------------------------------------------------------------------------------

    def finished(self, request: Any, block_ids: Sequence[Sequence[int]]) -> None:
        """The request is over; `block_ids` are what it has computed."""
        self._hits.pop(request.request_id, None)
        known = self._known.pop(request.request_id, None)
        if known is None or request.status not in FINISHED_WELL:
            return
        self._plan(known, request.num_computed_tokens, block_ids)
        tokens = self._complete(known, request.num_computed_tokens)
        missed = sum(max(0, tokens // shape.block_tokens - done) for shape, done in zip(self._shapes, known.done, strict=True))
        if missed:
            self._stats.add("store_blocks_unsaved", missed)

    def reset(self) -> bool:
        """Forget all that was saved under this engine's names; whether the store did."""
        for known in self._known.values():
            known.lookup = None
            known.done = [0] * len(self._groups)
            if known.request.num_computed_tokens:  # from what was there before
                known.outdated = known.request.num_preemptions
        self._hits.clear()
        self._resetting = set(self._held) or None
        return self._remove_all()

    def _remove_all(self) -> bool:
        if self._client is None:
            return True
        try:
            count = self._client.remove_all(timeout_s=self._config.save_timeout_s)
        except KbtpError as error:
            logger.error("The store may still have blocks of before the reset: %s", error)
            return False
        logger.info("%d blocks of this engine's geometry were removed from the store.", count)
        return True

    def take_stats(self) -> KbtpStats | None:
        return self._stats.take()

    def close(self) -> None:
        if self._lookups is not None:
            self._lookups.close()
        if self._client is not None:
            self._client.close()
