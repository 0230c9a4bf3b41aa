"""The two stages of the conformance tests: the software RNIC on one side, a scripted peer on the other.

`receiving` has the device as MPA responder, with memory of every kind that must come to no harm (tests/fabric/victim.py);
`sending` has it as MPA initiator, and what it posts is read octet by octet. On both, the connection is past its start-up.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kbtp_core.fabric.api import Access, Op, QueueLimits
from tests.fabric.peer import Peer, closing, listening
from tests.fabric.victim import RECEIVE_BYTES, RECEIVES, Victim, expect_terminate, victim
from tests.fabric.wire import AtomicResponse, ReadRequest, Segment, StartUp, Tagged, Terminate, Untagged, read_response, write
from tests.fabric.world import Done, End, Memory, Node, node

LIMITS = QueueLimits(ird=16, ord=16)


@dataclass
class Receiving:
    """The device listens to `peer`; `end` is its side."""

    it: Victim
    peer: Peer
    end: End

    def memory(self, content: int | bytes, access: Access) -> Memory:
        """Memory that this test may change."""
        return self.it.device.memory(content, access)

    def is_terminated(self, culprit: Segment, layer: int, kind: int, code: int, *, with_rdma: bool = False) -> None:
        """Octet for octet a Terminate about `culprit`, and the end."""
        expect_terminate(self.peer, self.end, Terminate.about(culprit, layer, kind, code, with_rdma=with_rdma))

    def receive(self) -> tuple[Done, bytes]:
        """The next message delivered to the ULP, and its octets."""
        done = self.end.expect(Op.RECEIVE)
        return done, self.it.inbox.read(done.wr_id * RECEIVE_BYTES, done.length)

    def sync(self) -> None:
        """Return when the device has taken all that was sent: it answers an empty Read behind it. The next request has MSN 2."""
        self.peer.send(ReadRequest(1, 2, 0, 0, 0).segment(1))
        assert self.peer.receive() == read_response(1, 2, b"")


@contextmanager
def receiving(
    *, receives: int = RECEIVES, request: StartUp = StartUp(), limits: QueueLimits | None = None, buffer_bytes: int | None = None
) -> Iterator[Receiving]:
    """The device has accepted `request` and seen a first (empty) frame."""
    with victim() as it:
        usual, it.limits = it.limits, limits or it.limits
        peer, end = it.connect(receives=receives, request=request, buffer_bytes=buffer_bytes)
        it.limits = usual
        with closing(peer):
            peer.reads_markers = request.wants_markers
            peer.send(write(0, 0, b""))
            end.expect(Op.CONNECTED)
            yield Receiving(it, peer, end)


@dataclass
class Sending:
    """The device has connected to `peer`; `end` is its side."""

    device: Node
    end: End
    peer: Peer

    def read(self) -> Segment:
        return self.peer.receive()

    def untagged(self) -> Untagged:
        return self.peer.receive_untagged()

    def tagged(self) -> Tagged:
        segment = self.peer.receive()
        assert isinstance(segment, Tagged), segment
        return segment

    def answer_read(self, asked: Untagged, octet: bytes = b"r") -> None:
        header = ReadRequest.decode(asked.payload)
        self.peer.send(read_response(header.sink_stag, header.sink_offset, octet * header.length))

    def answer_atomic(self, asked: Untagged, value: int, msn: int = 1) -> None:
        self.peer.send(AtomicResponse(int.from_bytes(asked.payload[4:8], "big"), value).segment(msn))


@contextmanager
def sending(reply: StartUp = StartUp(is_reply=True), limits: QueueLimits = LIMITS, **aids: object) -> Iterator[Sending]:
    """The device has sent a Request and `peer` has answered with `reply`."""
    with node(**aids) as device, listening() as listener:
        end = device.create_qp(limits)
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer(reply)
            end.expect(Op.CONNECTED)
            yield Sending(device, end, peer)
