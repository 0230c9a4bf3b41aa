"""A store that was away is used again soon after its return, however long it was away."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from kbtp_core.client import Client
from tests.soak.served import ServedStore

AWAY_S = 6.5  # pauses that went on doubling would leave it alone for five seconds more
BACK_S = 3.0


def test_a_store_that_was_away_for_long_is_used_within_seconds_of_its_return(tmp_path: Path) -> None:
    store = ServedStore(tmp_path, "--ram", str(64 << 20))
    try:
        with Client(store.address, b"tenant", timeout_s=1.0) as client:
            client.put(["k"], [b"value"])
            store.stop(signal.SIGKILL)
            away_until = time.monotonic() + AWAY_S
            while time.monotonic() < away_until:
                assert not client.exists(["k"]).any()
                time.sleep(0.01)
            store.start()
            back_at = time.monotonic()
            while not client.exists(["k"]).any():
                assert time.monotonic() - back_at < BACK_S
                client.put(["k"], [b"value"])
                time.sleep(0.01)
    finally:
        store.stop(signal.SIGKILL)
