"""Octets that nobody planned: never a crash, always an end within a deadline, no octet changed without a right to it.

One victim serves every example of a test, so that damage which only shows later shows too. The seeds are fixed: a
failure here fails everywhere.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kbtp_core.fabric.api import Op, QueueLimits
from tests.fabric.peer import Peer, closing, dial, listening
from tests.fabric.victim import LENGTH, Victim, victim
from tests.fabric.wire import (
    AtomicRequest,
    Opcode,
    ReadRequest,
    Segment,
    StartUp,
    Tagged,
    Terminate,
    Untagged,
    frame,
    read_response,
    send,
    write,
)
from tests.fabric.world import Node, node, request

BOUNDED = settings(
    max_examples=120,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
WORDS = st.one_of(st.sampled_from([0, 1, 2, 7, 8, LENGTH, 0x7FFFFFFF, 0xFFFFFFFF]), st.integers(0, 0xFFFFFFFF))
LONG_WORDS = st.one_of(st.sampled_from([0, 8, LENGTH - 8, LENGTH, (1 << 64) - 1, (1 << 64) - 8]), st.integers(0, (1 << 64) - 1))
PAYLOADS = st.one_of(st.binary(max_size=300), st.sampled_from([0, 1000, LENGTH, LENGTH + 1]).map(bytes))


@pytest.fixture(scope="module")
def target() -> Iterator[Victim]:
    with victim() as it:
        it.limits = QueueLimits(ird=4, ord=4, startup_timeout_s=2.0)
        yield it


@pytest.fixture(scope="module")
def initiator() -> Iterator[Node]:
    with node() as device:
        yield device


def stags(it: Victim) -> st.SearchStrategy[int]:
    """All that a peer could know or guess, except where it may write: there nothing could be proved."""
    known = [it.readable.stag, it.local.stag, it.foreign.stag, it.unknown_stag, 0, 0xFFFFFFFF]
    return st.sampled_from(known)


def segments(it: Victim) -> st.SearchStrategy[Segment]:
    tagged = st.builds(Tagged, st.integers(0, 15), stags(it), LONG_WORDS, PAYLOADS, st.booleans())
    opcodes, queues = st.integers(0, 15), st.one_of(st.none(), st.integers(0, 4))
    untagged = st.builds(Untagged, opcodes, st.integers(0, 3), PAYLOADS, WORDS, stags(it), st.booleans(), queues)
    reads = st.builds(ReadRequest, WORDS, LONG_WORDS, WORDS, stags(it), LONG_WORDS).map(lambda read: read.segment())
    atomics = st.builds(AtomicRequest, st.integers(0, 3), WORDS, stags(it), LONG_WORDS, LONG_WORDS).map(lambda atomic: atomic.segment())
    return st.one_of(tagged, untagged, reads, atomics)


def good_frames(it: Victim) -> list[bytes]:
    """One well-formed frame of every operation; none of them changes memory that is checked."""
    built: list[Segment] = [
        send(b"payload"),
        Untagged(Opcode.SEND_INVALIDATE, 1, b"x" * 40, invalidate_stag=it.foreign.stag),
        Untagged(Opcode.IMMEDIATE, 1, b"12345678"),
        write(it.readable.stag, 0, b"w" * 60),
        read_response(it.readable.stag, 0, b"r" * 60),
        ReadRequest(7, 0, 64, it.readable.stag, 0).segment(),
        AtomicRequest(0, 1, it.readable.stag, 0, 1).segment(),
        Untagged(Opcode.ATOMIC_RESPONSE, 1, bytes(12)),
        Terminate.about(send(b"x"), 1, 2, 2).segment(),
    ]
    return [segment.frame() for segment in built]


def throw(it: Victim, octets: bytes) -> None:
    """A started connection, these octets, FIN: both sides end within their deadlines and no protected octet changed."""
    peer, end = it.connect()
    with closing(peer):
        if peer.send_while_it_lasts(octets):
            try_finish(peer)
        peer.read_to_end()
    end.drain()
    assert [memory.read() for memory in it.memories] == it.before


def try_finish(peer: Peer) -> None:
    try:
        peer.finish()
    except OSError:
        return


@given(st.data())
@BOUNDED
def test_random_octets_behind_a_start_up_end_the_connection(target: Victim, data: st.DataObject) -> None:
    throw(target, data.draw(st.binary(max_size=600)))


@given(st.data())
@BOUNDED
def test_well_framed_nonsense_ends_the_connection(target: Victim, data: st.DataObject) -> None:
    throw(target, b"".join(frame(ulpdu) for ulpdu in data.draw(st.lists(st.binary(max_size=120), max_size=4))))


@given(st.data())
@BOUNDED
def test_segments_with_any_fields_end_the_connection(target: Victim, data: st.DataObject) -> None:
    throw(target, b"".join(segment.frame() for segment in data.draw(st.lists(segments(target), max_size=5))))


@given(st.data())
@BOUNDED
def test_frames_with_flipped_octets_end_the_connection(target: Victim, data: st.DataObject) -> None:
    """Half of them with their CRC made good again, so that the checks behind it are reached."""
    octets = bytearray(data.draw(st.sampled_from(good_frames(target))))
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] ^= data.draw(st.integers(1, 255))
    if data.draw(st.booleans()):
        (length,) = struct.unpack_from(">H", octets)
        octets = bytearray(frame(bytes(octets[2 : 2 + length])))
    throw(target, bytes(octets))


@given(st.data())
@BOUNDED
def test_good_frames_in_any_order_end_the_connection(target: Victim, data: st.DataObject) -> None:
    throw(target, b"".join(data.draw(st.lists(st.sampled_from(good_frames(target)), max_size=6))))


@given(st.data())
@BOUNDED
def test_request_frames_with_any_fields_end_or_are_announced(target: Victim, data: st.DataObject) -> None:
    octets = bytearray(StartUp(private_data=data.draw(st.binary(max_size=40))).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        octets[data.draw(st.integers(0, len(octets) - 1))] ^= data.draw(st.integers(1, 255))
    with closing(dial(target.port)) as peer:
        if peer.send_while_it_lasts(bytes(octets)):
            try_finish(peer)
        incoming, deadline = None, time.monotonic() + 4.0
        while incoming is None and not peer.has_news() and time.monotonic() < deadline:
            incoming = target.device.poll_request(0.005)
        if incoming is not None:
            incoming.reject()
        peer.read_to_end()


@given(st.data())
@BOUNDED
def test_replies_with_any_octets_end_in_time(initiator: Node, data: st.DataObject) -> None:
    octets = bytearray(StartUp(is_reply=True).encode() + send(b"early").frame())
    for _ in range(data.draw(st.integers(0, 3))):
        octets[data.draw(st.integers(0, len(octets) - 1))] ^= data.draw(st.integers(1, 255))
    end = initiator.create_qp(QueueLimits(startup_timeout_s=1.0))
    with listening() as listener:
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.receive_start()
            peer.send_while_it_lasts(bytes(octets[: data.draw(st.integers(0, len(octets)))]))
            try_finish(peer)
    end.drain()


@given(st.data())
@BOUNDED
def test_answers_with_any_fields_write_only_where_they_were_asked_to(initiator: Node, data: st.DataObject) -> None:
    sink = initiator.memory(256)
    end = initiator.create_qp()
    with listening() as listener:
        end.qp.connect("127.0.0.1", listener.port)
        with closing(listener.accept()) as peer:
            peer.answer()
            end.expect(Op.CONNECTED)
            end.post(request(Op.READ, sink, 64, offset=64), request(Op.FETCH_ADD))
            peer.receive()
            peer.receive()
            answer = read_response(sink.stag, 64, b"!" * data.draw(st.integers(0, 80)), is_last=data.draw(st.booleans()))
            if data.draw(st.booleans()):
                answer = replace(answer, offset=data.draw(st.sampled_from([0, 63, 65, 128, (1 << 64) - 1])))
            atomic = Untagged(Opcode.ATOMIC_RESPONSE, data.draw(st.integers(0, 2)), data.draw(st.binary(max_size=16)))
            answers: list[Segment] = [answer, answer, atomic]
            peer.send_while_it_lasts(*data.draw(st.permutations(answers)))
            try_finish(peer)
            peer.read_to_end()
    end.drain()
    assert sink.read(0, 64) == bytes(64)
    assert sink.read(128) == bytes(128)
    sink.region.close()
