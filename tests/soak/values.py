"""Keys and their values for the soak of a store: what a key's octets are follows from the key alone, whoever put it and whenever.

A value is a part of one array that all processes make alike, so it costs no memory to put one and one comparison to check one. Where it
starts differs from key to key by single octets, so that octets of any other key, or of another place of the same value, are seen at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

LARGEST_BYTES = 11 << 18
"""2.75 MiB: a page of a large model, and the largest block."""
_BASE_BYTES = 8 << 20
_BASE: NDArray[np.uint8] = np.random.default_rng(20240229).integers(0, 256, _BASE_BYTES, np.uint8)
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class Space:
    """Keys `0 … count-1` whose values fit into blocks of one size."""

    block_bytes: int
    count: int

    def length(self, number: int) -> int:
        """Of three values one is small, one fills its block, and one is anything."""
        kind, size = _mixed(number) % 3, _mixed(number + self.block_bytes)
        if kind == 0:
            return 1 + size % min(self.block_bytes, 4096)
        return self.block_bytes if kind == 1 else 1 + size % self.block_bytes

    def value(self, number: int) -> NDArray[np.uint8]:
        start = _mixed(number * 31 + self.block_bytes) % (_BASE_BYTES - LARGEST_BYTES)
        return _BASE[start : start + self.length(number)]

    def key(self, number: int) -> str:
        return f"{self.block_bytes}/{number}"

    def draw(self, random: Random, most: int, most_bytes: int) -> list[int]:
        """One number or more, low ones rather than high ones, with at most so many octets together, as far as the first does."""
        numbers = list(dict.fromkeys(int(self.count * random.random() ** 3) for _ in range(random.randint(1, most))))
        sizes = np.cumsum([self.length(number) for number in numbers])
        return numbers[: max(1, int(np.count_nonzero(sizes <= most_bytes)))]


SPACES = (Space(4 << 10, 30_000), Space(64 << 10, 6_000), Space(1 << 20, 800), Space(LARGEST_BYTES, 300))
"""About 1.3 GB of values."""


def _mixed(number: int) -> int:
    """A permutation of 64-bit numbers without a pattern (splitmix64)."""
    number = (number * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) & _MASK
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
