"""Memory that is taken away while it is used: after `close` has returned, not one octet moves."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from kbtp_core.fabric.api import (
    Access,
    Array,
    CompletionFlag,
    CompletionStatus,
    Op,
    QueuePairClosed,
    terminate_code,
)
from tests.fabric.peer import closing, dial
from tests.fabric.wire import Opcode, ReadRequest, StartUp, Tagged, Terminate, Untagged, write
from tests.fabric.world import ALL_REMOTE, Done, End, connect, node, request, wait_for_octets


def test_stags_of_regions_are_distinct_and_not_in_sequence() -> None:
    with node() as device:
        stags = [device.memory(8).stag for _ in range(200)]
        assert len(set(stags)) == 200
        steps = {(second - first) % (1 << 32) for first, second in pairwise(stags)}
        assert len(steps) > 190


def keep_posting(end: End, *requests: Array) -> list[Done]:
    """Post again whenever all has completed, so that there is traffic until the stream ends; the last completions."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            end.post(*requests)
        except QueuePairClosed:
            return end.drain()
        for _ in requests:
            done = end.node.next_done(end.qp.number)
            if done.status != CompletionStatus.OK:
                return [done, *end.drain()]
    raise AssertionError("the stream did not end within 30 s")


def test_no_octet_changes_once_a_region_is_closed_under_writes() -> None:
    with node() as left, node() as right, ThreadPoolExecutor(1) as writer:
        length = 4 << 20
        sources = [left.memory(np.full(length, fill, np.uint8)) for fill in (1, 2)]
        for _ in range(8):
            target = right.memory(length, Access.REMOTE_WRITE)
            a, b = connect(left, right)
            last = writer.submit(keep_posting, a, *(request(Op.WRITE, source, length, to=(target.stag, 0)) for source in sources))
            wait_for_octets(target)
            target.region.close()
            assert not target.region.is_valid
            frozen = target.read()
            time.sleep(0.02)
            assert target.read() == frozen
            assert b.drain()[-1].value == terminate_code(1, 1, 0)
            assert target.read() == frozen
            end = last.result()[-1]
            assert (end.value, end.flags) == (terminate_code(1, 1, 0), CompletionFlag.REMOTE)


def test_no_octet_changes_once_a_sink_is_closed_under_a_read() -> None:
    with node() as left, node() as right, ThreadPoolExecutor(1) as reader:
        length = 16 << 20
        source = right.memory(np.full(length, 9, np.uint8), Access.REMOTE_READ)
        for _ in range(4):
            sink = left.memory(length)
            a, _ = connect(left, right)
            last = reader.submit(keep_posting, a, *(request(Op.READ, sink, length, to=(source.stag, 0)) for _ in range(2)))
            wait_for_octets(sink)
            sink.region.close()
            frozen = sink.read()
            time.sleep(0.02)
            assert sink.read() == frozen
            assert last.result()[-1].op == Op.DISCONNECTED
            assert sink.read() == frozen


def test_a_read_whose_source_is_closed_ends_with_a_terminate_and_no_new_octets() -> None:
    with node() as device, closing(dial(device.listen(), receive_buffer_bytes=1 << 16)) as peer:
        length = 32 << 20
        source = device.memory(np.full(length, 1, np.uint8), Access.REMOTE_READ)
        peer.send(StartUp().encode())
        end = device.serve()
        end.qp.accept()
        peer.receive_start()
        asked = ReadRequest(7, 0, length, source.stag, 0).segment()
        peer.send(asked, write(0, 0, b""))
        end.expect(Op.CONNECTED)
        assert peer.receive(verify=False).payload[:1] == b"\x01"
        source.region.close()
        source.fill(np.full(length, 2, np.uint8))
        received = 0
        while isinstance(segment := peer.receive(verify=False), Tagged):
            assert b"\x02" not in segment.payload
            received += len(segment.payload)
        assert received < length
        assert segment.opcode == Opcode.TERMINATE
        terminate = Terminate.decode(segment.payload)
        assert (terminate.layer, terminate.kind, terminate.code) == (0, 1, 0)
        assert terminate.ddp_header in (b"", asked.header())


def test_a_peer_may_invalidate_what_it_is_reading() -> None:
    with node() as device, closing(dial(device.listen(), receive_buffer_bytes=1 << 16)) as peer:
        length = 32 << 20
        source = device.memory(length, Access.REMOTE_READ | Access.REMOTE_INVALIDATE)
        peer.send(StartUp().encode())
        end = device.serve()
        end.receive_into(device.memory(8), 8)
        end.qp.accept()
        peer.receive_start()
        peer.send(ReadRequest(7, 0, length, source.stag, 0).segment())
        end.expect(Op.CONNECTED)
        peer.receive(verify=False)
        peer.send(Untagged(Opcode.SEND_INVALIDATE, 1, b"", invalidate_stag=source.stag))
        assert end.expect(Op.RECEIVE).stag == source.stag
        assert not source.region.is_valid
        peer.receive_terminate(skip=True)


def test_closing_a_region_while_another_is_used_hurts_only_its_users() -> None:
    with node() as left, node() as right:
        keep, drop = right.memory(64, ALL_REMOTE), right.memory(64, ALL_REMOTE)
        a, _ = connect(left, right)
        drop.region.close()
        drop.region.close()
        a.post(request(Op.READ, left.memory(64), 64, to=(keep.stag, 0)))
        a.expect(Op.READ)


def test_a_domain_that_is_closed_takes_its_regions_along() -> None:
    with node() as left, node() as right:
        pd = right.fabric.alloc_pd()
        target = right.memory(64, ALL_REMOTE, pd=pd)
        pd.close()
        a, _ = connect(left, right)
        a.post(request(Op.WRITE, left.memory(b"x"), 1, to=(target.stag, 0)))
        a.drain()
        assert target.read() == bytes(64)
