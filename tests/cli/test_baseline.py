"""The native loops that the bench compares against move the bytes that they claim to move."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from kbtp_core import _baseline
from kbtp_core.cli.bench.baseline import copy_gib_per_s

MIB = 1 << 20


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    for end in (ours, theirs):
        end.setblocking(True)
    with ours, theirs:
        yield ours, theirs


def random_octets(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_stream_arrives_as_it_was_sent(pair: tuple[socket.socket, socket.socket]) -> None:
    source, sink = random_octets(3 * MIB + 17, 1), np.zeros(3 * MIB + 17, np.uint8)
    sender = in_thread(lambda: _baseline.stream_send(pair[0].fileno(), source, source.size, MIB))
    _baseline.stream_receive(pair[1].fileno(), sink, sink.size, MIB)
    sender.join(10)
    assert np.array_equal(source, sink)


def test_stores_land_at_their_offsets(pair: tuple[socket.socket, socket.socket]) -> None:
    block, count = 4096, 64
    source, pool = random_octets(block * count, 2), np.zeros(block * count, np.uint8)
    server = in_thread(lambda: _baseline.serve_stores(pair[1].fileno(), pool))
    offsets = np.random.default_rng(3).permutation(count).astype(np.uint64) * np.uint64(block)
    times = np.zeros(2, np.uint64)
    assert _baseline.run_stores(pair[0].fileno(), source, offsets, block, 32, 10.0, times) == 2
    pair[0].close()
    server.join(10)
    assert np.array_equal(source, pool)
    assert times.min() > 0


def test_loads_answer_with_the_blocks_that_were_asked_for(pair: tuple[socket.socket, socket.socket]) -> None:
    pool = random_octets(4 * 4096, 4)
    server = in_thread(lambda: _baseline.serve_loads(pair[1].fileno(), pool))
    request = np.array([1, 3 * 4096, 4096, 0, 0], np.uint64).tobytes()
    pair[0].sendall(request + np.array([2, 0, 100, 0, 0], np.uint64).tobytes())
    answer = pair[0].recv(40 + 4096 + 40 + 100, socket.MSG_WAITALL)
    assert answer[:40] == request
    assert answer[40 : 40 + 4096] == pool[3 * 4096 :].tobytes()
    assert answer[40 + 4096 + 40 :] == pool[:100].tobytes()
    pair[0].close()
    server.join(10)
    assert not server.is_alive()


def test_a_run_of_loads_counts_its_batches(pair: tuple[socket.socket, socket.socket]) -> None:
    pool = random_octets(16 * 4096, 5)
    in_thread(lambda: _baseline.serve_loads(pair[1].fileno(), pool))
    offsets = np.arange(16, dtype=np.uint64) * np.uint64(4096)
    times, sink = np.zeros(5, np.uint64), np.zeros(32 * 4096, np.uint8)
    assert _baseline.run_loads(pair[0].fileno(), sink, offsets, 4096, 8, 10.0, times) == 5
    assert times.min() > 0
    assert np.array_equal(sink, np.concatenate([pool, pool]))


def test_a_request_outside_of_the_pool_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    pool = random_octets(4096, 6)
    pair[0].sendall(np.array([1, 1, 4096, 0, 0], np.uint64).tobytes())
    with pytest.raises(RuntimeError, match="outside of its pool"):
        _baseline.serve_loads(pair[1].fileno(), pool)


def test_a_peer_that_goes_away_ends_the_run(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[1].close()
    with pytest.raises(RuntimeError):
        _baseline.run_loads(pair[0].fileno(), np.zeros(4096, np.uint8), np.zeros(1, np.uint64), 4096, 1, 10.0, np.zeros(1, np.uint64))


def test_an_echo_sends_back_whole_messages(pair: tuple[socket.socket, socket.socket]) -> None:
    server = in_thread(lambda: _baseline.serve_echo(pair[1].fileno(), 64))
    times = np.zeros(7, np.uint64)
    assert _baseline.run_echo(pair[0].fileno(), 64, 10.0, times) == 7
    assert times.min() > 0
    message = random_octets(64, 8).tobytes()
    pair[0].sendall(message[:10])
    pair[0].sendall(message[10:])
    assert pair[0].recv(64, socket.MSG_WAITALL) == message
    pair[0].close()
    server.join(10)
    assert not server.is_alive()


def test_a_copy_copies() -> None:
    source, sink = random_octets(2 * MIB, 7), np.zeros(2 * MIB, np.uint8)
    assert copy_gib_per_s(source, sink, 0.05) > 0
    assert np.array_equal(source, sink)
