"""CHECKSUM: completions that carry a checksum of the block, and when it is computed."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import numpy as np
import pytest

from kbtp_core.protocol.constants import Capability, Flag, Status
from kbtp_core.protocol.effects import LoadMany, Send
from kbtp_core.protocol.wire import DataDescriptor, Load
from tests.protocol.test_pair_requests import put
from tests.protocol.world import STAG, Link, lent_world, ring_world


def counted() -> tuple[Callable[[bytes], int], list[bytes]]:
    """A checksum of octets, and what it was asked for; the target takes any function of 32 bits for CRC-32C."""
    seen: list[bytes] = []

    def crc(octets: bytes) -> int:
        seen.append(octets)
        return zlib.crc32(octets)

    return crc, seen


def checked() -> tuple[Link, list[bytes]]:
    crc, seen = counted()
    return ring_world(crc32c=crc).link(quota=3, handles=8, capabilities=Capability.CHECKSUM).greet(), seen


def load(link: Link, handle: int, flags: int = 0) -> int:
    batch = link.initiator.load([handle], 0, STAG, 0, 64, flags)
    link.run(batch)
    assert batch.status.tolist() == [Status.OK]
    return int(batch.checksum[0])


def test_stores_and_loads_carry_the_checksum_of_the_blocks_data_and_frees_carry_none() -> None:
    link, _ = checked()
    stored = link.initiator.alloc_store_inline([100, 101], 0, [b"first", b"second"], Flag.SEAL)
    link.run(stored)
    assert stored.checksum.tolist() == [zlib.crc32(b"first"), zlib.crc32(b"second")]
    assert load(link, 101) == zlib.crc32(b"second")
    freed = link.initiator.free([101], 0)
    link.run(freed)
    assert freed.checksum.tolist() == [0]


def test_the_checksum_of_a_sealed_block_is_computed_once_in_each_life() -> None:
    link, seen = checked()
    put(link, 100, b"old")
    assert [load(link, 100), load(link, 100)] == [zlib.crc32(b"old")] * 2
    link.run(link.initiator.free([100], 0))
    put(link, 100, b"new")
    assert load(link, 100) == zlib.crc32(b"new")
    assert seen == [b"old", b"new"]


@pytest.mark.parametrize("generation", [1, 2])
def test_a_generation_that_comes_again_brings_no_old_checksum(generation: int) -> None:
    link, _ = checked()
    put(link, 100, b"old")
    assert load(link, 100) == zlib.crc32(b"old")
    link.run(link.initiator.free([100], 0))
    table = link.world.target.table
    table.generations[0] = table.entries["generation"][0] = 65535 if generation == 1 else 1  # 65,535 binds and frees later
    assert put(link, 100, b"new") == generation
    assert load(link, 100) == zlib.crc32(b"new")


def test_the_checksum_of_an_open_block_is_computed_every_time() -> None:
    link, seen = checked()
    put(link, 100, b"open", 0)
    assert load(link, 100, Flag.ALLOW_UNSEALED) == zlib.crc32(b"open")
    link.run(link.initiator.store_inline([100], 0, [b"other"], Flag.SEAL))
    assert load(link, 100) == zlib.crc32(b"other")
    assert seen == [b"open", b"open", b"other"]


def test_without_the_capability_nothing_is_computed() -> None:
    crc, seen = counted()
    world = ring_world(crc32c=crc)
    link = world.link(quota=3, handles=8).greet()
    put(link, 100, b"data")
    assert (load(link, 100), seen) == (0, [])


def test_a_checksum_is_granted_where_the_target_reads_its_pool_and_can_compute_it() -> None:
    crc, _ = counted()
    granted = []
    for world in (ring_world(crc32c=crc), ring_world(), lent_world()):
        ack = world.link(capabilities=Capability.CHECKSUM).greet().initiator.ack
        assert ack is not None
        granted.append(ack.capabilities)
    assert granted == [Capability.CHECKSUM, Capability.NONE, Capability.NONE]


def test_a_session_with_checksums_is_served_one_message_at_a_time_and_by_no_executor() -> None:
    link, _ = checked()
    put(link, 100, b"data")
    raw = np.frombuffer(Load(1, 100, 0, DataDescriptor(STAG, 0, 64)).encode(), np.uint8).reshape(1, 40)
    effects = link.session.receive_loads(raw, 0.0)
    assert not any(isinstance(effect, LoadMany) for effect in effects)
    assert isinstance(effects[-1], Send)
    assert not link.session.allows_executor
    assert ring_world().link().greet().session.allows_executor
    assert not ring_world().link().session.allows_executor
