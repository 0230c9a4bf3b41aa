"""Streams that are cut anywhere: where the octets of a frame part must change nothing.

Large payloads go from the socket straight to their place, small ones through a buffer, and a frame may stop arriving
at any octet between the two; all of it has to give the same memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from kbtp_core.fabric.api import Access, Op
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.wire import Opcode, Segment, StartUp, Tagged, Untagged, read_response, send, write
from tests.fabric.world import End, Node, node, pattern, request, untagged_stream

LENGTH = 20_001
"""Its frames have pad octets, and it is large enough to be placed directly."""


def cuts(frame_bytes: int) -> Iterator[int]:
    """Where a frame may stop: in its header, at the edges of the payload, and at each octet of its trailer."""
    yield from (1, 2, 3, 15, 16, 19, 20, 21, 100, frame_bytes // 2)
    yield from range(frame_bytes - 9, frame_bytes)


def pause() -> None:
    """Let the device read what it has."""
    time.sleep(0.004)


def started(device: Node) -> tuple[End, Peer]:
    peer = dial(device.listen())
    peer.send(StartUp().encode())
    end = device.serve()
    end.qp.accept()
    peer.receive_start()
    peer.send(write(0, 0, b""))
    end.expect(Op.CONNECTED)
    return end, peer


def send_cut(peer: Peer, frame: bytes, at: int) -> None:
    peer.send(frame[:at])
    pause()
    peer.send(frame[at:])


@pytest.mark.parametrize("pad", range(4))
def test_a_send_may_stop_at_any_octet(pad: int) -> None:
    length = LENGTH + pad
    content = pattern(length).tobytes()
    with node() as device:
        end, peer = started(device)
        inbox = device.memory(length)
        with closing(peer):
            for msn, at in enumerate(cuts(len(send(content).frame())), 1):
                inbox.fill(bytes(length))
                end.receive_into(inbox, length)
                send_cut(peer, send(content, msn).frame(), at)
                assert end.expect(Op.RECEIVE).length == length, at
                assert inbox.read() == content, at
                device.check_guards()


@pytest.mark.parametrize("pad", range(4))
def test_a_write_may_stop_at_any_octet(pad: int) -> None:
    length = LENGTH + pad
    content = pattern(2 * length).tobytes()
    with node() as device:
        end, peer = started(device)
        target, inbox = device.memory(2 * length, Access.REMOTE_WRITE), device.memory(4)
        frames = [Tagged(Opcode.WRITE, target.stag, 0, content[:length], is_last=False), write(target.stag, length, content[length:])]
        with closing(peer):
            for msn, at in enumerate(cuts(len(frames[1].frame())), 1):
                target.fill(bytes(2 * length))
                end.receive_into(inbox, 4)
                for segment in frames:
                    send_cut(peer, segment.frame(), at)
                peer.send(send(b"done", msn))
                end.expect(Op.RECEIVE)
                assert target.read() == content, at
                device.check_guards()


@pytest.mark.parametrize("pad", range(4))
def test_a_read_response_may_stop_at_any_octet(pad: int) -> None:
    length = LENGTH + pad
    content = pattern(2 * length).tobytes()
    with node() as device, listening() as listener:
        end = device.create_qp()
        end.qp.connect("127.0.0.1", listener.port)
        sink = device.memory(2 * length)
        with closing(listener.accept()) as peer:
            peer.answer()
            end.expect(Op.CONNECTED)
            frames = [read_response(sink.stag, 0, content[:length], is_last=False), read_response(sink.stag, length, content[length:])]
            for at in cuts(len(frames[1].frame())):
                sink.fill(bytes(2 * length))
                end.post(request(Op.READ, sink, 2 * length))
                peer.receive()
                for segment in frames:
                    send_cut(peer, segment.frame(), at)
                end.expect(Op.READ)
                assert sink.read() == content, at
                device.check_guards()


def test_scattered_memory_may_be_filled_in_any_pieces() -> None:
    page_bytes, count = 1000, 50
    content = pattern(page_bytes * count)
    with node() as device:
        end, peer = started(device)
        target = device.scattered(pattern(page_bytes * count, 2), page_bytes, Access.REMOTE_WRITE | Access.LOCAL_WRITE)
        with closing(peer):
            octets = b"".join(segment.frame() for segment in untagged_stream(content.tobytes(), 15_013, Opcode.SEND))
            for msn, step in enumerate((1_000, 8_191, 30_000, 49_999), 1):
                target.fill(bytes(page_bytes * count))
                end.receive_into(target, page_bytes * count)
                octets = b"".join(segment.frame() for segment in untagged_stream(content.tobytes(), 15_013, Opcode.SEND, msn))
                for at in range(0, len(octets), step):
                    peer.send(octets[at : at + step])
                    pause()
                end.expect(Op.RECEIVE)
                assert target.read() == content.tobytes()


def test_many_small_frames_may_come_in_one_piece() -> None:
    with node() as device:
        end, peer = started(device)
        inbox = device.memory(1000 * 8)
        with closing(peer):
            end.receive_into(inbox, 8, count=1000)
            frames: list[Segment] = [Untagged(Opcode.SEND, at + 1, b"%07d" % at) for at in range(1000)]
            peer.send(*frames)
            assert [end.expect(Op.RECEIVE).wr_id for _ in range(1000)] == list(range(1000))
            assert inbox.read() == b"".join(b"%07d\0" % at for at in range(1000))


def test_small_and_large_frames_may_come_in_one_piece() -> None:
    content = pattern(200_000).tobytes()
    with node() as device:
        end, peer = started(device)
        target, inbox = device.memory(200_000, Access.REMOTE_WRITE), device.memory(64)
        with closing(peer):
            end.receive_into(inbox, 4, count=16)
            frames: list[Segment] = []
            for msn in range(1, 17):
                starts = range(0, 200_000, 16_000 + msn)
                frames += [Tagged(Opcode.WRITE, target.stag, at, content[at : at + starts.step], is_last=at == starts[-1]) for at in starts]
                frames.append(send(b"%04d" % msn, msn))
            peer.send(*frames)
            for _ in range(16):
                end.expect(Op.RECEIVE)
            assert target.read() == content
            assert inbox.read() == b"".join(b"%04d" % msn for msn in range(1, 17))
