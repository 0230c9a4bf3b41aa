"""The slab engine on disks that lie, fill up, fail, hang or may not be written, and on folders that are not what they should be."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kbtp_core._native import crc32c
from kbtp_core.store.disk import DiskError, DiskStatus, Fault
from kbtp_core.store.slab import SlabEngine
from tests.store.disks import batch, folder_in_memory, get, keys_of, octets_of, put, value

OK, NO_SPACE, IO_ERROR = DiskStatus.OK, DiskStatus.NO_SPACE, DiskStatus.IO_ERROR
EXTENT_BYTES = 128 << 10


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def open_store(folder: Path, *faults: Fault, extents: int = 16, **options: Any) -> SlabEngine:
    return SlabEngine(folder / "store", extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES, faults=faults, **options)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "store").iterdir())}


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        octet = file.read(1)[0]
        file.seek(bit // 8)
        file.write(bytes([octet ^ 1 << bit % 8]))


@pytest.mark.parametrize("bit", [0, 7, 8 * 4500 + 3, 8 * 8999 + 7])
def test_a_bit_that_flips_on_its_way_to_the_disk_makes_a_miss_and_room(folder: Path, bit: int) -> None:
    with open_store(folder, Fault("payload_write", 2, "flip", bit)) as engine:
        for name in ("a", "b", "c"):
            assert put(engine, [name], 9000, offset=1) == [OK]
        assert [value(engine, name) for name in ("a", "b", "c")] == [octets_of("a", 9000), None, octets_of("c", 9000)]
        assert engine.stats()["checksum_errors"] == 1
        assert engine.lookup(keys_of(["b"])).tolist() == [0]
        assert put(engine, ["b"], 9000) == [OK]
        assert value(engine, "b") == octets_of("b", 9000)


@pytest.mark.parametrize("io_uring", [False, True])
def test_a_bit_that_flips_on_its_way_from_the_disk_makes_a_miss(folder: Path, io_uring: bool) -> None:
    with open_store(folder, Fault("payload_read", 2, "flip", 777), io_uring=io_uring) as engine:
        put(engine, ["a", "b", "c"], 9000)
        result, octets = get(engine, ["a", "b", "c"])
        assert sorted(result.status.tolist()) == [OK, OK, DiskStatus.MISS]
        assert sum(part == octets_of(name, 9000) for name, part in zip(("a", "b", "c"), octets, strict=True)) == 2


def test_a_bit_that_flips_on_the_disk_is_found_by_the_first_read_after_a_restart_even_of_a_part(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a"], 9000)
    at = (folder / "store" / "extents.dat").read_bytes().index(octets_of("a", 9000)[:64])
    flip(folder / "store" / "extents.dat", 8 * (at + 8000))
    with open_store(folder) as engine:
        result, octets = get(engine, ["a"], capacity=10, offset=5)
        assert (result.status.tolist(), octets) == ([DiskStatus.MISS], [b""])
        assert engine.stats()["checksum_errors"] == 1


@pytest.mark.parametrize("bit", range(0, 64 * 8, 29))
def test_a_record_with_a_flipped_bit_is_dropped_and_no_other(folder: Path, bit: int) -> None:
    with open_store(folder) as engine:
        put(engine, ["a", "b", "c"], 9000)
    flip(folder / "store" / "slots.tbl", 64 * 8 + bit)
    with open_store(folder) as engine:
        there = [value(engine, name) for name in ("a", "b", "c")]
        assert there.count(None) == 1
        assert all(octets in (None, octets_of(name, 9000)) for name, octets in zip(("a", "b", "c"), there, strict=True))
        assert engine.stats()["records_dropped"] == 1
        assert put(engine, ["d", "e"], 9000) == [OK, OK]
    with open_store(folder) as engine:
        assert engine.stats()["records_dropped"] == 0


def test_a_record_in_another_slot_or_from_another_store_is_none(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a"], 9000)
    table = folder / "store" / "slots.tbl"
    record = table.read_bytes()[:64]
    with table.open("r+b") as file:
        file.seek(64)
        file.write(record)
    with open_store(folder) as engine:
        assert (engine.stats()["values"], engine.stats()["records_dropped"]) == (1, 1)
    shutil.move(folder / "store", folder / "other")
    with open_store(folder) as engine:
        put(engine, ["z"], 100)
    with table.open("r+b") as file:
        file.write(record)
    with open_store(folder) as engine:
        assert engine.lookup(keys_of(["a", "z"])).tolist() == [0, 0]


@pytest.mark.parametrize("length", [0, 4 * 4096, 1 << 31, 0xFFFF_F001, 0xFFFF_FFFF])
def test_a_record_of_a_value_that_does_not_fit_its_slot_is_none_though_its_checksum_is_right(folder: Path, length: int) -> None:
    with open_store(folder) as engine:
        put(engine, ["a", "b"], 9000)
    superblock, table = (folder / "store" / "superblock").read_bytes(), folder / "store" / "slots.tbl"
    record = bytearray(table.read_bytes()[:64])
    place = superblock[56:72] + (0).to_bytes(8, "little")
    assert crc32c(place + record[4:]).to_bytes(4, "little") == record[:4]
    record[48:52] = length.to_bytes(4, "little")
    record[:4] = crc32c(place + record[4:]).to_bytes(4, "little")
    with table.open("r+b") as file:
        file.write(record)
    with open_store(folder) as engine:
        assert engine.lookup(keys_of(["a", "b"])).tolist() == [0, 9000]
        assert engine.stats()["records_dropped"] == 1
        assert (value(engine, "a"), value(engine, "b")) == (None, octets_of("b", 9000))
        engine.check_integrity()


def test_of_two_records_of_one_key_the_newer_counts(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a", "b"], 9000)
        old = (folder / "store" / "slots.tbl").read_bytes()[:64]
        engine.remove(keys_of(["a"]))
        put(engine, ["c"], 9000)  # takes the slot that was free
        put(engine, ["a"], 9000, version=1)
    with (folder / "store" / "slots.tbl").open("r+b") as file:
        file.write(old)
    with open_store(folder) as engine:
        assert value(engine, "a") == octets_of("a", 9000, 1)
        engine.check_integrity()


@pytest.mark.parametrize(("point", "visit"), [("payload_write", 1), ("payload_write", 2), ("record_write", 1)])
def test_a_full_filesystem_costs_one_retry_and_no_value(folder: Path, point: str, visit: int) -> None:
    with open_store(folder, Fault(point, visit, "no_space")) as engine:
        assert put(engine, ["a", "b"], 9000) == [OK, OK]
        assert [value(engine, name) for name in ("a", "b")] == [octets_of("a", 9000), octets_of("b", 9000)]
        assert (engine.stats()["space_retries"], engine.error) == (1, "")


@pytest.mark.parametrize("point", ["payload_write", "record_write"])
def test_a_filesystem_that_stays_full_refuses_puts_and_costs_one_extent_at_most(folder: Path, point: str) -> None:
    names = [f"v{i}" for i in range(12)]
    with open_store(folder) as engine:
        assert set(put(engine, names, EXTENT_BYTES // 2)) == {OK}  # two in an extent
    with open_store(folder, Fault(point, 0, "no_space"), Fault("clear_write", 0, "no_space")) as engine:
        for name in ("b", "c", "d"):
            assert put(engine, [name], 20_000) == [NO_SPACE]
        assert engine.lookup(keys_of(["b", "c", "d"])).tolist() == [0, 0, 0]
        assert np.count_nonzero(engine.lookup(keys_of(names))) == 10
        deadline = time.monotonic() + 5
        while engine.stats()["free_extents"] < 11 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert (engine.stats()["free_extents"], engine.stats()["space_retries"], engine.error) == (11, 1, "")
    with open_store(folder) as engine:
        assert put(engine, ["b"], 20_000) == [OK]
        assert value(engine, "b") == octets_of("b", 20_000)


@pytest.mark.parametrize("point", ["payload_write", "payload_sync", "record_write", "record_sync", "clear_write", "clear_sync"])
def test_a_write_or_sync_that_fails_degrades_the_disk_and_says_why(folder: Path, point: str) -> None:
    with open_store(folder) as engine:
        put(engine, ["a", "b"], 9000)
    with open_store(folder, Fault(point, 1, "io_error")) as engine:
        if point.startswith("clear"):
            engine.remove(keys_of(["b"]))
        else:
            assert put(engine, ["c"], 9000) == [IO_ERROR]
        assert "Input/output error" in engine.error
        assert str(folder / "store") in engine.error
        assert (engine.stats()["is_degraded"], value(engine, "a")) == (1, None)
        assert put(engine, ["d"], 9000) == [IO_ERROR]
        with pytest.raises(DiskError, match="Input/output error"):
            engine.sync()
    with open_store(folder) as engine:
        assert value(engine, "a") == octets_of("a", 9000)


@pytest.mark.parametrize("io_uring", [False, True])
def test_one_bad_read_is_a_miss_and_many_in_a_row_degrade_the_disk(folder: Path, io_uring: bool) -> None:
    faults = [Fault("payload_read", visit, "io_error") for visit in (1, *range(3, 19))]
    with open_store(folder, *faults, io_uring=io_uring) as engine:
        put(engine, ["a"], 9000)
        assert value(engine, "a") is None
        assert value(engine, "a") == octets_of("a", 9000)
        for _ in range(15):
            assert value(engine, "a") is None
        assert engine.error == ""
        assert value(engine, "a") is None
        assert "reads in a row failed" in engine.error
        assert engine.stats()["read_errors"] == 17


@pytest.mark.parametrize(
    ("point", "io_uring"),
    [("payload_write", True), ("payload_sync", True), ("record_sync", True), ("payload_read", True), ("payload_read", False)],
)
def test_a_disk_that_hangs_costs_its_timeout_once_and_touches_nothing_afterwards(folder: Path, point: str, io_uring: bool) -> None:
    open_store(folder).close()
    engine = open_store(folder, Fault(point, 2, "hang", 1200), io_timeout_s=0.3, io_uring=io_uring)
    assert put(engine, ["a"], 4096) == [OK]
    memory = np.full(4096, 0xDD, np.uint8)
    address, size, zero = (np.array([n], t) for n, t in ((memory.ctypes.data, np.uint64), (4096, np.uint32), (0, np.uint32)))
    started = time.monotonic()
    if point == "payload_read":
        assert value(engine, "a") == octets_of("a", 4096)
        assert engine.get(keys_of(["a"]), address, size, zero).status.tolist() == [DiskStatus.MISS]
    else:
        assert put(engine, ["b"], 4096) == [IO_ERROR]
    assert 0.25 < time.monotonic() - started < 1.0
    assert "does not answer" in engine.error
    started = time.monotonic()
    assert put(engine, ["c"], 4096) == [IO_ERROR]
    assert engine.remove(keys_of(["a"])).tolist() == [False]
    engine.close()
    assert time.monotonic() - started < 0.2
    del engine
    time.sleep(1.2)
    assert (memory == 0xDD).all()
    with open_store(folder) as engine:
        assert value(engine, "a") == octets_of("a", 4096)


def test_puts_and_removals_that_wait_for_a_disk_that_hangs_all_end(folder: Path) -> None:
    with open_store(folder, Fault("payload_write", 1, "hang", 800), io_timeout_s=0.3) as engine:
        answers: list[list[int]] = []
        threads = [threading.Thread(target=lambda: answers.append([int(s) for s in put(engine, ["a"], 9000)])) for _ in range(3)]
        threads.append(threading.Thread(target=lambda: answers.append(engine.remove(keys_of(["a"])).tolist())))
        started = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - started < 2
        assert len(answers) == 4


def test_a_removal_hides_a_put_that_is_under_way_for_good(folder: Path) -> None:
    with open_store(folder, Fault("payload_sync", 2, "hang", 300)) as engine:  # the first is the new file's
        answers: list[list[DiskStatus]] = []
        writer = threading.Thread(target=lambda: answers.append(put(engine, ["a"], 9000)))
        writer.start()
        deadline = time.monotonic() + 5
        while not engine.fault_visits()["payload_write"] and time.monotonic() < deadline:
            time.sleep(0.005)
        started = time.monotonic()
        assert engine.remove(keys_of(["a"])).tolist() == [True]
        assert time.monotonic() - started > 0.1, "the removal did not wait for what was in flight"
        writer.join()
        assert answers == [[DiskStatus.REMOVED]]
        assert value(engine, "a") is None
        engine.check_integrity()
    with open_store(folder) as engine:
        assert engine.stats()["values"] == 0


def test_a_store_of_another_geometry_is_refused_and_left_as_it_is(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a"], 9000)
    before = contents(folder)
    with pytest.raises(DiskError, match=r"holds a store of 16 extents of 131072 octets .* opened as one of 8 of 131072"):
        open_store(folder, extents=8)
    with pytest.raises(DiskError, match=r"opened as one of 32 of 65536"):
        SlabEngine(folder / "store", 16 * EXTENT_BYTES, extent_bytes=EXTENT_BYTES // 2)
    assert contents(folder) == before
    with open_store(folder) as engine:
        assert value(engine, "a") == octets_of("a", 9000)


@pytest.mark.parametrize(
    ("octet", "text"), [(0, "is no superblock"), (8, "has format 0, this version reads format 1"), (30, "is damaged"), (4090, "is damaged")]
)
def test_a_superblock_that_is_not_ours_is_refused_and_left_as_it_is(folder: Path, octet: int, text: str) -> None:
    with open_store(folder) as engine:
        put(engine, ["a"], 9000)
    flip(folder / "store" / "superblock", 8 * octet)
    before = contents(folder)
    with pytest.raises(DiskError, match=text):
        open_store(folder)
    assert contents(folder) == before


def test_a_table_without_its_superblock_is_refused(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a"], 9000)
    (folder / "store" / "superblock").unlink()
    with pytest.raises(DiskError, match=r"holds slots\.tbl but no superblock"):
        open_store(folder)


@pytest.mark.parametrize("name", ["extents.dat", "slots.tbl"])
def test_a_file_that_was_cut_short_is_refused(folder: Path, name: str) -> None:
    open_store(folder).close()
    os.truncate(folder / "store" / name, 4096)
    with pytest.raises(DiskError, match=f"{name} has 4096 octets and its superblock says"):
        open_store(folder)


def test_a_folder_that_is_open_already_is_refused(folder: Path) -> None:
    with open_store(folder), pytest.raises(DiskError, match="is open in another process or store"):
        open_store(folder)


def test_a_folder_that_may_not_be_written_is_refused_with_the_way_out(folder: Path) -> None:
    (folder / "file").write_bytes(b"")
    with pytest.raises(DiskError, match="Not a directory"):
        SlabEngine(folder / "file" / "store", 1 << 20, extent_bytes=EXTENT_BYTES)
    with pytest.raises(DiskError, match="Read-only file system: a store needs a folder that it may write"):
        open_store(folder, Fault("superblock_write", 1, "read_only"))


def test_a_disk_with_too_little_space_for_the_store_is_refused_and_cleaned(folder: Path) -> None:
    with pytest.raises(DiskError, match="No space left on device: give the store less capacity"):
        open_store(folder, Fault("extents_allocate", 1, "no_space"))
    assert [path.name for path in (folder / "store").iterdir()] == ["lock"]
    with open_store(folder) as engine:
        assert put(engine, ["a"], 9000) == [OK]


def test_without_direct_io_everything_works_and_says_so(folder: Path) -> None:
    with open_store(folder, direct=False) as engine:
        assert engine.stats()["is_direct"] == 0
        assert put(engine, ["a"], 9001) == [OK]
        assert value(engine, "a") == octets_of("a", 9001)


def test_a_kernel_without_io_uring_is_no_obstacle_and_shows(folder: Path) -> None:
    with open_store(folder, io_uring=False) as engine:
        assert engine.stats()["has_io_uring"] == 0
        put(engine, ["a"], 9000)
        assert value(engine, "a") == octets_of("a", 9000)


def test_a_wrong_checksum_given_with_a_put_makes_a_miss(folder: Path) -> None:
    with open_store(folder) as engine:
        wrong = batch(["a"], 9000)
        wrong.crcs += 1
        assert wrong.put(engine) == [OK]
        assert value(engine, "a") is None
