"""A target as a server: the thread, the clock and the lock around `TargetCore`.

One thread waits for completions and drives everything. Local calls (`bind`, `reclaim`, `take_drained`) come from any thread and are
short; one lock covers the target. Nothing waits without a bound.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kbtp_core.errors import SessionClosed
from kbtp_core.fabric.api import Fabric
from kbtp_core.protocol.target import Target
from kbtp_core.session.target_core import PoolRegion, TargetCore

_log = logging.getLogger(__name__)

_EXIT_TIMEOUT_S: Final = 0.5  # for a server that was not closed before the interpreter ends
_ABORT_TIMEOUT_S: Final = 0.5  # what is aborted ends as soon as its device notices


MakePool = Callable[[int], tuple[Target, PoolRegion] | None]
"""A target with blocks of so many octets, and what registers its pool; None if there can't be one."""


class TargetServer:
    """Serves `target` at host:port of `fabric` (port 0: any) from construction until `close`.

    `pool_region` registers the pool's memory in a connection's protection domain. With `use_executor` plain LOADs are answered by
    the provider where it can. At most `session_limit` connections are served at once; each must say HELLO within `hello_timeout_s`.
    When there are as many, the session that has been idle longest makes room for the next.
    A peer that still reads a block `drain_limit_s` after its owner took it back loses its connection, and so does one that answers
    none of the RDMA Reads for its stores for `store_limit_s`.
    A peer that wants blocks of another size gets the pool that `make_pool` makes for that size, once, under the server's lock; without
    it, or where it makes none, the peer is refused.

    Raises FabricError if the address can't be had.
    """

    def __init__(
        self,
        fabric: Fabric,
        target: Target,
        pool_region: PoolRegion,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        use_executor: bool = True,
        session_limit: int = 256,
        hello_timeout_s: float = 5.0,
        drain_limit_s: float = 10.0,
        store_limit_s: float = 30.0,
        make_pool: MakePool | None = None,
    ) -> None:
        self.target: Final = target
        self._make_pool = make_pool
        self._targets = {target.pool.block_bytes: target}
        target.picker = self._pick
        self._cq = fabric.create_cq()
        self._lock = threading.Lock()
        self._core = TargetCore(
            fabric,
            self._cq,
            target,
            pool_region,
            use_executor=use_executor,
            session_limit=session_limit,
            hello_timeout_s=hello_timeout_s,
            drain_limit_s=drain_limit_s,
            store_limit_s=store_limit_s,
        )
        self._listener = fabric.listen(host, port, self._cq, startup_timeout_s=hello_timeout_s)
        self.address: Final[tuple[str, int]] = self._listener.address
        self._is_stopping = False
        self._is_accepting = True
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"kbtp-target-{self.address[1]}", daemon=True)
        self._thread.start()
        # A thread that still waits in native code while the interpreter is torn down would take the process with it.
        atexit.register(self.close, _EXIT_TIMEOUT_S)

    def bind(self, handles: ArrayLike, block_offsets: ArrayLike, lengths: ArrayLike, *, sealed: bool = True) -> NDArray[np.uint16]:
        """See `Target.bind`."""
        with self._lock:
            return self.target.bind(handles, block_offsets, lengths, sealed=sealed)

    def reclaim(self, handles: ArrayLike) -> NDArray[np.bool_]:
        """See `Target.reclaim`. Late LOADs are refused from now on; those under way end, and then `take_drained` has the handle."""
        with self._lock:
            return self.target.reclaim(handles)

    def take_drained(self) -> NDArray[np.uint64]:
        """See `Target.take_drained`."""
        with self._lock:
            return self.target.take_drained()

    @property
    def session_count(self) -> int:
        with self._lock:
            return self._core.connection_count

    def check(self) -> None:
        """Raise SessionClosed if the server's thread has died; a target that answers nothing must not look alive."""
        if self._failure is not None:
            raise SessionClosed(f"the target at {self.address[0]}:{self.address[1]} has failed: {self._failure!r}") from self._failure

    def check_integrity(self) -> None:
        """Assert the target's invariants."""
        with self._lock:
            for target in self._targets.values():
                target.check_integrity()

    def close(self, timeout_s: float = 5.0) -> None:
        """Say goodbye, wait up to `timeout_s` for peers to finish, end every connection, by force if need be. Idempotent."""
        atexit.unregister(self.close)
        with self._lock:
            if self._is_stopping:
                return
            self._is_accepting = False
            self._listener.close()
            self._core.shut_down(time.monotonic())
        deadline = time.monotonic() + timeout_s
        self._wait_for_disconnects(min(deadline, time.monotonic() + timeout_s / 2))
        with self._lock:
            self._core.close_all()
        self._wait_for_disconnects(deadline)
        with self._lock:
            self._core.abort_all()
        self._wait_for_disconnects(time.monotonic() + _ABORT_TIMEOUT_S)
        self._is_stopping = True
        self._cq.wake()
        self._thread.join(timeout=timeout_s)
        self._cq.close()

    @property
    def targets(self) -> list[Target]:
        """The targets of all pools."""
        with self._lock:
            return list(self._targets.values())

    def _pick(self, block_bytes: int) -> Target | None:
        """With the lock, from a session's greeting."""
        target = self._targets.get(block_bytes)
        made = self._make_pool(block_bytes) if target is None and self._make_pool is not None else None
        if made is not None:
            target, pool_region = made
            self._targets[block_bytes] = target
            self._core.add_pool(target, pool_region)
        return target

    def _wait_for_disconnects(self, deadline: float) -> None:
        while self.session_count and self._thread.is_alive() and time.monotonic() < deadline:
            time.sleep(0.002)

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._cq.wait(self._core.wait_limit_s)
                self._step()
        except BaseException as error:
            self._failure = error
            _log.critical("the target at %s:%d has failed and serves nobody any more", *self.address, exc_info=True)
            with self._lock:
                self._core.close_all()
            raise

    def _step(self) -> None:
        with self._lock:
            now = time.monotonic()
            if self._is_accepting:
                for request in self._listener.poll():
                    self._core.admit(request, now)
            self._core.process(self._cq.poll(), now)
