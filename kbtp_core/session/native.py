"""A target beside an executor: what the two share, in the terms of `fabric.api`.

Only a pool that its ring owns is shared; of a lent pool the executor runs LOADs alone, for its owner binds and reclaims entries at
any time.
"""

from __future__ import annotations

from kbtp_core.fabric.api import Executor, Fabric, PoolState, SharesPool, StoreGrant
from kbtp_core.protocol.pool import BlockPool
from kbtp_core.protocol.target import Target
from kbtp_core.protocol.target_keyed import KeyedTargetSession
from kbtp_core.protocol.target_session import TargetSession


def create_executor(fabric: Fabric, target: Target) -> Executor | None:
    """An executor for `target`, which counts on it from now on; None where the fabric has none."""
    table = target.table
    if target.keyed is not None:  # its executor shares the pool with the target already
        own: Executor = target.keyed.executor
        return own if fabric.create_executor(table.entries, table.base_handle, target.pool.block_bytes) is not None else None
    executor = fabric.create_executor(table.entries, table.base_handle, target.pool.block_bytes, _pool_state(target))
    if executor is not None:
        target.readers = executor.readers
    if isinstance(executor, SharesPool):
        target.share(executor)
    return executor


def store_grant(executor: Executor, target: Target, session: TargetSession) -> StoreGrant | None:
    """What `executor` may do for a session of `target` beyond LOAD."""
    pool, ack = target.pool, session.ack
    if not isinstance(pool, BlockPool) or not isinstance(executor, SharesPool) or ack is None:
        return None
    return StoreGrant(
        owner=session.number,
        handle_base=session.handle_base,
        handle_count=session.handle_count,
        inline_bytes=ack.inline_bytes,
        quota=ack.quota,
        usage=pool.usage_cell(session.number),
        keyed=session.keyed_peer.native if isinstance(session, KeyedTargetSession) and session.keyed_peer is not None else None,
    )


def _pool_state(target: Target) -> PoolState | None:
    pool = target.pool
    return shared_pool(target, pool) if isinstance(pool, BlockPool) and target.allows_executor else None


def shared_pool(target: Target, pool: BlockPool) -> PoolState:
    """The pool of `target` as an executor shares it."""
    return PoolState(
        memory=pool.memory,
        base_offset=pool.base_offset,
        block_states=pool.states,
        entry_states=target.entry_state,
        owners=target.owners,
        generations=target.table.generations,
        slots=pool.ring.slots,
        counters=pool.ring.counters,
        log2_slots=pool.ring.log2_slots,
        is_masked=pool.ring.is_masked,
        clears_blocks=target.clears_blocks,
    )
