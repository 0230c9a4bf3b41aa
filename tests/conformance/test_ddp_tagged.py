"""Tagged segments that arrive: RFC 5041 sections 4.1, 4.2, 5 and 7, as RDMA Writes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp_core.fabric.api import Access, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.victim import LENGTH, Victim, attack, expect_end
from tests.fabric.wire import ALL_ONES, Opcode, Segment, Tagged, Terminate, frame, send, write

WRAP = ALL_ONES - 3


def is_refused(build: Callable[[Victim], Segment], code: int) -> None:
    """The segment is answered with a tagged buffer error; the victim checks that no memory changed."""
    with receiving() as stage:
        culprit = build(stage.it)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 1, 1, code)


@rule("RFC 5041 section 4.1", "receiver", "DV must be 1 in a tagged segment.")
@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_wrong_version_is_refused(version: int) -> None:
    attack(Tagged(Opcode.WRITE, 1, 0, b"x", ddp_version=version), 1, 1, 4)


@rule("RFC 5041 section 4.1", "receiver", "The reserved bits of the control field of a tagged segment are not checked.")
def test_reserved_bits_are_not_checked() -> None:
    with receiving() as stage:
        target = stage.memory(8, Access.REMOTE_WRITE)
        ulpdu = bytearray(write(target.stag, 0, b"reserved").ulpdu())
        ulpdu[0] |= 0x3C
        stage.peer.send(frame(bytes(ulpdu)))
        stage.sync()
        assert target.read() == b"reserved"


@rule("RFC 5041 section 4.2", "receiver", "A message may start at any Tagged Offset of the buffer.")
@pytest.mark.parametrize("offset", [0, 1, 3, 8, 99])
def test_a_payload_is_placed_at_its_offset(offset: int) -> None:
    with receiving() as stage:
        target = stage.memory(100, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, offset, b"!"))
        stage.sync()
        assert target.read() == bytes(offset) + b"!" + bytes(99 - offset)


@rule("RFC 5041 section 5.2", "receiver", "Each segment is placed at its own Tagged Offset.")
def test_the_segments_of_a_message_are_placed() -> None:
    with receiving() as stage:
        target = stage.memory(12, Access.REMOTE_WRITE)
        parts = [Tagged(Opcode.WRITE, target.stag, at, b"%04d" % at, is_last=at == 8) for at in (0, 4, 8)]
        stage.peer.send(*parts)
        stage.sync()
        assert target.read() == b"000000040008"


@rule("RFC 5041 section 5.1", "receiver", "A tagged buffer may be written again and again.")
def test_the_same_octets_may_be_written_twice() -> None:
    with receiving() as stage:
        target = stage.memory(4, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"once"), write(target.stag, 1, b"ice"))
        stage.sync()
        assert target.read() == b"oice"


@rule("RFC 5041 section 5.2", "receiver", "STag and Tagged Offset of a message of no octets are not checked.")
def test_an_empty_write_is_not_checked() -> None:
    with receiving() as stage:
        readable, foreign = stage.it.readable.stag, stage.it.foreign.stag
        empty = [write(stage.it.unknown_stag, ALL_ONES, b""), write(readable, LENGTH + 1, b""), write(foreign, 0, b"")]
        stage.peer.send(*empty, send(b"fine"))
        assert stage.receive()[1] == b"fine"


@rule("RFC 5041 section 7.1", "receiver", "The STag must be valid.")
def test_an_unknown_stag_is_refused() -> None:
    is_refused(lambda it: write(it.unknown_stag, 0, b"x"), 0)


@rule("RFC 5041 section 7.1", "receiver", "STag 0 names nothing.")
def test_stag_zero_is_refused() -> None:
    is_refused(lambda it: write(0, 0, b"x"), 0)


@rule("RFC 5041 section 7.1", "receiver", "An STag that was revoked is not valid any more.")
def test_a_revoked_stag_is_refused() -> None:
    with receiving() as stage:
        target = stage.memory(8, Access.REMOTE_WRITE)
        target.region.close()
        culprit = write(target.stag, 0, b"x")
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 1, 1, 0)
        assert target.read() == bytes(8)


@rule("RFC 5041 section 7.1", "receiver", "The STag must be valid for this stream.")
def test_an_stag_of_another_stream_is_refused() -> None:
    is_refused(lambda it: write(it.foreign.stag, 0, b"x"), 2)


@rule("RFC 5041 section 7.1", "receiver", "The Tagged Offset must be in the range of the STag.")
@pytest.mark.parametrize("offset", [LENGTH, LENGTH + 1, 1 << 32, 1 << 63])
def test_an_offset_behind_the_end_is_refused(offset: int) -> None:
    is_refused(lambda it: write(it.writable.stag, offset, b"x"), 1)


@rule("RFC 5041 section 7.1", "receiver", "Tagged Offset plus payload must be in the range of the STag, to the octet.")
@pytest.mark.parametrize(("offset", "count"), [(LENGTH - 1, 2), (0, LENGTH + 1), (LENGTH - 8, 9)])
def test_a_payload_over_the_end_is_refused(offset: int, count: int) -> None:
    is_refused(lambda it: write(it.writable.stag, offset, bytes(count)), 1)


@rule("RFC 5041 section 7.1", "receiver", "Tagged Offset plus payload must not wrap.")
@pytest.mark.parametrize("count", [5, 8, 4000])
def test_an_offset_that_wraps_is_refused(count: int) -> None:
    is_refused(lambda it: write(it.writable.stag, WRAP, bytes(count)), 3)


@rule("RFC 5041 section 7.1", "receiver", "The STag must allow the payload to be placed: a right to write is needed.")
@pytest.mark.parametrize("name", ["readable", "counters", "local"])
def test_memory_that_may_not_be_written_is_refused(name: str) -> None:
    is_refused(lambda it: write(getattr(it, name).stag, 0, b"x"), 0)


@rule("RFC 5041 section 7.1", "receiver", "The first and the last octet of a buffer may be written.")
def test_a_buffer_can_be_written_whole() -> None:
    with receiving() as stage:
        target = stage.memory(100, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"w" * 100))
        stage.sync()
        assert target.read() == b"w" * 100


@rule("RFC 5041 section 7.1", "receiver", "Every segment is validated, not only the first of its message.")
def test_a_later_segment_is_checked_like_the_first() -> None:
    with receiving() as stage:
        target = stage.memory(100, Access.REMOTE_WRITE)
        culprit = write(target.stag, 60, b"b" * 41)
        stage.peer.send(Tagged(Opcode.WRITE, target.stag, 0, b"a" * 60, is_last=False), culprit)
        stage.is_terminated(culprit, 1, 1, 1)
        assert target.read(60) == bytes(40)


@rule("RFC 5041 section 7.1", "receiver", "A segment with an error is not placed, and neither is what follows.")
def test_nothing_is_placed_after_an_error() -> None:
    with receiving() as stage:
        culprit = write(stage.it.unknown_stag, 0, b"x")
        stage.peer.send(culprit, write(stage.it.writable.stag, 0, b"late"))
        stage.is_terminated(culprit, 1, 1, 0)


@rule("RFC 5041 section 7.1", "receiver", "A large segment is validated before any octet of it is placed.")
def test_a_large_segment_over_the_end_places_nothing() -> None:
    with receiving() as stage:
        target = stage.memory(40_000, Access.REMOTE_WRITE)
        culprit = write(target.stag, 1, b"x" * 40_000)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 1, 1, 1)
        assert target.read() == bytes(40_000)


@rule("RFC 5041 section 7.1", "receiver", "A Responder that speaks first is judged like any other.")
def test_a_write_before_the_first_frame_of_the_initiator_is_judged() -> None:
    with sending() as stage:
        secret = stage.device.memory(64)
        culprit = write(secret.stag, 0, b"early")
        stage.peer.send(culprit)
        assert stage.peer.receive_terminate() == Terminate.about(culprit, 1, 1, 0)
        stage.peer.close()
        expect_end(stage.end, terminate_code(1, 1, 0))
        assert secret.read() == bytes(64)


@rule("RFC 5041 section 4.1", "receiver", "A tagged message is delivered behind all messages before it.")
def test_a_send_behind_a_write_is_delivered_behind_it() -> None:
    with receiving() as stage:
        target = stage.memory(50_000, Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"d" * 50_000), send(b"done"))
        assert stage.receive()[1] == b"done"
        assert target.read() == b"d" * 50_000
        assert stage.end.is_idle(0.01)
