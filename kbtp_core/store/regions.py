"""The memory of a batch as regions of a session: values of equal size together, each group one run of tagged offsets."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from kbtp_core.fabric.api import Region
from kbtp_core.session import InitiatorSession
from kbtp_core.store.places import Places


def regions_of(
    session: InitiatorSession, places: Places
) -> Iterator[tuple[NDArray[np.intp] | slice, Region, NDArray[np.int64] | int, NDArray[np.uint32] | int]]:
    """Register the places; (which values, region, their offsets in it, their octets) for each group of equal values."""
    pieces = places.addresses.shape[1]
    if len(places) == 1 and pieces == 1:
        yield slice(None), _register(session, places.addresses.reshape(-1), int(places.lengths[0, 0]), places.owner), 0, places.lengths[0]
        return
    lengths = places.lengths
    if (lengths == lengths[0]).all():
        groups: list[NDArray[np.intp] | slice] = [slice(None)]
    else:
        _, which = np.unique(lengths, axis=0, return_inverse=True)
        which = which.reshape(-1)
        groups = [np.flatnonzero(which == number) for number in range(int(which.max()) + 1)]
    for group in groups:
        addresses, sizes = places.addresses[group], lengths[group][0].astype(np.int64)
        page = int(np.gcd.reduce(sizes))
        total = int(sizes.sum())
        if page == 0:
            continue
        if pieces > 1 and (sizes != page).any():
            steps = [np.arange(0, size, page, dtype=np.uint64) for size in sizes.tolist()]
            addresses = np.concatenate([addresses[:, [at]] + step for at, step in enumerate(steps)], axis=1)
        region = _register(session, np.ascontiguousarray(addresses).reshape(-1), page, places.owner)
        yield group, region, np.arange(len(addresses), dtype=np.int64) * total, total


def _register(session: InitiatorSession, addresses: NDArray[np.uint64], page_bytes: int, owner: object) -> Region:
    return session.register_pages(addresses, page_bytes, owner)
