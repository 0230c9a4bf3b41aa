"""A target process of a simulated world: its server loop, and in a lent pool the engine that binds and reclaims.

Checks what a target promises its owner: a lent block is rewritten only when `take_drained` has said that nothing reads it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kbtp_core.fabric.api import Access, ProtectionDomain, Region
from kbtp_core.fabric.sim import SimFabric
from kbtp_core.protocol import BlockPool, BlockState, BlockTable, LentPool, Target, TargetLimits
from kbtp_core.session import TargetCore
from tests.sim.model import Life

if TYPE_CHECKING:
    from tests.sim.world import World

HANDLE_BASE = 1000
SHORTEST_TICK_S = 5e-6
LONGEST_TICK_S = 0.02
HELLO_TIMEOUT_S = 0.02


class SimTarget:
    """One life of a target at `address`."""

    def __init__(self, world: World, address: tuple[str, int], *, is_lent: bool) -> None:
        self.world = world
        self.sim = world.sim
        self.address = address
        shape = world.shape
        self.device = SimFabric(self.sim, f"target{address[1]}", has_executor=shape.has_executor)
        self.life = Life(world.draw_incarnation(), is_lent)
        self.block_bytes = shape.block_bytes
        self.memory = np.zeros(shape.blocks * self.block_bytes, np.uint8)
        self._octets = self.memory.data
        pool = LentPool(self.block_bytes, self.memory.size) if is_lent else BlockPool(self.block_bytes, self.memory)
        self.table = BlockTable(shape.handles, HANDLE_BASE)
        self.target = Target(
            pool,
            self.table,
            name=self.device.name,
            incarnation=self.life.incarnation,
            limits=TargetLimits(outstanding=shape.outstanding, inline_bytes=self.block_bytes, handle_count=shape.handles // 4),
            trust_domains=frozenset({""}) if shape.is_one_domain else None,
            direct=None if is_lent else shape.direct,
            draw=world.draw,
        )
        self.cq = self.device.create_cq()
        self.core = TargetCore(
            self.device, self.cq, self.target, self._pool_region, hello_timeout_s=HELLO_TIMEOUT_S, use_executor=shape.has_executor
        )
        self.listener = self.device.listen(*address, self.cq)
        self.cq.on_ready = self.step
        self._is_ticking = False
        self._idle = list(range(HANDLE_BASE, HANDLE_BASE + shape.handles))
        self._bound: dict[int, int] = {}  # lent handle -> engine block
        self._generations: dict[int, int] = {}
        self._users = [0] * shape.blocks  # handles that name each engine block and are not drained
        self._contents = [b""] * shape.blocks
        self._keep_ticking()
        if is_lent:
            self._engine()

    def _pool_region(self, pd: ProtectionDomain) -> Region:
        access = Access.NONE if self.life.is_lent else Access.LOCAL_WRITE
        if not self.world.shape.has_pages:
            return pd.register(self.memory, access)
        page = self.block_bytes // 2
        addresses = (self.memory.ctypes.data + np.arange(self.memory.size // page) * page).astype(np.uint64)
        return pd.register_pages(addresses, page, access, self.memory)

    # The server's loop -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        for request in self.listener.poll():
            self.core.admit(request, self.sim.now)
        self.core.process(self.cq.poll(self.world.shape.poll_limit), self.sim.now)
        limit = self.core.wait_limit_s
        if limit < LONGEST_TICK_S and not self._is_ticking:
            self._is_ticking = True
            self.sim.after(max(limit, SHORTEST_TICK_S), self._tick)

    def _tick(self) -> None:
        self._is_ticking = False
        if not self.device.is_crashed:
            self.step()

    def _keep_ticking(self) -> None:
        """As a server that waits with a bound does."""
        if not self.device.is_crashed:
            self.step()
            self.target.check_integrity()
            self.sim.after(LONGEST_TICK_S, self._keep_ticking)

    def crash(self) -> None:
        self.device.crash()

    # The engine of a lent pool ---------------------------------------------------------------------------------------

    def _engine(self) -> None:
        if self.device.is_crashed:
            return
        self._take_drained()
        random = self.sim.random
        if self._bound and random.random() < 0.15:
            handles = random.sample(list(self._bound), min(len(self._bound), random.randint(1, 16)))
            self.target.reclaim(handles)
            for handle in handles:
                if random.random() < 0.95:
                    self.life.withdraw(handle, self._generations[handle])
        elif self._idle and not self.world.is_ending:
            self._bind(random.randint(1, min(16, len(self._idle))))
        if not self.world.is_ending:
            self.sim.after(random.random() * 4e-3, self._engine)

    def _bind(self, count: int) -> None:
        random = self.sim.random
        handles, blocks, lengths = [], [], []
        for _ in range(count):
            block = random.randrange(len(self._users))
            if not self._users[block]:
                # Nothing reads the block: the engine may write into it, octet by octet, as it likes.
                content = self.life.content(self.block_bytes)
                self._contents[block] = content
                self._octets[block * self.block_bytes : (block + 1) * self.block_bytes] = content
            self._users[block] += 1
            handles.append(self._idle.pop(random.randrange(len(self._idle))))
            blocks.append(block)
            lengths.append(random.choice((self.block_bytes, random.randint(1, self.block_bytes))))
            self._bound[handles[-1]] = block
        generations = self.target.bind(handles, np.array(blocks) * self.block_bytes, lengths)
        for handle, block, length, generation in zip(handles, blocks, lengths, generations.tolist(), strict=True):
            self._generations[handle] = generation
            self.life.lend(handle, generation, self._contents[block][:length])

    def _take_drained(self) -> None:
        for handle in self.target.take_drained().tolist():
            block = self._bound.pop(handle)
            self._users[block] -= 1
            self._idle.append(handle)

    # The end ---------------------------------------------------------------------------------------------------------

    def check_whole(self) -> None:
        """All sessions have ended: nothing may be missing."""
        assert self.core.connection_count == 0, f"{self.device.name}: connections are left"
        assert not self.target.sessions, f"{self.device.name}: sessions are left"
        if self.life.is_lent:
            if self._bound:
                self.target.reclaim(list(self._bound))
                self._take_drained()
            assert not self._bound, f"{self.device.name}: handles {sorted(self._bound)} never drained"
        self.target.check_integrity()
        assert self.target.draining_count == 0
        pool = self.target.pool
        if isinstance(pool, BlockPool):
            assert pool.count(BlockState.FREE) == pool.block_count, f"{self.device.name}: blocks are lost"
            assert len(pool.ring.listed_offsets()) == pool.block_count
            assert pool.quota_left == pool.block_count
        executor = self.core.executor
        if executor is not None:
            assert not executor.readers(np.arange(self.table.entry_count, dtype=np.uint64)).any(), "readers are left"
