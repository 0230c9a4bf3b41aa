"""How the answers to many LOADs become work requests, whole or in parts."""

from __future__ import annotations

import numpy as np
import pytest

from kbtp_core.fabric.api import Op, WrFlag
from kbtp_core.protocol.effects import LoadMany
from kbtp_core.protocol.wire import REQUEST
from kbtp_core.session.posting import PostBatch
from kbtp_core.session.runs import split_loads
from kbtp_core.session.slots import SendRows
from tests.session.loopback import LoopbackFabric

LENGTHS = [4, 0, 0, 5, 6, 0, 7, 0, 0]
LAST_WRITE = 6


def loads(token: int = 77) -> LoadMany:
    requests = np.zeros(len(LENGTHS), REQUEST)
    requests["stag"], requests["offset"] = np.arange(len(LENGTHS)) + 500, np.arange(len(LENGTHS)) * 64
    requests["flags"][4:6] = 8
    messages = np.repeat(np.arange(len(LENGTHS), dtype=np.uint8)[:, None], 40, axis=1)
    return LoadMany(messages, requests, np.arange(len(LENGTHS), dtype=np.uint64) * np.uint64(4096), np.array(LENGTHS, np.uint32), token)


def rows() -> SendRows:
    return SendRows(LoopbackFabric().alloc_pd(), 16, 64)  # type: ignore[arg-type]


def test_each_answer_follows_its_write() -> None:
    batch, sends = PostBatch(100), rows()
    batch.add_loads(sends, loads(), 9)
    requests = batch.finish(sends.mark)
    write, send, invalidate = int(Op.WRITE), int(Op.SEND), int(Op.SEND_INVALIDATE)
    assert requests["op"].tolist() == [write, send, send, send, write, send, write, invalidate, invalidate, write, send, send, send]
    signaled = np.flatnonzero(requests["flags"] & int(WrFlag.SIGNALED)).tolist()
    assert signaled == [9, 12]
    assert requests["wr_id"][signaled].tolist() == [77, 0]
    assert batch.signaled == [(110, 6), (113, 9)]  # the six answers before the last Write have left their rows when it completes
    assert requests["remote_stag"][[0, 7, 9]].tolist() == [500, 504, 506]
    assert sends.memory[:9, 0].tolist() == list(range(9))


@pytest.mark.parametrize("count", range(1, len(LENGTHS)))
def test_parts_make_the_same_requests_as_the_whole_and_the_token_is_with_the_last_write(count: int) -> None:
    whole, sends = PostBatch(0), rows()
    whole.add_loads(sends, loads(), 9)
    first, rest = split_loads(loads(), count)
    assert rest is not None
    assert (first.token, rest.token) == ((0, 77) if count <= LAST_WRITE else (77, 0))
    parts, part_sends = PostBatch(0), rows()
    parts.add_loads(part_sends, first, 9)
    parts.add_loads(part_sends, rest, 9)
    expected, got = whole.finish(sends.mark), parts.finish(part_sends.mark)
    expected["local_stag"], got["local_stag"] = 0, 0  # regions of two fabrics
    assert (expected == got).all()
    assert whole.signaled == parts.signaled


def test_all_at_once_is_one_part() -> None:
    everything = loads()
    assert split_loads(everything, len(LENGTHS)) == (everything, None)


def test_answers_without_any_write_need_no_token() -> None:
    batch, sends = PostBatch(0), rows()
    nothing = loads(token=0)
    failed = LoadMany(nothing.messages, nothing.requests, nothing.block_offsets, np.zeros(len(LENGTHS), np.uint32), 0)
    batch.add_loads(sends, failed, 9)
    requests = batch.finish(sends.mark)
    assert len(requests) == len(LENGTHS)
    assert batch.signaled == [(9, 9)]
