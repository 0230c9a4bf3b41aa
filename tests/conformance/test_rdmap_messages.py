"""Control octets, Writes and the four kinds of Send: RFC 5040 sections 4.1 to 4.7, 5.1, 5.3 and 7.2."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, Op
from tests.conformance.rule import rule
from tests.conformance.stage import Receiving, receiving, sending
from tests.fabric.victim import attack
from tests.fabric.wire import Opcode, ReadRequest, Segment, Tagged, Untagged, frame, send, write
from tests.fabric.world import Memory, pattern, request

CONTROL = {
    Op.WRITE: "c140",
    Op.READ: "4141",
    Op.SEND: "4143",
    Op.SEND_INVALIDATE: "4144",
    Op.SEND_SE: "4145",
    Op.SEND_SE_INVALIDATE: "4146",
    Op.IMMEDIATE: "4148",
    Op.IMMEDIATE_SE: "4149",
    Op.FETCH_ADD: "414a",
    Op.CMP_SWAP: "414a",
}


# Sender ---------------------------------------------------------------------------------------------------------------


@rule("RFC 5040 section 4.1", "sender", "The control octet has version 1, zero in the reserved bits, and the opcode of the message.")
@pytest.mark.parametrize(("op", "control"), CONTROL.items(), ids=[op.name for op in CONTROL])
def test_the_control_octets_of_each_message(op: Op, control: str) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        assert stage.peer.receive_octets(4)[2:].hex() == control


@rule("RFC 5040 section 4.1", "sender", "Sends use queue 0, requests queue 1.")
@pytest.mark.parametrize(("op", "queue"), [(Op.SEND, 0), (Op.SEND_SE_INVALIDATE, 0), (Op.READ, 1), (Op.FETCH_ADD, 1)])
def test_the_queue_of_each_message(op: Op, queue: int) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        assert int.from_bytes(stage.peer.receive_octets(12)[8:], "big") == queue


@rule("RFC 5040 section 4.1", "sender", "The Invalidate STag is zero in messages that invalidate nothing.")
@pytest.mark.parametrize("op", [Op.SEND, Op.SEND_SE, Op.READ, Op.FETCH_ADD, Op.IMMEDIATE])
def test_no_other_message_names_an_stag_to_invalidate(op: Op) -> None:
    with sending() as stage:
        stage.end.post(request(op, to=(0x11110001, 0)))
        assert stage.untagged().invalidate_stag == 0


@rule("RFC 5040 section 4.7", "sender", "Sends with Invalidate name the STag in every segment.")
@pytest.mark.parametrize("op", [Op.SEND_INVALIDATE, Op.SEND_SE_INVALIDATE])
def test_every_segment_names_the_stag_to_invalidate(op: Op) -> None:
    with sending(mulpdu=128) as stage:
        stage.end.post(request(op, stage.device.memory(300), 300, to=(0x11110001, 0)))
        assert [stage.untagged().invalidate_stag for _ in range(3)] == [0x11110001] * 3


@rule("RFC 5040 section 4.6", "sender", "A Send has no header of RDMAP: the payload follows the DDP header.")
def test_a_send_is_its_payload() -> None:
    with sending() as stage:
        stage.end.post(request(Op.SEND_SE, stage.device.memory(b"payload"), 7))
        assert stage.untagged() == Untagged(Opcode.SEND_SE, 1, b"payload")


@rule("RFC 5040 section 4.3", "sender", "A Write has no header of RDMAP: the payload follows the DDP header.")
def test_a_write_is_its_payload() -> None:
    with sending() as stage:
        stage.end.post(request(Op.WRITE, stage.device.memory(b"payload", Access.NONE), 7, to=(9, 10)))
        assert stage.tagged() == write(9, 10, b"payload")


@rule("RFC 5040 section 5.1", "sender", "A Write of no octets may be sent.")
def test_an_empty_write_is_sent() -> None:
    with sending() as stage:
        stage.end.post(request(Op.WRITE))
        assert stage.tagged() == write(0, 0, b"")


@rule("RFC 5040 section 5.1", "sender", "One Write goes to one buffer of the peer: two buffers take two messages.")
def test_two_writes_are_two_messages() -> None:
    with sending() as stage:
        source = stage.device.memory(b"ab", Access.NONE)
        stage.end.post(request(Op.WRITE, source, 1, to=(1, 0)), request(Op.WRITE, source, 1, offset=1, to=(2, 0)))
        assert [stage.tagged(), stage.tagged()] == [write(1, 0, b"a"), write(2, 0, b"b")]


@rule("RFC 5040 section 5.1", "sender", "Blocks that are not contiguous may be the source of one Write.")
def test_scattered_memory_is_written_as_one_message() -> None:
    with sending() as stage:
        content = pattern(10 * 64)
        source = stage.device.scattered(content, 64, Access.NONE)
        stage.end.post(request(Op.WRITE, source, 500, offset=30, to=(1, 0)))
        assert stage.tagged() == write(1, 0, content[30:530].tobytes())


@rule("RFC 5040 section 5.3", "sender", "All kinds of Send count in one sequence.")
def test_all_kinds_of_send_share_their_numbers() -> None:
    with sending() as stage:
        kinds = [Op.SEND, Op.SEND_SE, Op.IMMEDIATE, Op.SEND_INVALIDATE, Op.IMMEDIATE_SE, Op.SEND_SE_INVALIDATE]
        stage.end.post(*(request(op) for op in kinds))
        assert [stage.untagged().msn for _ in kinds] == [1, 2, 3, 4, 5, 6]


# Receiver: control octets ---------------------------------------------------------------------------------------------


@rule("RFC 5040 section 7.2", "receiver", "The version of RDMAP must be valid.")
@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("culprit", [send(b"x"), write(1, 0, b"x")], ids=["untagged", "tagged"])
def test_a_wrong_version_is_refused(culprit: Segment, version: int) -> None:
    attack(replace(culprit, rdmap_version=version), 0, 2, 5)


@rule("RFC 5040 section 4.1", "receiver", "The reserved bits of the control octet are ignored.")
def test_reserved_bits_are_ignored() -> None:
    with receiving() as stage:
        ulpdu = bytearray(send(b"reserved").ulpdu())
        ulpdu[1] |= 0x30
        stage.peer.send(frame(bytes(ulpdu)))
        assert stage.receive()[1] == b"reserved"


@rule("RFC 5040 section 7.2", "receiver", "The opcode must be valid.")
@pytest.mark.parametrize("opcode", [0xC, 0xD, 0xE, 0xF])
def test_an_unknown_opcode_is_refused(opcode: int) -> None:
    attack(Untagged(opcode, 1, b"x" * 28), 0, 2, 6)
    attack(Tagged(opcode, 1, 0, b"x" * 28), 0, 2, 6)


@rule("RFC 5040 section 4.1", "receiver", "Only Writes and Read Responses are tagged.")
@pytest.mark.parametrize("opcode", [op for op in Opcode if op not in (Opcode.WRITE, Opcode.READ_RESPONSE)])
def test_an_untagged_operation_in_a_tagged_segment_is_refused(opcode: Opcode) -> None:
    attack(Tagged(opcode, 1, 0, b"x" * 52), 0, 2, 6)


@rule("RFC 5040 section 4.1", "receiver", "Writes and Read Responses are always tagged.")
@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ_RESPONSE])
def test_a_tagged_operation_in_an_untagged_segment_is_refused(opcode: Opcode) -> None:
    attack(Untagged(opcode, 1, b"x" * 28), 0, 2, 6)


@rule("RFC 5040 section 4.1", "receiver", "Each opcode has its queue.")
@pytest.mark.parametrize("queue", [0, 2, 3, 4])
def test_a_read_request_on_another_queue_is_refused(queue: int) -> None:
    attack(Untagged(Opcode.READ_REQUEST, 1, bytes(28), queue=queue), 1, 2, 1)


@rule("RFC 5040 section 4.1", "receiver", "The Invalidate STag is ignored in a Send.")
def test_the_stag_of_a_plain_send_is_ignored() -> None:
    with receiving() as stage:
        stag = stage.it.foreign.stag
        first = Untagged(Opcode.SEND, 1, b"12", is_last=False, invalidate_stag=stag)
        stage.peer.send(first, Untagged(Opcode.SEND, 1, b"34", 2, invalidate_stag=stag + 1), Untagged(Opcode.SEND_SE, 2, invalidate_stag=7))
        done, octets = stage.receive()
        assert (done.stag, done.flags, octets) == (0, CompletionFlag(0), b"1234")
        assert stage.receive()[0].flags == CompletionFlag.SOLICITED


@rule("RFC 5040 section 4.1", "receiver", "The Invalidate STag is ignored in a Read Request.")
def test_the_stag_of_a_read_request_is_ignored() -> None:
    with receiving() as stage:
        stage.peer.send(replace(ReadRequest(1, 2, 0, 0, 0).segment(), invalidate_stag=stage.it.readable.stag))
        assert stage.peer.receive().opcode == Opcode.READ_RESPONSE


@rule("RFC 5041 section 4.3", "receiver", "A message does not change its kind between two segments.")
def test_a_message_that_changes_its_kind_is_refused() -> None:
    attack(Untagged(Opcode.SEND_SE, 1, b"x", 1), 0, 2, 6, Untagged(Opcode.SEND, 1, b"x", is_last=False))


# Receiver: Writes and Sends -------------------------------------------------------------------------------------------


@rule("RFC 5040 section 5.1", "receiver", "A valid Write is placed and not delivered to the ULP.")
def test_a_write_is_not_delivered() -> None:
    with receiving() as stage:
        target = stage.memory(8, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"placed"))
        stage.sync()
        assert target.read(0, 6) == b"placed"
        assert stage.end.is_idle(0.02)


@rule("RFC 5040 section 5.3", "receiver", "One Send consumes one buffer, in the order in which they were posted.")
def test_each_send_takes_the_next_buffer() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"one", 1), write(0, 0, b""), send(b"two", 2))
        assert [stage.receive()[0].wr_id for _ in range(2)] == [0, 1]


@rule("RFC 5040 section 5.3", "receiver", "The ULP learns how many octets a Send put into its buffer, and the rest stays.")
def test_a_send_changes_only_what_it_fills() -> None:
    with receiving() as stage:
        stage.it.inbox.fill(b"." * 16)
        stage.peer.send(send(b"short"))
        assert stage.receive()[0].length == 5
        assert stage.it.inbox.read(0, 16) == b"short" + b"." * 11


@rule("RFC 5040 section 5.3", "receiver", "A Send that is larger than its buffer is an error.")
def test_a_send_larger_than_its_buffer_is_refused() -> None:
    with receiving(receives=0) as stage:
        inbox = stage.memory(16, Access.LOCAL_WRITE)
        stage.end.receive_into(inbox, 3)
        stage.peer.send(send(b"four"))
        stage.is_terminated(send(b"four"), 1, 2, 5)
        assert inbox.read() == bytes(16)


@rule("RFC 5040 section 5.3", "receiver", "A Send of no octets consumes a buffer.")
def test_an_empty_send_takes_a_buffer() -> None:
    with receiving(receives=1) as stage:
        stage.peer.send(send(b"", 1), send(b"", 2))
        assert stage.receive()[0].length == 0
        stage.is_terminated(send(b"", 2), 1, 2, 2)


@rule("RFC 5040 section 5.3", "receiver", "A Send with Solicited Event is marked as such, others are not.")
def test_a_solicited_event_is_reported() -> None:
    with receiving() as stage:
        stage.peer.send(Untagged(Opcode.SEND_SE, 1), send(b"", 2))
        assert [stage.receive()[0].flags for _ in range(2)] == [CompletionFlag.SOLICITED, CompletionFlag(0)]


# Receiver: Sends with Invalidate --------------------------------------------------------------------------------------


def invalidating(stag: int, msn: int = 1, opcode: Opcode = Opcode.SEND_INVALIDATE) -> Untagged:
    return Untagged(opcode, msn, b"bye", invalidate_stag=stag)


def may_be_invalidated(stage: Receiving) -> Memory:
    return stage.memory(64, Access.REMOTE_WRITE | Access.REMOTE_READ | Access.REMOTE_INVALIDATE)


@rule("RFC 5040 section 5.3", "receiver", "A Send with Invalidate invalidates its STag before the ULP is told, which learns which one.")
@pytest.mark.parametrize("opcode", [Opcode.SEND_INVALIDATE, Opcode.SEND_SE_INVALIDATE])
def test_a_send_with_invalidate_invalidates(opcode: Opcode) -> None:
    with receiving() as stage:
        target = may_be_invalidated(stage)
        stage.peer.send(invalidating(target.stag, opcode=opcode))
        done, octets = stage.receive()
        assert not target.region.is_valid
        assert CompletionFlag.INVALIDATED in done.flags
        assert (done.stag, octets) == (target.stag, b"bye")
        assert (CompletionFlag.SOLICITED in done.flags) == (opcode == Opcode.SEND_SE_INVALIDATE)


@rule("RFC 5040 section 5.3", "receiver", "What was written before the invalidation stays; a Write behind it is refused.")
def test_a_write_behind_an_invalidation_is_refused() -> None:
    with receiving() as stage:
        target = may_be_invalidated(stage)
        culprit = write(target.stag, 0, b"late")
        stage.peer.send(write(target.stag, 0, b"good"), invalidating(target.stag), culprit)
        stage.receive()
        stage.is_terminated(culprit, 1, 1, 0)
        assert target.read(0, 4) == b"good"


@rule("RFC 5040 section 5.3", "receiver", "An STag is invalidated when the message is delivered, not by an earlier segment.")
def test_the_first_segment_invalidates_nothing() -> None:
    with receiving() as stage:
        target = may_be_invalidated(stage)
        stage.peer.send(replace(invalidating(target.stag), is_last=False))
        stage.sync()
        assert target.region.is_valid
        stage.peer.send(replace(invalidating(target.stag), offset=3))
        assert stage.receive()[1] == b"byebye"
        assert not target.region.is_valid


@rule("RFC 5040 section 7.2", "receiver", "The STag to invalidate must be valid.")
@pytest.mark.parametrize("stag", ["unknown", "zero", "gone"])
def test_an_stag_that_names_nothing_cannot_be_invalidated(stag: str) -> None:
    with receiving() as stage:
        gone = may_be_invalidated(stage)
        gone.region.close()
        culprit = invalidating({"unknown": stage.it.unknown_stag, "zero": 0, "gone": gone.stag}[stag])
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, 9)


@rule("RFC 5040 section 7.2", "receiver", "The STag to invalidate must be associated with this stream.")
def test_an_stag_of_another_stream_cannot_be_invalidated() -> None:
    with receiving() as stage:
        culprit = invalidating(stage.it.foreign.stag)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, 9)


@rule("RFC 5040 section 8.1.1", "receiver", "A peer cannot invalidate an STag that is not meant to be: a right is needed.")
@pytest.mark.parametrize("name", ["readable", "writable", "counters", "local"])
def test_an_stag_without_the_right_cannot_be_invalidated(name: str) -> None:
    with receiving() as stage:
        culprit = invalidating(getattr(stage.it, name).stag)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, 9)
