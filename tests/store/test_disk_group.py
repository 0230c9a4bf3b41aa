"""Several disks as one: where keys go, and what a disk that fails costs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from kbtp_core.cluster.placement import Placement
from kbtp_core.store.disk import DiskError, DiskStatus, Fault
from kbtp_core.store.disk_group import DiskGroup
from kbtp_core.store.quota import QuotaTable
from kbtp_core.store.slab import SlabEngine
from tests.store.disks import folder_in_memory, get, keys_of, octets_of, put

NAMES = [f"v{i}" for i in range(200)]
OK, MISS, IO_ERROR = DiskStatus.OK, DiskStatus.MISS, DiskStatus.IO_ERROR


@pytest.fixture
def folder() -> Iterator[Path]:
    with folder_in_memory() as path:
        yield path


def open_group(folder: Path, *faults: Fault, disks: int = 4) -> DiskGroup:
    """Disk 1 has the faults."""
    quotas = QuotaTable()
    return DiskGroup(
        {
            f"disk{i}": SlabEngine(
                folder / f"disk{i}", 4 << 20, extent_bytes=1 << 20, quotas=quotas, io_timeout_s=0.3, faults=faults if i == 1 else ()
            )
            for i in range(disks)
        }
    )


def owners() -> list[int]:
    return Placement({f"disk{i}": 10 for i in range(4)}).owners(keys_of(NAMES)[:, 8:]).tolist()


def test_each_key_is_on_the_disk_of_the_ring_and_answers_keep_the_order_of_the_batch(folder: Path) -> None:
    group = open_group(folder)
    sizes = [100 + i for i in range(len(NAMES))]
    assert set(put(group, NAMES, sizes)) == {OK}
    assert group.lookup(keys_of(NAMES)).tolist() == sizes
    assert get(group, NAMES, 1000)[1] == [octets_of(name, size) for name, size in zip(NAMES, sizes, strict=True)]
    for disk, engine in enumerate(group.engines):
        assert (engine.lookup(keys_of(NAMES)) > 0).tolist() == [owner == disk for owner in owners()]
        assert 20 <= engine.stats()["values"] <= 90
    assert group.stats()["values"] == 200
    assert group.stats()["disks"] == 4
    group.close()


@pytest.mark.parametrize("action", ["io_error", "hang"])
def test_a_disk_that_fails_or_hangs_is_a_miss_for_its_own_keys_and_nobody_elses(folder: Path, action: str) -> None:
    open_group(folder).close()
    group = open_group(folder, Fault("payload_sync", 2, action, 1000))
    is_lost = np.array(owners()) == 1
    assert set(put(group, NAMES[:100], 500)) == {OK}
    started = time.monotonic()
    statuses = put(group, NAMES[100:], 500)
    assert time.monotonic() - started < 1
    assert statuses == [IO_ERROR if lost else OK for lost in is_lost[100:]]
    assert get(group, NAMES, 500)[0].status.tolist() == [MISS if lost else OK for lost in is_lost]
    assert (group.lookup(keys_of(NAMES)) > 0).tolist() == (~is_lost).tolist()
    assert (group.degraded_names, group.stats()["is_degraded"]) == (("disk1",), 1)
    assert str(folder / "disk1") in group.error
    with pytest.raises(DiskError):
        group.sync()
    group.close()


def test_the_disks_work_side_by_side(folder: Path) -> None:
    group = open_group(folder, Fault("payload_read", 0, "hang", 200))
    put(group, NAMES[:20], 500)
    engine = group.engines[0]
    engine_names = [name for name, owner in zip(NAMES[:20], owners(), strict=False) if owner == 0]
    started = time.monotonic()
    get(engine, engine_names, 500)
    assert time.monotonic() - started < 0.15
    group.close()
