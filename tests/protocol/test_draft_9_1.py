"""Draft section 9.1, RDMAP Binding. Each test quotes the sentence that it checks."""

from __future__ import annotations

from kbtp_core.protocol.constants import Flag
from kbtp_core.protocol.effects import Read, Send, Write
from kbtp_core.protocol.ring import MASKED_ADD, add_mask
from kbtp_core.protocol.wire import AllocStore, DataDescriptor, Load, Store
from tests.protocol.test_draft_6_6 import direct_link
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world

DATA = DataDescriptor(STAG, 0, 64)


def test_messages_are_sends() -> None:
    """Requests, HELLO, HELLO_ACK, and COMPLETION are carried in Send or Send with Solicited Event messages; INVALIDATE uses Send with
    Invalidate."""
    link = ring_world().link(quota=1, handles=4)
    (ack,) = link.session.receive(link.initiator.hello(), 0.0)
    assert isinstance(ack, Send)
    assert ack.invalidate_stag is None
    (completion,) = link.session.receive(Load(1, 100, 0, DATA, Flag.INVALIDATE).encode(), 0.0)
    assert isinstance(completion, Send)
    assert completion.invalidate_stag == STAG


def test_loads_are_writes_and_stores_are_reads() -> None:
    """Loads use RDMA Write; stores without INLINE use RDMA Read by the target."""
    link = ready(ring_world())
    put(link, 100, b"x", Flag.NONE)
    assert isinstance(link.session.receive(Store(1, 100, 0, DATA).encode(), 0.0)[0], Read)
    assert isinstance(link.session.receive(AllocStore(2, 101, 0, DATA).encode(), 0.0)[0], Read)
    put(link, 102, b"x")
    assert isinstance(link.session.receive(Load(3, 102, 0, DATA).encode(), 0.0)[0], Write)


def test_counters_move_by_masked_fetch_add() -> None:
    """Ring counters use FetchAdd with the Add Mask of Section 3.3."""
    link = direct_link(quota=2)
    link.take_direct([b"x"])
    assert link.allocator is not None
    assert (link.allocator.add, link.allocator.add_mask) == (MASKED_ADD, add_mask(1))


def test_an_rdmap_fabric_offers_no_records() -> None:
    """Completions are always COMPLETION messages; RECORD_COMPLETION is not offered (Section 6.5)."""
    from kbtp_core.fabric.softrnic import SoftRnic  # here, as all else in this file needs no native code
    from kbtp_core.session.target_core import TargetCore

    fabric = SoftRnic()
    core = TargetCore(fabric, fabric.create_cq(), ring_world().target, lambda pd: pd.register(bytearray(8), 0), use_executor=False)  # type: ignore[arg-type]
    assert core.offers == 0
    fabric.close()


def test_a_target_with_direct_allocation_has_atomics() -> None:
    """Targets that advertise DIRECT_ALLOC, and targets that execute allocations in their RDMA interface, MUST support the atomic
    operations of [RFC7306]."""
    link = direct_link()
    assert link.initiator.ack is not None
    assert link.initiator.ack.direct.head_stag
    assert [link.fetch_add_head() for _ in range(2)] == [0, 0x0000_0001_0000_0010]
