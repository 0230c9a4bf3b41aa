"""The remote connector in a real LMCache engine, with a store in a process of its own."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from lmcache.v1.memory_management import BytesBufferMemoryObj, MemoryFormat

from tests.engines.lmcache.conftest import FLAGS
from tests.engines.lmcache.harness import CHUNK, HIDDEN, LAYERS, Engine, caches, request
from tests.soak.served import ServedStore

MakeEngine = Callable[..., Engine]


@pytest.mark.parametrize("has_meta", [True, False])
@pytest.mark.parametrize("tail", [0, 20])
def test_what_is_stored_is_retrieved_octet_for_octet(engine: MakeEngine, has_meta: bool, tail: int) -> None:
    one = engine(has_meta=has_meta, save_unfull_chunk=tail > 0, model=f"m/{has_meta}-{tail}")
    count = 4 * CHUNK + tail
    tokens, slots = request(1, count)
    source, into = caches(2), caches()
    assert one.engine.lookup(tokens) == 0
    one.store(tokens, source, slots, until=count)
    assert one.retrieve(tokens, into, slots) == count
    for made, came in zip(source, into, strict=True):
        assert torch.equal(made[:, slots], came[:, slots])
    assert one.held() == 0


@pytest.mark.parametrize("has_meta", [True, False])
def test_batches_answer_for_every_key_and_the_prefix_ends_at_the_first_miss(engine: MakeEngine, has_meta: bool) -> None:
    one = engine(has_meta=has_meta, model=f"m/batches-{has_meta}")
    keys = one.keys(request(3, 5 * CHUNK)[0])
    stored = [keys[0], keys[1], keys[3]]
    objects = one.objects(stored)
    one.awaited(one.connector.batched_put(stored, objects))
    assert [obj.get_ref_count() for obj in objects] == [1, 1, 1]
    assert one.connector.batched_contains(keys) == 2
    assert one.awaited(one.connector.batched_async_contains("l", keys)) == 2
    found = one.awaited(one.connector.batched_get(keys))
    assert [obj is not None for obj in found] == [True, True, False, True, False]
    for obj, made in zip((found[0], found[1], found[3]), objects, strict=True):
        assert bytes(obj.byte_array) == bytes(made.byte_array)
        assert obj.get_shapes() == made.get_shapes()
        assert obj.get_memory_format() == made.get_memory_format()
    prefix = one.awaited(one.connector.batched_get_non_blocking("l", keys))
    assert len(prefix) == 2
    for obj in [*objects, *prefix, *(obj for obj in found if obj is not None)]:
        obj.ref_count_down()
    assert one.held() == 0


def test_the_rest_of_the_contract(engine: MakeEngine) -> None:
    one = engine(model="m/rest")
    keys = one.keys(request(4, 2 * CHUNK)[0])
    (obj,) = one.objects(keys[:1])
    assert one.connector.support_ping()
    assert one.awaited(one.connector.ping()) == 0
    assert one.connector.exists_sync(keys[0]) is False
    one.awaited(one.connector.put(keys[0], obj))
    assert one.connector.exists_sync(keys[0]) is True
    assert one.awaited(one.connector.exists(keys[0])) is True
    assert len(one.awaited(one.connector.list())) == 1
    assert one.connector.remove_sync(keys[0]) is True
    assert one.connector.remove_sync(keys[0]) is False
    assert one.awaited(one.connector.get(keys[0])) is None
    obj.ref_count_down()
    assert one.held() == 0


def test_a_closed_connector_answers_with_misses(engine: MakeEngine) -> None:
    one = engine(model="m/closed")
    keys = one.keys(request(5, 2 * CHUNK)[0])
    objects = one.objects(keys)
    one.awaited(one.connector.close())
    one.awaited(one.connector.close())
    one.awaited(one.connector.batched_put(keys, objects))
    assert one.awaited(one.connector.batched_get(keys)) == [None, None]
    assert one.connector.batched_contains(keys) == 0
    assert one.awaited(one.connector.ping()) != 0
    for obj in objects:
        obj.ref_count_down()
    assert one.held() == 0


def test_a_cancelled_load_and_a_cancelled_put_give_everything_back(engine: MakeEngine) -> None:
    one = engine(model="m/cancel")
    keys = one.keys(request(6, 8 * CHUNK)[0])
    objects = one.objects(keys)
    one.awaited(one.connector.batched_put(keys, objects))

    async def cancel(call: object) -> None:
        task = asyncio.ensure_future(call)  # type: ignore[arg-type]
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(20):
        one.awaited(cancel(one.connector.batched_get(keys)))
        one.awaited(cancel(one.connector.batched_put(keys, objects)))
    one.awaited(one.connector.close())
    assert [obj.get_ref_count() for obj in objects] == [1] * 8
    for obj in objects:
        obj.ref_count_down()
    assert one.held() == 0


def test_a_store_that_is_killed_is_misses_and_one_that_is_back_is_used_again(engine: MakeEngine, tmp_path: Path) -> None:
    served = ServedStore(tmp_path, *FLAGS, drain_s=1.0)
    try:
        one = engine(served.address, model="m/killed", settings={"timeout_s": 1.0, "connect_timeout_s": 0.5})
        tokens, slots = request(7, 4 * CHUNK)
        source = caches(8)
        one.store(tokens, source, slots, until=4 * CHUNK)
        served.stop(signal.SIGKILL)
        assert one.engine.lookup(tokens) == 0
        assert one.retrieve(tokens, caches(), slots) == 0
        assert one.awaited(one.connector.ping()) != 0
        one.engine.store(tokens, kvcaches=source, slot_mapping=slots)
        served.start()
        deadline = time.monotonic() + 30
        while one.awaited(one.connector.ping()) != 0:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        one.store(tokens, source, slots, until=4 * CHUNK)
        into = caches()
        assert one.retrieve(tokens, into, slots) == 4 * CHUNK
        assert torch.equal(source[0][:, slots], into[0][:, slots])
        assert one.held() == 0
    finally:
        served.stop()


def test_engines_whose_bytes_differ_find_nothing_of_each_other(engine: MakeEngine) -> None:
    first, second = engine(model="m/apart", settings={"revision": "a"}), engine(model="m/apart", settings={"revision": "b"})
    keys = first.keys(request(9, CHUNK)[0])
    (obj,) = first.objects(keys)
    first.awaited(first.connector.put(keys[0], obj))
    assert first.connector.exists_sync(keys[0])
    assert not second.connector.exists_sync(keys[0])
    obj.ref_count_down()


def test_an_unknown_setting_is_said_with_the_nearest_and_leaves_the_engine_without_the_plugin(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    one = engine(settings={"timeot_s": 1})
    assert one.backend is None
    assert "has no setting 'timeot_s'; did you mean 'timeout_s'?" in caplog.text


def test_layers_of_a_chunk_are_values_of_their_own(engine: MakeEngine) -> None:
    one = engine(model="m/layers", use_layerwise=True)
    keys = one.keys(request(10, CHUNK)[0])[0].split_layers(LAYERS)
    for tokens in (CHUNK, 20):
        shape = torch.Size([tokens, 2, HIDDEN])
        objects = [one.local.allocate(shape, torch.bfloat16, MemoryFormat.KV_T2D) for _ in keys]
        for at, obj in enumerate(objects):
            obj.tensor[:] = at + tokens
        one.awaited(one.connector.batched_put(keys, objects))
        found = one.awaited(one.connector.batched_get(keys))
        for obj, made in zip(found, objects, strict=True):
            assert obj.get_shape() == shape
            assert obj.get_memory_format() == MemoryFormat.KV_T2D
            assert torch.equal(obj.tensor, made.tensor)
            assert one.connector.remove_sync(keys[found.index(obj)])
        for obj in [*objects, *found]:
            obj.ref_count_down()
    assert one.held() == 0


def test_compressed_octets_come_back_as_they_were(engine: MakeEngine) -> None:
    one = engine(model="m/compressed")
    keys = one.keys(request(11, 2 * CHUNK)[0])
    one.awaited(one.connector.batched_put(keys, [BytesBufferMemoryObj(b"first"), BytesBufferMemoryObj(bytes(3000))]))
    found = one.awaited(one.connector.batched_get(keys))
    assert [obj.byte_array for obj in found] == [b"first", bytes(3000)]
    assert one.held() == 0


def test_a_seed_that_differs_between_processes_is_explained_at_start(
    engine: MakeEngine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    engine(model="m/seed")
    assert "Start all engines with PYTHONHASHSEED=0" not in caplog.text
    monkeypatch.delenv("PYTHONHASHSEED")
    engine(model="m/no-seed")
    assert "Start all engines with PYTHONHASHSEED=0" in caplog.text


def test_a_fault_is_counted_each_time_and_said_once(engine: MakeEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    served = ServedStore(tmp_path, *FLAGS, drain_s=1.0)
    served.stop()
    one = engine(served.address, model="m/faults", settings={"timeout_s": 0.5, "connect_timeout_s": 0.3})
    keys = one.keys(request(12, 2 * CHUNK)[0])
    for _ in range(3):
        assert one.awaited(one.connector.batched_get(keys)) == [None, None]
    assert one.connector.faults.snapshot() == {"get/unavailable": 6}
    assert caplog.text.count("chunks of a get: the store can't be reached") == 1
    assert one.held() == 0
