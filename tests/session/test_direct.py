"""The direct modes end to end: blocks read and taken by one-sided operations, on every fabric."""

from __future__ import annotations

import time

import numpy as np
import pytest

from kbtp_core import _native
from kbtp_core.errors import DeadlineExceeded, SessionClosed
from kbtp_core.protocol import NO_STATUS, BlockState, Capability, DirectPolicy, Flag, Status
from kbtp_core.protocol.effects import Send
from kbtp_core.protocol.wire import Completion
from kbtp_core.session import BUFFER_ACCESS, InitiatorSession, TargetServer
from tests.session.conftest import BLOCK, World, buffer, soon, wait_until
from tests.session.test_fairness import FAR, Desk

ALL = Capability.DIRECT_LOAD | Capability.DIRECT_ALLOC | Capability.MASKED_ATOMICS
TRUSTED = DirectPolicy(load_domains=frozenset({"gpu"}), alloc_domains=frozenset({"gpu"}), ticket_timeout_s=5.0)


def trusted(world: World, server: TargetServer, capabilities: Capability = ALL, **wishes: int) -> InitiatorSession:
    return world.connect(server, trust_domain="gpu", capabilities=int(capabilities), **wishes)


@pytest.mark.parametrize("capabilities", [ALL, ALL & ~Capability.MASKED_ATOMICS], ids=["masked", "unmasked"])
def test_blocks_are_taken_written_bound_and_read_back_without_the_target(world: World, capabilities: Capability) -> None:
    server = world.ring(direct=TRUSTED)
    session = trusted(world, server, capabilities)
    assert session.target.capabilities == capabilities
    memory = buffer(16)
    memory[: 4 * BLOCK] = np.random.default_rng(2).integers(0, 256, 4 * BLOCK)
    region = session.register(memory)
    handles, places = 1000 + np.arange(4), np.arange(4) * BLOCK
    for life in range(6):  # more allocations than the ring has slots
        stored = session.store_direct(handles, 0, region, places, [BLOCK, 100, 1, BLOCK], deadline=soon()).wait()
        assert stored.ok, stored.status
        assert stored.generation.tolist() == [2 + 2 * life] * 4
        loaded = session.load_direct(handles, stored.generation, region, places + 8 * BLOCK, BLOCK, deadline=soon()).wait()
        assert loaded.ok, loaded.status
        assert loaded.data_length.tolist() == [BLOCK, 100, 1, BLOCK]
        assert (memory[8 * BLOCK : 9 * BLOCK] == memory[:BLOCK]).all()
        assert (memory[11 * BLOCK : 12 * BLOCK] == memory[3 * BLOCK : 4 * BLOCK]).all()
        assert session.load(handles, stored.generation, region, places + 12 * BLOCK, BLOCK, deadline=soon()).wait().ok
        assert (memory[15 * BLOCK :] == memory[3 * BLOCK : 4 * BLOCK]).all()
        assert session.free(handles, stored.generation, deadline=soon()).wait().ok
    server.check_integrity()


def test_a_direct_load_tells_the_same_failures_as_a_request(world: World) -> None:
    session = trusted(world, world.ring(direct=TRUSTED))
    region = session.register(buffer(8))
    session.store_direct([1000], 0, region, 0, 50, deadline=soon()).wait()
    session.store_direct([1001], 0, region, 0, 50, deadline=soon(), flags=Flag.NONE).wait()
    handles, generations, lengths = [1000, 1000, 1001, 1002, 999, 1000], [2, 3, 0, 0, 0, 0], [50, 50, 50, 50, 50, 49]
    direct = session.load_direct(handles, generations, region, 0, lengths, deadline=soon()).wait()
    asked = session.load(handles, generations, region, 0, lengths, deadline=soon()).wait()
    assert direct.status.tolist() == asked.status.tolist()
    assert direct.status[0] == Status.OK


def test_no_ticket_is_taken_beyond_the_quota(world: World) -> None:
    session = trusted(world, world.ring(direct=TRUSTED), quota=3)
    region = session.register(buffer(8))
    stored = session.store_direct(1000 + np.arange(5), 0, region, 0, BLOCK, deadline=soon()).wait()
    assert stored.status.tolist() == [Status.OK] * 3 + [Status.NO_SPACE] * 2
    assert session.free([1001], 0, deadline=soon()).wait().ok
    assert session.store_direct([1004], 0, region, 0, BLOCK, deadline=soon()).wait().ok


def test_a_ticket_whose_bind_failed_is_used_again(world: World) -> None:
    server = world.ring(direct=TRUSTED)
    session = trusted(world, server, quota=2)
    region = session.register(buffer(2))
    assert session.store_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait().ok
    again = session.store_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait()
    assert again.status.tolist() == [Status.ALREADY_BOUND]
    assert session.store_direct([1001], 0, region, 0, BLOCK, deadline=soon()).wait().ok
    server.check_integrity()


def test_an_abandoned_ticket_takes_direct_allocation_away_and_requests_go_on(world: World) -> None:
    server = world.ring(direct=DirectPolicy(alloc_domains=frozenset({"gpu"}), ticket_timeout_s=0.1))
    session = trusted(world, server, quota=2)
    region = session.register(buffer(2))
    assert session.store_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait().ok
    assert session.store_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait().status[0] == Status.ALREADY_BOUND  # keeps a ticket
    wait_until(lambda: server.target.pool.count(BlockState.TAKEN) == 0)  # type: ignore[union-attr]
    assert session.store_direct([1001], 0, region, 0, BLOCK, deadline=soon()).wait().status.tolist() == [Status.UNSUPPORTED]
    assert session.alloc_store([1001], 0, region, 0, BLOCK, deadline=soon()).wait().ok
    assert session.alloc_store([1002], 0, region, 0, BLOCK, deadline=soon()).wait().status.tolist() == [Status.NO_SPACE]
    assert session.free([1000, 1001], 0, deadline=soon()).wait().ok
    server.check_integrity()


def test_the_partition_returns_to_everybody_when_its_session_ends(world: World) -> None:
    server = world.ring(blocks=4, direct=TRUSTED)
    for _ in range(3):
        session = trusted(world, server, quota=4)
        region = session.register(buffer(4))
        assert session.store_direct(1000 + np.arange(3), 0, region, 0, BLOCK, deadline=soon()).wait().ok
        session.close()
        wait_until(lambda: server.session_count == 0)
        server.check_integrity()
        assert server.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
    plain = world.connect(server, quota=4)
    assert plain.alloc_store_inline(1000 + np.arange(4), 0, [b"x"] * 4, deadline=soon()).wait().ok


def test_whoever_is_not_listed_gets_no_direct_mode(world: World) -> None:
    server = world.ring(direct=TRUSTED)
    session = world.connect(server, trust_domain="other", capabilities=int(ALL))
    assert session.target.capabilities == 0
    assert session.target.direct.pool_stag == 0
    region = session.register(buffer(1))
    with pytest.raises(ValueError, match="did not grant DIRECT_LOAD"):
        session.load_direct([1000], 0, region, 0, BLOCK, deadline=soon())
    with pytest.raises(ValueError, match="did not grant DIRECT_ALLOC"):
        session.store_direct([1000], 0, region, 0, BLOCK, deadline=soon())


def test_a_block_that_its_writer_can_still_change_is_served_only_inside_its_trust_domain(world: World) -> None:
    server = world.ring(direct=TRUSTED)
    writer, friend, stranger = trusted(world, server), trusted(world, server), world.connect(server, trust_domain="other")
    region = writer.register(buffer(1))
    assert writer.store_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait().ok
    assert friend.load([1000], 0, friend.register(buffer(1)), 0, BLOCK, deadline=soon()).wait().ok
    refused = stranger.load([1000], 0, stranger.register(buffer(1)), 0, BLOCK, deadline=soon()).wait()
    assert refused.status.tolist() == [Status.NOT_PERMITTED]


def test_stags_are_worth_nothing_on_another_session_and_allow_only_what_they_are_for(world: World) -> None:
    server = world.ring(direct=TRUSTED)
    owner = trusted(world, server)
    for thief in (trusted(world, server), owner):
        region = thief.register(buffer(1))
        ack = thief._core.protocol.ack
        assert ack is not None
        # Another session's Pool STag, or one's own Head STag for reading: both end the connection.
        stag = owner.target.direct.pool_stag if thief is not owner else owner.target.direct.head_stag
        direct = ack.direct.__class__(**{**ack.direct.__dict__, "table_stag": stag})
        thief._core.protocol.ack = ack.__class__(**{**ack.__dict__, "direct": direct})
        with pytest.raises(SessionClosed):
            thief.load_direct([1000], 0, region, 0, BLOCK, deadline=soon()).wait()
        assert thief is owner or owner.is_open
    wait_until(lambda: server.session_count == 0)
    server.check_integrity()


def test_checksums_are_of_what_was_stored(world: World) -> None:
    session = world.connect(world.ring(crc32c=_native.crc32c), capabilities=int(Capability.CHECKSUM))
    memory = buffer(2)
    memory[:BLOCK] = np.random.default_rng(3).integers(0, 256, BLOCK)
    region = session.register(memory)
    stored = session.alloc_store([1000], 0, region, 0, BLOCK, deadline=soon()).wait()
    assert stored.checksum.tolist() == [_native.crc32c(memory[:BLOCK].tobytes())]
    for _ in range(2):
        loaded = session.load([1000], 0, region, BLOCK, BLOCK, deadline=soon()).wait()
        assert loaded.checksum.tolist() == [_native.crc32c(memory[BLOCK:].tobytes())]
    assert session.free([1000], 0, deadline=soon()).wait().checksum.tolist() == [0]


def test_without_the_capability_the_checksum_is_zero_and_records_are_never_offered(world: World) -> None:
    wishes = Capability.CHECKSUM | Capability.RECORD_COMPLETION
    session = world.connect(world.ring(), capabilities=int(wishes))
    assert session.target.capabilities == 0
    assert session.alloc_store_inline([1000], 0, [b"x"], deadline=soon()).wait().checksum.tolist() == [0]


def test_a_direct_batch_has_a_deadline_too(world: World) -> None:
    server = world.ring(direct=TRUSTED)
    session = trusted(world, server)
    region = session.register(buffer(1))
    batch = session.load_direct([1000], 0, region, 0, BLOCK, deadline=time.monotonic() - 1)
    with pytest.raises(DeadlineExceeded, match="1 of 1 blocks were not reached directly"):
        batch.wait()
    assert not region.is_valid


def test_a_goodbye_between_write_and_bind_fails_the_batch_and_nothing_else() -> None:
    desk = Desk(direct=TRUSTED)
    core = desk.join(trust_domain="gpu", capabilities=int(ALL), quota=2)
    region = core.pd.register(buffer(1), BUFFER_ACCESS)
    asked = core.submit(core.protocol.load([1000], 0, region.stag, 0, BLOCK), None, FAR)  # keeps the session from ending at once
    pending = core.store_direct([1000], 0, region, 0, BLOCK, FAR, 0.0)
    desk.core.shut_down(0.0)
    for _ in range(8):
        desk.listen_all()
    assert not asked.done
    assert pending.done
    assert isinstance(pending.error, SessionClosed)
    assert pending.status.tolist() == [NO_STATUS]
    for _ in range(4):
        desk.turn()
        desk.listen_all()
    assert asked.status.tolist() == [Status.SHUTTING_DOWN]
    desk.target.check_integrity()


def test_a_goodbye_fences_a_direct_batch_that_is_under_way() -> None:
    desk = Desk(direct=TRUSTED)
    core = desk.join(trust_domain="gpu", capabilities=int(ALL), quota=2)
    region = core.pd.register(buffer(1), BUFFER_ACCESS)
    pending = core.load_direct(np.full(300, 1000), 0, region, 0, BLOCK, FAR, 0.0)  # more than may be outstanding at once
    desk.core.shut_down(0.0)
    desk.listen_all()
    assert pending.done
    assert isinstance(pending.error, SessionClosed)
    assert not region.is_valid


def test_a_broken_protocol_fences_the_batches_that_lack_answers() -> None:
    desk = Desk(direct=TRUSTED)
    core = desk.join(trust_domain="gpu", capabilities=int(ALL), quota=2)
    asked, direct = (core.pd.register(buffer(1), BUFFER_ACCESS) for _ in range(2))
    unanswered = core.submit(core.protocol.load([1000], 0, asked.stag, 0, BLOCK), asked, FAR)
    loading = core.load_direct(np.full(300, 1000), 0, direct, 0, BLOCK, FAR, 0.0)
    (connection,) = desk.core._connections.values()
    connection.add([Send(Completion(request_id=999, handle=1000, generation=0, status=0).encode(), answers=0)], 0.0)
    desk.core.flush()
    desk.listen_all()
    assert unanswered.done
    assert loading.done
    assert isinstance(unanswered.error, SessionClosed)
    assert "broke the protocol" in str(unanswered.error)
    assert not asked.is_valid
    assert not direct.is_valid
