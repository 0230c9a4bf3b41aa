"""What the file engine does beyond the contract: names, whole files, and faults of the filesystem."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from kbtp_core.store.disk import DiskError, DiskStatus
from kbtp_core.store.file_engine import FileEngine
from tests.store.disks import key_of, keys_of, octets_of, put, value

OK = DiskStatus.OK


def path_of(folder: Path, name: str) -> Path:
    text = key_of(name).hex()
    return folder / "blocks" / text[16:18] / text[18:20] / text


def test_a_value_is_one_file_that_begins_with_its_octets(tmp_path: Path) -> None:
    engine = FileEngine(tmp_path, 1 << 20)
    assert put(engine, ["a"], 5000) == [OK]
    assert path_of(tmp_path, "a").read_bytes()[:5000] == octets_of("a", 5000)
    assert list((tmp_path / "incoming").iterdir()) == []
    engine.remove(keys_of(["a"]))
    assert not path_of(tmp_path, "a").exists()


@pytest.mark.parametrize("name", ["blocks/readme", "blocks/ab/cd/" + "0" * 47, "blocks/AB", "blocks/00/00/" + "f" * 48])
def test_a_name_that_is_none_of_ours_refuses_the_store_and_stays(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_bytes(b"precious")
    with pytest.raises(DiskError, match="is no value of a KBTP file store"):
        FileEngine(tmp_path, 1 << 20)
    assert (tmp_path / name).read_bytes() == b"precious"


def test_a_file_that_was_cut_or_changed_is_a_miss_and_what_was_half_written_goes(tmp_path: Path) -> None:
    engine = FileEngine(tmp_path, 1 << 20)
    put(engine, ["cut", "flipped", "whole"], 5000)
    engine.close()
    os.truncate(path_of(tmp_path, "cut"), 3000)
    with path_of(tmp_path, "flipped").open("r+b") as file:
        file.write(b"\0\0\0\0")
    (tmp_path / "incoming" / "half").write_bytes(b"half")
    engine = FileEngine(tmp_path, 1 << 20)
    assert [value(engine, name) for name in ("cut", "flipped", "whole")] == [None, None, octets_of("whole", 5000)]
    assert engine.stats()["checksum_errors"] == 1
    assert not (tmp_path / "incoming" / "half").exists()
    assert put(engine, ["flipped"], 5000) == [OK]


@pytest.mark.parametrize(("failures", "status"), [(1, DiskStatus.OK), (2, DiskStatus.NO_SPACE)])
def test_a_full_filesystem_costs_one_eviction_and_one_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, status: DiskStatus
) -> None:
    engine = FileEngine(tmp_path, 1 << 20)
    put(engine, ["old"], 5000)
    left = [failures]
    real = os.fdatasync

    def full(file: int) -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(errno.ENOSPC, "No space left on device")
        real(file)

    monkeypatch.setattr(os, "fdatasync", full)
    assert put(engine, ["new"], 5000) == [status]
    assert value(engine, "old") is None
    assert (engine.error, engine.stats()["values"]) == ("", int(status == OK))
    assert put(engine, ["newer"], 5000) == [OK]


def test_a_disk_that_fails_is_degraded_and_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FileEngine(tmp_path, 1 << 20)
    put(engine, ["a"], 5000)

    def broken(file: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", broken)
        assert put(engine, ["b"], 5000) == [DiskStatus.IO_ERROR]
    assert "Input/output error" in engine.error
    assert (value(engine, "a"), put(engine, ["c"], 10)) == (None, [DiskStatus.IO_ERROR])
    assert value(FileEngine(tmp_path, 1 << 20), "a") == octets_of("a", 5000)
