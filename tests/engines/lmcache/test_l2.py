"""The L2 adapter as LMCache's server drives it, over a real store: made by LMCache's own factory, with its memory objects."""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

from kbtp_core.errors import ConfigError
from tests.soak.served import ServedStore

CHUNK_BYTES = 40_000
WAIT_S = 15.0


def adapter_of(address: str, **settings: Any) -> Any:
    params = {"members": address, "timeout_s": 2.0, **settings}
    config = PluginL2AdapterConfig.from_dict({"module_path": "kbtp_lmcache.l2", "class_name": "KBTPL2Adapter", "adapter_params": params})
    return create_l2_adapter_from_registry(config)


@pytest.fixture
def adapter(store: ServedStore) -> Iterator[Any]:
    made = adapter_of(store.address)
    yield made
    made.close()


def chunk(fill: int | None = None, size: int = CHUNK_BYTES) -> TensorMemoryObj:
    octets = torch.zeros(size, dtype=torch.uint8) if fill is None else torch.full((size,), fill, dtype=torch.uint8)
    shape = torch.Size([size])
    meta = MemoryObjMetadata(shape, torch.uint8, octets.data_ptr(), size, 1, fmt=MemoryFormat.BINARY)
    return TensorMemoryObj(octets, meta, None)


def keys_of(name: str, count: int, *, rank: int = 0, group: int = 0, salt: str = "") -> list[ObjectKey]:
    return [ObjectKey(f"{name}{at}".encode().ljust(32, b"."), "some/model", rank, group, salt) for at in range(count)]


def ended(descriptor: int, query: Callable[[], Any]) -> Any:
    """What `query` says once `descriptor` was signalled."""
    deadline = time.monotonic() + WAIT_S
    while True:
        assert select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0], "no event came"
        if found := query():
            return found
        assert time.monotonic() < deadline
        time.sleep(0.005)


def store_all(adapter: Any, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> bool:
    task = adapter.submit_store_task(keys, objects)
    (found,) = ended(adapter.get_store_event_fd(), adapter.pop_completed_store_tasks).items()
    assert found[0] == task
    return bool(found[1].is_successful())


def bits(bitmap: Any, count: int) -> list[bool]:
    return [bool(bitmap.test(at)) for at in range(count)]


def look_up(adapter: Any, keys: list[ObjectKey]) -> list[bool]:
    task = adapter.submit_lookup_and_lock_task(keys, {})
    found = ended(adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task))
    assert adapter.query_lookup_and_lock_result(task) is None
    adapter.submit_unlock(keys)
    return bits(found, len(keys))


def load(adapter: Any, keys: list[ObjectKey], objects: list[TensorMemoryObj]) -> list[bool]:
    task = adapter.submit_load_task(keys, objects)
    return bits(ended(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)), len(keys))


def test_chunks_that_one_server_stored_another_loads(adapter: Any, store: ServedStore) -> None:
    keys = keys_of("shared", 3)
    assert store_all(adapter, keys, [chunk(at + 1) for at in range(3)])
    other = adapter_of(store.address)
    asked = [*keys, *keys_of("other", 1)]
    assert look_up(other, asked) == [True, True, True, False]
    objects = [chunk() for _ in asked]
    assert load(other, asked, objects) == [True, True, True, False]
    assert [obj.raw_data.unique().tolist() for obj in objects] == [[1], [2], [3], [0]]
    other.close()


def test_what_differs_in_rank_group_salt_or_revision_is_another_chunk(adapter: Any, store: ServedStore) -> None:
    assert store_all(adapter, keys_of("own", 1), [chunk(1)])
    for others in ({"rank": 1}, {"group": 1}, {"salt": "b"}):
        assert look_up(adapter, keys_of("own", 1, **others)) == [False]
    newer = adapter_of(store.address, revision="2")
    assert look_up(newer, keys_of("own", 1)) == [False]
    newer.close()


def test_a_chunk_of_another_length_is_a_miss(adapter: Any) -> None:
    keys = keys_of("length", 1)
    assert store_all(adapter, keys, [chunk(1)])
    assert load(adapter, keys, [chunk(size=CHUNK_BYTES + 1)]) == [False]
    assert load(adapter, keys, [chunk(size=CHUNK_BYTES - 1)]) == [False]


def test_removed_chunks_are_gone_and_no_longer_counted(adapter: Any) -> None:
    keys = keys_of("removed", 2)
    assert store_all(adapter, keys, [chunk(1), chunk(2)])
    assert adapter.get_usage().total_bytes_used == 2 * CHUNK_BYTES
    adapter.delete(keys[:1])
    assert look_up(adapter, keys) == [False, True]
    assert adapter.get_usage().total_bytes_used == CHUNK_BYTES


def test_a_store_that_is_not_there_fails_and_is_used_when_it_is_back(tmp_path: Path) -> None:
    store = ServedStore(tmp_path, "--ram", "64MiB")
    adapter = adapter_of(store.address)
    keys = keys_of("lost", 2)
    assert store_all(adapter, keys, [chunk(1), chunk(2)])
    store.stop(signal.SIGKILL)
    begin = time.monotonic()
    assert not store_all(adapter, keys_of("new", 1), [chunk(3)])
    assert look_up(adapter, keys) == [False, False]
    assert load(adapter, keys, [chunk(), chunk()]) == [False, False]
    assert time.monotonic() - begin < 10
    assert adapter.report_status()["faults"]["put/unavailable"] == 1
    store.start()
    deadline = time.monotonic() + WAIT_S
    while not store_all(adapter, keys_of("new", 1), [chunk(3)]):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert look_up(adapter, keys_of("new", 1)) == [True]
    adapter.close()
    store.stop(signal.SIGKILL)


def test_the_three_events_have_descriptors_of_their_own(adapter: Any) -> None:
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3


@pytest.mark.parametrize(("settings", "text"), [({"tenat": "x"}, "did you mean 'tenant'?"), ({"members": ""}, "members is missing")])
def test_a_wrong_setting_is_named(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        adapter_of("127.0.0.1:1", **settings)
    assert text in str(refusal.value)
