"""The slab engine under kill -9 at every place where it writes or syncs, with torn writes among them.

A child process works on a small store by a fixed script and notes in a journal what it begins and what was acknowledged. It kills
itself at one visit of one fault point, or has a power failure there: what was written and not synced is lost, all or some of it. Then
the store is opened here, and each key must be one of the values that were put and not yet taken back, or a miss; what was acknowledged
and never taken back must be there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from kbtp_core.store.disk import DiskStatus, Fault
from kbtp_core.store.slab import FAULT_POINTS, SlabEngine
from tests.store.disks import folder_in_memory, keys_of, octets_of, put, value

EXTENT_BYTES = 128 << 10
READS = ("payload_read", "table_read")
WRITES = ("superblock_write", "payload_write", "record_write", "clear_write")
TORN_AFTER = (1, 37, 5000)  # octets of a write that reach the disk


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def open_store(folder: Path, faults: tuple[Fault, ...] = (), extents: int = 16) -> SlabEngine:
    return SlabEngine(folder / "store", extents * EXTENT_BYTES, extent_bytes=EXTENT_BYTES, io_threads=2, faults=faults)


class Journal:
    """What a child did, line by line, in a file that survives it."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def note(self, *words: object) -> None:
        os.write(self._file, json.dumps(words).encode() + b"\n")

    def put(self, engine: SlabEngine, names: list[str], length: int, version: int = 0) -> None:
        self.note("put", names, length, version)
        self.note(
            "done",
            [name for name, status in zip(names, put(engine, names, length, version=version), strict=True) if status == DiskStatus.OK],
        )

    def remove(self, engine: SlabEngine, names: list[str]) -> None:
        self.note("remove", names)
        engine.remove(keys_of(names))
        self.note("removed", names)


def work_that_fits(engine: SlabEngine, journal: Journal) -> None:
    """Puts of several sizes, removals, and keys that come again with other octets; nothing is evicted."""
    journal.put(engine, ["a", "b", "c", "d"], 9000)
    journal.put(engine, ["e", "f"], 40_000)
    journal.put(engine, ["g"], 4096)
    journal.remove(engine, ["b", "e"])
    journal.put(engine, ["b", "h"], 9000, version=1)
    journal.remove(engine, ["g", "a"])
    journal.put(engine, ["a", "g", "i"], 100, version=2)


def work_that_evicts(engine: SlabEngine, journal: Journal) -> None:
    """More values than fit, of two sizes, so that slots are used again and extents change their class."""
    for start in range(0, 16, 4):
        journal.put(engine, [f"s{i}" for i in range(start, start + 4)], 40_000)
    for start in range(0, 6, 2):
        journal.put(engine, [f"t{i}" for i in range(start, start + 2)], 100_000)
    journal.remove(engine, ["t1", "t5", "s15"])
    journal.put(engine, ["t1", "s15"], 100_000, version=1)


SCRIPTS: dict[str, tuple[Callable[[SlabEngine, Journal], None], int]] = {"fits": (work_that_fits, 16), "evicts": (work_that_evicts, 4)}


def run_child(folder: Path, script: str, fault: Fault | None) -> int:
    """Run a script in a process of its own; the signal that ended it, or 0."""
    work, extents = SCRIPTS[script]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            engine = open_store(folder, (fault,) if fault else (), extents)
            work(engine, Journal(folder / "journal"))
            engine.close()
            (folder / "visits").write_text(json.dumps(engine.fault_visits()))
            status = 0
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    assert os.WIFSIGNALED(ended) or os.WEXITSTATUS(ended) == 0, "the child failed by itself"
    return os.WTERMSIG(ended) if os.WIFSIGNALED(ended) else 0


@dataclass
class Expected:
    """What may be there for one key."""

    values: set[tuple[int, int]] = field(default_factory=set)  # (length, version)
    is_certain: bool = False  # acknowledged, and nothing took it back since


def expected_from(journal: Path) -> dict[str, Expected]:
    keys: dict[str, Expected] = {}
    for line in journal.read_text().splitlines() if journal.exists() else []:
        match json.loads(line):
            case ["put", names, length, version]:
                for name in names:
                    keys.setdefault(name, Expected()).values.add((length, version))
            case ["remove", names]:
                for name in names:
                    keys[name].is_certain = False
            case ["done", names]:
                for name in names:
                    keys[name].is_certain = True
            case ["removed", names]:
                for name in names:
                    keys[name].values.clear()
    return keys


def check_after(folder: Path, script: str) -> tuple[int, int]:
    """Open the store that a child left; how many values were certain, and how many of those are there."""
    engine = open_store(folder, extents=SCRIPTS[script][1])
    certain = warm = 0
    for name, expected in expected_from(folder / "journal").items():
        octets = value(engine, name, 1 << 17)
        assert octets in [None, *(octets_of(name, *one) for one in expected.values)], f"{name} has octets that nobody put"
        certain += expected.is_certain
        warm += expected.is_certain and octets is not None
    assert engine.stats()["checksum_errors"] == 0, "a record was there without its payload"
    engine.check_integrity()
    assert put(engine, ["after"], 9000) == [DiskStatus.OK]
    engine.close()
    return certain, warm


def visits_of(script: str) -> dict[str, int]:
    with folder_in_memory() as folder:
        assert run_child(folder, script, None) == 0
        check_after(folder, script)
        counts: dict[str, int] = json.loads((folder / "visits").read_text())
        return counts


def faults_at(point: str, visits: int) -> Iterator[Fault]:
    """Right before each visit, inside it, and after the last: after another is before the next point's."""
    if visits:
        yield Fault(point, visits, "kill_after")
    for visit in range(1, visits + 1):
        yield Fault(point, visit, "kill")
        yield Fault(point, visit, "lose", visit % 3 and visit)
        if point in WRITES:
            yield Fault(point, visit, "torn", TORN_AFTER[visit % len(TORN_AFTER)])


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS)
def test_after_a_kill_at_any_write_or_sync_each_key_is_a_value_that_was_put_or_a_miss(script: str) -> None:
    visits = visits_of(script)
    certain = warm = kills = 0
    for point in FAULT_POINTS:
        for fault in faults_at(point, 0 if point in READS else visits[point]):
            with folder_in_memory() as folder:
                kills += run_child(folder, script, fault) == 9
                found = check_after(folder, script)
                certain, warm = certain + found[0], warm + found[1]
    assert kills > 100
    if script == "fits":
        assert warm == certain > 100, f"of {certain} values whose acknowledgement was durable {warm} are there"


def test_the_scripts_pass_every_point_that_writes_or_syncs() -> None:
    visits = [visits_of(script) for script in SCRIPTS]
    assert [point for point in FAULT_POINTS if point not in READS and not any(counts[point] for counts in visits)] == []


def test_a_store_that_was_killed_while_it_was_opened_again_still_has_its_values(folder: Path) -> None:
    with open_store(folder) as engine:
        put(engine, ["a", "b"], 9000)
    for point in ("superblock_write", "superblock_sync", "superblock_rename", "folder_sync"):
        for action in ("kill", "kill_after"):
            run_child_that_opens(folder, Fault(point, 1, action))
            with open_store(folder) as engine:
                assert value(engine, "a", 1 << 14) == octets_of("a", 9000)


def test_each_start_is_a_new_epoch_and_knows_how_the_last_ended(folder: Path) -> None:
    with open_store(folder) as engine:
        assert engine.stats()["started_clean"] == 1
        epoch = engine.stats()["epoch"]
    with open_store(folder) as engine:
        assert engine.stats()["started_clean"] == 1
        assert engine.stats()["epoch"] > epoch
    run_child_that_opens(folder, Fault("superblock_rename", 1, "kill_after"))
    with open_store(folder) as engine:
        assert engine.stats()["started_clean"] == 0


def run_child_that_opens(folder: Path, fault: Fault) -> None:
    child = os.fork()
    if child == 0:
        open_store(folder, (fault,))
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == 9
