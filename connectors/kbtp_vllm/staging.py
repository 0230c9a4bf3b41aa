"""KV caches that the RNIC can't reach (an accelerator's memory) go through a stage: a small twin of them in host memory.

`StagedSource` and `StagedSink` do what `PullSource` and `PullSink` do, with one copy more: prefill copies a request's blocks out before it
offers them, decode pulls into the stage and copies in when all is there. What does not find room in the stage waits in line.

Rules:
1. A stage block belongs to one offer or pull from before its copy until the transfer layer has released or fenced it.
2. The line is first come, first served. It moves because every offer ends by its lease and every pull by its deadline.
3. Whatever the transfer layer raises ends that offer or pull alone, reported like any other, with its stage blocks back.
4. Copies run on the engine's own thread and stream, so they see what the engine computed and it sees what they brought.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.logger import init_logger

from kbtp_core.errors import ConfigError, KbtpError
from kbtp_core.fabric.api import FabricError
from kbtp_core.transfer import FREE_ONLY, PagedMemory, PullResult, PullSink, PullSource
from kbtp_vllm import geometry

logger = init_logger("vllm.kbtp.staging")

Blocks = NDArray[np.int64]

TRANSFER_ERRORS: Final = (KbtpError, FabricError, OSError, ValueError, RuntimeError, LookupError, MemoryError)
"""What asking the transfer layer for something may raise; it costs a request and not the engine."""


class HostStage:
    """`block_count` blocks in host memory, laid out like the engine's `tensors` of `groups` with `engine_blocks` blocks each."""

    def __init__(self, tensors: Mapping[str, Any], groups: Sequence[Sequence[str]], engine_blocks: int, stage_bytes: int) -> None:
        self._groups = [_distinct(tensors, layers) for layers in groups]
        self._engine = tensors
        self._engine_blocks = engine_blocks
        block_bytes = sum(tensors[layer].nbytes // engine_blocks for layer in self._groups[0])
        self.block_count = min(stage_bytes // block_bytes, engine_blocks)
        if self.block_count < 1:
            raise ConfigError(f"stage_mib leaves no room for a single block of {block_bytes} octets; raise it.")
        # Stage numbers are unique over all groups, so layers that share storage in the engine share a twin as well.
        storages = {tensors[layer].data_ptr(): tensors[layer] for group in self._groups for layer in group}
        twins = {address: _twin(tensor, engine_blocks, self.block_count) for address, tensor in storages.items()}
        self._twins = {layer: twins[tensors[layer].data_ptr()] for group in self._groups for layer in group}
        self.memory: PagedMemory = geometry.paged_memory(self._twins, self._groups, self.block_count)
        self._free = deque(range(self.block_count))

    @property
    def free_count(self) -> int:
        return len(self._free)

    def take(self, blocks: Blocks) -> Blocks:
        """A stage block for each engine block; both are block indexes (group * blocks + number)."""
        numbers = np.array([self._free.popleft() for _ in blocks], dtype=np.int64)
        return np.asarray(blocks // self._engine_blocks * self.block_count + numbers)

    def give_back(self, staged: Blocks) -> None:
        self._free.extend((staged % self.block_count).tolist())

    def copy_out(self, blocks: Blocks, staged: Blocks) -> None:
        """Engine memory → stage."""
        self._copy(self._engine, blocks, self._engine_blocks, self._twins, staged, self.block_count)

    def copy_in(self, staged: Blocks, blocks: Blocks) -> None:
        """Stage → engine memory."""
        self._copy(self._twins, staged, self.block_count, self._engine, blocks, self._engine_blocks)

    def _copy(self, source: Mapping[str, Any], take: Blocks, take_count: int, sink: Mapping[str, Any], put: Blocks, put_count: int) -> None:
        for number, layers in enumerate(self._groups):
            chosen = take // take_count == number
            if not chosen.any():
                continue
            for layer in layers:
                origin, target = source[layer], sink[layer]
                parts = origin.shape[0] // take_count
                rows = _rows(take[chosen] % take_count, parts, origin.device)
                target[_rows(put[chosen] % put_count, parts, target.device)] = origin[rows].to(target.device)


def _distinct(tensors: Mapping[str, Any], layers: Sequence[str]) -> list[str]:
    """These layers without the ones that share an earlier one's KV cache."""
    return list({tensors[layer].data_ptr(): layer for layer in reversed(layers)}.values())[::-1]


def _rows(numbers: Blocks, parts: int, device: Any) -> Any:
    """A tensor's rows for these blocks, of `parts` rows each."""
    return torch.from_numpy((numbers[:, None] * parts + np.arange(parts)).reshape(-1)).to(device)


def _twin(tensor: Any, engine_blocks: int, block_count: int) -> Any:
    """A host tensor like this one, dimensions in the same order in memory, with another number of blocks; pinned if that helps."""
    shape = [tensor.shape[0] // engine_blocks * block_count, *tensor.shape[1:]]
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    pinned = tensor.device.type == "cuda"
    storage = torch.empty([shape[dimension] for dimension in order], dtype=tensor.dtype, pin_memory=pinned)
    return storage.permute(*(order.index(dimension) for dimension in range(tensor.dim())))


@dataclass(frozen=True)
class _Offer:
    request_id: str
    handles: NDArray[np.uint64]
    generations: NDArray[np.uint16]
    blocks: Blocks


class StagedSource:
    """A `PullSource` over a stage."""

    def __init__(self, stage: HostStage, source: PullSource) -> None:
        self._stage = stage
        self._source = source
        self._line: deque[_Offer] = deque()
        self._staged: dict[str, Blocks] = {}
        self._failed: list[str] = []  # offers that could not be made

    @property
    def address(self) -> tuple[str, int]:
        return self._source.address

    @property
    def incarnation(self) -> int:
        return self._source.incarnation

    @property
    def first_handle(self) -> int:
        return self._source.first_handle

    def offer(self, request_id: str, handles: NDArray[np.uint64], generations: NDArray[np.uint16], blocks: Blocks) -> None:
        """As PullSource.offer; the lease starts once the blocks are staged. At most `HostStage.block_count` blocks.

        An offer that can't be made is logged and released.
        """
        self._line.append(_Offer(request_id, handles, generations, blocks))
        self._move()

    def _move(self) -> None:
        while self._line and self._line[0].blocks.size <= self._stage.free_count:
            offer = self._line.popleft()
            staged = self._stage.take(offer.blocks)
            try:
                self._stage.copy_out(offer.blocks, staged)
                self._source.offer(offer.request_id, offer.handles, offer.generations, staged)
            except TRANSFER_ERRORS:
                logger.exception("Request %s could not be offered: decode will compute it.", offer.request_id)
                self._stage.give_back(staged)
                self._failed.append(offer.request_id)
            else:
                self._staged[offer.request_id] = staged

    def take_released(self) -> list[str]:
        released = self._source.take_released()
        for request_id in released:
            self._stage.give_back(self._staged.pop(request_id))
        self._move()
        failed, self._failed = self._failed, []
        return released + failed

    def stats(self) -> dict[str, int]:
        return self._source.stats()

    def close(self) -> None:
        self._source.close()


@dataclass
class _Pull:
    request_id: str
    host: str
    port: int
    incarnation: int
    handles: NDArray[np.uint64]
    generations: NDArray[np.uint16]
    blocks: Blocks
    timeout_s: float
    asked_at: float
    staged: Blocks | None = None  # the wanted blocks' places, once it is under way

    @property
    def wanted(self) -> NDArray[np.bool_]:
        return np.asarray(self.blocks != FREE_ONLY)


class StagedSink:
    """A `PullSink` over a stage."""

    def __init__(self, stage: HostStage, sink: PullSink) -> None:
        self._stage = stage
        self._sink = sink
        self._line: deque[_Pull] = deque()
        self._active: dict[str, _Pull] = {}
        self._over: list[PullResult] = []  # ended in the line
        self._frees = 0

    def pull(
        self,
        request_id: str,
        host: str,
        port: int,
        incarnation: int,
        handles: NDArray[np.uint64],
        generations: NDArray[np.uint16],
        blocks: Blocks,
        *,
        timeout_s: float,
    ) -> None:
        """As PullSink.pull, but what that raises later is reported as a failed pull."""
        if request_id in self._active or any(pull.request_id == request_id for pull in self._line):
            raise ValueError(f"request {request_id} is being pulled already")
        pull = _Pull(request_id, host, port, incarnation, handles, generations, blocks, timeout_s, time.monotonic())
        count = np.count_nonzero(pull.wanted)
        if count == 0:
            self._free_handles(pull)
        elif count > self._stage.block_count:
            self._give_up(pull, f"{count} blocks do not fit into the stage's {self._stage.block_count}; raise stage_mib")
        else:
            self._line.append(pull)
            self._move()

    def _move(self) -> None:
        while self._line and np.count_nonzero(self._line[0].wanted) <= self._stage.free_count:
            pull = self._line.popleft()
            left_s = pull.timeout_s - (time.monotonic() - pull.asked_at)
            if left_s <= 0:
                self._give_up(pull, f"the stage had no room within {pull.timeout_s:g} s; raise stage_mib")
                continue
            pull.staged = self._stage.take(pull.blocks[pull.wanted])
            places = np.full(pull.blocks.size, FREE_ONLY, dtype=np.int64)
            places[pull.wanted] = pull.staged
            try:
                self._sink.pull(
                    pull.request_id, pull.host, pull.port, pull.incarnation, pull.handles, pull.generations, places, timeout_s=left_s
                )
            except TRANSFER_ERRORS as error:
                self._stage.give_back(pull.staged)
                self._give_up(pull, str(error))
            else:
                self._active[pull.request_id] = pull

    def _give_up(self, pull: _Pull, error: str) -> None:
        """End a pull that is not under way."""
        self._free_handles(pull)
        self._over.append(PullResult(pull.request_id, False, error, 0, 0, time.monotonic() - pull.asked_at, pull.wanted))

    def _free_handles(self, pull: _Pull) -> None:
        """Under an id of its own: its result is nobody's, and the request's own may be under way."""
        self._frees += 1
        name = f"free {self._frees} of {pull.request_id}"
        nothing = np.full(pull.blocks.size, FREE_ONLY, dtype=np.int64)
        try:
            self._sink.pull(name, pull.host, pull.port, pull.incarnation, pull.handles, pull.generations, nothing, timeout_s=pull.timeout_s)
        except TRANSFER_ERRORS as error:
            logger.warning("Handles of request %s stay until prefill's lease ends, they could not be freed: %s", pull.request_id, error)

    def cancel(self, request_id: str) -> None:
        for pull in [pull for pull in self._line if pull.request_id == request_id]:
            self._line.remove(pull)
            self._give_up(pull, "it was cancelled")
        if request_id in self._active:
            self._sink.cancel(request_id)

    def take_finished(self) -> list[PullResult]:
        finished: list[PullResult] = []
        for result in self._sink.take_finished():
            pull = self._active.pop(result.request_id, None)
            if pull is None:
                continue  # only handles were freed
            assert pull.staged is not None
            loaded = ~result.failed[pull.wanted]
            self._stage.copy_in(pull.staged[loaded], pull.blocks[pull.wanted][loaded])
            self._stage.give_back(pull.staged)
            finished.append(result)
        now = time.monotonic()
        for pull in [pull for pull in self._line if now - pull.asked_at > pull.timeout_s]:
            self._line.remove(pull)
            self._give_up(pull, f"the stage had no room within {pull.timeout_s:g} s; raise stage_mib")
        self._move()
        finished += self._over
        self._over = []
        return finished

    def close(self) -> None:
        self._sink.close()
