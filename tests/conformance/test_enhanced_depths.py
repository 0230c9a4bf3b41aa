"""Negotiation of read depths: RFC 6581 section 9.1."""

from __future__ import annotations

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, FabricError, Op, QueueLimits, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import Enhanced, ReadRequest, StartUp, Terminate, read_response
from tests.fabric.world import End, Node, node, request

NO_NEGOTIATION = 0x3FFF


def reply_to(asked: Enhanced, limits: QueueLimits) -> Enhanced:
    """The enhanced data that a device with these limits answers."""
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(StartUp(enhanced=asked).encode())
        device.serve(limits).qp.accept()
        enhanced = peer.receive_start().enhanced
        assert enhanced is not None
        return enhanced


def outstanding(device: Node, end: End, peer: Peer, wanted: int) -> int:
    """How many of `wanted` Reads leave before any is answered."""
    sink = device.memory(8 * wanted)
    end.post(*(request(Op.READ, sink, 8, offset=8 * at) for at in range(wanted)))
    count = 0
    peer.timeout_s = 0.1
    try:
        while True:
            peer.receive_untagged()
            count += 1
    except TimeoutError:
        return count


def answered_with(enhanced: Enhanced) -> StartUp:
    return StartUp(is_reply=True, enhanced=enhanced)


@rule("RFC 6581 section 9", "sender", "IRD and ORD are 14-bit unsigned integers in network byte order, under the flags.")
def test_the_octets_of_a_request_hold_the_depths() -> None:
    with node() as device, listening() as listener:
        device.create_qp(QueueLimits(ird=0x1234, ord=0x0567)).qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            assert peer.receive_start_octets()[20:24].hex() == "12340567"


@rule(
    "RFC 6581 section 9.1", "sender", "A Request carries how many Reads the Initiator can take and how many it wants to have outstanding."
)
def test_a_request_has_the_limits_of_the_queue_pair() -> None:
    with node() as device, listening() as listener:
        device.create_qp(QueueLimits(ird=7, ord=9)).qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            assert peer.receive_start().enhanced == Enhanced(ird=7, ord=9)


@rule("RFC 6581 section 9.1", "sender", "The Responder's ORD is at most the Initiator's IRD.")
def test_the_responder_asks_for_no_more_than_the_initiator_can_serve() -> None:
    assert reply_to(Enhanced(ird=2, ord=3), QueueLimits(ird=4, ord=9)).ord == 2


@rule("RFC 6581 section 9.1", "sender", "The Responder's ORD in the Reply is the one that it uses.")
def test_the_responder_offers_its_own_smaller_ord() -> None:
    assert reply_to(Enhanced(ird=16, ord=3), QueueLimits(ird=4, ord=5)).ord == 5


@rule("RFC 6581 section 9.1", "sender", "The Responder's IRD in the Reply is what it can really hold.")
def test_the_responder_states_its_own_ird() -> None:
    assert reply_to(Enhanced(ird=16, ord=30), QueueLimits(ird=4, ord=5)).ird == 4


@rule("RFC 6581 section 9.1", "sender", "The Responder may raise its IRD, so that an empty Read can say that the Initiator is ready.")
def test_an_ird_of_zero_is_raised_to_one() -> None:
    wish = Enhanced(ird=4, ord=0, is_peer_to_peer=True, offers_read=True)
    assert reply_to(wish, QueueLimits(ird=0, ord=1)).ird == 1


@rule("RFC 6581 section 9.1", "receiver", "A Responder that has raised its IRD serves as many Reads.")
def test_the_read_that_the_raised_ird_promises_is_served() -> None:
    wish = StartUp(enhanced=Enhanced(ird=4, ord=0, is_peer_to_peer=True, offers_read=True))
    with node() as device, closing(dial(device.listen())) as peer:
        peer.send(wish.encode())
        device.serve(QueueLimits(ird=0, ord=1)).qp.accept()
        peer.receive_start()
        peer.send(ReadRequest(0, 0, 0, 0, 0).segment())
        assert peer.receive() == read_response(0, 0, b"")


@rule("RFC 6581 section 9.1", "sender", "An ORD of 0x3FFF in the Request is answered with an IRD of 0x3FFF.")
def test_no_negotiation_of_the_initiators_ord() -> None:
    assert reply_to(Enhanced(ird=2, ord=NO_NEGOTIATION), QueueLimits(ird=4, ord=9)).ird == NO_NEGOTIATION


@rule("RFC 6581 section 9.1", "sender", "An IRD of 0x3FFF in the Request is answered with an ORD of 0x3FFF.")
def test_no_negotiation_of_the_initiators_ird() -> None:
    assert reply_to(Enhanced(ird=NO_NEGOTIATION, ord=3), QueueLimits(ird=4, ord=9)).ord == NO_NEGOTIATION


@rule("RFC 6581 section 9.1", "receiver", "The Responder never has more Reads outstanding than the Initiator's IRD.")
def test_the_responder_keeps_within_the_initiators_ird() -> None:
    with receiving(request=StartUp(enhanced=Enhanced(ird=2, ord=3)), limits=QueueLimits(ird=4, ord=9)) as stage:
        assert outstanding(stage.it.device, stage.end, stage.peer, 5) == 2


@rule("RFC 6581 section 9.1", "receiver", "An IRD of 0x3FFF in the Request leaves the Responder's ORD as it is.")
def test_the_responders_ord_stays_without_negotiation() -> None:
    with receiving(request=StartUp(enhanced=Enhanced(ird=NO_NEGOTIATION, ord=3)), limits=QueueLimits(ird=4, ord=3)) as stage:
        assert outstanding(stage.it.device, stage.end, stage.peer, 5) == 3


@rule("RFC 6581 section 9.1", "receiver", "An ORD of 0x3FFF in the Request leaves the Responder's IRD as it is.")
def test_the_responders_ird_stays_without_negotiation() -> None:
    wish = StartUp(enhanced=Enhanced(ird=2, ord=NO_NEGOTIATION))
    with receiving(request=wish, limits=QueueLimits(ird=1, ord=1), buffer_bytes=1 << 16) as stage:
        large = stage.memory(16 << 20, Access.REMOTE_READ)
        one_more = ReadRequest(7, 0, 1, large.stag, 0).segment(2)
        stage.peer.send(ReadRequest(7, 0, 16 << 20, large.stag, 0).segment(1), one_more)
        assert stage.peer.receive_terminate(skip=True) == Terminate.about(one_more, 1, 2, 2)
        stage.peer.close()
        stage.end.drain()


@rule("RFC 6581 section 9.1", "receiver", "The Initiator's ORD is at most the Responder's IRD.")
def test_the_initiator_keeps_within_the_responders_ird() -> None:
    with sending(answered_with(Enhanced(ird=2, ord=1))) as stage:
        assert outstanding(stage.device, stage.end, stage.peer, 5) == 2


@rule("RFC 6581 section 9.1", "receiver", "A Responder's IRD that is larger than the Initiator's ORD changes nothing.")
def test_the_initiator_keeps_within_its_own_ord() -> None:
    with sending(answered_with(Enhanced(ird=30, ord=1)), QueueLimits(ird=16, ord=3)) as stage:
        assert outstanding(stage.device, stage.end, stage.peer, 5) == 3


@rule("RFC 6581 section 9.1", "receiver", "An IRD of 0x3FFF in the Reply leaves the Initiator's ORD as it is.")
def test_the_initiators_ord_stays_without_negotiation() -> None:
    with sending(answered_with(Enhanced(ird=NO_NEGOTIATION, ord=1)), QueueLimits(ird=16, ord=3)) as stage:
        assert outstanding(stage.device, stage.end, stage.peer, 5) == 3


@rule("RFC 6581 section 9.1", "receiver", "An ORD of 0x3FFF in the Reply leaves the Initiator's IRD as it is.")
def test_the_initiators_ird_stays_without_negotiation() -> None:
    with sending(answered_with(Enhanced(ird=4, ord=NO_NEGOTIATION)), QueueLimits(ird=1, ord=1)) as stage:
        stage.peer.send(ReadRequest(1, 2, 0, 0, 0).segment())
        assert stage.read() == read_response(1, 2, b"")


@rule("RFC 6581 section 9.1", "sender", "An Initiator whose IRD is too small for the Responder's ORD says so in a Terminate and ends.")
def test_a_responder_that_wants_more_reads_than_offered_is_told_so() -> None:
    with node() as device, listening() as listener:
        end = device.create_qp(QueueLimits(ird=16, ord=16))
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer(answered_with(Enhanced(ird=16, ord=17)))
            assert peer.receive_terminate() == Terminate(2, 0, 6)
            peer.close()
            last = end.drain()[-1]
            assert (last.value, last.status) == (terminate_code(2, 0, 6), CompletionStatus.CONNECT_FAILED)


@rule("RFC 6581 section 9.1", "receiver", "A Responder's ORD that is just the Initiator's IRD is taken.")
def test_a_responder_that_wants_as_many_reads_as_offered_is_taken() -> None:
    with sending(answered_with(Enhanced(ird=16, ord=16))) as stage:
        stage.end.post(request(Op.SEND))
        assert stage.untagged().opcode == 3


def depths(end: End) -> tuple[int, int]:
    stats = end.qp.stats()
    return stats["peer_ird"], stats["peer_ord"]


@rule("RFC 6581 section 9.1", "receiver", "The Responder hands the Initiator's IRD and ORD to the ULP.")
def test_the_ulp_learns_the_depths_of_a_request() -> None:
    with receiving(request=StartUp(enhanced=Enhanced(ird=5, ord=6))) as stage:
        assert depths(stage.end) == (5, 6)


@rule("RFC 6581 section 9.1", "receiver", "The Initiator hands the Responder's IRD and ORD to the ULP.")
def test_the_ulp_learns_the_depths_of_a_reply() -> None:
    with sending(answered_with(Enhanced(ird=5, ord=6))) as stage:
        assert depths(stage.end) == (5, 6)


@rule("RFC 6581 section 9.1", "receiver", "The Initiator hands the Responder's IRD and ORD to the ULP for a rejection too.")
def test_the_ulp_learns_the_depths_of_a_rejection() -> None:
    with node() as device, listening() as listener:
        end = device.create_qp()
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer(StartUp(is_reply=True, is_rejected=True, enhanced=Enhanced(ird=1, ord=40)))
            end.expect(Op.DISCONNECTED, CompletionStatus.CONNECT_FAILED)
            assert depths(end) == (1, 40)


@rule("RFC 5040 section 6.1", "sender", "No more requests are outstanding than were negotiated; Reads and Atomics count together.")
def test_reads_and_atomics_share_the_depth() -> None:
    with sending(answered_with(Enhanced(ird=2, ord=1))) as stage:
        sink = stage.device.memory(8)
        stage.end.post(request(Op.READ, sink, 8), request(Op.FETCH_ADD), request(Op.READ, sink, 8), request(Op.SEND))
        first, _ = stage.untagged(), stage.untagged()
        stage.peer.expect_silence(0.05)
        stage.answer_read(first)
        third = stage.untagged()
        assert (third.opcode, third.msn) == (1, 3)


@rule("RFC 5040 section 6.1", "receiver", "A peer that sends more requests than were negotiated is refused.")
@pytest.mark.parametrize("is_within", [True, False], ids=["as many", "one more"])
def test_requests_beyond_the_depth_are_refused(is_within: bool) -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        large = stage.memory(8 << 20, Access.REMOTE_READ)
        reads = [ReadRequest(7, 0, 8 << 20, large.stag, 0).segment(msn) for msn in range(1, 5)]
        one_more = ReadRequest(7, 0, 1, large.stag, 0).segment(5)
        stage.peer.send(*reads, *([] if is_within else [one_more]))
        if is_within:
            assert stage.peer.receive(verify=False).opcode == 2
            stage.end.qp.abort()
        else:
            assert stage.peer.receive_terminate(skip=True) == Terminate.about(one_more, 1, 2, 2)
        stage.peer.close()
        stage.end.drain()


@rule("RFC 6581 section 9.1", "receiver", "A Responder with IRD 0 is sent no Reads at all.")
def test_no_read_is_posted_to_a_peer_that_takes_none() -> None:
    with sending(answered_with(Enhanced(ird=0, ord=1))) as stage, pytest.raises(FabricError, match="IRD is 0"):
        stage.end.post(request(Op.READ))
