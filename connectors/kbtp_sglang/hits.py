"""How much of a prefix can be restored, given which pages of which pools there are.

A prefix of n pages is restorable if the first n pages of KV are there, and of each other pool what its policy asks for:

- all_pages: its first n pages;
- trailing_pages: its last pages up to n, as many as the transfer names (of a shorter prefix: all of it);
- block_groups: anything; such a pool has a second form of the same pages and reports its own verdict.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def leading(is_there: NDArray[np.bool_]) -> int:
    """How many there are before the first that is missing."""
    missing = np.flatnonzero(~is_there)
    return int(missing[0]) if len(missing) else len(is_there)


def with_all(is_there: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """For each n from 1: whether a prefix of n pages is restorable that needs all pages."""
    return np.asarray(np.logical_and.accumulate(is_there))


def with_trailing(is_there: NDArray[np.bool_], count: int) -> NDArray[np.bool_]:
    """As `with_all`, of a pool that needs the last `count` pages alone."""
    total = np.concatenate([[0], np.cumsum(is_there)])
    ends = np.arange(1, len(is_there) + 1)
    begins = np.maximum(ends - max(1, count), 0)
    return np.asarray(total[ends] - total[begins] == ends - begins)


def pages_in_groups(is_there: NDArray[np.bool_], block_pages: int, group_pages: int) -> int:
    """Pages of KV that the leading complete groups cover: `is_there` is of their keys, group after group."""
    if block_pages < 1 or group_pages < 1:
        return 0
    return leading(is_there) // group_pages * block_pages


def longest(restorable: NDArray[np.bool_]) -> int:
    """The longest prefix that is."""
    found = np.flatnonzero(restorable)
    return int(found[-1]) + 1 if len(found) else 0
