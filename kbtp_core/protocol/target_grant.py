"""What a target grants to a HELLO that it admits: limits, handles, quota, capabilities, and access for the direct modes.

A capability is granted if it was wanted, if the operator and the binding allow it, and if there is what it needs:
STORE a keyed store that has the pool; CHECKSUM a pool whose octets the target can read; RECORD_COMPLETION a binding that offers it;
the direct modes a pool that belongs to its ring, a trust domain that the operator listed, and a driver that can register memory (`Expose`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from numpy.typing import NDArray

from kbtp_core.protocol.constants import Capability
from kbtp_core.protocol.hello import DirectAccess, Hello, HelloAck
from kbtp_core.protocol.partition import Partition
from kbtp_core.protocol.pool import BlockPool

if TYPE_CHECKING:
    from kbtp_core.protocol.target import Target


_FAIR_SHARE: Final = 8


@dataclass(frozen=True)
class Exposure:
    """What a session may reach by one-sided operations. `pool` is registered so that tagged offset = Pool Offset base + Block Offset.

    With `is_readable`, the table and the whole pool: remote read, nothing else. With `partition`, its slots: remote read; its Head:
    remote atomic; its blocks, and no others, at the same offsets as in the pool: remote write.
    """

    pool: BlockPool
    table: NDArray[Any]
    is_readable: bool
    partition: Partition | None


Expose: TypeAlias = Callable[[Exposure], DirectAccess | None]
"""Register what an Exposure names and return STags and offsets, or None if that can't be had."""


@dataclass(frozen=True)
class Grant:
    """What `grant` decided, and for which of the targets behind one address."""

    target: Target
    ack: HelloAck
    handle_base: int
    handle_count: int
    partition: Partition | None


def grant(target: Target, owner: int, hello: Hello, nonce: bytes, offers: Capability, expose: Expose | None) -> Grant:
    """Take quota and handles for session `owner`. `offers` are the capabilities of its binding."""
    limits, pool = target.limits, target.pool
    wanted = Capability(hello.capabilities & int(Capability.RECORD_COMPLETION | Capability.CHECKSUM | Capability.STORE | _DIRECT))
    granted = wanted & offers & Capability.RECORD_COMPLETION
    if target.keyed is not None:
        granted |= wanted & Capability.STORE
    partition, access, quota = None, DirectAccess(), 0
    if isinstance(pool, BlockPool):
        if target.crc32c is not None:
            granted |= wanted & Capability.CHECKSUM
        quota_wanted, handles_wanted = min(hello.quota, limits.quota), min(hello.handle_count, limits.handle_count)
        if limits.shares_fairly:
            quota_wanted = min(quota_wanted, max(1, pool.quota_left // _FAIR_SHARE))
        modes, partition, access = _grant_direct(target, pool, owner, hello.trust_domain, wanted, quota_wanted, expose)
        granted |= modes
        quota = len(partition.block_offsets) if partition is not None else pool.grant(owner, quota_wanted)
        if limits.shares_fairly:
            handles_wanted = min(handles_wanted, 2 * quota)
        handle_base, handle_count = target.ranges.take(handles_wanted)
    else:
        handle_base = target.table.base_handle + target.reserved_handles
        handle_count = target.table.entry_count - target.reserved_handles
    ack = HelloAck(
        request_id=hello.request_id,
        capabilities=int(granted),
        block_bytes=pool.block_bytes,
        block_count=pool.block_count,
        quota=quota,
        handle_base=handle_base,
        handle_count=handle_count,
        table_base=target.table.base_handle,
        table_count=target.table.entry_count,
        outstanding=min(max(hello.outstanding, 1), limits.outstanding),
        inline_bytes=min(hello.inline_bytes, limits.inline_bytes),
        incarnation=target.incarnation,
        direct=access,
        nonce=nonce,
        target_name=target.name,
    )
    return Grant(target, ack, handle_base, handle_count, partition)


_DIRECT = Capability.DIRECT_LOAD | Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS


def _grant_direct(
    target: Target, pool: BlockPool, owner: int, domain: str, wanted: Capability, quota: int, expose: Expose | None
) -> tuple[Capability, Partition | None, DirectAccess]:
    policy = target.direct
    if policy is None or expose is None:
        return Capability.NONE, None, DirectAccess()
    granted, partition = Capability.NONE, None
    if domain in policy.load_domains:
        granted |= wanted & Capability.DIRECT_LOAD
    if domain in policy.alloc_domains and wanted & Capability.DIRECT_ALLOC:
        masked = bool(wanted & Capability.MASKED_ATOMICS) and policy.masked
        partition = pool.carve(owner, quota, masked=masked, timeout_s=policy.ticket_timeout_s)
        if partition is not None:
            granted |= Capability.DIRECT_ALLOC | (Capability.MASKED_ATOMICS if masked else Capability.NONE)
    if granted is Capability.NONE:
        return Capability.NONE, None, DirectAccess()
    access = expose(Exposure(pool, target.table.entries, bool(granted & Capability.DIRECT_LOAD), partition))
    if access is None:
        if partition is not None:
            pool.dissolve(owner, clear=False)
            pool.revoke(owner)
        return Capability.NONE, None, DirectAccess()
    if partition is not None:
        access = replace(access, ticket_timeout_ms=max(1, int(policy.ticket_timeout_s * 1000)), ring_log2_slots=partition.ring.log2_slots)
    return granted, partition, access
