"""Atomic operations: RFC 7306 sections 4, 5 and 8."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import Receiving, receiving, sending
from tests.fabric.peer import closing
from tests.fabric.victim import LENGTH, Victim, expect_end
from tests.fabric.wire import (
    ALL_ONES,
    AtomicRequest,
    AtomicResponse,
    Opcode,
    ReadRequest,
    Segment,
    Terminate,
    Untagged,
    read_response,
    write,
)
from tests.fabric.world import Memory, connect, node, request

FETCH_ADD, CMP_SWAP = 0, 2


def counter(stage: Receiving, *words: int) -> Memory:
    return stage.memory(struct.pack(f"={len(words)}Q", *words), Access.REMOTE_ATOMIC)


def word(memory: Memory, index: int = 0) -> int:
    return int(struct.unpack("=Q", memory.read(8 * index, 8))[0])


def run(old: int, ask: Callable[[int], AtomicRequest]) -> tuple[int, int]:
    """What the operation returns, and what it leaves in memory that held `old`."""
    with receiving() as stage:
        target = counter(stage, 1, old, 2)
        stage.peer.send(ask(target.stag).segment())
        answer = AtomicResponse.decode(stage.peer.receive_untagged().payload)
        assert (word(target, 0), word(target, 2)) == (1, 2)
        return answer.value, word(target, 1)


# The requester --------------------------------------------------------------------------------------------------------


@rule("RFC 7306 section 5.2.1", "sender", "A FetchAdd has code 0, Add Data and Mask, Compare Data 0 and Compare Mask all ones.")
def test_the_octets_of_a_fetch_add() -> None:
    with sending(first_atomic_id=0x77) as stage:
        stage.end.post(request(Op.FETCH_ADD, to=(0xABCD0001, 0x1000), operand=5, mask=6, compare=7, compare_mask=8))
        expected = "00000000" + "00000077" + "abcd0001" + f"{0x1000:016x}" + f"{5:016x}" + f"{6:016x}" + "0" * 16 + "f" * 16
        assert stage.untagged().payload.hex() == expected


@rule("RFC 7306 section 5.2.1", "sender", "A CmpSwap has code 2, Swap Data and Mask, Compare Data and Mask.")
def test_the_octets_of_a_cmp_swap() -> None:
    with sending(first_atomic_id=0x77) as stage:
        stage.end.post(request(Op.CMP_SWAP, to=(0xABCD0001, 0x1000), operand=5, mask=6, compare=7, compare_mask=8))
        expected = "00000002" + "00000077" + "abcd0001" + "".join(f"{value:016x}" for value in (0x1000, 5, 6, 7, 8))
        assert stage.untagged().payload.hex() == expected


@rule("RFC 7306 section 5.2", "sender", "Atomic Requests use queue 1 and count with Read Requests.")
def test_atomics_and_reads_share_their_numbers() -> None:
    with sending() as stage:
        stage.end.post(request(Op.FETCH_ADD), request(Op.READ), request(Op.CMP_SWAP))
        asked = [stage.untagged() for _ in range(3)]
        assert [(segment.opcode, segment.msn) for segment in asked] == [(10, 1), (1, 2), (10, 3)]
        assert {segment.header()[6:10] for segment in asked} == {bytes.fromhex("00000001")}


@rule("RFC 7306 section 5.2.1", "sender", "Atomic Requests leave in the order in which they were submitted.")
def test_atomics_leave_in_order() -> None:
    with sending() as stage:
        stage.end.post(*(request(Op.FETCH_ADD, operand=at) for at in range(10)))
        assert [AtomicRequest.decode(stage.untagged().payload).data for _ in range(10)] == list(range(10))


@rule("RFC 7306 section 5.4", "receiver", "An atomic is complete when its response is delivered, not before.")
def test_an_atomic_waits_for_its_response() -> None:
    with sending() as stage:
        stage.end.post(request(Op.FETCH_ADD))
        asked = stage.untagged()
        assert stage.end.is_idle(0.05)
        stage.answer_atomic(asked, 41)
        assert stage.end.expect(Op.FETCH_ADD).value == 41


@rule("RFC 7306 section 5.2.2", "receiver", "The response goes to the ULP: the value before the operation.")
@pytest.mark.parametrize("op", [Op.FETCH_ADD, Op.CMP_SWAP])
def test_the_value_of_a_response_is_reported(op: Op) -> None:
    with sending() as stage:
        stage.end.post(request(op))
        stage.answer_atomic(stage.untagged(), 0x0102030405060708)
        assert stage.end.expect(op).value == 0x0102030405060708


@rule("RFC 7306 section 5", "receiver", "Responses are matched with requests by their MSN on queue 3, which starts at 1.")
def test_responses_count_on_their_own_queue() -> None:
    with sending() as stage:
        stage.end.post(request(Op.READ), request(Op.FETCH_ADD, wr_id=1), request(Op.FETCH_ADD, wr_id=2))
        read, first, second = stage.untagged(), stage.untagged(), stage.untagged()
        stage.answer_read(read)
        stage.answer_atomic(first, 10, 1)
        stage.answer_atomic(second, 20, 2)
        stage.end.expect(Op.READ)
        assert [(done.wr_id, done.value) for done in (stage.end.expect(Op.FETCH_ADD), stage.end.expect(Op.FETCH_ADD))] == [(1, 10), (2, 20)]


@rule("RFC 7306 section 5.2.2", "receiver", "A response that does not match its request is an error.")
@pytest.mark.parametrize(
    ("msn", "payload", "error"),
    [
        (1, b"\0\0\0\x09" + bytes(8), (0, 2, 7)),
        (2, b"\0\0\0\x01" + bytes(8), (1, 2, 3)),
        (1, b"\0\0\0\x01" + bytes(7), (0, 2, 0xFF)),
        (1, b"\0\0\0\x01" + bytes(9), (1, 2, 5)),
    ],
    ids=["another identifier", "another number", "too short", "too long"],
)
def test_an_atomic_response_that_does_not_match_is_refused(msn: int, payload: bytes, error: tuple[int, int, int]) -> None:
    with sending() as stage:
        stage.end.post(request(Op.FETCH_ADD))
        stage.untagged()
        culprit = Untagged(Opcode.ATOMIC_RESPONSE, msn, payload)
        stage.peer.send(culprit)
        assert stage.peer.receive_terminate() == Terminate.about(culprit, *error)
        stage.peer.close()
        stage.end.expect(Op.FETCH_ADD, CompletionStatus.FLUSHED)
        assert stage.end.expect(Op.DISCONNECTED).value == terminate_code(*error)


@rule("RFC 7306 section 5.2.2", "receiver", "A response to no request is an error.")
def test_an_atomic_response_without_a_request_is_refused() -> None:
    with sending() as stage:
        culprit = AtomicResponse(1, 2).segment(1)
        stage.peer.send(culprit)
        with closing(stage.peer):
            assert stage.peer.receive_terminate() == Terminate.about(culprit, 0, 2, 7)
        expect_end(stage.end, terminate_code(0, 2, 7))


# The responder --------------------------------------------------------------------------------------------------------


@rule("RFC 7306 section 5.2.2", "sender", "A response has the request's identifier and the value before: 12 octets on queue 3.")
def test_the_octets_of_a_response() -> None:
    with receiving() as stage:
        target = counter(stage, 0x0000000500000050)
        stage.peer.send(AtomicRequest(FETCH_ADD, 0x77, target.stag, 0, 1).segment())
        octets = stage.peer.receive_octets(36)
        assert octets[:32].hex() == "001e414b" + "00000000" + "00000003" + "00000001" + "00000000" + "00000077" + "0000000500000050"


@rule("RFC 7306 section 5.2.2", "sender", "Responses count on queue 3 from 1, whatever was read in between.")
def test_responses_have_their_own_numbers() -> None:
    with receiving() as stage:
        target = counter(stage, 0)
        ask = AtomicRequest(FETCH_ADD, 1, target.stag, 0, 1)
        stage.peer.send(ask.segment(1), ReadRequest(1, 2, 0, 0, 0).segment(2), ask.segment(3))
        assert stage.peer.receive_untagged() == AtomicResponse(1, 0).segment(1)
        assert stage.peer.receive() == read_response(1, 2, b"")
        assert stage.peer.receive_untagged() == AtomicResponse(1, 1).segment(2)


@rule("RFC 7306 section 5.2.2", "sender", "The identifier of the request is reflected, whatever it is.")
@pytest.mark.parametrize("identifier", [0, 1, 0x80000000, 0xFFFFFFFF])
def test_the_identifier_is_reflected(identifier: int) -> None:
    with receiving() as stage:
        stage.peer.send(AtomicRequest(FETCH_ADD, identifier, counter(stage, 9).stag, 0, 0).segment())
        assert AtomicResponse.decode(stage.peer.receive_untagged().payload) == AtomicResponse(identifier, 9)


@rule("RFC 7306 section 5.1.1", "receiver", "FetchAdd with mask 0 is a plain 64-bit addition; the carry out of bit 63 is dropped.")
@pytest.mark.parametrize(("old", "add", "new"), [(0, 1, 1), (ALL_ONES, 1, 0), (0xFFFFFFFF, 1, 1 << 32), (5, ALL_ONES, 4)])
def test_a_plain_fetch_add(old: int, add: int, new: int) -> None:
    assert run(old, lambda stag: AtomicRequest(FETCH_ADD, 1, stag, 8, add)) == (old, new)


@rule("RFC 7306 section 5.1.1", "receiver", "Each bit of the Add Mask ends a field, whose carry is dropped.")
@pytest.mark.parametrize(
    ("bits", "old", "new"),
    [
        (2, 0x0000000000000000, 0x0000000100000010),
        (2, 0x0000000300000030, 0x0000000400000000),
        (2, 0xFFFFFFFF00000030, 0x0000000000000000),
        (10, 0x0000000500000050, 0x0000000600000060),
        (10, 0xFFFFFFFF00003FF0, 0x0000000000000000),
        (28, 0xFFFFFFFFFFFFFFF0, 0x0000000000000000),
    ],
)
def test_a_masked_fetch_add(bits: int, old: int, new: int) -> None:
    mask = 1 << 63 | 1 << 31 | 1 << bits + 3
    assert run(old, lambda stag: AtomicRequest(FETCH_ADD, 1, stag, 8, 0x0000000100000010, mask)) == (old, new)


@rule("RFC 7306 section 1.1", "receiver", "A FetchAdd of 0 changes nothing: it finds out whether atomics are there.")
def test_a_fetch_add_of_zero_changes_nothing() -> None:
    assert run(0x1234, lambda stag: AtomicRequest(FETCH_ADD, 1, stag, 8, 0)) == (0x1234, 0x1234)


@rule("RFC 7306 section 5.2.1", "receiver", "Compare Data and Compare Mask are ignored in a FetchAdd.")
def test_the_compare_fields_of_a_fetch_add_are_ignored() -> None:
    assert run(5, lambda stag: AtomicRequest(FETCH_ADD, 1, stag, 8, 2, 0, compare=99, compare_mask=0)) == (5, 7)


@rule("RFC 7306 section 5.2.1", "receiver", "The reserved bits beside the operation code are ignored.")
def test_reserved_bits_of_an_atomic_are_ignored() -> None:
    assert run(5, lambda stag: AtomicRequest(0xFFFFFFF0 | FETCH_ADD, 1, stag, 8, 2)) == (5, 7)


@rule("RFC 7306 section 5.1.2", "receiver", "CmpSwap swaps the bits of the Swap Mask if the bits of the Compare Mask are equal.")
@pytest.mark.parametrize("compare", [0x88, 0xFFFFFFFFFFFFFF88])
def test_a_cmp_swap_that_matches(compare: int) -> None:
    old, new = 0x1122334455667788, 0x112233445566AA88
    assert run(old, lambda stag: AtomicRequest(CMP_SWAP, 1, stag, 8, 0xAAAAAAAAAAAAAAAA, 0xFF00, compare, 0xFF)) == (old, new)


@rule("RFC 7306 section 5.1.2", "receiver", "CmpSwap changes nothing if they are not; the value before is returned either way.")
@pytest.mark.parametrize("compare_mask", [0xFF, ALL_ONES, 1])
def test_a_cmp_swap_that_does_not_match(compare_mask: int) -> None:
    old = 0x1122334455667788
    assert run(old, lambda stag: AtomicRequest(CMP_SWAP, 1, stag, 8, 0xAAAAAAAAAAAAAAAA, 0xFF00, 0x89, compare_mask)) == (old, old)


@rule("RFC 7306 section 5.1.2", "receiver", "An empty Compare Mask matches anything, an empty Swap Mask swaps nothing.")
@pytest.mark.parametrize(("mask", "new"), [(ALL_ONES, 9), (0, 5)])
def test_a_cmp_swap_with_empty_masks(mask: int, new: int) -> None:
    assert run(5, lambda stag: AtomicRequest(CMP_SWAP, 1, stag, 8, 9, mask, 77, 0)) == (5, new)


@rule("RFC 7306 section 5.1.1", "receiver", "The operation is done on the word in the memory's own byte order.")
def test_the_word_is_in_the_memorys_own_order() -> None:
    with receiving() as stage:
        target = stage.memory(struct.pack("=Q", 0xFF), Access.REMOTE_ATOMIC)
        stage.peer.send(AtomicRequest(FETCH_ADD, 1, target.stag, 0, 1).segment())
        assert stage.peer.receive_untagged().payload[4:] == bytes.fromhex("00000000000000ff")
        assert target.read() == struct.pack("=Q", 0x100)


@rule("RFC 7306 section 5.1.1", "receiver", "A FetchAdd that is not aligned to 64 bits changes nothing and is an error.")
@pytest.mark.parametrize("offset", [1, 4, 7])
def test_an_unaligned_fetch_add_changes_nothing(offset: int) -> None:
    unaligned(FETCH_ADD, offset)


@rule("RFC 7306 section 5.1.2", "receiver", "A CmpSwap that is not aligned to 64 bits changes nothing and is an error.")
@pytest.mark.parametrize("offset", [1, 4, 7])
def test_an_unaligned_cmp_swap_changes_nothing(offset: int) -> None:
    unaligned(CMP_SWAP, offset)


def unaligned(operation: int, offset: int) -> None:
    """The victim checks that its memory is as it was."""
    with receiving() as stage:
        culprit = AtomicRequest(operation, 1, stage.it.counters.stag, offset, 1, ALL_ONES, 0, 0).segment()
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 2, 7)


@rule("RFC 7306 section 8.2", "receiver", "It is the address that must be aligned, not only the offset: scattered pages may move it.")
def test_an_aligned_offset_at_an_unaligned_address_is_refused() -> None:
    with receiving() as stage:
        arena = stage.memory(256, Access.NONE).arena
        start = int(arena.ctypes.data) + 4096
        region = stage.it.device.pd.register(arena[4096 + 4 : 4096 + 132], Access.REMOTE_ATOMIC)
        assert start % 8 == 0
        culprit = AtomicRequest(FETCH_ADD, 1, region.stag, 8, 1).segment()
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 2, 7)


ATOMIC_CASES: list[tuple[str, Callable[[Victim], tuple[int, int]], int]] = [
    ("unknown STag", lambda it: (it.unknown_stag, 0), 0),
    ("behind the end", lambda it: (it.counters.stag, LENGTH), 1),
    ("readable", lambda it: (it.readable.stag, 0), 2),
    ("writable", lambda it: (it.writable.stag, 0), 2),
    ("local only", lambda it: (it.local.stag, 0), 2),
    ("another session", lambda it: (it.foreign.stag, 0), 3),
    ("offset wraps", lambda it: (it.counters.stag, ALL_ONES - 7), 4),
]


@rule("RFC 5040 section 8.1.1", "receiver", "An atomic is run only in its own range, on its own stream, with a right of its own.")
@pytest.mark.parametrize("operation", [FETCH_ADD, CMP_SWAP])
@pytest.mark.parametrize(("where", "code"), [pytest.param(where, code, id=name) for name, where, code in ATOMIC_CASES])
def test_an_atomic_outside_of_its_rights_is_refused(where: Callable[[Victim], tuple[int, int]], code: int, operation: int) -> None:
    with receiving() as stage:
        culprit = AtomicRequest(operation, 1, *where(stage.it), 1, ALL_ONES, 0, 0).segment()
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, code)


@rule("RFC 7306 section 5.2.1", "receiver", "An operation code that is not supported is an error.")
@pytest.mark.parametrize("operation", [1, 3, 15])
def test_an_unknown_atomic_operation_is_refused(operation: int) -> None:
    with receiving() as stage:
        culprit = AtomicRequest(operation, 1, stage.it.counters.stag, 0, 1).segment()
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 2, 6)


@rule("RFC 7306 section 4", "receiver", "An Atomic Request has 52 octets, no fewer and no more.")
@pytest.mark.parametrize(("count", "kind", "code"), [(0, 0, 0xFF), (51, 0, 0xFF), (53, 1, 5)])
def test_an_atomic_request_of_another_length_is_refused(count: int, kind: int, code: int) -> None:
    with receiving() as stage:
        octets = AtomicRequest(FETCH_ADD, 1, stage.it.counters.stag, 0, 1).encode() + b"\0"
        culprit = Untagged(Opcode.ATOMIC_REQUEST, 1, octets[:count])
        stage.peer.send(culprit)
        stage.is_terminated(culprit, kind, 2, code)


@rule("RFC 7306 section 4.1", "receiver", "Atomic Requests come on queue 1 and on no other.")
@pytest.mark.parametrize("queue", [0, 2, 3, 4])
def test_an_atomic_request_on_another_queue_is_refused(queue: int) -> None:
    with receiving() as stage:
        culprit = Untagged(Opcode.ATOMIC_REQUEST, 1, AtomicRequest(FETCH_ADD, 1, stage.it.counters.stag, 0, 1).encode(), queue=queue)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 1, 2, 1)


@rule("RFC 7306 section 5.2.1", "receiver", "A valid Atomic Request is not delivered to the ULP and takes none of its buffers.")
def test_an_atomic_is_not_delivered() -> None:
    with receiving(receives=0) as stage:
        stage.peer.send(AtomicRequest(FETCH_ADD, 1, counter(stage, 0).stag, 0, 1).segment())
        stage.peer.receive()
        assert stage.end.is_idle(0.02)


@rule("RFC 7306 section 5.4", "receiver", "Atomics are run in the order in which they came.")
def test_atomics_are_run_in_order() -> None:
    with receiving() as stage:
        stag = counter(stage, 0).stag
        asked = [AtomicRequest(CMP_SWAP, at, stag, 0, at + 1, ALL_ONES, at).segment(at + 1) for at in range(4)]
        stage.peer.send(*asked)
        assert [stage.peer.receive_untagged().payload for _ in asked] == [AtomicResponse(at, at).encode() for at in range(4)]


@rule("RFC 7306 section 5.4", "receiver", "An atomic sees what was written before it on the stream.")
def test_an_atomic_sees_the_write_before_it() -> None:
    with receiving() as stage:
        target = stage.memory(8, Access.REMOTE_WRITE | Access.REMOTE_ATOMIC)
        stage.peer.send(write(target.stag, 0, struct.pack("=Q", 40)), AtomicRequest(FETCH_ADD, 1, target.stag, 0, 2).segment())
        assert stage.peer.receive_untagged().payload == AtomicResponse(1, 40).encode()
        assert word(target) == 42


@rule("RFC 7306 section 7", "sender", "Responses to Reads and atomics leave in the order of their requests.")
def test_reads_and_atomics_are_answered_in_order() -> None:
    with receiving() as stage:
        target = stage.memory(struct.pack("=Q", 1), Access.REMOTE_READ | Access.REMOTE_ATOMIC)
        add = AtomicRequest(FETCH_ADD, 1, target.stag, 0, 1)
        asked: list[Segment] = [add.segment(1), ReadRequest(7, 0, 8, target.stag, 0).segment(2), add.segment(3)]
        stage.peer.send(*asked)
        assert [stage.peer.receive().opcode for _ in asked] == [Opcode.ATOMIC_RESPONSE, Opcode.READ_RESPONSE, Opcode.ATOMIC_RESPONSE]
        assert word(target) == 3


@rule("RFC 7306 section 5.3", "receiver", "Atomics of many streams on one word are each done whole.")
def test_atomics_of_many_streams_lose_no_step() -> None:
    with node() as left, node() as right:
        target = right.memory(8, Access.REMOTE_ATOMIC)
        ends = [connect(left, right)[0] for _ in range(8)]
        for end in ends:
            end.post(*(request(Op.FETCH_ADD, to=(target.stag, 0), operand=1) for _ in range(100)))
        seen = [end.expect(Op.FETCH_ADD).value for end in ends for _ in range(100)]
        assert sorted(seen) == list(range(800))
        assert word(target) == 800


@rule("RFC 7306 section 5.2", "receiver", "Atomic Requests count against the same depth as Read Requests.")
def test_an_atomic_beyond_the_depth_is_refused() -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        large = stage.memory(8 << 20, Access.REMOTE_READ)
        reads = [ReadRequest(7, 0, 8 << 20, large.stag, 0).segment(msn) for msn in range(1, 5)]
        one_more = AtomicRequest(FETCH_ADD, 1, stage.it.counters.stag, 0, 1).segment(5)
        stage.peer.send(*reads, one_more)
        assert stage.peer.receive_terminate(skip=True) == Terminate.about(one_more, 1, 2, 2)
        stage.peer.close()
        stage.end.drain()
