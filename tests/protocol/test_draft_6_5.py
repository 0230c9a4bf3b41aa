"""Draft section 6.5, Completion. Each test quotes the sentence that it checks."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import Capability, Flag, Status
from kbtp_core.protocol.effects import Send, Write
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.wire import Bind, DataDescriptor, Load
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, Link, ring_world

RECORDS = Capability.RECORD_COMPLETION


def recorded(*, offers: Capability = RECORDS, wanted: Capability = RECORDS) -> Link:
    return ring_world().link(quota=3, handles=8, capabilities=wanted, offers=offers).greet()


def placed(link: Link, batch: Batch, *offsets: int) -> Batch:
    """`batch`, with its records at these offsets."""
    link.initiator.with_records(batch).set_records(0, STAG, np.array(offsets, np.uint64))
    return batch


def test_a_completion_is_a_send() -> None:
    """By default the target completes a request with a COMPLETION message sent as a Send (or Send with Invalidate when INVALIDATE is
    set)."""
    link = ready(ring_world())
    put(link, 100, b"x")
    for flags, stag in [(0, None), (Flag.INVALIDATE, STAG)]:
        sent = link.session.receive(Load(1, 100, 0, DataDescriptor(STAG, 0, 64), flags).encode(), 0.0)[1]
        assert isinstance(sent, Send)
        assert (len(sent.data), sent.data[1], sent.invalidate_stag) == (40, 8, stag)


def test_the_send_follows_the_write_it_vouches_for() -> None:
    """the contents of a buffer written by RDMA Write are determinate once a subsequent Send has been delivered (rule 5 of Section 5.5
    of [RFC5040]), so receipt of the completion implies that the loaded data is in the initiator's buffer."""
    link = ready(ring_world())
    put(link, 100, b"x")
    write, sent = link.session.receive(Load(1, 100, 0, DataDescriptor(STAG, 0, 64)).encode(), 0.0)
    assert isinstance(write, Write)
    assert isinstance(sent, Send)


def test_a_record_is_written_instead_where_it_was_granted() -> None:
    """If the target advertised RECORD_COMPLETION and the request has the RECORD flag, the target instead writes a 24-octet completion
    record to the Completion Descriptor: Request ID (64 bits), Status (16 bits), Generation (16 bits), Data Length (32 bits), and Block
    Offset (64 bits)."""
    link = recorded()
    batches = [
        placed(link, link.initiator.alloc_store_inline([100], 0, [b"data"], Flag.SEAL), 1000),
        placed(link, link.initiator.load([100, 101], 0, STAG, 0, 64), 2000, 2024),
        placed(link, link.initiator.free([100], 0), 3000),
    ]
    for batch in batches:
        link.run(batch)
    assert [batch.status.tolist() for batch in batches] == [[Status.OK], [Status.OK, Status.NOT_BOUND], [Status.OK]]
    assert link.memory[:4].tobytes() == b"data"
    assert link.memory[2000:2024].tobytes().hex() == "0000000200000000" + "0000" + "0002" + "00000004" + "0000000000000000"
    assert link.immediates == [1000, 2000, 2024, 3000]
    assert link.initiator.bound_count == 0


def test_a_record_cannot_invalidate_and_bind_has_none() -> None:
    """the target instead writes a 24-octet completion record"""
    link = recorded()
    both = placed(link, link.initiator.load([100], 0, STAG, 0, 64, Flag.INVALIDATE), 0)
    link.run(both)
    assert both.status.tolist() == [Status.MALFORMED]
    (sent,) = link.session.receive(Bind(9, 100, 0, 0, 1, 0, Flag.RECORD).encode(), 0.0)
    assert isinstance(sent, Send)


@pytest.mark.parametrize(("offers", "wanted"), [(Capability.NONE, RECORDS), (RECORDS, Capability.NONE), (Capability.NONE, Capability.NONE)])
def test_records_need_a_binding_that_orders_writes(offers: Capability, wanted: Capability) -> None:
    """A target MUST use completion records only on bindings in which an RDMA Write cannot become visible before the data of earlier
    RDMA Writes on the same connection."""
    link = recorded(offers=offers, wanted=wanted)
    assert link.initiator.ack is not None
    assert link.initiator.ack.capabilities == 0
    with pytest.raises(ValueError, match="did not grant RECORD_COMPLETION"):
        link.initiator.with_records(link.initiator.free([100], 0))
    batch = link.initiator.load([101], 0, STAG, 0, 64)
    batch.add_records()
    batch.set_records(0, STAG, batch.block_offset)
    link.run(batch)
    assert batch.status.tolist() == [Status.UNSUPPORTED]


def test_an_rdmap_fabric_has_no_records() -> None:
    """RDMAP does not guarantee this (rules 3 and 5 of Section 5.5 of [RFC5040]), so a target MUST NOT advertise RECORD_COMPLETION in the
    RDMAP binding."""
    from kbtp_core.fabric.softrnic import SoftRnic  # here, as all else in this file needs no native code

    assert not hasattr(SoftRnic, "write_with_immediate")
    link = recorded(offers=Capability.NONE)
    assert link.initiator.ack is not None
    assert not link.initiator.ack.capabilities & RECORDS
