"""Immediate Data: RFC 7306 sections 4, 6 and 7."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kbtp_core.fabric.api import Access, CompletionFlag, Op
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.victim import attack
from tests.fabric.wire import Opcode, Untagged, send, write
from tests.fabric.world import request

DATA = b"immediat"


@rule("RFC 7306 section 6.2", "sender", "Immediate Data is 8 octets behind an untagged header on queue 0.")
@pytest.mark.parametrize(("op", "control"), [(Op.IMMEDIATE, "4148"), (Op.IMMEDIATE_SE, "4149")])
def test_the_octets_of_an_immediate(op: Op, control: str) -> None:
    with sending() as stage:
        stage.end.post(request(op, operand=0x0102030405060708))
        assert stage.peer.receive_octets(28).hex() == "001a" + control + "0" * 8 + "0" * 8 + "00000001" + "0" * 8 + "0102030405060708"


@rule("RFC 7306 section 6.3", "sender", "Immediate Data leaves in the order in which it was submitted, among Sends.")
def test_immediates_leave_in_order() -> None:
    with sending() as stage:
        stage.end.post(request(Op.IMMEDIATE, operand=1), request(Op.SEND), request(Op.IMMEDIATE_SE, operand=2))
        assert [stage.untagged().opcode for _ in range(3)] == [Opcode.IMMEDIATE, Opcode.SEND, Opcode.IMMEDIATE_SE]


@rule("RFC 7306 section 6.1", "sender", "An Immediate completes like a Send.")
def test_an_immediate_completes() -> None:
    with sending() as stage:
        stage.end.post(request(Op.IMMEDIATE, wr_id=5))
        assert stage.end.expect(Op.IMMEDIATE).wr_id == 5


@rule("RFC 7306 section 6.1", "receiver", "The 8 octets are handed to the ULP.")
def test_the_data_is_reported() -> None:
    with receiving() as stage:
        stage.peer.send(Untagged(Opcode.IMMEDIATE, 1, bytes(range(1, 9))))
        done = stage.end.expect(Op.RECEIVE_IMMEDIATE)
        assert (done.value, done.flags) == (0x0102030405060708, CompletionFlag(0))


@rule("RFC 7306 section 6.1", "receiver", "Immediate Data with Solicited Event is marked as such.")
def test_a_solicited_event_is_reported() -> None:
    with receiving() as stage:
        stage.peer.send(Untagged(Opcode.IMMEDIATE_SE, 1, DATA))
        assert stage.end.expect(Op.RECEIVE_IMMEDIATE).flags == CompletionFlag.SOLICITED


@rule("RFC 7306 section 6.3", "receiver", "One Immediate consumes one buffer, in turn with Sends.")
def test_an_immediate_takes_a_buffer() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"", 1), Untagged(Opcode.IMMEDIATE, 2, DATA), send(b"", 3))
        assert stage.receive()[0].wr_id == 0
        assert stage.end.expect(Op.RECEIVE_IMMEDIATE).wr_id == 1
        assert stage.receive()[0].wr_id == 2


@rule("RFC 7306 section 6.3", "receiver", "An Immediate without a buffer is an error.")
def test_an_immediate_without_a_buffer_is_refused() -> None:
    attack(Untagged(Opcode.IMMEDIATE, 1, DATA), 1, 2, 2, receives=0)


@rule("RFC 7306 section 6.3", "receiver", "Immediate Data must have exactly 8 octets.")
@pytest.mark.parametrize("count", [0, 7, 9, 200])
@pytest.mark.parametrize("opcode", [Opcode.IMMEDIATE, Opcode.IMMEDIATE_SE])
def test_another_length_is_refused(opcode: Opcode, count: int) -> None:
    attack(Untagged(opcode, 1, b"i" * count), 0, 2, 0xFF)


@rule("RFC 7306 section 6.3", "receiver", "Immediate Data in two segments is none.")
def test_an_immediate_in_two_segments_is_refused() -> None:
    attack(Untagged(Opcode.IMMEDIATE, 1, DATA, is_last=False), 0, 2, 0xFF)


@rule("RFC 7306 section 4.1", "receiver", "Immediate Data comes on queue 0 and on no other.")
@pytest.mark.parametrize("queue", [1, 2, 3])
def test_an_immediate_on_another_queue_is_refused(queue: int) -> None:
    attack(Untagged(Opcode.IMMEDIATE, 1, DATA, queue=queue), 1, 2, 1)


@rule("RFC 7306 section 4.1", "receiver", "The Invalidate STag of Immediate Data is ignored.")
def test_the_stag_of_an_immediate_is_ignored() -> None:
    with receiving() as stage:
        target = stage.memory(8, Access.REMOTE_WRITE | Access.REMOTE_INVALIDATE)
        stage.peer.send(replace(Untagged(Opcode.IMMEDIATE, 1, DATA), invalidate_stag=target.stag))
        assert stage.end.expect(Op.RECEIVE_IMMEDIATE).stag == 0
        assert target.region.is_valid


@rule("RFC 7306 section 7", "receiver", "An Immediate is completed after the Writes before it are placed.")
def test_an_immediate_behind_a_write_means_that_it_is_there() -> None:
    with receiving() as stage:
        target = stage.memory(50_000, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"d" * 50_000), Untagged(Opcode.IMMEDIATE, 1, DATA))
        stage.end.expect(Op.RECEIVE_IMMEDIATE)
        assert target.read() == b"d" * 50_000


@rule("RFC 7306 section 6.3", "receiver", "Immediate Data is delivered in the order in which it was sent.")
def test_immediates_are_delivered_in_order() -> None:
    with receiving() as stage:
        stage.peer.send(*(Untagged(Opcode.IMMEDIATE, at, bytes(7) + bytes([at])) for at in range(1, 5)))
        assert [stage.end.expect(Op.RECEIVE_IMMEDIATE).value for _ in range(4)] == [1, 2, 3, 4]
