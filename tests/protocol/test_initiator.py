"""The initiator by itself: what it sends, in which order it counts answers, and how a session ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kbtp_core.errors import SessionClosed, SessionRefused
from kbtp_core.protocol.constants import NO_STATUS, Capability, Flag, Opcode, Status
from kbtp_core.protocol.hello import DirectAccess, Hello, HelloAck
from kbtp_core.protocol.initiator import HelloParameters, Initiator, InitiatorState
from kbtp_core.protocol.initiator_batch import Batch
from kbtp_core.protocol.wire import Completion, Free, Goodbye, Header, parse
from tests.protocol.test_pair_requests import ready
from tests.protocol.world import STAG, draw, ring_world

PEER = "10.0.0.1:7400"
WISHES = HelloParameters(outstanding=4, inline_bytes=8, capabilities=int(Capability.RECORD_COMPLETION), trust_domain="team")


def fresh(secret: bytes | None = None) -> Initiator:
    return Initiator(WISHES, peer=PEER, incarnation=7, secret=secret, draw=draw)


def ack(status: int = Status.OK, **fields: Any) -> bytes:
    return HelloAck(0, status, **{"outstanding": 4, "block_bytes": 64, "incarnation": 5, "inline_bytes": 8, **fields}).encode()


def started(**fields: Any) -> Initiator:
    initiator = fresh()
    initiator.hello()
    assert initiator.receive(ack(**fields)) == []
    assert initiator.state is InitiatorState.READY
    return initiator


def answers(*request_ids: int, status: int = Status.OK) -> np.ndarray:
    return np.frombuffer(b"".join(Completion(i, 100, 1, status).encode() for i in request_ids), np.uint8).reshape(-1, 40)


def request_id(sequence: int, index: int) -> int:
    return sequence << 32 | index


# What is sent --------------------------------------------------------------------------------------------------------


def test_a_hello_says_all_that_is_wished_for() -> None:
    wishes = HelloParameters(0x21, 4096, 10, 20, 30, 40, "client", "team")
    initiator = Initiator(wishes, peer=PEER, incarnation=7, draw=draw)
    assert parse(initiator.hello()) == Hello(0, 7, 0x21, 4096, 10, 20, 30, 40, draw(16), "client", "team")
    with pytest.raises(SessionClosed, match=rf"^the session with {PEER} is greeting, not start$"):
        initiator.hello()
    with pytest.raises(ValueError, match=r"^a name of 256 octets is longer than 255"):
        Initiator(HelloParameters(client_name="a" * 256), peer=PEER, incarnation=7)


def test_inline_data_of_different_lengths_is_sent_as_long_as_it_is() -> None:
    link = ready(ring_world())
    stored = link.initiator.alloc_store_inline([100, 101, 102], 0, [b"a", b"longer", b"abc"], Flag.SEAL)
    assert stored.message_lengths is not None
    assert stored.message_lengths.tolist() == [41, 46, 43]
    link.run(stored)
    assert stored.status.tolist() == [Status.OK] * 3
    assert stored.data_length.tolist() == [1, 6, 3]
    assert [link.world.block(64 * i, 6) for i in range(3)] == [b"a\0\0\0\0\0", b"longer", b"abc\0\0\0"]


def test_a_batch_with_records_asks_for_them_in_every_message() -> None:
    initiator = started(capabilities=int(Capability.RECORD_COMPLETION))
    inline = initiator.with_records(initiator.store_inline([100, 101], 0, [b"a", b"bcd"]))
    assert inline.has_records
    assert inline.message_lengths is not None
    assert inline.message_lengths.tolist() == [57, 59]
    inline.set_records(1, 0xABCD, np.array([0x20], np.uint64))
    assert inline.messages[0].tobytes()[40:57] == bytes(16) + b"a"
    assert inline.messages[1].tobytes()[40:59].hex() == "0000abcd" + "0000000000000020" + "00000000" + b"bcd".hex()
    free = initiator.with_records(initiator.free([100], 3))
    free.set_records(0, 1, np.array([2], np.uint64))
    assert (free.messages.shape, free.message_lengths) == ((1, 40), None)
    assert parse(free.messages[0].tobytes()).record is not None  # type: ignore[union-attr]
    assert not initiator.free([100], 3).has_records


def test_records_that_were_not_granted_are_refused() -> None:
    initiator = started()
    with pytest.raises(ValueError, match=rf"^{PEER} did not grant RECORD_COMPLETION$"):
        initiator.with_records(initiator.free([100], 3))


@pytest.mark.parametrize(
    "call",
    [
        lambda i: i.load([1 << 64], 0, STAG, 0, 64),
        lambda i: i.load([-1], 0, STAG, 0, 64),
        lambda i: i.load([100], 1 << 16, STAG, 0, 64),
        lambda i: i.store([100], 0, 1 << 32, 0, 64),
        lambda i: i.alloc_store([100], 0, STAG, 1 << 64, 64),
        lambda i: i.load([100], 0, STAG, -1, 64),
        lambda i: i.load([100], 0, STAG, 0, 1 << 32),
        lambda i: i.store_inline([100], 1 << 16, [b"x"]),
        lambda i: i.free([100], 1 << 16),
        lambda i: i.bind([100], 1 << 16, 0, 1, 0),
        lambda i: i.bind([100], 0, 1 << 32, 1, 0),
        lambda i: i.bind([100], 0, 0, 1 << 32, 0),
        lambda i: i.bind([100], 0, 0, 1, -1),
    ],
)
def test_a_number_that_does_not_fit_its_field_is_refused_and_not_cut(call: Callable[[Initiator], Batch]) -> None:
    initiator = started()
    with pytest.raises(OverflowError):
        call(initiator)
    assert not initiator.has_unsent


@pytest.mark.parametrize(("handles", "data"), [([100], []), ([100, 101], [b"one"]), ([100], [b"one", b"two"])])
def test_as_many_inline_data_as_handles_are_asked_for(handles: Sequence[int], data: Sequence[bytes]) -> None:
    initiator = started()
    with pytest.raises(ValueError):
        initiator.store_inline(handles, 0, data)
    assert not initiator.has_unsent


def test_inline_data_may_be_as_long_as_was_granted() -> None:
    initiator = started()
    assert initiator.store_inline([100], 0, [b"12345678"]).messages.shape == (1, 48)
    with pytest.raises(ValueError, match=rf"^9 octets of inline data, but {PEER} takes at most 8$"):
        initiator.store_inline([100, 101], 0, [b"1", b"123456789"])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^a batch of 0 requests$"):
        started().free([], 0)


def test_a_window_is_as_large_as_limit_and_credit_allow() -> None:
    initiator = started()
    first, second = initiator.free([1, 2, 3], 1), initiator.free([4, 5, 6], 1)
    initiator.reserved_count = 1
    assert initiator.take_window(2) == (first, 0, 2)
    assert (first.outstanding_count, first.sent_count, initiator.outstanding_count) == (2, 2, 2)
    assert initiator.take_window(2) == (first, 2, 3)
    assert (first.outstanding_count, first.sent_count, initiator.outstanding_count) == (3, 3, 3)
    assert initiator.take_window(2) is None
    initiator.reserved_count = 0
    assert initiator.take_window(2) == (second, 0, 1)
    assert initiator.take_window(2) is None
    assert first.is_outstanding.dtype == np.bool_
    assert (first.is_outstanding.tolist(), second.is_outstanding.tolist()) == ([True] * 3, [True, False, False])
    assert initiator.has_unsent


def test_nothing_is_sent_before_hello_is_answered() -> None:
    initiator = fresh()
    assert initiator.take_window(1) is None
    with pytest.raises(SessionClosed, match=rf"^the session with {PEER} is start, not ready$"):
        initiator.free([100], 1)
    with pytest.raises(SessionClosed, match=rf"^the session with {PEER} is start, not ready$"):
        initiator.expect_ready()
    started().expect_ready()


# Answers -------------------------------------------------------------------------------------------------------------


def test_answers_to_several_batches_may_come_in_one_array_in_any_order() -> None:
    initiator = started()
    first, second = initiator.free([1, 2], 1), initiator.load([3, 4], 1, STAG, 0, 64)
    while initiator.take_window(9):
        pass
    mixed = answers(request_id(1, 1), request_id(2, 0), request_id(1, 0))
    assert initiator.receive_completions(mixed) == [first]
    assert (first.is_done, second.is_done, initiator.outstanding_count) == (True, False, 1)
    assert second.status.tolist() == [Status.OK, NO_STATUS]
    assert initiator.receive_completions(answers(request_id(2, 1), status=Status.LENGTH)) == [second]
    assert second.status.tolist() == [Status.OK, Status.LENGTH]
    assert initiator.bound_count == -2  # two FREEs; LOADs bind nothing


def test_batches_that_are_done_are_told_even_if_a_later_answer_matches_nothing() -> None:
    initiator = started()
    first = initiator.free([1], 1)
    initiator.take_window(9)
    assert initiator.receive_completions(answers(request_id(1, 0), request_id(2, 0))) == [first]
    assert initiator.state is InitiatorState.CLOSED
    assert str(initiator.error) == (
        f"target {PEER} broke the protocol: a completion of request 0x200000000, or one with it, that is not outstanding"
    )


def test_bound_handles_are_counted_as_their_answers_come() -> None:
    initiator = started()
    for call, status, count in [
        (lambda: initiator.alloc_store([1, 2], 0, STAG, 0, 1), Status.OK, 2),
        (lambda: initiator.bind([3, 4], 0, 0, 1, 0), Status.OK, 4),
        (lambda: initiator.alloc_store_inline([5, 6], 0, [b"a", b"b"]), Status.NO_SPACE, 4),
        (lambda: initiator.store([1, 2], 0, STAG, 0, 1), Status.OK, 4),
        (lambda: initiator.free([1, 2], 0), Status.OK, 2),
    ]:
        batch = call()
        initiator.take_window(9)
        initiator.receive_completions(answers(*(request_id(batch.sequence, i) for i in range(2)), status=status))
        assert batch.is_done
        assert initiator.bound_count == count


def test_sequences_run_on_past_their_end_and_pass_over_those_in_use() -> None:
    initiator = started()
    long_lived = [initiator.free([1], 1), initiator.free([2], 1)]
    assert [batch.sequence for batch in long_lived] == [1, 2]
    initiator._next_sequence = 0x7FFF_FFFE  # those above are for calls that the provider makes by itself
    assert [initiator.draw_sequence() for _ in range(4)] == [0x7FFF_FFFE, 0x7FFF_FFFF, 3, 4]  # 0 is HELLO's


def test_an_abandoned_batch_that_was_not_sent_is_forgotten() -> None:
    initiator = started()
    batch = initiator.free([1], 1)
    initiator.abandon(batch)
    initiator.abandon(batch)  # twice is as once
    assert batch.is_done
    assert not initiator.has_unsent
    initiator._next_sequence = batch.sequence
    assert initiator.draw_sequence() == batch.sequence


@pytest.mark.parametrize(
    ("octets", "why"),
    [
        (Free(1, 2, 3).encode(), "messages of 24 octets, expected 40"),
        (bytes(40), "message 0 of 1 is no COMPLETION of version 1"),
        (Completion(request_id(9, 0), 1, 1, 0).encode(), "a completion of request 0x900000000, or one with it, that is not outstanding"),
    ],
)
def test_answers_that_are_none_end_the_session(octets: bytes, why: str) -> None:
    initiator = started()
    initiator.free([1], 1)
    initiator.take_window(1)
    assert initiator.receive_completions(np.frombuffer(octets, np.uint8).reshape(1, -1)) == []
    assert str(initiator.error) == f"target {PEER} broke the protocol: {why}"
    assert (initiator.state, initiator.outstanding_count) == (InitiatorState.CLOSED, 0)


def test_an_answer_before_hello_is_answered_ends_the_session() -> None:
    initiator = fresh()
    initiator.receive_completions(answers(request_id(1, 0)))
    assert str(initiator.error) == f"target {PEER} broke the protocol: a completion while start"
    assert initiator.state is InitiatorState.CLOSED


# HELLO_ACK -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (Status.UNAUTHENTICATED, "UNAUTHENTICATED. Configure the secret of trust domain 'team'"),
        (Status.NOT_PERMITTED, "NOT_PERMITTED: it does not serve this trust domain. Configure the same trust domain on both sides"),
        (
            Status.UNSUPPORTED,
            "UNSUPPORTED: it has no pool of the block size asked for. Use the same geometry on both sides, or block size 0",
        ),
        (Status.SHUTTING_DOWN, "SHUTTING_DOWN. Try another target, or again once it is back"),
        (Status.BUSY, "BUSY: it serves as many sessions as it may. Raise its session limit, or try again"),
        (Status.MALFORMED, "MALFORMED"),
        (77, "status 77"),
    ],
)
def test_a_refusal_says_what_to_do(status: int, why: str) -> None:
    initiator = fresh()
    initiator.hello()
    assert initiator.receive(HelloAck(0, status).encode()) == []
    assert isinstance(initiator.error, SessionRefused)
    assert str(initiator.error) == f"target {PEER} answered HELLO with {why}."
    assert initiator.state is InitiatorState.CLOSED


def test_wrong_secrets_are_told_apart_by_who_notices() -> None:
    initiator = fresh(b"key")
    initiator.hello()
    (proof,) = initiator.receive(HelloAck(0, Status.UNAUTHENTICATED, nonce=draw(16)).encode())
    assert parse(proof).proof != b""  # type: ignore[union-attr]
    assert initiator.state is InitiatorState.PROVING
    initiator.receive(HelloAck(0, Status.UNAUTHENTICATED).encode())
    assert str(initiator.error) == (
        f"target {PEER} answered HELLO with UNAUTHENTICATED: the secrets differ. "
        "Configure the same secret for the trust domain on both sides."
    )
    initiator = fresh(b"key")
    initiator.hello()
    initiator.receive(ack(proof=bytes(32)))
    assert str(initiator.error) == (
        f"target {PEER} answered HELLO with OK, but without the proof that our secret asks for. Configure the same secret on both sides."
    )


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HelloAck(1 << 32, Status.OK).encode(), "HELLO_ACK for request 0x100000000"),
        (ack(outstanding=0), "a HELLO_ACK that grants nothing, or more than was asked for"),
        (ack(block_bytes=0), "a HELLO_ACK that grants nothing, or more than was asked for"),
        (ack(incarnation=0), "a HELLO_ACK that grants nothing, or more than was asked for"),
        (ack(capabilities=2), "a HELLO_ACK that grants nothing, or more than was asked for"),
        (
            ack(outstanding=5, inline_bytes=7),
            "a HELLO_ACK that grants more than was asked for: 5 outstanding requests of 4, 7 inline octets of 8",
        ),
        (
            ack(outstanding=3, inline_bytes=9),
            "a HELLO_ACK that grants more than was asked for: 3 outstanding requests of 4, 9 inline octets of 8",
        ),
        (ack(direct=DirectAccess(ring_log2_slots=33)), "a HELLO_ACK with a ring of 2^33 slots, more than there are tickets"),
        (Goodbye().encode(), "unexpected Goodbye while greeting"),
        (Header(Opcode.FREE, 1).encode(), "unexpected Free while greeting"),
        (Completion(0, 0, 0, Status.MALFORMED).encode(), "a completion while greeting"),
        (b"\1\2\0\0", "malformed message: a message of 4 octets is shorter than the header of 24"),
    ],
)
def test_an_answer_to_hello_that_breaks_the_protocol_is_named(answer: bytes, why: str) -> None:
    initiator = fresh()
    initiator.hello()
    assert initiator.receive(answer) == []
    assert str(initiator.error) == f"target {PEER} broke the protocol: {why}"
    assert (initiator.state, initiator.ack) == (InitiatorState.CLOSED, None)
    assert initiator.receive(ack()) == []  # whatever comes then
    assert initiator.ack is None


def test_all_that_was_asked_for_may_be_granted() -> None:
    initiator = started(capabilities=1, direct=DirectAccess(ring_log2_slots=32))
    assert initiator.ack is not None
    assert (initiator.ack.outstanding, initiator.ack.inline_bytes, initiator.ack.capabilities) == (4, 8, 1)
    asks_nothing = Initiator(HelloParameters(outstanding=0), peer=PEER, incarnation=7, draw=draw)
    asks_nothing.hello()
    asks_nothing.receive(ack(outstanding=1, inline_bytes=0))
    assert asks_nothing.state is InitiatorState.READY
    asks_nothing = Initiator(HelloParameters(outstanding=0), peer=PEER, incarnation=7, draw=draw)
    asks_nothing.hello()
    asks_nothing.receive(ack(outstanding=2, inline_bytes=0))
    assert "2 outstanding requests of 0" in str(asks_nothing.error)


# Ends ----------------------------------------------------------------------------------------------------------------


def test_the_targets_goodbye_gives_up_what_was_not_sent_and_waits_for_the_rest() -> None:
    initiator = started()
    sent, unsent = initiator.free([1, 2], 1), initiator.free([3], 1)
    initiator.take_window(1)
    assert initiator.receive(Goodbye(status=Status.SHUTTING_DOWN).encode()) == []
    assert (initiator.state, sent.is_done, unsent.is_done) == (InitiatorState.CLOSING, False, True)
    assert initiator.take_window(9) is None
    assert initiator.receive_completions(answers(request_id(1, 0))) == [sent]
    assert initiator.state is InitiatorState.CLOSED
    with pytest.raises(SessionClosed, match=rf"^{PEER} said goodbye \(SHUTTING_DOWN\)$"):
        initiator.draw_sequence()


def test_a_goodbye_waits_for_loads_under_way_elsewhere() -> None:
    initiator = started()
    initiator.elsewhere_count = 3
    assert parse(initiator.goodbye(Status.BUSY)) == Goodbye(0, Status.BUSY)
    initiator.answered_elsewhere(2)
    assert (initiator.elsewhere_count, initiator.state) == (1, InitiatorState.CLOSING)
    initiator.answered_elsewhere(1)
    assert (initiator.elsewhere_count, initiator.state) == (0, InitiatorState.CLOSED)
    with pytest.raises(SessionClosed, match=rf"^the session with {PEER} is closing$"):
        initiator.expect_ready()


def test_the_first_end_of_a_session_is_the_one_that_is_told() -> None:
    for end, why in [
        (lambda i: i.disconnected("reset by peer"), f"the session with {PEER} ended: reset by peer"),
        (lambda i: i.break_off("a record came twice"), f"target {PEER} broke the protocol: a record came twice"),
    ]:
        initiator = started()
        batch = initiator.free([1, 2], 1)
        initiator.take_window(1)
        end(initiator)
        initiator.disconnected("later")
        assert (str(initiator.error), initiator.state) == (why, InitiatorState.CLOSED)
        assert (initiator.outstanding_count, initiator.has_unsent) == (0, False)
        assert batch.status.tolist() == [NO_STATUS, NO_STATUS]
        assert initiator.receive_completions(answers(request_id(1, 0))) == []
        assert str(initiator.error) == why
