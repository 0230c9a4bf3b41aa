"""What comes before what: RFC 5040 section 5.5."""

from __future__ import annotations

import numpy as np

from kbtp_core.fabric.api import Access, Op, WrFlag
from tests.conformance.rule import rule
from tests.conformance.stage import receiving, sending
from tests.fabric.wire import Opcode, ReadRequest, StartUp, Tagged, read_response, send, write
from tests.fabric.world import ALL_REMOTE, connect, node, request


@rule("RFC 5040 section 5.5", "receiver", "1. Streams do not wait for each other.")
def test_a_stream_that_stands_still_holds_up_no_other() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"half").frame()[:-1])
        stage.it.check()
        stage.peer.send(send(b"half").frame()[-1:])
        assert stage.receive()[1] == b"half"


@rule("RFC 5040 section 5.5", "sender", "2. The two directions of a stream do not wait for each other.")
def test_a_side_sends_while_its_receive_direction_stands_still() -> None:
    with receiving() as stage:
        stage.peer.send(send(b"half").frame()[:-1])
        stage.end.post(request(Op.SEND, stage.it.inbox, 4))
        assert stage.peer.receive() == send(bytes(4))


@rule("RFC 5040 section 5.5", "receiver", "10. Sends are delivered in the order in which they were sent.")
def test_sends_of_different_sizes_are_delivered_in_order() -> None:
    with receiving(receives=0) as stage:
        inbox = stage.memory(60_000, Access.LOCAL_WRITE)
        stage.end.receive_into(inbox, 20_000, count=3)
        stage.peer.send(send(b"1" * 20_000, 1), send(b"2", 2), send(b"3" * 19_999, 3))
        assert [stage.end.expect(Op.RECEIVE).length for _ in range(3)] == [20_000, 1, 19_999]


@rule("RFC 5040 section 5.5", "receiver", "10. When a Send is delivered all Writes before it are placed.")
def test_a_delivered_send_means_that_earlier_writes_are_there() -> None:
    with receiving() as stage:
        target = stage.memory(100_000, Access.REMOTE_WRITE)
        for msn in range(1, 5):
            octets = bytes([msn]) * 50_000
            first = Tagged(Opcode.WRITE, target.stag, 0, octets, is_last=False)
            stage.peer.send(first, write(target.stag, 50_000, octets), send(b"", msn))
            stage.receive()
            assert target.read() == octets * 2


@rule("RFC 5040 section 5.5", "receiver", "11. When a Read Response is delivered, the messages of its direction before it are placed.")
def test_a_delivered_response_means_that_earlier_writes_are_there() -> None:
    with sending() as stage:
        sink, target = stage.device.memory(8), stage.device.memory(100_000, Access.REMOTE_WRITE)
        stage.end.post(request(Op.READ, sink, 8))
        stage.untagged()
        big = [Tagged(Opcode.WRITE, target.stag, at, b"w" * 50_000, is_last=at > 0) for at in (0, 50_000)]
        stage.peer.send(*big, read_response(sink.stag, 0, b"response"))
        stage.end.expect(Op.READ)
        assert target.read() == b"w" * 100_000


@rule("RFC 5040 section 5.5", "receiver", "12. A Read sees what Writes before it on the stream have written.")
def test_a_read_sees_the_write_before_it() -> None:
    with receiving() as stage:
        target = stage.memory(30_000, Access.REMOTE_READ | Access.REMOTE_WRITE)
        stage.peer.send(write(target.stag, 0, b"w" * 30_000), ReadRequest(7, 0, 30_000, target.stag, 0).segment())
        assert stage.peer.receive() == read_response(7, 0, b"w" * 30_000)


@rule("RFC 5040 section 5.5", "receiver", "12. A Read of no octets is not answered before it is delivered whole.")
def test_half_a_read_request_is_not_answered() -> None:
    with receiving() as stage:
        octets = ReadRequest(7, 8, 0, 0, 0).segment().frame()
        stage.peer.send(octets[:-1])
        stage.peer.expect_silence(0.05)
        stage.peer.send(octets[-1:])
        assert stage.peer.receive() == read_response(7, 8, b"")


@rule("RFC 5040 section 5.5", "sender", "12. A fenced message waits until all Reads and atomics before it are answered.")
def test_a_fenced_send_waits_for_the_requests_before_it() -> None:
    with sending() as stage:
        sink = stage.device.memory(16)
        fenced = request(Op.SEND, sink, 8, flags=WrFlag.SIGNALED | WrFlag.FENCE)
        stage.end.post(request(Op.READ, sink, 8), request(Op.FETCH_ADD), fenced, request(Op.SEND))
        read, atomic = stage.untagged(), stage.untagged()
        stage.peer.expect_silence(0.05)
        stage.answer_read(read)
        stage.peer.expect_silence(0.05)
        stage.answer_atomic(atomic, 0)
        assert [stage.untagged(), stage.untagged()] == [send(b"r" * 8, 1), send(b"", 2)]


@rule("RFC 5040 section 5.5", "sender", "13. Messages go out in the order in which the ULP submitted them.")
def test_all_kinds_of_messages_leave_in_order() -> None:
    with sending() as stage:
        order = [Op.READ, Op.SEND, Op.WRITE, Op.FETCH_ADD, Op.IMMEDIATE, Op.SEND_INVALIDATE, Op.CMP_SWAP]
        stage.end.post(*(request(op) for op in order))
        assert [stage.read().opcode for _ in order] == [1, 3, 0, 10, 8, 4, 10]


@rule("RFC 5040 section 5.5", "sender", "14. A Write is not complete before TCP has taken its last octet.")
def test_a_write_that_the_socket_does_not_take_is_not_complete() -> None:
    with node() as device, node() as other:
        port = other.listen()
        end = device.create_qp()
        end.qp.connect("127.0.0.1", port)
        waiting = other.next_request()  # accepted by nobody: nothing reads
        end.post(request(Op.WRITE, device.memory(1 << 20), 1 << 20, to=(1, 0)))
        assert end.is_idle(0.05)
        waiting.reject()
        end.drain()


@rule("RFC 5040 section 5.5", "sender", "15. Operations complete in the order in which they were submitted.")
def test_a_send_behind_a_read_completes_behind_it() -> None:
    with sending() as stage:
        stage.end.post(request(Op.READ, stage.device.memory(8), 8), request(Op.SEND))
        read = stage.untagged()
        assert stage.untagged().opcode == Opcode.SEND
        assert stage.end.is_idle(0.05)
        stage.answer_read(read)
        stage.end.expect(Op.READ)
        stage.end.expect(Op.SEND)


@rule("RFC 5040 section 5.5", "receiver", "18. A Send may be delivered before Reads before it are answered.")
def test_a_send_overtakes_the_answer_of_a_read() -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        large = stage.it.device.memory(np.zeros(16 << 20, np.uint8), Access.REMOTE_READ)
        stage.peer.send(ReadRequest(7, 0, 16 << 20, large.stag, 0).segment(), send(b"meanwhile"))
        assert stage.receive()[1] == b"meanwhile"
        stage.end.qp.abort()
        stage.end.drain()


@rule("RFC 5040 section 5.5", "receiver", "19. A Read is complete only on its delivered response, whatever else has come.")
def test_a_later_message_does_not_complete_a_read() -> None:
    with sending() as stage:
        inbox = stage.device.memory(8)
        stage.end.receive_into(inbox, 8)
        stage.end.post(request(Op.READ, stage.device.memory(8), 8))
        read = stage.untagged()
        stage.peer.send(send(b"x"))
        stage.end.expect(Op.RECEIVE)
        assert stage.end.is_idle(0.05)
        stage.answer_read(read)
        stage.end.expect(Op.READ)


@rule("RFC 5040 section 5.5", "sender", "20. Responses go out in the order in which the requests were delivered.")
def test_responses_leave_in_order() -> None:
    with receiving() as stage:
        source = stage.memory(b"0123456789", Access.REMOTE_READ)
        stage.peer.send(*(ReadRequest(7, 0, 1, source.stag, 3 - at).segment(at + 1) for at in range(4)))
        assert [stage.peer.receive().payload for _ in range(4)] == [b"3", b"2", b"1", b"0"]


@rule("RFC 5040 section 5.5", "sender", "20. A delivered response is enough to complete the Read: two devices do it a thousand times.")
def test_many_reads_between_two_devices_complete_in_order() -> None:
    with node() as left, node() as right:
        source, sink = right.memory(bytes(range(250)) * 4, ALL_REMOTE), left.memory(1000)
        a, _ = connect(left, right)
        a.post(*(request(Op.READ, sink, 1, offset=at, to=(source.stag, at), wr_id=at) for at in range(1000)))
        assert [a.expect(Op.READ).wr_id for _ in range(1000)] == list(range(1000))
        assert sink.read() == source.read()


@rule("RFC 5040 section 6.1", "sender", "Once the stream is up, nothing but RDMA messages goes over it.")
def test_every_octet_after_the_start_up_is_of_a_frame() -> None:
    with sending(StartUp(is_reply=True)) as stage:
        stage.end.post(request(Op.SEND), request(Op.WRITE))
        stage.end.qp.close()
        assert [stage.read().opcode, stage.read().opcode] == [Opcode.SEND, Opcode.WRITE]
        assert stage.peer.read_to_end() == b""
