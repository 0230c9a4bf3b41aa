"""One session of a client with a store, and what is known through it: handles for puts, where values are, the usual calls."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kbtp_core import _native
from kbtp_core.errors import DeadlineExceeded, SessionClosed
from kbtp_core.protocol.constants import Status
from kbtp_core.session import InitiatorSession
from kbtp_core.session.calls import StoreCalls

_CACHE_LOG2_SETS: Final = 14
_LOOK_S: Final = 0.25  # how late a session may be noticed that ends while a handle is waited for


@dataclass(frozen=True)
class LinkOptions:
    """How a client connects to each store."""

    block_bytes: int = 0
    """The largest value; 0 takes the store's default pool."""
    secret: bytes | None = None
    trust_domain: str = ""
    client_name: str = ""
    connect_timeout_s: float = 3.0
    quota: int = 1024
    """Blocks that values may hold that are on their way."""
    outstanding: int = 1024
    inline_bytes: int = 1 << 16
    stripes: int = 1
    """Connections to each store: more than one where a single one is slower than the network between."""


@dataclass(frozen=True)
class SpaceOf:
    """What a client's values belong to."""

    tenant: int
    namespace: int
    ttl_s: int
    id_prefix: bytes
    """What is hashed before a key (`identity.id_prefix`)."""


class _Handles:
    """Handles of a session for values on their way to the store, at most so many. Under the channel's lock."""

    def __init__(self, runs: list[tuple[int, int]], most: int) -> None:
        self._most_each = -(-most // max(1, len(runs)))
        self._runs: list[tuple[int, int]] = []
        self.free: list[int] = []
        self.doubtful: list[int] = []
        self.update(runs)

    @property
    def count(self) -> int:
        return sum(count for _, count in self._runs)

    def update(self, runs: list[tuple[int, int]]) -> None:
        """The session has these now, base and count each: a connection that was made anew has others."""
        runs = [(base, min(count, self._most_each)) for base, count in runs]
        if runs == self._runs:
            return
        new = [range(base, base + count) for base, count in runs if (base, count) not in self._runs]
        self._runs = runs
        self.free, self.doubtful = self._own(self.free), self._own(self.doubtful)
        # In turns, so that a batch takes some of each connection.
        self.free += [handle for turn in itertools.zip_longest(*new) for handle in turn if handle is not None]

    def give_back(self, free: list[int], doubtful: list[int]) -> None:
        """Those that are not the session's any more are dropped."""
        self.free += free if len(self._runs) == 1 else self._own(free)
        self.doubtful += doubtful if len(self._runs) == 1 else self._own(doubtful)

    def _own(self, handles: list[int]) -> list[int]:
        return [handle for handle in handles if any(0 <= handle - base < count for base, count in self._runs)]


class Channel:
    """A session, and what is known through it."""

    def __init__(self, session: InitiatorSession, options: LinkOptions, space: SpaceOf) -> None:
        self.session: Final = session
        self.since: Final = time.monotonic()
        self.cache: Final = _native.HandleCache(_CACHE_LOG2_SETS)
        self.changed: Final = threading.Condition()  # guards the handles
        self._is_striped = options.stripes > 1
        runs, most = session.own_handles, options.quota
        self.takes_values: Final = not most or any(count for _, count in runs)
        """Whether the store had any room to promise when the session began."""
        self.calls: StoreCalls | None = None  # for the usual case
        if not self._is_striped:  # half of them are for calls that the provider makes by itself
            base, count = runs[0][0], min(runs[0][1], most)
            share = np.arange(base, base + count // 2, dtype=np.uint64)
            self.calls = StoreCalls.create(session, self.cache, space.id_prefix, space.tenant, share)
            if self.calls is not None:
                runs, most = [(base + len(share), count - len(share))], count - len(share)
        self.handles: Final = _Handles(runs, most)

    def give_back(self, handles: NDArray[np.uint64], is_free: NDArray[np.bool_] | None) -> None:
        """Handles that a put has used; those that are not `is_free` are doubtful, and with None there are none of them."""
        with self.changed:
            free, doubtful = (handles.tolist(), []) if is_free is None else (handles[is_free].tolist(), handles[~is_free].tolist())
            self.handles.give_back(free, doubtful)
            self.changed.notify_all()

    def take_handles(self, wanted: int, deadline: float) -> NDArray[np.uint64]:
        """One or more handles, up to `wanted`; waits until there is one. Raises DeadlineExceeded, SessionClosed."""
        while True:
            with self.changed:
                own = self.handles
                if self._is_striped:
                    own.update(self.session.own_handles)
                if own.free:
                    taken = own.free[-wanted:]
                    del own.free[-wanted:]
                    return np.array(taken, np.uint64)
                doubtful, own.doubtful = own.doubtful, []
                left_s = deadline - time.monotonic()
                if not doubtful and left_s <= 0:
                    raise DeadlineExceeded(f"no block of {self.session.peer} came free in time; ask for more quota, or put less at once")
                if not doubtful:
                    self.changed.wait(min(left_s, _LOOK_S))
            if not self.session.is_open:
                raise SessionClosed(f"the session with {self.session.peer} has ended")
            if doubtful:
                self._free_doubtful(doubtful, deadline)

    def _free_doubtful(self, handles: list[int], deadline: float) -> None:
        """Free handles whose puts have no known end: the answer comes behind those of the puts."""
        is_settled: NDArray[np.bool_] = np.zeros(len(handles), np.bool_)
        try:
            status = self.session.free(handles, 0, deadline=deadline).wait().status
            is_settled = (status == Status.OK) | (status == Status.NOT_BOUND)
        finally:
            self.give_back(np.array(handles, np.uint64), is_settled)
