"""One client of a store's soak: random calls, every octet and every length compared, every call's end measured.

How lateness is told from a machine that has too little CPU: the kernel counts for each thread how long it could run and had no CPU
(/proc/self/task/*/schedstat). A call is late by as much as it ends after its deadline, less what the threads of this process waited for a
CPU meanwhile; the limit holds for that. A call in which the process was stopped is not measured: SIGCONT is counted. Nothing else is
excused: not a lock, not the interpreter, not the store.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import DeadlineExceeded, KbtpError
from kbtp_core.fabric.softrnic import SoftRnic
from kbtp_core.store.link import LinkOptions
from tests.soak.values import SPACES, Space

PATIENCE_S = 10.0
LATE_LIMIT_S = 0.1
LARGEST_BATCH, BATCH_BYTES = 16, 6 << 20
CLIENTS_QUOTA, OUTSTANDING = 64, 128
UNTOUCHED = 0xDD
_GOT = (ItemStatus.OK, ItemStatus.MISSING, ItemStatus.NO_SPACE, ItemStatus.TIMED_OUT, ItemStatus.UNAVAILABLE)
_PUT = (ItemStatus.OK, ItemStatus.EXISTS, ItemStatus.NO_SPACE, ItemStatus.TIMED_OUT, ItemStatus.UNAVAILABLE)
_T = TypeVar("_T")


class Stops:
    """How often this process was continued after a stop."""

    def __init__(self) -> None:
        self.count = 0
        signal.signal(signal.SIGCONT, self._on_continue)

    def _on_continue(self, *_: object) -> None:
        self.count += 1


def starved_ns() -> dict[str, int]:
    """Nanoseconds that each thread of this process could run and had no CPU."""
    waited: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            waited[task.name] = int((task / "schedstat").read_text().split()[1])
    return waited


class StoreClient:
    """Works until its time is over. What it finds wrong is an AssertionError."""

    def __init__(self, address: str, number: int, space: Space, pins_until: float) -> None:
        self._random = Random(number)
        self._number = number
        self._space = space
        self._pins_until = pins_until
        self._stops = Stops()
        self._fabric = SoftRnic()
        options = LinkOptions(block_bytes=space.block_bytes, quota=CLIENTS_QUOTA, outstanding=OUTSTANDING, client_name=f"soak-{number}")
        self._shared = Client(address, b"soak-shared", options=options, fabric=self._fabric)
        ttl_s = self._random.choice((0, 0, 2))
        self._own = Client(address, f"soak-{number}".encode(), options=options, fabric=self._fabric, ttl_s=ttl_s)
        self._own_is_known = True
        """Whether no put in the own namespace has an unknown end."""
        self._buffers: NDArray[np.uint8] = np.zeros(BATCH_BYTES + space.block_bytes, np.uint8)
        self.counts: Counter[str] = Counter()
        self.latest_s = 0.0

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        steps = (self._put, self._get, self._look, self._remove, self._pin, self._forget_own, self._give_up_get, self._give_up_put)
        while time.monotonic() < end:
            self._random.choices(steps, (6, 12, 3, 1, 1, 0.3, 1, 1))[0]()
        if self._random.random() < 0.7:
            self._shared.close()
            self._own.close()

    # Calls -----------------------------------------------------------------------------------------------------------

    def _put(self) -> None:
        client, space, numbers = self._draw()
        pins = time.monotonic() < self._pins_until and self._random.random() < 0.05
        self._put_values(client, space, numbers, [space.value(at) for at in numbers], durable=self._random.random() < 0.15, pin=pins)

    def _put_values(
        self, client: Client, space: Space, numbers: list[int], values: list[Any], *, timeout_s: float = PATIENCE_S, **flags: bool
    ) -> None:
        keys = [space.key(at) for at in numbers]
        name = "put" if timeout_s == PATIENCE_S else "hasty put"
        status = self._timed(name, timeout_s, lambda: client.put(keys, values, timeout_s=timeout_s, **flags))
        self._note(name, status, _PUT)
        if client is self._own and not np.isin(status, (ItemStatus.OK, ItemStatus.EXISTS, ItemStatus.NO_SPACE)).all():
            self._own_is_known = False

    def _get(self) -> None:
        client, space, numbers = self._draw()
        self._get_values(client, space, numbers, PATIENCE_S)

    def _get_values(self, client: Client, space: Space, numbers: list[int], timeout_s: float) -> NDArray[np.uint8]:
        ends = np.cumsum([space.length(at) for at in numbers]).tolist()
        self._buffers[: ends[-1]] = UNTOUCHED
        into = [self._buffers[end - space.length(at) : end] for at, end in zip(numbers, ends, strict=True)]
        keys = [space.key(at) for at in numbers]
        name = "get" if timeout_s == PATIENCE_S else "hasty get"
        found = self._timed(name, timeout_s, lambda: client.get(keys, into, timeout_s=timeout_s))
        self._note(name, found.status, _GOT)
        for at in np.flatnonzero(found.ok).tolist():
            value = space.value(numbers[at])
            assert found.lengths[at] == value.size, f"{keys[at]} has {found.lengths[at]} octets instead of {value.size}"
            wrong = np.flatnonzero(into[at] != value)
            assert not len(wrong), f"{keys[at]}: {len(wrong)} of {value.size} octets are wrong, from octet {wrong[:1]} on"
        return found.status

    def _look(self) -> None:
        client, space, numbers = self._draw(64)
        promote = self._random.random() < 0.3
        keys = [space.key(at) for at in numbers]
        found = self._timed("look", PATIENCE_S, lambda: client.lengths(keys, promote=promote, timeout_s=PATIENCE_S))
        for number, length in zip(numbers, found.tolist(), strict=True):
            assert length in (0, space.length(number)), f"{space.key(number)} has {length} octets instead of {space.length(number)}"

    def _remove(self) -> None:
        client, space, numbers = self._draw(4)
        keys = [space.key(at) for at in numbers]
        self._timed("remove", PATIENCE_S, lambda: client.remove(keys, timeout_s=PATIENCE_S))

    def _pin(self) -> None:
        client, space, numbers = self._draw(4)
        keys = [space.key(at) for at in numbers]
        self._timed("pin", PATIENCE_S, lambda: client.pin(keys, lease_s=2.0, timeout_s=PATIENCE_S))
        if self._random.random() < 0.5:
            self._timed("unpin", PATIENCE_S, lambda: client.unpin(keys, timeout_s=PATIENCE_S))

    def _forget_own(self) -> None:
        """Nobody else puts there, so what was there is gone, unless one of the puts has no known end."""
        _, space, numbers = self._draw()
        count = self._timed("remove_all", PATIENCE_S, lambda: self._own.remove_all(timeout_s=PATIENCE_S))
        if count is not None and self._own_is_known:
            status = self._get_values(self._own, space, numbers, PATIENCE_S)
            assert not (status == ItemStatus.OK).any(), f"{numbers} are there after all was removed"

    def _give_up_get(self) -> None:
        """With a deadline that is too short: from its end on the memory stays as it is."""
        client, space, numbers = self._draw()
        self._get_values(client, space, numbers, self._short())
        before = self._buffers.copy()
        time.sleep(0.003)
        assert np.array_equal(before, self._buffers), "memory changed after a get had returned"

    def _give_up_put(self) -> None:
        """From its end on the memory may be used for other things, and the value is none of those."""
        client, space, numbers = self._draw()
        ends = np.cumsum([space.length(at) for at in numbers]).tolist()
        values = [self._buffers[end - space.length(at) : end] for at, end in zip(numbers, ends, strict=True)]
        for at, value in zip(numbers, values, strict=True):
            value[:] = space.value(at)
        self._put_values(client, space, numbers, values, timeout_s=self._short())
        self._buffers[: ends[-1]] = UNTOUCHED

    # Inside ----------------------------------------------------------------------------------------------------------

    def _draw(self, most: int = LARGEST_BATCH) -> tuple[Client, Space, list[int]]:
        """A namespace, and keys whose values fit into this client's blocks."""
        fitting = [space for space in SPACES if space.block_bytes <= self._space.block_bytes]
        space = self._space if self._random.random() < 0.8 else self._random.choice(fitting)
        client = self._shared if self._random.random() < 0.8 else self._own
        return client, space, space.draw(self._random, most, BATCH_BYTES)

    def _short(self) -> float:
        return 0.0002 * 25 ** self._random.random()

    def _timed(self, name: str, timeout_s: float, call: Callable[[], _T]) -> Any:
        """What the call returns, or None if it raised a KbtpError."""
        result: _T | None = None
        stops, starved, begun = self._stops.count, starved_ns(), time.monotonic()
        try:
            result = call()
            ended = time.monotonic()
        except KbtpError as error:
            ended = time.monotonic()
            self.counts[f"{name} {'TIMED_OUT' if isinstance(error, DeadlineExceeded) else 'UNAVAILABLE'}"] += 1
        self.counts[name] += 1
        late_s = ended - begun - timeout_s
        if late_s > 0 and stops == self._stops.count:
            excused_s = sum(waited - starved.get(thread, 0) for thread, waited in starved_ns().items()) / 1e9
            self.latest_s = max(self.latest_s, late_s - excused_s)
            assert late_s - excused_s <= LATE_LIMIT_S, (
                f"a {name} ended {late_s * 1000:.0f} ms after its deadline of {timeout_s * 1000:.1f} ms; "
                f"{excused_s * 1000:.0f} ms of that it waited for a CPU"
            )
        return result

    def _note(self, name: str, status: NDArray[np.uint8], allowed: tuple[ItemStatus, ...]) -> None:
        for one, count in Counter(status.tolist()).items():
            assert one in allowed, f"a {name} ended with {ItemStatus(one).name}"
            self.counts[f"{name} {ItemStatus(one).name}"] += count


def life(address: str, number: int, space_number: int, seconds: float, pins_until: float, report: Any) -> None:
    """A process: one client. What is wrong ends it with a traceback and status 1; `report` gets what it has counted."""
    import logging

    logging.basicConfig(filename="/tmp/B_client.log", level=logging.DEBUG, format="%(asctime)s %(process)d %(name)s %(message)s")
    client = StoreClient(address, number, SPACES[space_number], pins_until)
    client.run(seconds)
    report.send((client.counts, client.latest_s))
    os._exit(0)  # as a process that is killed would: nothing is tidied up
