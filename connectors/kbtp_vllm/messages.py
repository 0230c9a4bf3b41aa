"""What the scheduler's and the workers' halves of the connector tell each other; vLLM pickles it between processes.

Every block list here is flat over all KV cache groups and names blocks by *block index*: group * blocks + vLLM block id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kbtp_vllm.store_keys import StoreNames

FREE_ONLY = -1
"""In `Pull.block_indexes`: the block is not wanted, its handle is only freed."""


@dataclass(frozen=True)
class WorkerAddress:
    """Where one prefill worker answers, and which life of it."""

    host: str
    port: int
    incarnation: int


@dataclass(frozen=True)
class Handshake(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Worker to scheduler, once at start: what decode pulls from, what the blocks are called in the store."""

    source: SourceShape | None = None
    names: StoreNames | None = None


@dataclass(frozen=True)
class SourceShape:
    """A prefill worker's table of handles."""

    address: WorkerAddress
    first_handle: int
    table_entries: int
    offer_limit: int  # blocks that one offer may have


@dataclass(frozen=True)
class Offer:
    """Prefill: bind these handles to these blocks and serve them until they are freed or the lease ends."""

    request_id: str
    handles: NDArray[np.uint64]
    generations: NDArray[np.uint16]
    block_indexes: NDArray[np.int64]


@dataclass(frozen=True)
class Pull:
    """Decode: load the remote handles into the local blocks, then free the handles."""

    request_id: str
    remote_engine: str
    workers: tuple[WorkerAddress, ...]
    handles: NDArray[np.uint64]
    generations: NDArray[np.uint16]
    block_indexes: NDArray[np.int64]


@dataclass(frozen=True)
class Load:
    """From the store: a list of keys for each KV group that is stored, and all their blocks in that order."""

    request_id: str
    keys: list[list[bytes]]
    block_indexes: NDArray[np.int64]


@dataclass(frozen=True)
class Save:
    """To the store, what one step has computed. `number` comes back in a SaveReport."""

    number: int
    keys: list[list[bytes]]
    block_indexes: NDArray[np.int64]


@dataclass
class SaveReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """Worker to scheduler: saves that no longer read their blocks, and by how many workers."""

    ended: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> SaveReport:
        assert isinstance(other, SaveReport)
        for number, count in other.ended.items():
            self.ended[number] = self.ended.get(number, 0) + count
        return self


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, every step."""

    offers: list[Offer] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    releases: list[Pull] = field(default_factory=list)  # nothing is loaded and nobody waits for them
    cancels: list[str] = field(default_factory=list)  # pulls whose request was aborted
    refused: dict[str, str] = field(default_factory=dict)  # requests that wait for a load which cannot be: why
    loads: list[Load] = field(default_factory=list)
    saves: list[Save] = field(default_factory=list)
