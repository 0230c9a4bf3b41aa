"""Frames that a peer must not send, one test a rule: which Terminate answers, octet for octet, and that nothing else happens."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op, terminate_code
from tests.fabric.peer import closing
from tests.fabric.victim import LENGTH, RECEIVE_BYTES, Victim, attack, expect_end, expect_terminate, victim
from tests.fabric.wire import (
    ALL_ONES,
    AtomicRequest,
    Opcode,
    ReadRequest,
    Segment,
    Tagged,
    Terminate,
    Untagged,
    crc_field,
    frame,
    read_response,
    send,
    write,
)

WRAP = ALL_ONES - 3
Build = Callable[[Victim], Segment]


# Framing (layer 2) ------------------------------------------------------------------------------------------------


def test_a_bad_crc_is_answered_without_headers_and_nothing_is_delivered() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            octets = bytearray(send(b"spoilt").frame())
            octets[-1] ^= 1
            peer.send(write(0, 0, b""), bytes(octets))
            expect_terminate(peer, end, Terminate(2, 0, 2))


def test_a_header_is_not_believed_before_its_crc() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            octets = bytearray(write(it.unknown_stag, 0, b"x" * 100).frame())
            octets[50] ^= 0x80
            peer.send(write(0, 0, b""), bytes(octets))
            expect_terminate(peer, end, Terminate(2, 0, 2))


def test_a_bad_crc_on_a_later_segment_of_a_send_delivers_nothing() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            second = bytearray(Untagged(Opcode.SEND, 1, b"b" * 60, 60).frame())
            second[30] ^= 0xFF
            peer.send(Untagged(Opcode.SEND, 1, b"a" * 60, is_last=False), bytes(second))
            expect_terminate(peer, end, Terminate(2, 0, 2))


@pytest.mark.parametrize("length", [0, 1, 2, 13, 14, 17])
def test_a_frame_too_short_for_its_header_ends_the_connection(length: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(frame((b"\x41\x43" + bytes(16))[:length]))
            assert peer.receive_terminate().layer in (0, 1, 2)
            peer.close()
            assert end.drain()[-1].value != 0


def test_a_tagged_frame_of_thirteen_octets_ends_the_connection() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(frame(write(it.writable.stag, 0, b"").header()[:13]))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


@pytest.mark.parametrize("length", [64769, 65535])
def test_the_largest_lengths_are_no_way_past_the_bounds(length: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(write(it.writable.stag, LENGTH - 8, bytes(length - 14)))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


def test_a_stream_that_ends_inside_a_frame_is_an_error_and_delivers_nothing() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(b"whole"), send(b"never whole", 2).frame()[:-1])
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 5
            peer.finish()
            peer.read_to_end()
            peer.close()
            expect_end(end, terminate_code(2, 0, 1))


def test_a_stream_that_ends_between_the_segments_of_a_send_delivers_nothing() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(Untagged(Opcode.SEND, 1, b"half", is_last=False))
            peer.finish()
            peer.read_to_end()
            peer.close()
            *events, _ = end.drain()
            assert not [event for event in events if event.op == Op.RECEIVE and event.status == CompletionStatus.OK]


def test_a_large_length_and_then_silence_costs_only_this_connection() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(b"first"), b"\xff\xff" + send(b"", 2).ulpdu())
            it.check()
            peer.close()
            assert end.drain()[-1].value != 0


# DDP and RDMAP control --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_wrong_ddp_version_is_refused_in_a_tagged_frame(version: int) -> None:
    attack(Tagged(Opcode.WRITE, 1, 0, b"x", ddp_version=version), 1, 1, 4)


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_wrong_ddp_version_is_refused_in_an_untagged_frame(version: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", ddp_version=version), 1, 2, 6)


@pytest.mark.parametrize("version", [0, 2, 3])
@pytest.mark.parametrize("culprit", [send(b"x"), write(1, 0, b"x")], ids=["untagged", "tagged"])
def test_a_wrong_rdmap_version_is_refused(culprit: Segment, version: int) -> None:
    attack(replace(culprit, rdmap_version=version), 0, 2, 5)


@pytest.mark.parametrize("opcode", [0xC, 0xD, 0xE, 0xF])
def test_an_unknown_opcode_is_refused(opcode: int) -> None:
    attack(Untagged(opcode, 1, b"x" * 28), 0, 2, 6)
    attack(Tagged(opcode, 1, 0, b"x" * 28), 0, 2, 6)


@pytest.mark.parametrize("opcode", [op for op in Opcode if op not in (Opcode.WRITE, Opcode.READ_RESPONSE)])
def test_an_untagged_operation_in_a_tagged_frame_is_refused(opcode: Opcode) -> None:
    attack(Tagged(opcode, 1, 0, b"x" * 52), 0, 2, 6)


@pytest.mark.parametrize("opcode", [Opcode.WRITE, Opcode.READ_RESPONSE])
def test_a_tagged_operation_in_an_untagged_frame_is_refused(opcode: Opcode) -> None:
    attack(Untagged(opcode, 1, b"x" * 28), 0, 2, 6)


@pytest.mark.parametrize("queue", [1, 2, 3, 4, 0xFFFFFFFF])
def test_a_send_on_another_queue_is_refused(queue: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", queue=queue), 1, 2, 1)


@pytest.mark.parametrize("queue", [0, 2, 3, 4])
@pytest.mark.parametrize("opcode", [Opcode.READ_REQUEST, Opcode.ATOMIC_REQUEST])
def test_a_request_on_another_queue_is_refused(opcode: Opcode, queue: int) -> None:
    attack(Untagged(opcode, 1, bytes(28 if opcode == Opcode.READ_REQUEST else 52), queue=queue), 1, 2, 1)


# Queue 0 ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("msn", [0, 2, 0xFFFFFFFF])
def test_a_send_out_of_sequence_is_refused(msn: int) -> None:
    attack(send(b"x", msn), 1, 2, 3)


def test_a_send_that_repeats_a_number_is_refused() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(send(b"x", 1), send(b"x", 1))
            end.expect(Op.CONNECTED)
            end.expect(Op.RECEIVE)
            expect_terminate(peer, end, Terminate.about(send(b"x", 1), 1, 2, 3))


def test_a_first_segment_with_an_offset_is_refused() -> None:
    attack(Untagged(Opcode.SEND, 1, b"x", 1), 1, 2, 4)


@pytest.mark.parametrize("offset", [0, 9, 11, 0xFFFFFFF6])
def test_a_later_segment_with_a_gap_or_overlap_is_refused(offset: int) -> None:
    attack(Untagged(Opcode.SEND, 1, b"x" * 10, offset), 1, 2, 4, Untagged(Opcode.SEND, 1, b"x" * 10, is_last=False))


def test_a_message_that_changes_its_kind_between_segments_is_refused() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(Untagged(Opcode.SEND, 1, b"x", is_last=False), Untagged(Opcode.SEND_SE, 1, b"x", 1))
            peer.receive_terminate()
            peer.close()
            assert not [done for done in end.drain() if done.op == Op.RECEIVE and done.status == CompletionStatus.OK]


def test_a_send_without_a_posted_receive_is_refused() -> None:
    attack(send(b"x"), 1, 2, 2, receives=0)


def test_a_send_longer_than_its_receive_by_one_octet_is_refused() -> None:
    attack(send(b"x" * (RECEIVE_BYTES + 1)), 1, 2, 5)


def test_a_send_that_grows_too_long_in_a_later_segment_is_refused() -> None:
    first = Untagged(Opcode.SEND, 1, b"x" * RECEIVE_BYTES, is_last=False)
    attack(Untagged(Opcode.SEND, 1, b"y", RECEIVE_BYTES), 1, 2, 5, first)


@pytest.mark.parametrize("count", [0, 7, 9])
def test_an_immediate_of_another_length_than_eight_is_refused(count: int) -> None:
    attack(Untagged(Opcode.IMMEDIATE, 1, b"i" * count), 0, 2, 0xFF)


def test_an_immediate_without_a_posted_receive_is_refused() -> None:
    attack(Untagged(Opcode.IMMEDIATE, 1, b"immediat"), 1, 2, 2, receives=0)


@pytest.mark.parametrize("target", ["readable", "foreign", "unknown", "zero"])
def test_memory_that_the_peer_may_not_invalidate_stays(target: str) -> None:
    with victim() as it:
        stags = {"readable": it.readable.stag, "foreign": it.foreign.stag, "unknown": it.unknown_stag, "zero": 0}
        peer, end = it.connect()
        with closing(peer):
            culprit = Untagged(Opcode.SEND_INVALIDATE, 1, b"", invalidate_stag=stags[target])
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 0, 1, 9))


# Tagged memory ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "code"),
    [
        pytest.param(lambda it: write(it.unknown_stag, 0, b"x"), 0, id="unknown STag"),
        pytest.param(lambda it: write(0, 0, b"x"), 0, id="STag zero"),
        pytest.param(lambda it: write(it.writable.stag, LENGTH, b"x"), 1, id="one octet behind the end"),
        pytest.param(lambda it: write(it.writable.stag, LENGTH - 1, b"xy"), 1, id="over the end by one octet"),
        pytest.param(lambda it: write(it.writable.stag, 0, bytes(LENGTH + 1)), 1, id="longer than the region by one octet"),
        pytest.param(lambda it: write(it.writable.stag, 1 << 63, b"x"), 1, id="far away"),
        pytest.param(lambda it: write(it.foreign.stag, 0, b"x"), 2, id="another session"),
        pytest.param(lambda it: write(it.writable.stag, WRAP, b"x" * 8), 3, id="offset wraps to zero and beyond"),
        pytest.param(lambda it: write(it.readable.stag, 0, b"x"), 0, id="read-only"),
        pytest.param(lambda it: write(it.counters.stag, 0, b"x"), 0, id="atomics only"),
        pytest.param(lambda it: write(it.local.stag, 0, b"x"), 0, id="local only"),
    ],
)
def test_a_write_outside_of_its_rights_is_refused(build: Build, code: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = build(it)
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 1, 1, code))


def test_a_later_segment_of_a_write_is_checked_like_the_first() -> None:
    with victim() as it:
        original = it.writable.read()
        peer, end = it.connect()
        with closing(peer):
            culprit = write(it.writable.stag, LENGTH - 10, b"w" * 11)
            peer.send(Tagged(Opcode.WRITE, it.writable.stag, LENGTH - 20, b"w" * 10, is_last=False), culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 1, 1, 1))
        assert it.writable.read() == original[:-20] + b"w" * 10 + original[-10:]
        it.writable.fill(original[-20:], LENGTH - 20)


def test_an_empty_write_is_not_checked() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(write(it.unknown_stag, ALL_ONES, b""), write(it.readable.stag, LENGTH + 1, b""), send(b"fine"))
            end.expect(Op.CONNECTED)
            end.expect(Op.RECEIVE)


READ_CASES: list[tuple[str, Callable[[Victim], ReadRequest], int]] = [
    ("unknown STag", lambda it: ReadRequest(7, 0, 1, it.unknown_stag, 0), 0),
    ("one octet behind the end", lambda it: ReadRequest(7, 0, 1, it.readable.stag, LENGTH), 1),
    ("over the end by one octet", lambda it: ReadRequest(7, 0, 2, it.readable.stag, LENGTH - 1), 1),
    ("huge", lambda it: ReadRequest(7, 0, 0xFFFFFFFF, it.readable.stag, 0), 1),
    ("write-only", lambda it: ReadRequest(7, 0, 1, it.writable.stag, 0), 2),
    ("atomics only", lambda it: ReadRequest(7, 0, 1, it.counters.stag, 0), 2),
    ("local only", lambda it: ReadRequest(7, 0, 1, it.local.stag, 0), 2),
    ("another session", lambda it: ReadRequest(7, 0, 1, it.foreign.stag, 0), 3),
    ("offset wraps", lambda it: ReadRequest(7, 0, 8, it.readable.stag, WRAP), 4),
]


@pytest.mark.parametrize(("build", "code"), [pytest.param(build, code, id=name) for name, build, code in READ_CASES])
def test_a_read_outside_of_its_rights_is_refused(build: Callable[[Victim], ReadRequest], code: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = build(it).segment()
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 0, 1, code, with_rdma=True))


def test_an_empty_read_is_answered_and_not_checked() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(ReadRequest(9, 10, 0, it.unknown_stag, ALL_ONES).segment())
            assert peer.receive() == read_response(9, 10, b"")
            end.expect(Op.CONNECTED)


@pytest.mark.parametrize("msn", [0, 2])
def test_a_request_out_of_sequence_is_refused(msn: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = ReadRequest(7, 0, 1, it.readable.stag, 0).segment(msn)
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 1, 2, 3))


@pytest.mark.parametrize("count", [0, 27, 29, 60])
def test_a_read_request_of_another_length_ends_the_connection(count: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(Untagged(Opcode.READ_REQUEST, 1, (ReadRequest(7, 0, 4, it.readable.stag, 0).encode() + bytes(40))[:count]))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


def test_a_read_request_in_two_segments_ends_the_connection() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            octets = ReadRequest(7, 0, 4, it.readable.stag, 0).encode()
            peer.send(Untagged(Opcode.READ_REQUEST, 1, octets[:14], is_last=False), Untagged(Opcode.READ_REQUEST, 1, octets[14:], 14))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


@pytest.mark.parametrize("is_atomic", [False, True], ids=["reads", "atomics"])
def test_requests_beyond_the_depth_are_refused(is_atomic: bool) -> None:
    with victim() as it:
        large = it.device.memory(16 << 20, Access.REMOTE_READ)
        peer, end = it.connect(buffer_bytes=1 << 16)
        with closing(peer):
            reads = [ReadRequest(7, 0, 16 << 20, large.stag, 0).segment(msn) for msn in range(1, 5)]
            one_more = AtomicRequest(0, 1, it.counters.stag, 0, 1) if is_atomic else ReadRequest(7, 0, 1, it.readable.stag, 0)
            peer.send(*reads, one_more.segment(5))
            terminate = peer.receive_terminate(skip=True)
            peer.close()
            assert (terminate.layer, terminate.kind, terminate.code) in ((1, 2, 2), (0, 2, 7))
            assert end.drain()[-1].value == terminate_code(terminate.layer, terminate.kind, terminate.code)


# Atomics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("offset", [1, 4, 7, LENGTH - 7])
@pytest.mark.parametrize("operation", [0, 2])
def test_an_unaligned_atomic_changes_nothing(operation: int, offset: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(AtomicRequest(operation, 1, it.counters.stag, offset, 1, ALL_ONES, 0, 0).segment())
            terminate = peer.receive_terminate()
            peer.close()
            expected = {(0, 2, 7)} | ({(0, 1, 1)} if offset > LENGTH - 8 else set())
            assert (terminate.layer, terminate.kind, terminate.code) in expected
            expect_end(end, terminate_code(terminate.layer, terminate.kind, terminate.code))


ATOMIC_CASES: list[tuple[str, Callable[[Victim], tuple[int, int]], int]] = [
    ("unknown STag", lambda it: (it.unknown_stag, 0), 0),
    ("behind the end", lambda it: (it.counters.stag, LENGTH), 1),
    ("readable", lambda it: (it.readable.stag, 0), 2),
    ("writable", lambda it: (it.writable.stag, 0), 2),
    ("local only", lambda it: (it.local.stag, 0), 2),
    ("another session", lambda it: (it.foreign.stag, 0), 3),
    ("offset wraps", lambda it: (it.counters.stag, ALL_ONES - 7), 4),
]


@pytest.mark.parametrize("operation", [0, 2])
@pytest.mark.parametrize(("where", "code"), [pytest.param(where, code, id=name) for name, where, code in ATOMIC_CASES])
def test_an_atomic_outside_of_its_rights_is_refused(where: Callable[[Victim], tuple[int, int]], code: int, operation: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = AtomicRequest(operation, 1, *where(it), 1, ALL_ONES, 0, 0).segment()
            peer.send(culprit)
            terminate = peer.receive_terminate()
            peer.close()
            assert (terminate.layer, terminate.kind, terminate.code) == (0, 1, code)
            assert terminate.ddp_header == culprit.header()
            expect_end(end, terminate_code(0, 1, code))


@pytest.mark.parametrize("operation", [1, 3, 15])
def test_an_unknown_atomic_operation_is_refused(operation: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = AtomicRequest(operation, 1, it.counters.stag, 0, 1).segment()
            peer.send(culprit)
            expect_terminate(peer, end, Terminate.about(culprit, 0, 2, 6))


@pytest.mark.parametrize("count", [0, 51, 53])
def test_an_atomic_request_of_another_length_ends_the_connection(count: int) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            octets = AtomicRequest(0, 1, it.counters.stag, 0, 1).encode() + b"\0"
            peer.send(Untagged(Opcode.ATOMIC_REQUEST, 1, octets[:count]))
            peer.receive_terminate()
            peer.close()
            assert end.drain()[-1].value != 0


# Terminate --------------------------------------------------------------------------------------------------------


def test_a_second_terminate_is_not_heard() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            first, second = Terminate(0, 2, 0xFF).segment(), replace(Terminate(1, 1, 1).segment(), msn=2)
            peer.send_while_it_lasts(first, second)
            peer.read_to_end()
            assert end.drain()[-1].value == terminate_code(0, 2, 0xFF)


@pytest.mark.parametrize("payload", [b"", b"\x01", bytes(3), b"\0\0\xe0\0" + bytes(2), b"\xff\xff\xff\xff" + bytes(60)])
def test_a_terminate_that_makes_no_sense_ends_the_connection_all_the_same(payload: bytes) -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            peer.send(Untagged(Opcode.TERMINATE, 1, payload))
            peer.read_to_end()
            peer.close()
            assert end.drain()[-1].value != 0


def test_frames_after_a_fault_are_dropped() -> None:
    with victim() as it:
        original = it.writable.read()
        peer, end = it.connect()
        with closing(peer):
            culprit = write(it.unknown_stag, 0, b"x")
            peer.send(culprit, write(it.writable.stag, 0, b"late"), send(b"late"))
            expect_terminate(peer, end, Terminate.about(culprit, 1, 1, 0))
        assert it.writable.read() == original


def test_a_terminate_reaches_a_peer_that_keeps_talking() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprit = write(it.unknown_stag, 0, b"x")
            peer.send(culprit)
            noise = write(it.unknown_stag, 0, bytes(60000)).frame()
            for _ in range(40):
                if not peer.send_while_it_lasts(noise):
                    break
            expect_terminate(peer, end, Terminate.about(culprit, 1, 1, 0))


def test_the_terminate_is_the_only_one() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            culprits: list[Segment] = [Untagged(0xC, 1, b"x"), Untagged(0xD, 1, b"x"), Tagged(Opcode.WRITE, 1, 0, b"x")]
            peer.send(*culprits)
            expect_terminate(peer, end, Terminate.about(culprits[0], 0, 2, 6))


def test_a_frame_in_single_octets_is_one_frame() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            for octet in send(b"drop by drop").frame():
                peer.send(struct.pack("B", octet))
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 12


def test_pad_octets_are_not_judged_but_the_crc_covers_them() -> None:
    with victim() as it:
        peer, end = it.connect()
        with closing(peer):
            covered = send(b"pad").frame()[:-5] + b"\x5a"
            peer.send(covered + crc_field(covered))
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 3
