"""RDMA Read: RFC 5040 sections 4.4, 4.5, 5.2 and 7.2."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kbtp_core.fabric.api import Access, CompletionStatus, Op
from tests.conformance.rule import rule
from tests.conformance.stage import Sending, receiving, sending
from tests.fabric.victim import LENGTH, Victim
from tests.fabric.wire import ALL_ONES, Opcode, ReadRequest, Segment, Tagged, Untagged, read_response, write
from tests.fabric.world import Memory, pattern, request

WRAP = ALL_ONES - 3


# The requester: what it asks ------------------------------------------------------------------------------------------


@rule("RFC 5040 section 4.4", "sender", "A Read Request has sink STag and offset, size, source STag and offset: 28 octets.")
def test_the_octets_of_a_read_request() -> None:
    with sending(stags=[0x01020304]) as stage:
        sink = stage.device.memory(0x2000)
        stage.end.post(request(Op.READ, sink, 0x64, offset=0x1234, to=(0xABCD0002, 0x05060708090A0B0C)))
        assert stage.untagged().payload.hex() == "01020304" + "0000000000001234" + "00000064" + "abcd0002" + "05060708090a0b0c"


@rule("RFC 5040 section 5.2.1", "sender", "A Read Request is one untagged segment on queue 1 and carries nothing of the ULP.")
def test_a_read_request_is_one_segment() -> None:
    with sending(mulpdu=64) as stage:
        stage.end.post(request(Op.READ, stage.device.memory(100), 100))
        octets = stage.peer.receive_octets(2 + 46 + 4)
        assert octets[:20].hex() == "002e" + "4141" + "00000000" + "00000001" + "00000001" + "00000000"


@rule("RFC 5040 section 5.2.1", "sender", "A Read of no octets may be asked for.")
def test_an_empty_read_is_sent() -> None:
    with sending() as stage:
        stage.end.post(request(Op.READ))
        assert ReadRequest.decode(stage.untagged().payload).length == 0


@rule("RFC 5040 section 5.2.1", "sender", "Read Requests leave in the order in which they were submitted.")
def test_reads_leave_in_order() -> None:
    with sending() as stage:
        sink = stage.device.memory(100)
        stage.end.post(*(request(Op.READ, sink, 1, offset=at) for at in range(10)))
        assert [ReadRequest.decode(stage.untagged().payload).sink_offset for _ in range(10)] == list(range(10))


# The requester: what it is answered -----------------------------------------------------------------------------------


def reading(stage: Sending, length: int = 64) -> Memory:
    """A Read of `length` octets to offset 100 of this memory is outstanding."""
    sink = stage.device.memory(4096)
    stage.end.post(request(Op.READ, sink, length, offset=100))
    stage.untagged()
    return sink


@rule("RFC 5040 section 5.2.2", "receiver", "The response is placed at the sink, and its delivery completes the Read.")
def test_a_response_completes_the_read() -> None:
    with sending() as stage:
        sink = reading(stage)
        stage.peer.send(read_response(sink.stag, 100, b"r" * 64))
        assert stage.end.expect(Op.READ).length == 64
        assert sink.read() == bytes(100) + b"r" * 64 + bytes(4096 - 164)


@rule("RFC 5040 section 5.5", "receiver", "A Read is not complete before the last segment of its response is delivered.")
def test_a_read_waits_for_the_last_segment() -> None:
    with sending() as stage:
        sink = reading(stage)
        stage.peer.send(read_response(sink.stag, 100, b"a" * 40, is_last=False))
        assert stage.end.is_idle(0.05)
        stage.peer.send(read_response(sink.stag, 140, b"b" * 24))
        stage.end.expect(Op.READ)
        assert sink.read(100, 64) == b"a" * 40 + b"b" * 24


@rule("RFC 5040 section 5.2.2", "receiver", "A response of no octets completes a Read of none.")
@pytest.mark.parametrize("stag", [0, 7, 0xFFFFFFFF])
def test_an_empty_response_completes_an_empty_read(stag: int) -> None:
    with sending() as stage:
        stage.end.post(request(Op.READ))
        stage.untagged()
        stage.peer.send(read_response(stag, ALL_ONES, b""))
        stage.end.expect(Op.READ)


WRONG_ANSWERS: dict[str, Callable[[int], Segment]] = {
    "another STag": lambda stag: read_response(stag ^ 1, 100, bytes(64)),
    "an earlier offset": lambda stag: read_response(stag, 99, b"!" * 64),
    "a later offset": lambda stag: read_response(stag, 101, b"!" * 64),
    "one octet too many": lambda stag: read_response(stag, 100, b"!" * 65),
    "one octet too few": lambda stag: read_response(stag, 100, b"!" * 63),
    "no octets": lambda stag: read_response(stag, 100, b""),
    "an atomic response": lambda stag: Untagged(Opcode.ATOMIC_RESPONSE, 1, bytes(12)),
    "a Write to the sink": lambda stag: write(stag, 100, b"!" * 64),
}


@rule("RFC 5040 section 5.2.2", "receiver", "A response whose STag, offset or length is not that of the request is an error.")
@pytest.mark.parametrize("build", WRONG_ANSWERS.values(), ids=WRONG_ANSWERS.keys())
def test_an_answer_that_does_not_match_its_read_is_refused(build: Callable[[int], Segment]) -> None:
    with sending() as stage:
        sink = reading(stage)
        stage.peer.send(build(sink.stag))
        stage.peer.receive_terminate()
        stage.peer.close()
        first, last = stage.end.drain()
        assert (first.op, first.status) == (Op.READ, CompletionStatus.FLUSHED)
        assert last.value != 0
        assert sink.read() == bytes(4096)


@rule("RFC 5040 section 5.2.2", "receiver", "A response to no request writes nothing and is an error.")
def test_an_answer_without_a_question_writes_nothing() -> None:
    with sending() as stage:
        sink = stage.device.memory(64)
        stage.peer.send(read_response(sink.stag, 0, b"!" * 8))
        assert (stage.peer.receive_terminate().layer, sink.read()) == (0, bytes(64))
        stage.peer.close()
        assert stage.end.drain()[-1].value != 0


@rule("RFC 5040 section 5.2", "receiver", "A Read has one response: a second one writes nothing.")
def test_an_answer_that_comes_twice_writes_once() -> None:
    with sending() as stage:
        sink = reading(stage)
        stage.peer.send(read_response(sink.stag, 100, b"1" * 64), read_response(sink.stag, 100, b"2" * 64))
        stage.end.expect(Op.READ)
        stage.peer.receive_terminate()
        stage.peer.close()
        assert stage.end.drain()[-1].value != 0
        assert sink.read(100, 64) == b"1" * 64


@rule("RFC 5040 section 5.2.2", "receiver", "Responses belong to the requests in their order.")
def test_responses_are_matched_in_order() -> None:
    with sending() as stage:
        sink = stage.device.memory(16)
        stage.end.post(request(Op.READ, sink, 8, wr_id=1), request(Op.READ, sink, 8, offset=8, wr_id=2))
        first, second = stage.untagged(), stage.untagged()
        stage.answer_read(first, b"1")
        stage.answer_read(second, b"2")
        assert [stage.end.expect(Op.READ).wr_id for _ in range(2)] == [1, 2]
        assert sink.read() == b"1" * 8 + b"2" * 8


@rule("RFC 5040 section 8.1.1", "receiver", "A sink that was revoked gets nothing of a late response.")
def test_a_revoked_sink_gets_nothing() -> None:
    with sending() as stage:
        sink = reading(stage)
        sink.region.close()
        stage.peer.send(read_response(sink.stag, 100, b"!" * 64))
        stage.peer.receive_terminate()
        stage.peer.close()
        stage.end.drain()
        assert sink.read() == bytes(4096)


# The source -----------------------------------------------------------------------------------------------------------


@rule("RFC 5040 section 4.5", "sender", "A Read Response is tagged, has no header of RDMAP and carries the octets asked for.")
def test_a_read_is_answered() -> None:
    with receiving() as stage:
        stage.peer.send(ReadRequest(9, 10, 64, stage.it.readable.stag, 5).segment())
        assert stage.peer.receive() == read_response(9, 10, stage.it.readable.read(5, 64))


@rule("RFC 5040 section 4.4", "sender", "Sink STag and offset are copied into the response without being interpreted.")
@pytest.mark.parametrize(("stag", "offset"), [(0, 0), (0xFFFFFFFF, ALL_ONES), (0x12345678, 1 << 63)])
def test_the_sink_is_copied(stag: int, offset: int) -> None:
    with receiving() as stage:
        stage.peer.send(ReadRequest(stag, offset, 1, stage.it.readable.stag, 0).segment())
        answer = stage.peer.receive()
        assert isinstance(answer, Tagged)
        assert (answer.stag, answer.offset) == (stag, offset)


@rule("RFC 5040 section 5.2", "sender", "A Read has a single response, whatever its size.")
@pytest.mark.parametrize("length", [1, 61440, 61441, 200_000])
def test_a_long_read_is_one_message(length: int) -> None:
    with receiving() as stage:
        content = pattern(length).tobytes()
        source = stage.memory(content, Access.REMOTE_READ)
        stage.peer.send(ReadRequest(7, 1000, length, source.stag, 0).segment())
        received = b""
        while True:
            segment = stage.peer.receive()
            assert isinstance(segment, Tagged)
            assert segment.offset == 1000 + len(received)
            received += segment.payload
            if segment.is_last:
                break
        assert received == content
        stage.peer.expect_silence(0.02)


@rule("RFC 5040 section 5.2.1", "receiver", "The source of a Read of no octets is not validated.")
def test_an_empty_read_is_not_checked() -> None:
    with receiving() as stage:
        stage.peer.send(ReadRequest(9, 10, 0, stage.it.unknown_stag, ALL_ONES).segment())
        assert stage.peer.receive() == read_response(9, 10, b"")


@rule("RFC 5040 section 5.2.1", "sender", "A Read of no octets has a response of none.")
def test_an_empty_read_is_answered() -> None:
    with receiving() as stage:
        stage.peer.send(ReadRequest(9, 10, 0, stage.it.readable.stag, 0).segment())
        assert stage.peer.receive_octets(20)[:16].hex() == "000ec142" + "00000009" + "000000000000000a"


@rule("RFC 5040 section 5.2.1", "receiver", "A valid Read Request is not delivered to the ULP and takes none of its buffers.")
def test_a_read_request_is_not_delivered() -> None:
    with receiving(receives=0) as stage:
        stage.sync()
        assert stage.end.is_idle(0.02)


@rule("RFC 5040 section 5.2.1", "sender", "Read Requests are answered in the order in which they were sent.")
def test_reads_are_answered_in_order() -> None:
    with receiving() as stage:
        large = stage.memory(300_000, Access.REMOTE_READ)
        lengths = [300_000, 0, 1, 100_000]
        stage.peer.send(*(ReadRequest(at, 0, length, large.stag, 0).segment(at + 1) for at, length in enumerate(lengths)))
        order: list[int] = []
        while len(order) < 4:
            segment = stage.peer.receive()
            assert isinstance(segment, Tagged)
            if segment.is_last:
                order.append(segment.stag)
        assert order == [0, 1, 2, 3]


def is_refused(build: Callable[[Victim], ReadRequest], code: int) -> None:
    """The Read is answered with a remote protection error that quotes it."""
    with receiving() as stage:
        culprit = build(stage.it).segment()
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, code, with_rdma=True)


@rule("RFC 5040 section 7.2", "receiver", "The source STag must be valid.")
def test_an_unknown_source_is_refused() -> None:
    is_refused(lambda it: ReadRequest(7, 0, 1, it.unknown_stag, 0), 0)


@rule("RFC 5040 section 7.2", "receiver", "The source STag must be associated with this stream.")
def test_a_source_of_another_stream_is_refused() -> None:
    is_refused(lambda it: ReadRequest(7, 0, 1, it.foreign.stag, 0), 3)


@rule("RFC 5040 section 7.2", "receiver", "The source offset must be in the range of the source STag.")
@pytest.mark.parametrize("offset", [LENGTH, 1 << 40])
def test_a_source_behind_the_end_is_refused(offset: int) -> None:
    is_refused(lambda it: ReadRequest(7, 0, 1, it.readable.stag, offset), 1)


@rule("RFC 5040 section 7.2", "receiver", "Source offset plus size must be in the range of the source STag, to the octet.")
@pytest.mark.parametrize(("offset", "length"), [(LENGTH - 1, 2), (0, LENGTH + 1), (0, 0xFFFFFFFF)])
def test_a_source_over_the_end_is_refused(offset: int, length: int) -> None:
    is_refused(lambda it: ReadRequest(7, 0, length, it.readable.stag, offset), 1)


@rule("RFC 5040 section 7.2", "receiver", "Source offset plus size must not wrap.")
def test_a_source_that_wraps_is_refused() -> None:
    is_refused(lambda it: ReadRequest(7, 0, 8, it.readable.stag, WRAP), 4)


@rule("RFC 5040 section 8.1.1", "receiver", "Memory is read only with a right to read it.")
@pytest.mark.parametrize("name", ["writable", "counters", "local"])
def test_a_source_that_may_not_be_read_is_refused(name: str) -> None:
    is_refused(lambda it: ReadRequest(7, 0, 1, getattr(it, name).stag, 0), 2)


@rule("RFC 5041 section 7.1", "receiver", "The MSN of a request must be the next of its queue.")
@pytest.mark.parametrize("msn", [0, 2, 0xFFFFFFFF])
def test_a_request_out_of_sequence_is_refused(msn: int) -> None:
    with receiving() as stage:
        culprit = ReadRequest(7, 0, 1, stage.it.readable.stag, 0).segment(msn)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 1, 2, 3)


@rule("RFC 5040 section 4.4", "receiver", "A Read Request has 28 octets, no fewer and no more.")
@pytest.mark.parametrize(("count", "kind", "code"), [(0, 0, 0xFF), (27, 0, 0xFF), (29, 1, 5), (60, 1, 5)])
def test_a_read_request_of_another_length_is_refused(count: int, kind: int, code: int) -> None:
    with receiving() as stage:
        octets = ReadRequest(7, 0, 4, stage.it.readable.stag, 0).encode() + bytes(40)
        culprit = Untagged(Opcode.READ_REQUEST, 1, octets[:count])
        stage.peer.send(culprit)
        stage.is_terminated(culprit, kind, 2, code)


@rule("RFC 5040 section 4.4", "receiver", "A Read Request that is cut into segments is not one.")
def test_a_read_request_in_two_segments_is_refused() -> None:
    with receiving() as stage:
        octets = ReadRequest(7, 0, 4, stage.it.readable.stag, 0).encode()
        first = Untagged(Opcode.READ_REQUEST, 1, octets[:14], is_last=False)
        stage.peer.send(first, Untagged(Opcode.READ_REQUEST, 1, octets[14:], 14))
        stage.is_terminated(first, 0, 2, 0xFF)
