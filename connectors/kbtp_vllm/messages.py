"""What the scheduler's and the workers' halves of the connector tell each other; vLLM pickles it between processes.

Every block list here is flat over all KV cache groups and names blocks by *block index*: group * blocks + vLLM block id.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata

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
    """Worker to scheduler, once at start."""

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


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """Scheduler to workers, every step."""

    offers: list[Offer] = field(default_factory=list)
    pulls: list[Pull] = field(default_factory=list)
    releases: list[Pull] = field(default_factory=list)  # nothing is loaded and nobody waits for them
    cancels: list[str] = field(default_factory=list)  # pulls whose request was aborted
    refused: dict[str, str] = field(default_factory=dict)  # requests that wait for a load which cannot be: why
