"""Many LOADs at once are answered as one by one, and hold their blocks as long."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.protocol.constants import Flag, Status
from kbtp_core.protocol.effects import LoadMany, Send, Write
from kbtp_core.protocol.pool import BlockState
from kbtp_core.protocol.wire import DataDescriptor, Load
from tests.protocol.test_pair_requests import put, ready
from tests.protocol.world import STAG, Link, World, ring_world

ROOM = DataDescriptor(STAG, 0, 64)
LOADS = [
    Load(1, 100, 0, ROOM),
    Load(2, 100, 2, DataDescriptor(STAG, 64, 6)),
    Load(3, 100, 3, ROOM),
    Load(4, 100, 2, DataDescriptor(STAG, 128, 5)),
    Load(5, 101, 0, ROOM),
    Load(6, 103, 0, ROOM),
    Load(7, 103, 9, ROOM),
    Load(8, 99, 0, ROOM),
    Load(9, (1 << 64) - 1, 0, ROOM),
    Load(10, 102, 0, DataDescriptor(STAG, 192, 64), Flag.INVALIDATE),
    Load(11, 115, 0, ROOM, Flag.INVALIDATE),
    Load(12, 116, 0, ROOM),  # the first handle behind the table
]


def filled() -> tuple[World, Link]:
    world = ring_world(blocks=4)
    link = ready(world)
    put(link, 100, b"sealed")
    put(link, 101, b"open", Flag.NONE)
    put(link, 102, b"other")
    return world, link


def rows(loads: list[Load]) -> np.ndarray:
    return np.frombuffer(b"".join(load.encode() for load in loads), np.uint8).reshape(-1, 40)


def test_many_loads_are_answered_as_one_by_one() -> None:
    _, link = filled()
    (many,) = link.session.receive_loads(rows(LOADS), 0.0)
    assert isinstance(many, LoadMany)
    _, other = filled()
    for i, load in enumerate(LOADS):
        effects = other.session.receive(load.encode(), 0.0)
        sent = effects[-1]
        assert isinstance(sent, Send)
        assert many.messages[i].tobytes() == sent.data
        assert (sent.invalidate_stag is not None) == bool(many.requests["flags"][i])
        if len(effects) == 2:
            write = effects[0]
            assert isinstance(write, Write)
            assert (write.block_offset, write.length) == (int(many.block_offsets[i]), int(many.lengths[i]))
        else:
            assert many.lengths[i] == 0


def test_blocks_of_many_loads_are_not_given_back_before_the_last_write_is_done() -> None:
    world, link = filled()
    (many,) = link.session.receive_loads(rows(LOADS), 0.0)
    assert isinstance(many, LoadMany)
    assert world.target.reading[[0, 2]].tolist() == [2, 1]
    link.initiator.free([102], 0)
    link.run()
    assert world.target.pool.count(BlockState.DRAINING) == 1  # type: ignore[union-attr]
    link.session.write_done(many.token, True, 0.0)
    world.tick()
    assert world.target.pool.count(BlockState.DRAINING) == 0  # type: ignore[union-attr]
    world.target.check_integrity()


def test_a_lost_connection_ends_the_reading_of_many_loads() -> None:
    world, link = filled()
    link.session.receive_loads(rows(LOADS), 0.0)
    link.disconnect()
    assert not world.target.reading.any()
    assert world.target.pool.count(BlockState.FREE) == 4  # type: ignore[union-attr]
    world.target.check_integrity()


@pytest.mark.parametrize(
    "odd",
    [
        Load(1, 100, 0, ROOM),  # a Request ID twice
        Load(20, 100, 0, ROOM, Flag.ALLOW_UNSEALED),
        Load(20, 100, 0, ROOM, Flag.SEAL),
    ],
    ids=["id twice", "unsealed allowed", "undefined flag"],
)
def test_a_run_with_an_odd_message_is_taken_one_by_one(odd: Load) -> None:
    _, link = filled()
    effects = link.session.receive_loads(rows([Load(1, 100, 0, ROOM), odd]), 0.0)
    assert not any(isinstance(effect, LoadMany) for effect in effects)
    assert sum(isinstance(effect, Send) for effect in effects) == 2


def test_loads_behind_a_store_of_the_same_handle_wait_in_line() -> None:
    world, link = filled()
    world.hold_operations = True
    stored = link.initiator.store([101], 0, STAG, 0, 4, Flag.SEAL)
    link.run()
    assert link.session.receive_loads(rows([Load(70, 101, 0, ROOM), Load(71, 101, 0, ROOM)]), 0.0) == []
    effects = link.session.read_done(link.held.pop().token, True, 0.0)
    assert [type(effect) for effect in effects] == [Send, Write, Send, Write, Send]
    assert stored.count == 1
    world.target.check_integrity()


def test_a_target_that_shuts_down_serves_no_run() -> None:
    world, link = filled()
    world.target.shut_down()
    link.session.take_effects()
    effects = link.session.receive_loads(rows(LOADS[:2]), 0.0)
    assert [effect.data[23] for effect in effects if isinstance(effect, Send)] == [Status.SHUTTING_DOWN] * 2
