"""A pull moves exactly the blocks that were offered, or says why not; and nobody's memory is touched after it is reported."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from kbtp_core.errors import ConfigError
from kbtp_core.transfer import FREE_ONLY, HandleLedger, PullSource
from tests.transfer.world import DESCRIPTOR, ENTRIES, Engine, until, world


def test_offered_blocks_arrive_in_their_places_and_nothing_else_changes() -> None:
    with world() as w:
        before = [w.decode.block(i) for i in range(8)]
        w.pull("r", w.offer("r", [5, 0, 3]), [2, 7, 4])
        result = w.result()
        assert (result.ok, result.error, result.blocks, result.bytes) == (True, "", 3, 3 * 3 * 1024)
        expected = {2: w.prefill.block(5), 7: w.prefill.block(0), 4: w.prefill.block(3)}
        assert [w.decode.block(i) for i in range(8)] == [expected.get(i, before[i]) for i in range(8)]


def test_prefill_gets_its_blocks_back_once_they_were_pulled() -> None:
    with world() as w:
        w.pull("r", w.offer("r", [1, 2]), [1, 2])
        assert w.result().ok
        assert w.released() == ["r"]
        assert w.source.stats()["requests_on_offer"] == 0


def test_a_pull_that_comes_before_the_offer_waits_for_it() -> None:
    with world() as w:
        w.pull("first", w.offer("first", [0]), [0])
        assert w.result().ok  # there is a session now
        offered = w.ledger.take(2)
        w.pull("early", offered, [0, 1])
        until(lambda: w.sink.stats()["loads_repeated"] > 2, 5.0)
        assert w.sink.take_finished() == []
        w.source.offer("early", *offered, np.array([6, 7]))
        assert w.result().ok
        assert w.decode.block(0) == w.prefill.block(6)


def test_an_offer_that_never_comes_fails_at_the_deadline_and_not_after_it() -> None:
    with world() as w:
        before = w.decode.block(3)
        w.pull("never", w.ledger.take(1), [3], timeout_s=0.3)
        result = w.result(1.0)
        assert not result.ok
        assert "1 of 1 blocks did not arrive" in result.error or "not answered in time" in result.error
        assert 0.3 <= result.seconds < 0.4
        assert w.decode.block(3) == before


def test_a_late_pull_is_refused_after_the_lease_ran_out_and_the_blocks_were_given_away() -> None:
    with world(lease_s=10.0) as w:
        late = w.offer("late", [4])
        w.now[0] = 10.5
        assert w.released() == ["late"]
        for layer in w.prefill.layers:
            layer[4] = 0xDD  # somebody else's bytes
        before = w.decode.block(1)
        w.pull("late", late, [1])
        result = w.result()
        assert (result.ok, result.failed.tolist()) == (False, [True])
        assert "lease" in result.error
        assert w.decode.block(1) == before
        assert w.source.stats()["leases_expired"] == 1


def test_a_late_pull_is_refused_with_stale_generation_when_its_handle_is_used_again() -> None:
    with world() as w:
        late = w.offer("late", [4])
        w.source.withdraw("late")
        assert w.released() == ["late"]
        w.ledger.give_back(late[0])
        while True:  # the ledger uses the longest-free handle first
            handles, generations = w.ledger.take(1)
            if handles[0] == late[0][0]:
                break
        w.source.offer("new", handles, generations, np.array([5]))
        before = w.decode.block(1)
        w.pull("late", late, [1])
        result = w.result()
        assert not result.ok
        assert "STALE_GENERATION" in result.error
        assert w.decode.block(1) == before
        w.pull("new", (handles, generations), [2])  # the refused pull has freed nothing of the new owner's
        assert w.result().ok


def test_requests_that_share_blocks_are_pulled_and_released_each_for_itself() -> None:
    with world() as w:
        first, second = w.offer("first", [1, 2, 3]), w.offer("second", [1, 2, 4])
        w.pull("first", first, [0, 1, 2])
        assert w.result().ok
        assert w.released() == ["first"]
        w.pull("second", second, [3, 4, 5])
        assert w.result().ok
        assert [w.decode.block(i) for i in (3, 4, 5)] == [w.prefill.block(i) for i in (1, 2, 4)]
        assert w.released() == ["second"]


def test_blocks_that_decode_has_already_are_only_freed() -> None:
    with world() as w:
        before = w.decode.block(0)
        w.pull("r", w.offer("r", [5, 6]), [FREE_ONLY, 1])
        result = w.result()
        assert (result.ok, result.blocks) == (True, 1)
        assert w.decode.block(0) == before
        assert w.released() == ["r"]


def test_a_pull_of_nothing_frees_everything() -> None:
    with world() as w:
        w.pull("r", w.offer("r", [5, 6]), [FREE_ONLY, FREE_ONLY])
        assert w.result().ok
        assert w.released() == ["r"]


def test_a_pull_from_an_earlier_life_of_prefill_is_refused() -> None:
    with world() as w:
        w.pull("r", w.offer("r", [1]), [1], incarnation=w.source.incarnation ^ 1)
        result = w.result()
        assert not result.ok
        assert "was restarted" in result.error


def test_a_prefill_that_is_not_there_fails_at_once() -> None:
    with world() as w:
        w.pull("r", w.offer("r", [1]), [1], port=1)
        result = w.result(2.0)
        assert not result.ok
        assert "127.0.0.1:1" in result.error


def test_a_prefill_that_ends_is_noticed_and_its_pulls_fail() -> None:
    with world() as w:
        w.pull("first", w.offer("first", [1]), [1])
        assert w.result().ok
        lost = w.offer("second", [2])
        w.source.close()
        w.pull("second", lost, [2])
        assert not w.result(5.0).ok


def test_another_geometry_is_refused_by_name() -> None:
    with world(descriptor=b'{"model": "tiny", "dtype": "float8"}') as w:
        before = w.decode.block(1)
        w.pull("r", w.offer("r", [1]), [1])
        result = w.result()
        assert not result.ok
        assert "float8" in result.error
        assert w.decode.block(1) == before


def test_the_right_secret_opens_and_a_wrong_or_missing_one_does_not() -> None:
    with world(source_secret=b"k" * 32, sink_secret=b"k" * 32) as w:
        w.pull("r", w.offer("r", [1]), [1])
        assert w.result().ok
    for secret in (b"x" * 32, None):
        with world(source_secret=b"k" * 32, sink_secret=secret) as w:
            w.pull("r", w.offer("r", [1]), [1])
            result = w.result()
            assert not result.ok
            assert "127.0.0.1" in result.error


def test_many_pulls_at_once_all_arrive() -> None:
    with world(blocks=64) as w:
        for i in range(32):
            w.pull(f"r{i}", w.offer(f"r{i}", [2 * i, 2 * i + 1]), [2 * i + 1, 2 * i])
        assert all(result.ok for result in w.results(32))
        assert all(w.decode.block(2 * i) == w.prefill.block(2 * i + 1) for i in range(32))
        assert sorted(w.released(32)) == sorted(f"r{i}" for i in range(32))


def test_a_cancelled_pull_is_reported_as_failed_and_its_handles_are_freed() -> None:
    with world() as w:
        w.pull("first", w.offer("first", [1]), [1])
        assert w.result().ok
        w.released()
        handles, generations = w.ledger.take(1)
        w.pull("r", (handles, generations), [2])
        w.sink.cancel("r")
        result = w.result()
        assert not result.ok
        assert "cancelled" in result.error


def test_a_block_that_does_not_exist_is_refused_before_anything_moves() -> None:
    with world(blocks=4) as w:
        offered = w.ledger.take(1)
        with pytest.raises(ValueError, match="block 4 does not exist"):
            w.pull("r", offered, [4])
        with pytest.raises(ValueError, match="does not exist"):
            w.source.offer("r", *offered, np.array([4]))


def test_an_offer_whose_generation_was_not_foretold_is_refused_and_not_served() -> None:
    with world() as w:
        handles, generations = w.ledger.take(1)
        with pytest.raises(ValueError, match="foretold"):
            w.source.offer("r", handles, generations + np.uint16(1), np.array([1]))
        assert w.source.stats()["requests_on_offer"] == 0
        w.source.offer("r", handles, generations, np.array([1]))
        w.pull("r", (handles, generations), [2])
        assert w.result().ok


def test_a_descriptor_that_does_not_fit_is_refused_with_the_limit() -> None:
    memory = Engine(4, 1).memory
    with pytest.raises(ConfigError, match="descriptor has 65536 octets"):
        PullSource(memory, descriptor=b"x" * 65536, host="127.0.0.1", port=0, table_entries=ENTRIES, lease_s=1.0)


def test_a_long_descriptor_arrives_whole() -> None:
    with world(descriptor=DESCRIPTOR + b" " * 20000) as w:
        w.pull("r", w.offer("r", [1]), [1])
        assert repr(DESCRIPTOR + b" " * 20000)[2:-1] in w.result().error


def test_the_ledger_foretells_what_the_table_says_through_every_use() -> None:
    ledger = HandleLedger(3, 1)
    for use in range(70_000):
        handles, generations = ledger.take(1)
        assert generations[0] == (2 * (use // 2) + 1) % 65535 + 1
        ledger.give_back(handles)
    with pytest.raises(ValueError, match="not taken"):
        ledger.give_back(np.array([1], np.uint64))


def test_pulls_from_a_silent_prefill_end_at_their_own_deadlines() -> None:
    with world() as w, socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        w.pull("short", w.offer("short", [1]), [1], timeout_s=0.2, port=port)
        w.pull("long", w.offer("long", [2]), [2], timeout_s=0.6, port=port)
        results = w.results(2, 2.0)
        assert [result.request_id for result in results] == ["short", "long"]
        assert all(not result.ok for result in results)
        assert 0.2 <= results[0].seconds < 0.3
        assert 0.6 <= results[1].seconds < 0.7


def test_a_pull_that_loses_its_session_is_finished_on_a_new_one() -> None:
    with world(blocks=64) as w:
        w.pull("first", w.offer("first", [0]), [0])
        assert w.result().ok
        offered = w.ledger.take(63)
        w.pull("r", offered, list(range(1, 64)))
        until(lambda: w.sink.stats()["loads_repeated"] > 0, 5.0)
        for connection in list(w.source._server._core._connections.values()):
            connection.qp.abort()
        w.source.offer("r", *offered, np.arange(1, 64))
        result = w.result()
        assert (result.ok, result.error, result.blocks) == (True, "", 63)
        assert all(w.decode.block(i) == w.prefill.block(i) for i in range(64))


def test_a_pull_without_handles_ends_and_disturbs_nobody() -> None:
    with world() as w:
        nothing = (np.zeros(0, np.uint64), np.zeros(0, np.uint16))
        w.pull("empty", nothing, [])
        w.pull("empty too", nothing, [])
        w.pull("r", w.offer("r", [1]), [1])
        assert {result.request_id: result.ok for result in w.results(3)} == {"empty": True, "empty too": True, "r": True}


def test_a_generation_of_zero_is_refused_because_it_would_accept_anything() -> None:
    with world() as w:
        handles, generations = w.offer("r", [1])
        with pytest.raises(ValueError, match="generation 0"):
            w.pull("r", (handles, generations * 0), [1])


def test_a_session_of_an_earlier_life_is_replaced_before_a_pull_is_refused() -> None:
    """A prefill whose host crashed says no goodbye: the old session looks alive."""
    with world() as w:
        w.pull("first", w.offer("first", [0]), [0])
        assert w.result().ok
        lane = w.sink._lanes[w.source.address]
        assert lane._session is not None
        object.__setattr__(lane._session.target, "incarnation", 12345)
        w.pull("r", w.offer("r", [1]), [1])
        assert w.result().ok
