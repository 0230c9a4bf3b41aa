"""Nobody waits for a greedy neighbour, and loads don't wait for stores; driven by hand, turn by turn."""

from __future__ import annotations

from typing import Any

import numpy as np

from kbtp_core.fabric.api import Region
from kbtp_core.protocol import BlockPool, BlockTable, DirectPolicy, Flag, HelloParameters, Status, Target, TargetLimits
from kbtp_core.session import BUFFER_ACCESS
from kbtp_core.session.initiator_core import InitiatorCore, PendingBatch
from kbtp_core.session.target_core import READS_IN_FLIGHT, TURN_COST, TargetCore
from tests.session.conftest import BLOCK
from tests.session.loopback import LoopbackCq, LoopbackFabric

FAR = 1e9


class Desk:
    """A target and initiators on the loopback, of which each moves only when it is told to."""

    def __init__(
        self, *, blocks: int = 64, limits: TargetLimits = TargetLimits(outstanding=1000), direct: DirectPolicy | None = None
    ) -> None:
        self.fabric = LoopbackFabric()
        memory = np.zeros(blocks * BLOCK, np.uint8)
        table = BlockTable(4096, 1000)
        self.target = Target(BlockPool(BLOCK, memory), table, name="desk", incarnation=5, limits=limits, direct=direct)
        self.cq: LoopbackCq = self.fabric.create_cq()
        self.core = TargetCore(self.fabric, self.cq, self.target, lambda pd: pd.register(memory, BUFFER_ACCESS), use_executor=False)  # type: ignore[arg-type]
        self.listener = self.fabric.listen("desk", 1, self.cq)
        self.initiators: list[tuple[InitiatorCore, LoopbackCq]] = []

    def turn(self, now: float = 0.0) -> None:
        """One step of the server."""
        for request in self.listener.poll():
            self.core.admit(request, now)  # type: ignore[arg-type]
        self.core.process(self.cq.poll(), now)

    def join(self, **wishes: Any) -> InitiatorCore:
        cq = self.fabric.create_cq()
        parameters = HelloParameters(**{"quota": 8, "handle_count": 1024, "outstanding": 1000, "inline_bytes": 64, **wishes})
        core = InitiatorCore(self.fabric, cq, "desk", 1, parameters, incarnation=3)  # type: ignore[arg-type]
        self.initiators.append((core, cq))
        core.start()
        for _ in range(4):
            self.turn()
            self.listen_all()
        assert core.is_ready
        return core

    def listen_all(self) -> None:
        for core, cq in self.initiators:
            core.process(cq.poll(), 0.0)


def answered(batch: PendingBatch) -> int:
    return batch.count - int(np.count_nonzero(batch.status == 0xFFFF))


def failing_loads(core: InitiatorCore, count: int) -> PendingBatch:
    """Requests that are answered with a completion alone, each by itself."""
    return core.submit(core.protocol.load(np.full(count, 1), 0, 0, 0, BLOCK, Flag.ALLOW_UNSEALED), None, FAR)


def test_a_modest_session_is_answered_in_the_turn_in_which_a_greedy_one_has_a_thousand_requests() -> None:
    desk = Desk()
    greedy, modest = desk.join(), desk.join()
    flood = failing_loads(greedy, 900)
    one = failing_loads(modest, 1)
    desk.turn()
    desk.listen_all()
    assert answered(one) == 1
    assert answered(flood) <= TURN_COST + 1
    assert desk.core.has_pending_work
    assert desk.core.wait_limit_s == 0
    turns = 0
    while not flood.done:
        late = failing_loads(modest, 1)
        desk.turn()
        desk.listen_all()
        assert late.done, "a modest request waited longer than one turn"
        turns += 1
    assert turns <= 900 // TURN_COST + 1
    assert (flood.status == Status.NOT_PERMITTED).all()
    desk.target.check_integrity()


def registered(core: InitiatorCore) -> Region:
    return core.pd.register(np.zeros(BLOCK, np.uint8), BUFFER_ACCESS)


def test_loads_and_small_messages_pass_stores_whose_data_is_still_to_be_read() -> None:
    desk = Desk()
    core = desk.join(quota=64)
    region = registered(core)
    base = core.protocol.ack.handle_base if core.protocol.ack is not None else 0
    core.submit(core.protocol.alloc_store_inline([base], 0, [b"small"], 2), None, FAR)
    desk.turn()
    desk.listen_all()
    stores = core.submit(core.protocol.alloc_store(base + 1 + np.arange(60), 0, region.stag, 0, BLOCK, 2), region, FAR)
    load = core.submit(core.protocol.load([base], 0, region.stag, 0, BLOCK), region, FAR)
    refused = failing_loads(core, 1)
    desk.turn()
    desk.listen_all()
    assert load.ok
    assert refused.done
    assert answered(stores) == 0
    (connection,) = desk.core._connections.values()
    assert connection.reads_in_flight == READS_IN_FLIGHT
    for _ in range(10):
        desk.turn()
        desk.listen_all()
    assert stores.ok
    assert connection.reads_in_flight == 0
    desk.target.check_integrity()


def test_order_holds_for_a_handle_although_loads_pass_stores() -> None:
    desk = Desk()
    core = desk.join(quota=64)
    region = registered(core)
    base = core.protocol.ack.handle_base if core.protocol.ack is not None else 0
    handles = base + np.arange(40)
    stores = core.submit(core.protocol.alloc_store(handles, 0, region.stag, 0, 8, 2), region, FAR)
    loads = core.submit(core.protocol.load(handles, 2, region.stag, 8, BLOCK - 8), region, FAR)
    frees = core.submit(core.protocol.free(handles, 2), None, FAR)
    for _ in range(20):
        desk.turn()
        desk.listen_all()
    assert stores.ok
    assert loads.ok
    assert frees.ok
    desk.target.check_integrity()


def test_limits_of_one_session_are_nobody_elses() -> None:
    desk = Desk(blocks=16, limits=TargetLimits(outstanding=4, quota=2, handle_count=8, inline_bytes=8))
    acks = [desk.join().protocol.ack for _ in range(3)]
    assert [(ack.outstanding, ack.quota, ack.handle_count, ack.inline_bytes) for ack in acks if ack is not None] == [(4, 2, 8, 8)] * 3
    core, _ = desk.initiators[0]
    base = acks[0].handle_base if acks[0] is not None else 0
    batch = core.submit(core.protocol.alloc_store_inline(base + np.arange(4), 0, [b"x"] * 4), None, FAR)
    for _ in range(4):
        desk.turn()
        desk.listen_all()
    assert batch.status.tolist() == [Status.OK, Status.OK, Status.NO_SPACE, Status.NO_SPACE]
    other, _ = desk.initiators[1]
    base = acks[1].handle_base if acks[1] is not None else 0
    batch = other.submit(other.protocol.alloc_store_inline(base + np.arange(2), 0, [b"x"] * 2), None, FAR)
    for _ in range(4):
        desk.turn()
        desk.listen_all()
    assert batch.ok
