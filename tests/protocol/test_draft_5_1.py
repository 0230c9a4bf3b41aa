"""Draft section 5.1, Common Header. Each test quotes the sentence that it checks."""

from __future__ import annotations

import pytest

from kbtp_core.protocol.constants import Capability, Flag, Opcode, Status
from kbtp_core.protocol.wire import CompletionDescriptor, DataDescriptor, Free, Header, Load, parse
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, ring_world


def test_the_header_is_24_octets_of_seven_fields() -> None:
    """Version is 1."""
    octets = Header(Opcode.FREE, 0x1122334455667788, 0x99AABBCCDDEEFF00, 0x1234, flags=0x0004, status=0x0056).encode()
    assert octets.hex() == "01" + "06" + "0004" + "1122334455667788" + "99aabbccddeeff00" + "1234" + "0056"
    link = ready(ring_world())
    (answer,) = link.session.receive(b"\2" + octets[1:], 0.0)
    assert parse(answer.data).status == Status.MALFORMED  # type: ignore[union-attr]


def test_the_request_id_is_echoed() -> None:
    """Request ID is chosen by the initiator and echoed in the completion."""
    link = ready(ring_world())
    for request_id in (0, 7, (1 << 64) - 1):
        (answer,) = link.session.receive(Free(request_id, 100, 0).encode(), 0.0)
        assert parse(answer.data).request_id == request_id  # type: ignore[union-attr]


def test_generation_zero_means_any() -> None:
    """Generation in a request is the generation the initiator expects (zero means "any")"""
    link = ready(ring_world())
    put(link, 100, b"x")
    batch = link.initiator.load([100, 100, 100], [0, 2, 1], STAG, 0, 64)
    link.run(batch)
    assert batch.status.tolist() == [Status.OK, Status.OK, Status.STALE_GENERATION]


def test_a_completion_has_the_entrys_current_generation() -> None:
    """in a completion it is the entry's current generation."""
    link = ready(ring_world())
    seen = []
    for batch in (
        link.initiator.load([100], 0, STAG, 0, 64),
        link.initiator.alloc_store_inline([100], 0, [b"x"]),
        link.initiator.load([100], 9, STAG, 0, 64),
        link.initiator.free([100], 0),
    ):
        link.run(batch)
        seen.append(int(batch.generation[0]))
    assert seen == [1, 2, 2, 3]


def test_status_is_zero_in_requests() -> None:
    """Status is zero in requests."""
    link = ready(ring_world())
    batches = [link.initiator.load([100], 0, STAG, 0, 64), link.initiator.free([100], 0), link.initiator.bind([100], 0, 0, 1, 0)]
    assert all(batch.messages[0, 22:24].tolist() == [0, 0] for batch in batches)


@pytest.mark.parametrize(
    ("opcode", "allowed"),
    [
        (Opcode.LOAD, Flag.RECORD | Flag.INVALIDATE | Flag.ALLOW_UNSEALED),
        (Opcode.STORE, Flag.INLINE | Flag.SEAL | Flag.RECORD | Flag.INVALIDATE),
        (Opcode.ALLOC_STORE, Flag.INLINE | Flag.SEAL | Flag.RECORD | Flag.INVALIDATE),
        (Opcode.FREE, Flag.RECORD),
        (Opcode.BIND, Flag.SEAL),
        (Opcode.GOODBYE, Flag.NONE),
    ],
)
def test_a_flag_that_an_opcode_does_not_define_is_malformed(opcode: Opcode, allowed: Flag) -> None:
    """Flags are interpreted per opcode"""
    for bit in range(16):
        if 1 << bit & allowed:
            continue
        link = ready(ring_world())
        (answer,) = link.session.receive(Header(opcode, 9, 100, flags=1 << bit).encode() + bytes(16), 0.0)
        assert parse(answer.data).status == Status.MALFORMED  # type: ignore[union-attr]


def test_inline_says_that_data_follows() -> None:
    """0x0001 INLINE: data follows the request."""
    world = ring_world()
    link = ready(world)
    batch = link.initiator.alloc_store_inline([100], 0, [b"data"])
    assert batch.messages[0, 40:44].tobytes() == b"data"
    link.run(batch)
    assert world.block(0, 4) == b"data"


def test_seal_seals_after_the_store() -> None:
    """0x0002 SEAL: seal the block after the store."""
    world = ring_world()
    link = ready(world)
    put(link, 100, b"a", Flag.NONE)
    assert not world.target.table.entry(0).is_sealed
    link.run(link.initiator.store_inline([100], 0, [b"b"], Flag.SEAL))
    assert world.target.table.entry(0).is_sealed


def test_record_asks_for_a_completion_record() -> None:
    """0x0004 RECORD: complete with a completion record (Section 6.5); a Completion Descriptor is present."""
    octets = Load(1, 2, 3, DataDescriptor(4, 5, 6), Flag.RECORD, CompletionDescriptor(7, 8)).encode()
    assert len(octets) == 56
    link = ready(ring_world())
    (answer,) = link.session.receive(octets[:40], 0.0)
    assert parse(answer.data).status == Status.MALFORMED  # type: ignore[union-attr]
    record = ring_world().link(capabilities=Capability.RECORD_COMPLETION, offers=Capability.RECORD_COMPLETION).greet()
    effects = record.session.receive(octets, 0.0)
    assert type(effects[0]).__name__ == "Record"


def test_invalidate_completes_with_send_with_invalidate() -> None:
    """0x0008 INVALIDATE: the target completes with Send with Invalidate [RFC5040], invalidating the STag of the initiator's Data
    Descriptor."""
    link = ready(ring_world())
    put(link, 100, b"x")
    link.run(link.initiator.load([100, 101], 0, [STAG, STAG + 1], 0, 64, Flag.INVALIDATE))
    link.run(link.initiator.store([101], 0, STAG + 2, 0, 4, Flag.INVALIDATE))
    link.run(link.initiator.alloc_store([102], 0, STAG + 3, 0, 4, Flag.INVALIDATE))
    assert link.invalidated == [STAG, STAG + 1, STAG + 2, STAG + 3]


def test_allow_unsealed_lets_an_open_block_be_loaded() -> None:
    """0x0010 ALLOW_UNSEALED: a load may return an unsealed block."""
    link = ready(ring_world())
    put(link, 100, b"open", Flag.NONE)
    put(link, 101, b"sealed", Flag.SEAL)
    plain, allowed = (link.initiator.load([100, 101], 0, STAG, 0, 64, flags) for flags in (Flag.NONE, Flag.ALLOW_UNSEALED))
    link.run(plain, allowed)
    assert plain.status.tolist() == [Status.NOT_SEALED, Status.OK]
    assert allowed.status.tolist() == [Status.OK, Status.OK]
