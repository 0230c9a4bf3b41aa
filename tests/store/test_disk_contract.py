"""What every disk engine does, whichever it is (kbtp_core.store.disk)."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.store.disk import DiskEngine, DiskStatus
from kbtp_core.store.disk_group import DiskGroup
from kbtp_core.store.file_engine import FileEngine
from kbtp_core.store.quota import QuotaTable
from kbtp_core.store.slab import SlabEngine
from tests.store.disks import TENANT, batch, folder_in_memory, get, key_of, keys_of, octets_of, put, value

OK, MISS, EXISTS, LENGTH = DiskStatus.OK, DiskStatus.MISS, DiskStatus.EXISTS, DiskStatus.LENGTH
CAPACITY = 24 << 20
Opener = Callable[..., DiskEngine]


def slab(folder: Path, **options: QuotaTable) -> DiskEngine:
    return SlabEngine(folder, CAPACITY, extent_bytes=1 << 20, **options)


def threads(folder: Path, **options: QuotaTable) -> DiskEngine:
    return SlabEngine(folder, CAPACITY, extent_bytes=1 << 20, io_uring=False, **options)


def group(folder: Path, **options: QuotaTable) -> DiskEngine:
    quotas = options.get("quotas") or QuotaTable()
    return DiskGroup({name: SlabEngine(folder / name, CAPACITY // 2, extent_bytes=1 << 20, quotas=quotas) for name in ("disk0", "disk1")})


def file(folder: Path, **options: QuotaTable) -> DiskEngine:
    return FileEngine(folder, CAPACITY, **options)


@pytest.fixture(params=[slab, threads, group, file], ids=["slab", "slab without io_uring", "group", "file"])
def opener(request: pytest.FixtureRequest) -> Opener:
    made: Opener = request.param
    return made


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


@pytest.fixture
def engine(opener: Opener, folder: Path) -> Iterator[DiskEngine]:
    opened = opener(folder)
    yield opened
    assert opened.error == ""
    if isinstance(opened, SlabEngine):
        opened.check_integrity()
    opened.close()


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 100_000, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1, 64])
def test_a_value_of_any_length_at_any_address_comes_back_as_it_was(engine: DiskEngine, length: int, offset: int) -> None:
    assert put(engine, ["a", "b"], length, offset=offset) == [OK, OK]
    result, octets = get(engine, ["a", "b"])
    assert result.stored_lengths.tolist() == result.copied.tolist() == [length, length]
    assert octets == [octets_of("a", length), octets_of("b", length)]
    assert result.crcs.tolist() == batch(["a", "b"], length).crcs.tolist()


def test_what_was_put_is_there_after_a_restart(opener: Opener, folder: Path) -> None:
    names = [f"v{i}" for i in range(40)]
    first = opener(folder)
    put(first, names, [1 + 3001 * i for i in range(40)])
    first.close()
    again = opener(folder)
    assert [value(again, name) for name in names] == [octets_of(name, 1 + 3001 * i) for i, name in enumerate(names)]
    assert again.usage() == {TENANT: sum(1 + 3001 * i for i in range(40))}
    again.close()


def test_the_range_contract_holds_at_its_edges(engine: DiskEngine) -> None:
    put(engine, ["a"], 10_000)
    octets = octets_of("a", 10_000)

    def ranged(offset: int, capacity: int) -> tuple[int, int, bytes]:
        result, parts = get(engine, ["a"], capacity, offset)
        return int(result.status[0]), int(result.stored_lengths[0]), parts[0]

    assert ranged(0, 20_000) == (OK, 10_000, octets)
    assert ranged(1, 1) == (OK, 10_000, octets[1:2])
    assert ranged(4000, 5000) == (OK, 10_000, octets[4000:9000])
    assert ranged(4096, 1 << 20) == (OK, 10_000, octets[4096:])
    assert ranged(9_999, 100) == (OK, 10_000, octets[9_999:])
    assert ranged(10_000, 100) == (OK, 10_000, b"")
    assert ranged(10_001, 100) == (LENGTH, 10_000, b"")
    assert ranged(5, 0) == (OK, 10_000, b"")


def test_what_is_not_there_is_a_miss(engine: DiskEngine) -> None:
    result, octets = get(engine, ["nothing"])
    assert (result.status.tolist(), result.stored_lengths.tolist(), octets) == ([MISS], [0], [b""])
    assert engine.lookup(keys_of(["nothing"])).tolist() == [0]
    assert engine.remove(keys_of(["nothing"])).tolist() == [False]


def test_an_empty_batch_is_no_work(engine: DiskEngine) -> None:
    assert put(engine, [], 1) == []
    assert len(get(engine, [])[0].status) == len(engine.lookup(keys_of([]))) == len(engine.remove(keys_of([]))) == 0


def test_values_without_octets_and_values_that_are_too_long_are_refused(engine: DiskEngine) -> None:
    too_long = batch(["long"], 10)
    too_long.lengths[:] = CAPACITY + 1
    empty = batch(["empty"], 10)
    empty.lengths[:] = 0
    assert empty.put(engine) == too_long.put(engine) == [LENGTH]
    assert engine.usage() == {}


def test_the_first_writer_of_a_key_wins(engine: DiskEngine) -> None:
    assert put(engine, ["a"], 5000) == [OK]
    assert put(engine, ["b", "a"], 6000, version=1) == [OK, EXISTS]
    assert value(engine, "a") == octets_of("a", 5000)


def test_the_same_key_twice_in_a_batch_is_written_once(engine: DiskEngine) -> None:
    assert put(engine, ["a", "b", "a"], 5000) in ([OK, OK, OK], [OK, OK, EXISTS])
    assert engine.usage() == {TENANT: 10_000}


def test_writers_of_one_key_at_once_agree_on_its_value(engine: DiskEngine) -> None:
    names = [f"k{i}" for i in range(20)]
    answers: dict[int, list[DiskStatus]] = {}

    def write(version: int) -> None:
        answers[version] = put(engine, names, 9000, version=version)

    threads = [threading.Thread(target=write, args=(version,)) for version in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {status for statuses in answers.values() for status in statuses} <= {OK, EXISTS}
    for name in names:
        assert value(engine, name) in [octets_of(name, 9000, version) for version in range(8)]
    assert engine.usage() == {TENANT: 180_000}


def test_a_removed_value_is_a_miss_at_once_and_after_a_restart(opener: Opener, folder: Path) -> None:
    first = opener(folder)
    put(first, ["a", "b"], 5000)
    assert first.remove(keys_of(["a", "nothing"])).tolist() == [True, False]
    assert value(first, "a") is None
    assert first.lookup(keys_of(["a", "b"])).tolist() == [0, 5000]
    assert put(first, ["a"], 6000, version=1) == [OK]
    assert first.remove(keys_of(["b"])).tolist() == [True]
    first.close()
    again = opener(folder)
    assert (value(again, "a"), value(again, "b")) == (octets_of("a", 6000, 1), None)
    again.close()


def test_a_namespace_is_removed_without_its_neighbours(engine: DiskEngine) -> None:
    put(engine, ["a", "b"], 5000, namespace=7)
    put(engine, ["c"], 5000, namespace=8)
    put(engine, ["d"], 5000, namespace=7, tenant=2)
    assert engine.remove_namespace(TENANT, 7) == 2
    assert engine.lookup(keys_of(["a", "b", "c"])).tolist() == [0, 0, 5000]
    assert engine.lookup(keys_of(["d"], tenant=2)).tolist() == [5000]
    assert engine.remove_namespace(TENANT, 7) == 0


def test_a_value_whose_time_is_over_is_a_miss_and_can_be_put_anew(engine: DiskEngine) -> None:
    now = int(time.time())
    put(engine, ["old"], 5000, expiry=now - 5)
    put(engine, ["new"], 5000, expiry=now + 1000)
    put(engine, ["ever"], 5000)
    assert (value(engine, "old"), value(engine, "new")) == (None, octets_of("new", 5000))
    assert put(engine, ["old"], 5000, version=1) == [OK]
    assert value(engine, "old") == octets_of("old", 5000, 1)
    assert engine.expire(now + 999) == 0
    assert engine.expire(now + 1000) == 1
    assert engine.lookup(keys_of(["old", "new", "ever"])).tolist() == [5000, 0, 5000]


def test_listing_names_each_value_once_whatever_the_step(engine: DiskEngine) -> None:
    names = [f"n{i}" for i in range(25)]
    put(engine, names, [100 + i for i in range(25)], namespace=3, expiry=int(time.time()) + 500)
    put(engine, ["other"], 7, tenant=9)
    found: dict[bytes, int] = {}
    cursor = 0
    while True:
        listing = engine.list(TENANT, 3, cursor, 4)
        assert len(listing.keys) <= 4
        found.update({bytes(key): int(length) for key, length in zip(listing.keys, listing.lengths, strict=True)})
        assert (listing.expiries > time.time()).all()
        cursor = listing.cursor
        if cursor == 0:
            break
    assert found == {key_of(name): 100 + i for i, name in enumerate(names)}
    assert len(engine.list(None, None, 0, 1000).keys) == 26
    assert len(engine.list(9, 0, 0, 1000).keys) == 1


def test_more_values_than_fit_evict_some_and_leave_the_others_whole(engine: DiskEngine) -> None:
    names = [f"e{i}" for i in range(300)]
    for start in range(0, 300, 10):
        assert set(put(engine, names[start : start + 10], 150_000)) == {OK}
    for _ in range(10):  # room is made in the background: until it is, what was there just now may be gone
        there = engine.lookup(keys_of(names)) > 0
        values = [value(engine, name) for name in names]
        usage, evicted = engine.usage(), engine.stats()["evicted_values"]
        if np.array_equal(there, engine.lookup(keys_of(names)) > 0):
            break
    assert 90 <= there.sum() <= CAPACITY // 150_000
    assert values == [octets_of(name, 150_000) if is_there else None for name, is_there in zip(names, there, strict=True)]
    assert usage == {TENANT: 150_000 * int(there.sum())}
    assert evicted == 300 - there.sum()


def test_a_tenant_over_its_quota_is_refused_alone(opener: Opener, folder: Path) -> None:
    quotas = QuotaTable()
    quotas.set({TENANT: 15_000})
    engine = opener(folder, quotas=quotas)
    statuses = put(engine, ["a", "b", "c"], 6000)
    assert sorted(statuses) == [OK, OK, DiskStatus.QUOTA]  # disks work side by side, so any of the three may be the last
    assert put(engine, ["a"], 6000, tenant=2) == [OK]
    refused, accepted = "abc"[statuses.index(DiskStatus.QUOTA)], "abc"[statuses.index(OK)]
    engine.remove(keys_of([accepted]))
    assert put(engine, [refused], 6000) == [OK]
    assert engine.usage() == {TENANT: 12_000, 2: 6000}
    engine.close()
    assert quotas.usage() == {}


def test_after_close_everything_is_a_miss_or_an_error(opener: Opener, folder: Path) -> None:
    engine = opener(folder)
    put(engine, ["a"], 5000)
    engine.close()
    engine.close()
    assert put(engine, ["b"], 5000) == [DiskStatus.IO_ERROR]
    assert value(engine, "a") is None
    assert np.count_nonzero(engine.lookup(keys_of(["a"]))) == 0


def test_many_threads_that_put_get_and_remove_never_see_other_octets(engine: DiskEngine) -> None:
    names = [f"m{i}" for i in range(60)]
    wrong: list[str] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for _ in range(40):
            chosen = [names[i] for i in random.integers(0, len(names), 6)]
            match int(random.integers(0, 4)):
                case 0:
                    engine.remove(keys_of(chosen[:2]))
                case 1:
                    put(engine, chosen, [30_000 + 4096 * (int(name[1:]) % 9) for name in chosen], version=seed % 2)
                case _:
                    for name, octets in zip(chosen, get(engine, chosen, 1 << 17)[1], strict=True):
                        length = 30_000 + 4096 * (int(name[1:]) % 9)
                        if octets and octets not in (octets_of(name, length, 0), octets_of(name, length, 1)):
                            wrong.append(name)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
