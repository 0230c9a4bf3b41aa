"""How much of a prompt the store holds: the longest prefix that is whole for every KV group.

A group of full attention needs all blocks of the prefix. One with a sliding window needs those that the next token can still see.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class GroupShape:
    block_tokens: int
    window: int | None = None  # tokens; None: full attention

    def first_needed(self, tokens: int) -> int:
        """The first block that a prefix of so many tokens needs."""
        return 0 if self.window is None else max(0, tokens - self.window + 1) // self.block_tokens


class HitRule:
    """For engines with these groups; a hit is a multiple of `step` tokens."""

    def __init__(self, groups: Sequence[GroupShape]) -> None:
        self._groups = tuple(groups)
        self.step = math.lcm(*(group.block_tokens for group in groups))

    def tokens(self, present: Sequence[NDArray[np.bool_]], limit: int) -> int:
        """The longest prefix of up to `limit` tokens; `present` says for each group which of its blocks there are, from the first on."""
        blocks = [min(len(row), limit // group.block_tokens) for row, group in zip(present, self._groups, strict=True)]
        if len(self._groups) == 1 and self._groups[0].window is None:  # the usual case
            missing = int(present[0][: blocks[0]].argmin()) if blocks[0] else 0
            count = blocks[0] if blocks[0] and present[0][missing] else missing
            return count * self._groups[0].block_tokens
        longest = min(count * group.block_tokens for count, group in zip(blocks, self._groups, strict=True)) // self.step
        if longest == 0:
            return 0
        ends = np.arange(1, longest + 1, dtype=np.int64) * self.step
        is_whole = np.ones(longest, np.bool_)
        for row, group in zip(present, self._groups, strict=True):
            # For each block, the last one before it or itself that is missing; -1: none.
            last_missing = np.maximum.accumulate(np.where(row, -1, np.arange(len(row))))
            window = group.window if group.window is not None else int(ends[-1]) + 1
            first_needed = np.maximum(0, ends - window + 1) // group.block_tokens
            is_whole &= last_missing[ends // group.block_tokens - 1] < first_needed
        whole = np.flatnonzero(is_whole)
        return int(ends[whole[-1]]) if len(whole) else 0
