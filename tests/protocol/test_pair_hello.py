"""HELLO between a linked initiator and target: what is granted, who is refused, and who has to prove what."""

from __future__ import annotations

import pytest

from kbtp_core.errors import SessionClosed, SessionRefused
from kbtp_core.protocol.constants import Opcode, Status
from kbtp_core.protocol.effects import Close
from kbtp_core.protocol.hello import Hello, HelloAck
from kbtp_core.protocol.initiator import InitiatorState
from kbtp_core.protocol.target import TargetLimits
from kbtp_core.protocol.target_session import TargetState
from kbtp_core.protocol.wire import Completion, Header, parse
from tests.protocol.world import Link, draw, lent_world, ring_world


def error_of(link: Link) -> str:
    assert link.initiator.state is InitiatorState.CLOSED
    return str(link.initiator.error)


def test_a_session_is_granted_what_it_asks_for_within_limits() -> None:
    world = ring_world(blocks=4, handles=16, limits=TargetLimits(outstanding=8, inline_bytes=100))
    first = world.link(quota=3, handles=10, outstanding=100, inline_bytes=50).greet().initiator
    second = world.link(quota=3, handles=10).greet().initiator
    assert first.ack is not None
    assert second.ack is not None
    assert (first.ack.quota, first.ack.handle_base, first.ack.handle_count) == (3, 100, 10)
    assert (first.ack.outstanding, first.ack.inline_bytes) == (8, 50)
    assert (second.ack.quota, second.ack.handle_base, second.ack.handle_count) == (1, 110, 6)
    assert (first.ack.table_base, first.ack.table_count) == (100, 16)
    assert (first.ack.block_bytes, first.ack.block_count, first.ack.incarnation) == (64, 4, 0xABCDEF)
    assert (first.ack.capabilities, first.ack.target_name) == (0, "target")


def test_quota_and_handles_return_when_a_session_ends() -> None:
    world = ring_world(blocks=4, handles=16)
    for _ in range(3):
        link = world.link(quota=4, handles=16).greet()
        assert link.initiator.ack is not None
        assert (link.initiator.ack.quota, link.initiator.ack.handle_count) == (4, 16)
        link.disconnect()
    assert not world.target.sessions


def test_a_lent_pool_grants_no_quota_and_all_handles_but_the_reserved() -> None:
    ack = lent_world(handles=16, reserved=2).link(quota=4, handles=4).greet().initiator.ack
    assert ack is not None
    assert (ack.quota, ack.handle_base, ack.handle_count) == (0, 102, 14)


def test_with_a_key_both_sides_are_proved_with_a_second_hello() -> None:
    world = ring_world(secrets={"team": b"key"})
    link = world.link(trust_domain="team", secret=b"key").greet()
    assert link.initiator.state is InitiatorState.READY
    assert link.statuses == [Status.UNAUTHENTICATED, Status.OK]
    assert link.initiator.ack is not None
    assert link.initiator.ack.nonce == draw(16)


@pytest.mark.parametrize(("domain", "secret"), [("team", b"wrong"), ("other", b"key")])
def test_a_wrong_proof_closes_the_connection(domain: str, secret: bytes) -> None:
    link = ring_world(secrets={"team": b"key"}).link(trust_domain=domain, secret=secret).greet()
    assert "10.0.0.1:7400 answered HELLO with UNAUTHENTICATED: the secrets differ" in error_of(link)
    assert link.closed_because == f"a wrong proof for trust domain {domain!r}"
    assert link.session.state is TargetState.CLOSED


def test_an_initiator_without_a_key_is_told_which_one_it_needs() -> None:
    link = ring_world(secrets={"team": b"key"}).link(trust_domain="team").greet()
    assert "UNAUTHENTICATED. Configure the secret of trust domain 'team'" in error_of(link)


def test_an_initiator_with_a_key_refuses_a_target_that_proves_nothing() -> None:
    link = ring_world().link(trust_domain="team", secret=b"key").greet()
    assert "without the proof" in error_of(link)
    assert isinstance(link.initiator.error, SessionRefused)


def test_a_second_hello_without_a_proof_is_a_failed_proof() -> None:
    world = ring_world(secrets={"team": b"key"})
    link = world.link(trust_domain="team")
    hello = Hello(0, 1, trust_domain="team").encode()
    link.session.receive(hello, 0.0)
    answer, close = link.session.receive(hello, 0.0)
    assert parse(answer.data).status == Status.UNAUTHENTICATED  # type: ignore[union-attr]
    assert "wrong proof" in close.reason  # type: ignore[union-attr]


def test_only_a_refusal_for_want_of_a_proof_has_a_nonce() -> None:
    for second, status, nonce in [
        (Hello(1, 1, trust_domain="team", proof=bytes(32)).encode(), Status.UNAUTHENTICATED, draw(16)),
        (Hello(1, 1, trust_domain="team").encode() + b"x", Status.MALFORMED, bytes(16)),
    ]:
        link = ring_world(secrets={"team": b"key"}).link(trust_domain="team")
        (first,) = link.session.receive(Hello(1, 1, trust_domain="team").encode(), 0.0)
        assert first.data == HelloAck(1, Status.UNAUTHENTICATED, nonce=draw(16)).encode()  # type: ignore[union-attr]
        answer, close = link.session.receive(second, 0.0)
        assert answer.data == HelloAck(1, status, nonce=nonce).encode()  # type: ignore[union-attr]
        assert isinstance(close, Close)


def test_an_unknown_version_is_answered_with_the_highest_that_is_spoken() -> None:
    link = ring_world().link()
    hello = bytearray(link.initiator.hello())
    hello[0] = 9
    answer, _ = link.session.receive(bytes(hello), 0.0)
    assert parse(answer.data) == Completion(0, 0, 0, Status.VERSION, data_length=1)  # type: ignore[union-attr]
    short = ring_world().link().session.receive(bytes(hello[:24]), 0.0)  # what follows the header may be different there
    assert short == [answer, Close("HELLO of version 9")]
    link.initiator.receive(answer.data)  # type: ignore[union-attr]
    assert "VERSION; the highest that it speaks is 1" in error_of(link)


def test_a_block_size_that_the_target_has_not_is_refused() -> None:
    link = ring_world(block_bytes=64).link(block_bytes=128).greet()
    assert "UNSUPPORTED: it has no pool of the block size" in error_of(link)
    assert link.closed_because == "no pool of blocks of 128 octets"


def test_a_trust_domain_that_is_not_served_is_refused() -> None:
    link = ring_world(trust_domains=frozenset({"a"})).link(trust_domain="b").greet()
    assert "NOT_PERMITTED: it does not serve this trust domain" in error_of(link)
    assert link.closed_because == "trust domain 'b' is not served"


def test_a_target_that_shuts_down_admits_nobody() -> None:
    world = ring_world()
    world.target.shut_down()
    link = world.link().greet()
    assert "SHUTTING_DOWN" in error_of(link)
    assert link.closed_because == "the target shuts down"


def test_a_malformed_hello_is_answered_with_a_zeroed_body_and_closes() -> None:
    link = ring_world().link()
    answer, close = link.session.receive(Hello(42, 1).encode() + b"x", 0.0)
    assert answer.data == HelloAck(42, Status.MALFORMED).encode()  # type: ignore[union-attr]
    assert answer.data[24:] == bytes(136)  # type: ignore[union-attr]
    assert "after the proof" in close.reason  # type: ignore[union-attr]


@pytest.mark.parametrize("octets", [b"", b"\x01", Header(Opcode.FREE, 1).encode(), b"\xff" * 40])
def test_anything_but_hello_first_closes_the_connection(octets: bytes) -> None:
    link = ring_world().link()
    link.deliver(octets)
    assert link.closed_because == "the first message is no HELLO"
    assert link.statuses == []


def test_a_second_hello_on_a_ready_session_closes_it() -> None:
    link = ring_world().link().greet()
    link.deliver(Hello(1, 1).encode())
    assert link.closed_because == "a second HELLO"


@pytest.mark.parametrize("change", [{"outstanding": 17}, {"outstanding": 1 << 31}, {"inline_bytes": 257}, {"inline_bytes": 0xFFFFFFFF}])
def test_an_initiator_rejects_a_hello_ack_that_grants_more_than_was_asked_for(change: dict[str, int]) -> None:
    link = ring_world().link(outstanding=16, inline_bytes=256)
    link.initiator.hello()
    fields = {"outstanding": 16, "block_bytes": 64, "incarnation": 5, "inline_bytes": 256, **change}
    link.initiator.receive(HelloAck(0, Status.OK, **fields).encode())  # type: ignore[arg-type]
    assert "grants more than was asked for" in error_of(link)
    assert link.initiator.ack is None


@pytest.mark.parametrize("change", [{"outstanding": 0}, {"block_bytes": 0}, {"incarnation": 0}, {"capabilities": 1}])
def test_an_initiator_rejects_a_hello_ack_that_makes_no_sense(change: dict[str, int]) -> None:
    link = ring_world().link()
    link.initiator.hello()
    fields = {"outstanding": 1, "block_bytes": 64, "incarnation": 5, **change}
    link.initiator.receive(HelloAck(0, Status.OK, **fields).encode())  # type: ignore[arg-type]
    assert "grants nothing, or more than was asked for" in error_of(link)
    assert isinstance(link.initiator.error, SessionClosed)
