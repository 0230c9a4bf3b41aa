"""A scripted iWARP peer: one blocking TCP socket that sends what the test says and reads with a deadline.

It takes either MPA role, checks every FPDU that it reads (CRC, pad, markers) and has no behaviour of its own: it
answers nothing that the test does not answer. Any octets can be sent, at any time.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from tests.fabric.wire import Segment, StartUp, Terminate, Untagged, WireError, crc_field, decode_segment, pad_bytes

MARKER_INTERVAL = 512


class Peer:
    """One connection. Every read ends within `timeout_s`, else the test fails with TimeoutError."""

    def __init__(self, sock: socket.socket, timeout_s: float = 5.0) -> None:
        self.sock = sock
        self.timeout_s = timeout_s
        self.reads_markers = False
        self._position = 0  # octets of the FPDU stream read so far, markers included
        self._start = 0  # position of the first length octet of the frame being read
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    # Start-up

    def request(self, frame: StartUp = StartUp()) -> StartUp:
        """Be the initiator: send `frame`, read the Reply."""
        self.send(frame.encode())
        self.reads_markers = frame.wants_markers
        return self.receive_start()

    def answer(self, frame: StartUp | None = None) -> StartUp:
        """Be the responder: read the Request, send `frame` (default: an accepting mirror of it)."""
        request = self.receive_start()
        reply = frame or replace(request, is_reply=True, private_data=b"")
        self.send(reply.encode())
        self.reads_markers = reply.wants_markers
        return request

    def receive_start(self) -> StartUp:
        return StartUp.decode(self.receive_start_octets())

    def receive_start_octets(self) -> bytes:
        head = self.receive_octets(20)
        return head + self.receive_octets(struct.unpack_from(">H", head, 18)[0])

    # Sending

    def send(self, *parts: Segment | bytes) -> None:
        octets = b"".join(part if isinstance(part, bytes) else part.frame() for part in parts)
        self.sock.settimeout(self.timeout_s)
        self.sock.sendall(octets)

    def send_while_it_lasts(self, *parts: Segment | bytes) -> bool:
        """As `send`, but the other side may close meanwhile; False if it did."""
        try:
            self.send(*parts)
        except (ConnectionError, TimeoutError):
            return False
        return True

    def finish(self) -> None:
        """Send FIN; reading goes on."""
        self.sock.shutdown(socket.SHUT_WR)

    def reset(self) -> None:
        """End with a TCP reset."""
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()

    def close(self) -> None:
        self.sock.close()

    # Receiving

    def receive_octets(self, count: int) -> bytes:
        octets, deadline = bytearray(), time.monotonic() + self.timeout_s
        while len(octets) < count:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            piece = self.sock.recv(min(count - len(octets), 1 << 20))
            if not piece:
                raise EOFError(f"the stream ended after {bytes(octets).hex()}, {count} octets were due")
            octets += piece
        return bytes(octets)

    def receive_frame(self, *, verify: bool = True) -> bytes:
        """The octets of one FPDU, markers taken out after they were checked."""
        self._start = self._position
        raw = bytearray()
        head = self._take(2, raw)
        (length,) = struct.unpack(">H", head)
        body = self._take(length + pad_bytes(length), raw)
        crc = self._take(4, raw)
        if verify and crc != crc_field(bytes(raw[:-4])):
            raise WireError(f"CRC field {crc.hex()} of a frame of {len(raw)} octets, expected {crc_field(bytes(raw[:-4])).hex()}")
        if any(body[length:]):
            raise WireError(f"pad octets {body[length:].hex()} are not zero")
        return head + body + crc

    def receive(self, *, verify: bool = True) -> Segment:
        frame = self.receive_frame(verify=verify)
        return decode_segment(frame[2 : 2 + struct.unpack(">H", frame[:2])[0]])

    def receive_untagged(self) -> Untagged:
        segment = self.receive()
        assert isinstance(segment, Untagged), segment
        return segment

    def receive_terminate(self, *, skip: bool = False) -> Terminate:
        """The next segment, which must be a Terminate; with `skip`, whatever precedes it is read and dropped."""
        segment = self.receive(verify=not skip)
        while skip and segment.opcode != 7:
            segment = self.receive(verify=False)
        assert segment.opcode == 7, segment
        return Terminate.decode(segment.payload)

    def read_to_end(self) -> bytes:
        """All octets until FIN or reset."""
        octets, deadline = bytearray(), time.monotonic() + self.timeout_s
        while True:
            self.sock.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                piece = self.sock.recv(1 << 20)
            except ConnectionError:
                return bytes(octets)
            if not piece:
                return bytes(octets)
            octets += piece

    def has_news(self) -> bool:
        """Octets, FIN or a reset can be read."""
        return bool(select.select([self.sock], [], [], 0)[0])

    def expect_silence(self, seconds: float = 0.1) -> None:
        self.sock.settimeout(seconds)
        try:
            piece = self.sock.recv(1 << 16)
        except TimeoutError:
            return
        raise AssertionError(f"expected silence, read {piece.hex() or 'FIN'}")

    def _take(self, count: int, raw: bytearray) -> bytes:
        """The next `count` octets that are no markers; `raw` gets them with the markers."""
        if not self.reads_markers:
            raw += (octets := self.receive_octets(count))
            return octets
        taken = bytearray()
        while len(taken) < count:
            if self._position % MARKER_INTERVAL == 0:
                self._take_marker(raw)
            piece = self.receive_octets(min(count - len(taken), MARKER_INTERVAL - self._position % MARKER_INTERVAL))
            self._position += len(piece)
            raw += piece
            taken += piece
        return bytes(taken)

    def _take_marker(self, raw: bytearray) -> None:
        marker = self.receive_octets(4)
        is_between = not raw
        expected = struct.pack(">HH", 0, 0 if is_between else self._position - self._start)
        if marker != expected:
            raise WireError(f"marker {marker.hex()} at {self._position}, expected {expected.hex()}")
        raw += marker
        self._position += 4
        if is_between:
            self._start = self._position


class PeerListener:
    """A listening socket for the responder role; only TCP is done by `accept`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.sock = socket.create_server((host, 0))
        self.port: int = self.sock.getsockname()[1]

    def accept(self, timeout_s: float = 5.0) -> Peer:
        self.sock.settimeout(timeout_s)
        return Peer(self.sock.accept()[0])

    def close(self) -> None:
        self.sock.close()


def dial(port: int, *, receive_buffer_bytes: int | None = None) -> Peer:
    """A TCP connection to 127.0.0.1:port; no MPA yet."""
    sock = socket.socket()
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.settimeout(5.0)
    sock.connect(("127.0.0.1", port))
    return Peer(sock)


@contextmanager
def listening(host: str = "127.0.0.1") -> Iterator[PeerListener]:
    listener = PeerListener(host)
    try:
        yield listener
    finally:
        listener.close()


@contextmanager
def closing(peer: Peer) -> Iterator[Peer]:
    try:
        yield peer
    finally:
        peer.close()
