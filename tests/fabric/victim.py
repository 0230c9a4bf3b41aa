"""A device under attack: memory of every kind, one listener, and the proof that it was not harmed.

`Victim.connect` gives the test a scripted peer, past the start-up, and the victim's end of that connection.
`Victim.check` runs after every attack: no octet changed except where the peer had the right to write, and a
well-behaved peer is served as before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from kbtp_core.fabric.api import Access, CompletionFlag, CompletionStatus, Op, QueueLimits, terminate_code
from tests.fabric.peer import Peer, closing, dial
from tests.fabric.wire import ReadRequest, Segment, StartUp, Terminate, send
from tests.fabric.world import ALL_REMOTE, End, Memory, Node, node, pattern

LENGTH = 4096
RECEIVE_BYTES = 256
RECEIVES = 4


class Victim:
    """The regions are named for what a peer of the default domain may do with them."""

    def __init__(self, device: Node) -> None:
        self.device = device
        self.port = device.listen()
        self.limits = QueueLimits(ird=4, ord=4)
        self.readable = device.memory(pattern(LENGTH, 1), Access.REMOTE_READ)
        self.writable = device.memory(pattern(LENGTH, 2), Access.REMOTE_WRITE)
        self.counters = device.memory(pattern(LENGTH, 3), Access.REMOTE_ATOMIC)
        self.local = device.memory(pattern(LENGTH, 4), Access.LOCAL_WRITE)
        other = device.fabric.alloc_pd()
        self.foreign = device.memory(pattern(LENGTH, 5), ALL_REMOTE | Access.REMOTE_INVALIDATE, pd=other)
        self.inbox = device.memory(RECEIVE_BYTES * RECEIVES)
        self.memories = [self.readable, self.writable, self.counters, self.local, self.foreign]
        self.before = [memory.read() for memory in self.memories]
        taken = {memory.stag for memory in [*self.memories, self.inbox]}
        self.unknown_stag = next(stag for stag in range(0x1000, 0x2000) if stag not in taken)

    def connect(self, *, receives: int = RECEIVES, request: StartUp = StartUp(), buffer_bytes: int | None = None) -> tuple[Peer, End]:
        """A peer that has sent its Request and read the Reply; `receives` buffers of RECEIVE_BYTES are posted."""
        peer = dial(self.port, receive_buffer_bytes=buffer_bytes)
        peer.send(request.encode())
        end = self.device.serve(self.limits)
        if receives:
            end.receive_into(self.inbox, RECEIVE_BYTES, count=receives)
        end.qp.accept()
        peer.receive_start()
        return peer, end

    def check(self, *allowed: Memory) -> None:
        """Nothing changed but `allowed`, and a good peer is served."""
        for memory, before in zip(self.memories, self.before, strict=True):
            assert any(memory is one for one in allowed) or memory.read() == before
            assert memory.region.is_valid
        self.device.check_guards()
        peer, end = self.connect(receives=1)
        with closing(peer):
            peer.send(send(b"good"), ReadRequest(7, 0, 64, self.readable.stag, 5).segment())
            end.expect(Op.CONNECTED)
            assert end.expect(Op.RECEIVE).length == 4
            assert self.inbox.read(0, 4) == b"good"
            assert peer.receive().payload == self.before[0][5:69]
            peer.finish()
            assert end.drain()[-1].value == 0


@contextmanager
def victim() -> Iterator[Victim]:
    """A victim that is checked when the test is over."""
    with node() as device:
        it = Victim(device)
        yield it
        it.check()


def expect_end(end: End, value: int) -> None:
    """The victim's user hears of the end: receives flushed, then DISCONNECTED with a Terminate that was sent, not received."""
    *events, last = end.drain()
    assert (last.value, last.flags) == (value, CompletionFlag(0)), last
    for event in events:
        assert event.op == Op.CONNECTED or event.status == CompletionStatus.FLUSHED, event


def expect_terminate(peer: Peer, end: End, expected: Terminate) -> None:
    """Octet for octet this Terminate and then the end of the stream, at both sides."""
    assert peer.receive_frame().hex() == expected.segment().frame().hex(), expected
    assert peer.read_to_end() == b""
    peer.close()
    expect_end(end, terminate_code(expected.layer, expected.kind, expected.code))


def attack(culprit: Segment, layer: int, kind: int, code: int, *before: Segment, with_rdma: bool = False, receives: int = RECEIVES) -> None:
    """Send `before` and then `culprit` to a fresh victim; it must answer with a Terminate about `culprit` only."""
    with victim() as it:
        peer, end = it.connect(receives=receives)
        with closing(peer):
            peer.send(*before, culprit)
            expect_terminate(peer, end, Terminate.about(culprit, layer, kind, code, with_rdma=with_rdma))
