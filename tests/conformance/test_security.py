"""Duties of an RNIC towards its users: RFC 5040 section 8.1, RFC 5041 section 8.3, RFC 5042."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from kbtp_core.fabric.api import Access, Op, QueueFull, QueueLimits, terminate_code
from tests.conformance.rule import rule
from tests.conformance.stage import receiving
from tests.fabric.peer import dial
from tests.fabric.victim import attack
from tests.fabric.wire import ReadRequest, Segment, Tagged, Untagged, send, write
from tests.fabric.world import ALL_REMOTE, connect, node, request


@rule("RFC 5040 section 8.1.1", "receiver", "STags are hard to predict and spread over the whole range.")
def test_stags_are_random_and_sparse() -> None:
    with node() as device:
        stags = [device.memory(8).stag for _ in range(256)]
        assert len(set(stags)) == 256
        assert 0 not in stags
        assert len({b - a for a, b in pairwise(stags)}) > 250
        assert len({stag >> 24 for stag in stags}) > 100
        for bit in range(32):
            assert 80 < sum(stag >> bit & 1 for stag in stags) < 176


@rule("RFC 5042 section 6.1.1", "receiver", "An STag that was revoked does not come back soon.")
def test_a_revoked_stag_is_not_given_out_again() -> None:
    with node() as device:
        seen: set[int] = set()
        for _ in range(300):
            memory = device.memory(8)
            assert memory.stag not in seen
            seen.add(memory.stag)
            memory.region.close()


@rule("RFC 5040 section 8.1.1", "receiver", "A stream of one protection domain cannot use an STag of another.")
@pytest.mark.parametrize("kind", ["write", "read"])
def test_two_domains_do_not_see_each_others_memory(kind: str) -> None:
    with receiving() as stage:
        stag = stage.it.foreign.stag
        culprit: Segment = write(stag, 0, b"x") if kind == "write" else ReadRequest(7, 0, 1, stag, 0).segment()
        stage.peer.send(culprit)
        layer, kind_of, code = (1, 1, 2) if kind == "write" else (0, 1, 3)
        stage.is_terminated(culprit, layer, kind_of, code, with_rdma=kind == "read")


@rule("RFC 5041 section 8.2", "receiver", "An STag can be bound to one stream, by a domain of its own for that stream.")
def test_a_domain_of_one_stream_binds_its_stags_to_it() -> None:
    with node() as left, node() as right:
        domains = [right.fabric.alloc_pd(), right.fabric.alloc_pd()]
        targets = [right.memory(8, Access.REMOTE_WRITE, pd=pd) for pd in domains]
        ends = []
        for pd in domains:
            end = left.create_qp()
            end.qp.connect("127.0.0.1", right.listen())
            right.serve(pd=pd).qp.accept()
            end.expect(Op.CONNECTED)
            ends.append(end)
        source = left.memory(b"mine", Access.NONE)
        for end, target in zip(ends, targets, strict=True):
            end.post(request(Op.WRITE, source, 4, to=(target.stag, 0)), request(Op.READ))
            end.expect(Op.WRITE)
            end.expect(Op.READ)
            assert target.read(0, 4) == b"mine"
        ends[0].post(request(Op.WRITE, source, 4, to=(targets[1].stag, 4)))
        assert ends[0].drain()[-1].value == terminate_code(1, 1, 2)
        assert targets[1].read() == b"mine" + bytes(4)


@rule("RFC 5041 section 8.3.1", "receiver", "No octet outside of the registered range can be reached: ranges are exact to the octet.")
@pytest.mark.parametrize("length", [1, 7, 4095])
def test_ranges_are_exact_to_the_octet(length: int) -> None:
    with receiving() as stage:
        target = stage.memory(length, Access.REMOTE_WRITE)
        culprit = write(target.stag, length - 1, b"ab")
        stage.peer.send(write(target.stag, length - 1, b"z"), culprit)
        stage.is_terminated(culprit, 1, 1, 1)
        assert target.read() == bytes(length - 1) + b"z"


@rule("RFC 5041 section 8.3.1", "receiver", "Rights to read and to write are given one by one.")
def test_the_right_to_read_is_no_right_to_write() -> None:
    with receiving() as stage:
        target = stage.memory(b"secret", Access.REMOTE_WRITE)
        culprit = ReadRequest(7, 0, 6, target.stag, 0).segment()
        stage.peer.send(write(target.stag, 0, b"public"), culprit)
        stage.is_terminated(culprit, 0, 1, 2, with_rdma=True)


@rule("RFC 5041 section 8.3.1", "receiver", "Once a revocation has returned, nothing that arrives changes the buffer.")
def test_a_write_under_way_stops_when_its_memory_is_revoked() -> None:
    with receiving() as stage:
        length = 60_000
        target = stage.memory(2 * length, Access.REMOTE_WRITE)
        first = Tagged(0, target.stag, 0, b"1" * length, is_last=False).frame()
        second = write(target.stag, length, b"2" * length).frame()
        stage.peer.send(first, second[:30_000])
        deadline = time.monotonic() + 5
        while stage.end.qp.stats()["bytes_received"] < len(first) + 30_000 and time.monotonic() < deadline:
            time.sleep(0.002)
        target.region.close()
        before = target.read()
        stage.peer.send(second[30_000:])
        stage.peer.receive_terminate()
        stage.peer.close()
        stage.end.drain()
        assert target.read() == before


@rule("RFC 5040 section 8.1.1", "sender", "Once a revocation has returned, nothing more of the buffer is sent.")
def test_a_read_under_way_stops_when_its_memory_is_revoked() -> None:
    length = 16 << 20
    with receiving(buffer_bytes=1 << 16) as stage:
        source = stage.memory(length, Access.REMOTE_READ)
        stage.peer.send(ReadRequest(7, 0, length, source.stag, 0).segment())
        stage.peer.receive()
        source.region.close()
        source.fill(b"\xff" * length)
        while (segment := stage.peer.receive(verify=False)).opcode == 2:
            assert b"\xff" not in segment.payload
        stage.peer.close()
        stage.end.drain()


@rule("RFC 5040 section 8.1.1", "receiver", "A peer cannot invalidate an STag that several streams share.")
def test_shared_memory_is_not_a_peers_to_invalidate() -> None:
    with receiving() as stage:
        shared = stage.memory(8, ALL_REMOTE)
        culprit = Untagged(4, 1, invalidate_stag=shared.stag)
        stage.peer.send(culprit)
        stage.is_terminated(culprit, 0, 1, 9)
        assert shared.region.is_valid


@rule("RFC 5040 section 8.1.1", "receiver", "A completion queue that nobody reads harms only its own users.")
def test_a_completion_queue_that_nobody_reads_harms_no_other() -> None:
    with receiving() as stage:
        device = stage.it.device
        lazy = device.fabric.create_cq()
        with node() as other:
            end = other.create_qp()
            end.qp.connect("127.0.0.1", stage.it.port)
            qp = device.next_request().create_qp(device.pd, lazy, QueueLimits())
            qp.accept()
            end.expect(Op.CONNECTED)
            end.post(*(request(Op.READ) for _ in range(500)))
            for _ in range(500):
                end.expect(Op.READ)
        stage.peer.send(send(b"mine"))
        assert stage.receive()[1] == b"mine"


@rule("RFC 5040 section 8.1.1", "receiver", "The number of outstanding Read Requests of a peer has a hard limit.")
def test_a_flood_of_reads_is_cut_off() -> None:
    with receiving(buffer_bytes=1 << 16) as stage:
        large = stage.memory(8 << 20, Access.REMOTE_READ)
        stage.peer.send(*(ReadRequest(7, 0, 8 << 20, large.stag, 0).segment(msn) for msn in range(1, 100)))
        terminate = stage.peer.receive_terminate(skip=True)
        assert (terminate.layer, terminate.kind, terminate.code) == (1, 2, 2)
        stage.peer.close()
        stage.end.drain()


@rule("RFC 5042 section 6.4.3.1", "receiver", "A peer cannot take more receive buffers than its own stream has.")
def test_a_flood_of_sends_takes_only_the_buffers_of_its_stream() -> None:
    with receiving(receives=2) as stage:
        stage.peer.send(*(send(b"flood", msn) for msn in range(1, 100)))
        assert [stage.receive()[0].wr_id for _ in range(2)] == [0, 1]
        stage.is_terminated(send(b"flood", 3), 1, 2, 2)


@rule("RFC 5042 section 6.4.3", "sender", "Queues of a stream have limits of their own: what does not fit is refused at once.")
def test_a_queue_that_is_full_refuses_more() -> None:
    with node() as left, node() as right:
        a, _ = connect(left, right, QueueLimits(send_depth=4))
        with pytest.raises(QueueFull):
            a.post(*(request(Op.SEND) for _ in range(5)))


@rule("RFC 5042 section 6.4.1", "receiver", "Peers that connect and say nothing do not keep a good one out.")
def test_silent_peers_do_not_keep_a_good_one_out() -> None:
    with receiving() as stage:
        crowd = [dial(stage.it.port) for _ in range(300)]
        stage.it.check()
        for peer in crowd:
            peer.close()


@rule("RFC 5042 section 6.3.1", "receiver", "Each guess of an STag costs the connection.")
def test_a_guess_of_an_stag_costs_the_connection() -> None:
    attack(write(0x12345678, 0, b"guess"), 1, 1, 0)
