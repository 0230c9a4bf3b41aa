"""Stores that answer wrongly: a client says so in its own way, within its deadline, and writes nowhere but into what it was given."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import KbtpError
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.protocol import Opcode
from kbtp_core.protocol.effects import Effect, Send
from kbtp_core.protocol.hello import HelloAck
from kbtp_core.protocol.keyed import KeyedOpcode
from kbtp_core.session import TargetServer
from kbtp_core.store.link import LinkOptions
from kbtp_core.store.ram import RamOptions, RamStore

BLOCK = 4096
GUARD = 64
Lie = Callable[[bytes], bytes]


class Liar:
    """A store that changes its answers before they are sent; `lie` is what it does to each."""

    def __init__(self) -> None:
        self.lie: Lie = lambda answer: answer
        self.store = RamStore(BLOCK, 64 * BLOCK, options=RamOptions(session_handles=256))
        self.fabric = SoftRnic()
        open_session = self.store.target.open_session

        def opened(*args: Any, **kwargs: Any) -> Any:
            session: Any = open_session(*args, **kwargs)
            receive = session.receive
            session.receive = lambda message, now: [self._changed(effect) for effect in receive(message, now)]
            session.receive_loads = lambda raw, now: [effect for row in raw for effect in session.receive(row.tobytes(), now)]
            return session

        self.store.target.open_session = opened  # type: ignore[method-assign]
        self.server = TargetServer(self.fabric, self.store.target, self.store.pool_region, use_executor=False)

    def client(self) -> Client:
        options = LinkOptions(quota=8, outstanding=16, inline_bytes=1024)
        return Client("{}:{}".format(*self.server.address), b"ns", options=options, fabric=self.fabric, timeout_s=1.0)

    def close(self) -> None:
        self.server.close(1.0)
        self.server.check()
        self.fabric.close()

    def _changed(self, effect: Effect) -> Effect:
        return replace(effect, data=self.lie(effect.data)) if isinstance(effect, Send) else effect


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


def put_field(at: int, octets: bytes, opcode: int) -> Lie:
    """Answers of that kind have these octets there."""
    return lambda answer: answer[:at] + octets + answer[at + len(octets) :] if answer[1] == opcode else answer


def test_more_handles_than_were_asked_for_are_not_used(liar: Liar) -> None:
    def lie(answer: bytes) -> bytes:
        if answer[1] != Opcode.HELLO_ACK:
            return answer
        ack = HelloAck.decode(0, 0, answer)
        return replace(ack, quota=0xFFFF_FFFF, handle_count=0xFFFF_FFFF).encode()

    liar.lie = lie
    with liar.client() as client:
        assert client.put(["a"], [b"value"]).tolist() == [ItemStatus.OK]


@pytest.mark.parametrize("size", [100, 3000])
def test_a_load_that_claims_more_octets_than_there_was_room_for_is_not_believed(liar: Liar, size: int) -> None:
    with liar.client() as client:
        assert client.put(["a"], [bytes(size)]).tolist() == [ItemStatus.OK]
        liar.lie = put_field(24, (size + 1).to_bytes(4, "big"), Opcode.COMPLETION)
        found = client.get(["a"], [np.zeros(size, np.uint8)])
        assert found.status[0] not in (ItemStatus.OK, ItemStatus.EXISTS)


def test_a_list_with_a_tier_that_there_is_not_is_refused_as_a_broken_protocol(liar: Liar) -> None:
    with liar.client() as client:
        client.put(["a"], [b"value"])
        liar.lie = put_field(24 + 12 + 20, b"\x09", KeyedOpcode.LIST_RESULT)
        with pytest.raises(KbtpError, match="tier"):
            list(client.list())


def test_a_list_that_never_ends_ends_with_the_deadline(liar: Liar) -> None:
    liar.lie = put_field(24, (1).to_bytes(8, "big"), KeyedOpcode.LIST_RESULT)
    with liar.client() as client, pytest.raises(KbtpError):
        list(client.list(timeout_s=0.3))


@pytest.mark.parametrize("seed", range(40))
def test_whatever_a_store_answers_a_client_fails_in_its_own_way(liar: Liar, seed: int) -> None:
    draw = np.random.default_rng(seed)

    def lie(answer: bytes) -> bytes:
        if answer[1] == Opcode.HELLO_ACK or draw.random() < 0.5:
            return answer
        octets = bytearray(answer)
        for at in draw.integers(1, len(octets), int(draw.integers(1, 4))).tolist():
            octets[at] = int(draw.choice([0, 1, 2, 0x7F, 0x80, 0xFF, octets[at] ^ 1]))
        return bytes(octets[: int(draw.integers(4, len(octets) + 1))] if draw.random() < 0.3 else octets)

    memory = np.full((6, GUARD + BLOCK + GUARD), 0xA5, np.uint8)
    keys = [f"k{at}" for at in range(6)]
    buffers = [row[GUARD : GUARD + BLOCK - 512 * at] for at, row in enumerate(memory)]
    with liar.client() as client:
        liar.lie = lie
        for turn in range(4):
            with contextlib.suppress(KbtpError):
                client.put(keys, [bytes([at]) * (100 + 700 * at) for at in range(6)], timeout_s=0.3)
                found = client.get(keys, buffers, timeout_s=0.3)
                for status, length, buffer in zip(found.status, found.lengths, buffers, strict=True):
                    assert status != ItemStatus.OK or length <= buffer.size
                client.lengths(keys, timeout_s=0.3)
            for call in (client.pin, client.unpin):
                with contextlib.suppress(KbtpError):
                    call(keys, timeout_s=0.3)
            with contextlib.suppress(KbtpError):
                list(client.list(timeout_s=0.3))
            with contextlib.suppress(KbtpError):
                client.remove(keys[turn:], timeout_s=0.3)
    for row, buffer in zip(memory, buffers, strict=True):
        assert (row[:GUARD] == 0xA5).all()
        assert (row[GUARD + buffer.size :] == 0xA5).all()
