"""An engine's paged KV memory, as KBTP sees it.

One block is everything that the engine keeps for one block id: the page of each layer (and of K and of V, where they lie apart), in
order. Pages are equal in size and lie anywhere; a region over them is one run of tagged offsets, so that block b is
[b * block_bytes, (b + 1) * block_bytes).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PagedMemory:
    """`addresses` has shape (blocks, pages a block); `owner` keeps the memory alive."""

    addresses: NDArray[np.uint64]
    page_bytes: int
    owner: object

    def __post_init__(self) -> None:
        if self.addresses.ndim != 2 or self.addresses.size == 0 or self.addresses.dtype != np.uint64:
            raise ValueError(
                f"page addresses have shape {self.addresses.shape} and dtype {self.addresses.dtype}, not (blocks, pages) uint64"
            )
        if self.page_bytes <= 0 or self.block_bytes > 0xFFFF_FFFF:
            raise ValueError(f"pages of {self.page_bytes} octets make blocks of {self.block_bytes}: a block has 1 octet to 4 GiB")

    @property
    def block_count(self) -> int:
        return int(self.addresses.shape[0])

    @property
    def pages_per_block(self) -> int:
        return int(self.addresses.shape[1])

    @property
    def block_bytes(self) -> int:
        return self.pages_per_block * self.page_bytes

    def pages_of(self, blocks: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Addresses of all pages of these blocks, block by block. Raises ValueError naming a block that does not exist."""
        outside = (blocks < 0) | (blocks >= self.block_count)
        if outside.any():
            raise ValueError(f"block {int(blocks[outside][0])} does not exist: there are {self.block_count}")
        return self.addresses[blocks].reshape(-1)
