"""How the slab engine shares a disk between sizes: exact slots, eviction, and extents that go from cold sizes to warm ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.store.disk import DiskStatus
from kbtp_core.store.slab import SlabEngine
from tests.store.disks import batch, folder_in_memory, keys_of, octets_of, put, value

OK = DiskStatus.OK
PAGE = 2_750_000


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def names(prefix: str, count: int, start: int = 0) -> list[str]:
    return [f"{prefix}{i}" for i in range(start, start + count)]


def there(engine: SlabEngine, wanted: list[str]) -> int:
    return int(np.count_nonzero(engine.lookup(keys_of(wanted))))


@pytest.mark.slow
def test_one_small_value_does_not_decide_what_fits_later(tmp_path: Path) -> None:
    with SlabEngine(tmp_path / "store", 4 << 30) as engine:
        assert put(engine, ["small"], 4096) == [OK]
        pages = names("page", 200)
        one = batch(["page"], PAGE)
        one.memory, one.lengths, one.crcs = one.memory * 200, one.lengths.repeat(200), one.crcs.repeat(200)
        one.namespaces, one.expiries = one.namespaces.repeat(200), one.expiries.repeat(200)
        one.keys = keys_of(pages)
        assert set(one.put(engine)) == {OK}
        assert there(engine, [*pages, "small"]) == 201
        stats = engine.stats()
        assert stats["slot_bytes"] <= 1.02 * stats["committed_bytes"]
        assert (stats["extents"] - stats["free_extents"]) * (64 << 20) <= 1.02 * 200 * PAGE + (2 << 26), "slack of the extents' ends"
        assert stats["evicted_values"] == 0


def test_nothing_is_evicted_below_nine_tenths_of_the_disk(folder: Path) -> None:
    with SlabEngine(folder / "store", 64 << 20, extent_bytes=1 << 20) as engine:
        put(engine, ["small"], 4096)
        pages = names("p", 920)
        for start in range(0, 920, 40):
            assert set(put(engine, pages[start : start + 40], 64 << 10)) == {OK}
        assert engine.stats()["slot_bytes"] >= 0.89 * (64 << 20)
        assert there(engine, [*pages, "small"]) == 921


def test_a_size_that_went_cold_gives_its_extents_to_the_one_that_is_used(folder: Path) -> None:
    with SlabEngine(folder / "store", 16 << 20, extent_bytes=1 << 20) as engine:
        for start in range(0, 255, 51):
            assert set(put(engine, names("cold", 51, start), 64 << 10)) == {OK}
        for start in range(0, 60, 5):
            assert set(put(engine, names("warm", 5, start), 256 << 10)) == {OK}
        assert there(engine, names("warm", 60)) >= 48, "the newer size did not get three quarters of the disk"
        assert engine.stats()["drained_extents"] >= 12
        for name in names("warm", 60):
            assert value(engine, name) in (None, octets_of(name, 256 << 10))
        engine.check_integrity()


def test_what_is_read_outlives_what_is_not(folder: Path) -> None:
    with SlabEngine(folder / "store", 8 << 20, extent_bytes=1 << 20) as engine:
        hot = names("hot", 16)
        put(engine, hot, 64 << 10)
        for start in range(0, 400, 8):
            for name in hot:
                value(engine, name, 1 << 16)
            assert set(put(engine, names("once", 8, start), 64 << 10)) == {OK}
        assert there(engine, hot) >= 15


def test_more_sizes_than_extents_share_slots_and_all_fit(folder: Path) -> None:
    with SlabEngine(folder / "store", 64 << 20, extent_bytes=1 << 20) as engine:
        sizes = [4096 * (1 + i % 60) - 5 for i in range(240)]
        many = names("v", 240)
        for name, size in zip(many, sizes, strict=True):
            assert put(engine, [name], size) == [OK]
        assert there(engine, many) == 240
        assert engine.stats()["slot_sizes"] <= 48
    with SlabEngine(folder / "store", 64 << 20, extent_bytes=1 << 20) as engine:
        assert [value(engine, name) for name in many] == [octets_of(name, size) for name, size in zip(many, sizes, strict=True)]
        engine.check_integrity()


def test_an_extent_without_values_serves_any_size_again(folder: Path) -> None:
    with SlabEngine(folder / "store", 8 << 20, extent_bytes=1 << 20) as engine:
        for size in (4096, 65536, 300_000, 1 << 20):
            count = (8 << 20) // max(size, 65536) // 2
            assert set(put(engine, names("x", count), size)) == {OK}
            assert engine.remove(keys_of(names("x", count))).all()
            assert engine.stats()["free_extents"] == 8
        assert engine.stats()["evicted_values"] == 0


def test_values_in_flight_are_never_evicted_so_a_batch_that_is_too_large_is_refused_in_part(folder: Path) -> None:
    with SlabEngine(folder / "store", 1 << 20, extent_bytes=1 << 19) as engine:
        assert put(engine, names("x", 2), 1 << 19) == [OK, OK]
        assert put(engine, names("y", 2), 1 << 19) == [OK, OK]
        assert there(engine, [*names("x", 2), *names("y", 2)]) == 2


def test_the_housekeeper_keeps_slots_free_before_they_are_asked_for(folder: Path) -> None:
    with SlabEngine(folder / "store", 16 << 20, extent_bytes=1 << 20) as engine:
        for start in range(0, 4096, 128):
            put(engine, names("v", 128, start), 4096)
        deadline = time.monotonic() + 5
        while engine.stats()["values"] > 4096 - 100 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 4096 - 160 <= engine.stats()["values"] <= 4096 - 100


def test_batches_of_many_extents_keep_finding_room_in_a_full_store(folder: Path) -> None:
    with SlabEngine(folder / "store", 40 << 20, extent_bytes=1 << 20) as engine:
        for start in range(0, 600, 20):
            assert set(put(engine, names("big", 20, start), 200 << 10)) == {OK}
        engine.check_integrity()


def test_writers_side_by_side_in_a_full_store_all_find_room(folder: Path) -> None:
    refused: list[DiskStatus] = []

    def work(engine: SlabEngine, prefix: str) -> None:
        for start in range(0, 160, 8):
            refused.extend(status for status in put(engine, names(prefix, 8, start), 100 << 10) if status != OK)

    with SlabEngine(folder / "store", 24 << 20, extent_bytes=1 << 20) as engine:
        threads = [threading.Thread(target=work, args=(engine, prefix)) for prefix in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert refused == []
        engine.check_integrity()


@pytest.mark.slow
def test_under_pressure_from_many_threads_nothing_is_wrong_and_nothing_is_lost(folder: Path) -> None:
    wrong: list[str] = []
    sizes = (5_000, 60_000, 200_000)

    def work(engine: SlabEngine, seed: int) -> None:
        random = np.random.default_rng(seed)
        for step in range(60):
            chosen = [f"u{i}" for i in random.integers(0, 200, 8)]
            lengths = [sizes[int(name[1:]) % 3] for name in chosen]
            put(engine, chosen, lengths)
            wrong.extend(n for n, size in zip(chosen, lengths, strict=True) if value(engine, n, 1 << 18) not in (None, octets_of(n, size)))
            if step % 10 == 0:
                engine.remove(keys_of(chosen[:4]))
            if step % 20 == 0:
                engine.remove_namespace(1, 0)

    with SlabEngine(folder / "store", 8 << 20, extent_bytes=1 << 20) as engine:
        threads = [threading.Thread(target=work, args=(engine, seed)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (wrong, engine.error) == ([], "")
        engine.check_integrity()
        kept = {name: value(engine, name, 1 << 18) for name in names("u", 200)}
    with SlabEngine(folder / "store", 8 << 20, extent_bytes=1 << 20) as engine:
        assert {name: value(engine, name, 1 << 18) for name in names("u", 200)} == kept
        engine.check_integrity()
