"""What an executor has in progress, and what must wait for it (native/executor_session.hpp, rules 1 to 3)."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import Flag, Status
from kbtp_core.protocol.pool import BlockPool, BlockState
from kbtp_core.protocol.wire import AllocStore, DataDescriptor, Free, Goodbye, Load, Store
from tests.executor.twins import BASE, BLOCK, Connection, Side, make_side

STAG = 0x77


@pytest.fixture
def side() -> Side:
    return make_side(4, 8, has_executor=True)


def connect(side: Side, quota: int = 4) -> Connection:
    return side.connect(quota, 8, np.arange(1024, dtype=np.uint16).astype(np.uint8))


def fetched(request_id: int, handle: int = BASE, *, seal: bool = True, offset: int = 0) -> bytes:
    """An ALLOC_STORE whose data the target has to read."""
    return AllocStore(request_id, handle, 0, DataDescriptor(STAG, offset, BLOCK), Flag.SEAL if seal else 0).encode()


def inlined(request_id: int, data: bytes, handle: int = BASE, *, flags: int = 0) -> bytes:
    return AllocStore(request_id, handle, 0, DataDescriptor(0, 0, len(data)), flags | Flag.INLINE, None, data).encode()


def load(request_id: int, handle: int = BASE, flags: int = 0) -> bytes:
    return Load(request_id, handle, 0, DataDescriptor(STAG, 512, BLOCK), flags).encode()


def statuses(connection: Connection) -> dict[int, int]:
    return {int.from_bytes(data[4:12], "big"): int.from_bytes(data[22:24], "big") for data, _ in connection.answers}


def states(side: Side) -> list[int]:
    pool = side.target.pool
    assert isinstance(pool, BlockPool)
    return pool.states.tolist()


def test_a_request_behind_an_unfinished_store_of_its_handle_takes_effect_after_it(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(load(2))
    assert not peer.answers, "the block has no data yet"
    assert states(side)[0] == BlockState.TAKEN
    peer.finish_one()
    peer.finish_one()
    assert statuses(peer) == {1: Status.OK, 2: Status.OK}
    assert peer.memory[512 : 512 + BLOCK].tobytes() == bytes(range(BLOCK))


def test_requests_for_other_handles_pass(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(inlined(2, b"quick", BASE + 1))
    assert statuses(peer) == {2: Status.OK}
    assert peer.native_count == 2


def test_what_only_the_target_can_answer_waits_for_all_that_is_unsettled_and_keeps_its_place(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(load(2, BASE + 5))  # not bound: an error, which the target answers
    peer.send(inlined(3, b"x", BASE + 2))  # plain, but behind the one that waits
    assert not peer.answers
    peer.finish_one()
    assert list(statuses(peer).items()) == [(1, Status.OK), (2, Status.NOT_BOUND), (3, Status.OK)]
    assert peer.native_count == 1


def test_a_request_id_of_an_unfinished_store_is_malformed_and_not_run(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(inlined(1, b"x", BASE + 1))
    assert statuses(peer) == {1: Status.MALFORMED}
    assert not side.target.table.entry(1).is_valid
    peer.finish_one()
    assert [int.from_bytes(data[22:24], "big") for data, _ in peer.answers] == [Status.MALFORMED, Status.OK]


def test_a_store_waits_for_a_load_of_the_old_content(side: Side) -> None:
    peer = connect(side)
    peer.send(inlined(1, b"o" * BLOCK))
    peer.send(load(2, flags=Flag.ALLOW_UNSEALED))
    peer.send(Store(3, BASE, 0, DataDescriptor(0, 0, BLOCK), Flag.INLINE, None, b"n" * BLOCK).encode())
    assert statuses(peer).keys() == {1, 2}
    peer.finish_one()
    assert statuses(peer).keys() == {1, 2, 3}
    assert peer.memory[512 : 512 + BLOCK].tobytes() == b"o" * BLOCK
    assert side.memory[:BLOCK].tobytes() == b"n" * BLOCK


def test_a_store_leaves_a_block_alone_that_the_target_itself_is_still_sending(side: Side) -> None:
    peer = connect(side)
    peer.send(inlined(1, b"o" * BLOCK))
    peer.send(load(2, BASE + 5))  # the target answers this one
    peer._apply(peer.session.receive(load(3, flags=Flag.ALLOW_UNSEALED), 0.0))  # as if it had come behind it
    assert statuses(peer)[3] == Status.OK
    peer.send(Store(4, BASE, 0, DataDescriptor(0, 0, BLOCK), Flag.INLINE, None, b"n" * BLOCK).encode())
    peer.finish_one()
    assert peer.memory[512 : 512 + BLOCK].tobytes() == b"o" * BLOCK
    assert statuses(peer)[4] == Status.OK


def test_a_block_that_is_being_read_is_not_freed_before_its_reader_has_ended(side: Side) -> None:
    writer, reader = side.connect(4, 4, np.zeros(1024, np.uint8)), side.connect(0, 0, np.zeros(1024, np.uint8))
    writer.send(inlined(1, b"o" * BLOCK, flags=Flag.SEAL))
    reader.send(load(1))
    writer.send(Free(2, BASE, 0).encode())
    assert statuses(writer).keys() == {1}
    writer.send(inlined(3, b"n" * BLOCK, BASE + 1))
    reader.finish_one()
    assert reader.memory[512 : 512 + BLOCK].tobytes() == b"o" * BLOCK
    assert statuses(writer) == {1: Status.OK, 2: Status.OK, 3: Status.OK}


def test_a_free_gives_block_quota_and_generation_back_at_once(side: Side) -> None:
    peer = connect(side, quota=1)
    for round_ in range(3):
        peer.send(inlined(2 * round_, b"x"))
        peer.send(Free(2 * round_ + 1, BASE, 0).encode())
    assert set(statuses(peer).values()) == {Status.OK}
    assert peer.native_count == 6
    assert side.target.table.entry(0).generation == 7
    assert states(side) == [BlockState.FREE] * 4


def test_freed_blocks_are_cleared_where_domains_share_a_pool(side: Side) -> None:
    peer = connect(side)
    peer.send(inlined(1, b"secret", flags=Flag.SEAL))
    assert side.memory[:6].tobytes() == b"secret"
    peer.send(Free(2, BASE, 0).encode())
    assert peer.native_count == 2
    assert not side.memory.any()


def test_a_connection_that_ends_in_the_middle_of_a_store_loses_no_block(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(fetched(2, BASE + 1))
    peer.send(load(3, BASE + 7))  # withheld
    peer.disconnect()
    assert states(side) == [BlockState.FREE] * 4
    assert not side.target.sessions
    side.target.check_integrity()


def test_a_goodbye_behind_an_unfinished_store_waits_for_it(side: Side) -> None:
    peer = connect(side)
    peer.send(fetched(1))
    peer.send(Goodbye(9).encode())
    assert peer.is_open
    peer.finish_one()
    assert statuses(peer) == {1: Status.OK}
    assert not peer.is_open, "the target ends the session once everything is answered"


def test_nothing_is_run_for_a_session_whose_messages_wait_for_the_target(side: Side) -> None:
    peer = connect(side)
    assert peer.native is not None
    assert peer.native.take(inlined(1, b"x"), True, True) is None
    assert peer.native.take(inlined(1, b"x"), False, True) is not None


def test_stores_that_have_to_be_read_need_a_peer_that_answers_reads(side: Side) -> None:
    peer = connect(side)
    assert peer.native is not None
    assert peer.native.take(fetched(1), False, False) is None
    assert states(side) == [BlockState.FREE] * 4


def test_an_executor_that_was_stopped_runs_nothing_more(side: Side) -> None:
    peer = connect(side)
    assert side.executor is not None
    side.executor.stop()
    side.target.is_shutting_down = True
    peer.send(inlined(1, b"x"))
    assert statuses(peer) == {1: Status.SHUTTING_DOWN}


def test_a_session_may_store_into_its_own_handles_only(side: Side) -> None:
    first, second = (side.connect(2, 4, np.zeros(1024, np.uint8)) for _ in range(2))
    first.send(inlined(1, b"x", flags=0))
    for request_id, message in enumerate((inlined(2, b"y"), inlined(3, b"y", BASE + 1), Free(4, BASE, 0).encode()), 2):
        second.send(message)
        assert statuses(second)[request_id] == Status.NOT_PERMITTED
    assert second.native_count == 0


def test_no_more_blocks_are_taken_than_the_quota(side: Side) -> None:
    peer = connect(side, quota=2)
    for index in range(3):
        peer.send(inlined(index, b"x", BASE + index))
    assert statuses(peer) == {0: Status.OK, 1: Status.OK, 2: Status.NO_SPACE}


def test_a_session_is_idle_only_while_it_owns_no_block_not_even_for_a_store_under_way(side: Side) -> None:
    peer = connect(side)
    assert peer.session.is_idle
    peer.send(fetched(1))
    assert not peer.session.is_idle
    peer.finish_one()
    assert not peer.session.is_idle
    peer.send(Free(2, BASE, 0).encode())
    assert peer.session.is_idle
    assert peer.native_count == 2
