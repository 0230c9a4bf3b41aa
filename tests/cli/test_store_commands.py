"""`kbtp serve`, `kbtp smoke` and `kbtp ctl`, as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

KBTP = [sys.executable, "-m", "kbtp_core.cli"]


class Store:
    """A `kbtp serve` of its own."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.log = folder / "serve.log"
        self.flags = ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0", "--ram", "64MiB", "--disk", "128MiB", *flags]
        self.start()

    def start(self) -> None:
        with self.log.open("wb") as out:
            command = [*KBTP, "serve", "--data-dir", str(self.folder / "data"), *self.flags]
            self.process = subprocess.Popen(command, stderr=out, stdout=out, env={**os.environ, "NO_COLOR": "1"})
        deadline = time.monotonic() + 20
        while " serving at " not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)
        line = next(line for line in self.log.read_text().splitlines() if " serving at " in line)
        self.address = line.split(" serving at ")[1].split(",")[0]
        self.metrics = line.split("http://")[1].split("/")[0]

    def ctl(self, *arguments: str, code: int = 0) -> str:
        return run("ctl", "--server", self.address, "--metrics", self.metrics, "--block-bytes", "65536", *arguments, code=code)

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(20)


def run(*arguments: str, code: int = 0) -> str:
    done = subprocess.run([*KBTP, *arguments], capture_output=True, text=True, timeout=60, env={**os.environ, "NO_COLOR": "1"}, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path)
    yield made
    if made.process.poll() is None:
        made.stop(signal.SIGKILL)


def test_a_file_comes_back_after_the_store_was_killed(store: Store, tmp_path: Path) -> None:
    octets = np.random.default_rng(1).bytes(60_000)
    (tmp_path / "in").write_bytes(octets)
    assert "kept 60000 octets" in store.ctl("put", "--durable", "a/key", str(tmp_path / "in"))
    assert "has a value already" in store.ctl("put", "a/key", str(tmp_path / "in"))
    store.stop(signal.SIGKILL)
    store.start()
    store.ctl("get", "a/key", str(tmp_path / "out"))
    assert (tmp_path / "out").read_bytes() == octets
    listed = store.ctl("ls").split()
    assert listed[0] in store.ctl("id", "a/key")
    assert listed[1] == "60000"
    assert "b: no value" in store.ctl("exists", "a/key", "b", code=1)
    assert "1 values are gone" in store.ctl("rm", "a/key")
    assert "no value" in store.ctl("get", "a/key", str(tmp_path / "out"), code=1)
    assert store.stop() == 0


def test_smoke_and_figures(store: Store) -> None:
    assert "works" in run("smoke", "--server", store.address, "--durable")
    figures = json.loads(store.ctl("stat", "--json"))
    assert figures["store_ready"] == 1
    assert sum(value for name, value in figures.items() if name.startswith("store_puts_total/")) == 64
    assert "store_ready" in store.ctl("stat")
    assert "a second" in store.ctl("top", "--interval", "0.1", "--count", "2")


def test_a_trust_domain_is_said_what_it_may_use(tmp_path: Path) -> None:
    (tmp_path / "secrets").write_text("prod sesame\n")
    (tmp_path / "prod").write_text("sesame\n")
    (tmp_path / "value").write_text("octets")
    store = Store(tmp_path, "--secret-file", str(tmp_path / "secrets"))
    try:
        proof = ["--secret-file", str(tmp_path / "prod"), "--trust-domain", "prod"]
        assert "works" in run("smoke", "--server", store.address, "--durable", *proof)
        assert "failed: " in run("smoke", "--server", store.address, *proof, "--tenant", "other", code=1)
        assert "kept 6 octets" in store.ctl(*proof, "--namespace", "prod", "put", "key", str(tmp_path / "value"))
        refused = store.ctl(*proof, "--namespace", "other", "put", "key", str(tmp_path / "value"), code=1)
        assert "key: the store refuses it" in refused
        assert "does not let trust domain 'prod' use the values of tenant" in refused
        assert "tenant" in store.ctl(*proof, "--namespace", "other", "exists", "key", code=1)
        assert "'prod' may not use tenant" in store.log.read_text()
        assert "sesame" not in store.log.read_text()
    finally:
        assert store.stop() == 0


def test_what_is_wrong_is_said_and_nothing_starts(tmp_path: Path) -> None:
    text = run("serve", "--ram", "much", code=2)
    assert "the command line: ram is 'much'" in text
    (tmp_path / "c.toml").write_text("rma = 1\n")
    assert "did you mean 'ram'" in run("serve", "--config", str(tmp_path / "c.toml"), code=2)
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in run("serve", "--metrics-listen", "off", "--data-dir", str(tmp_path / "file"), code=2)


def test_settings_are_logged_with_where_they_come_from_and_quotas_are_read_again(tmp_path: Path) -> None:
    quotas = tmp_path / "quotas"
    quotas.write_text("default 1000\n")
    store = Store(tmp_path, "--quota-file", str(quotas))
    try:
        assert "ram = 67108864 (the command line)" in store.log.read_text()
        assert "engine = slab (default)" in store.log.read_text()
        (tmp_path / "in").write_bytes(bytes(2000))
        assert "as much as it may have" in store.ctl("put", "--durable", "k", str(tmp_path / "in"), code=1)
        quotas.write_text("default 100000\n")
        store.process.send_signal(signal.SIGHUP)
        deadline = time.monotonic() + 10
        while "read the quotas again" not in store.log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        store.ctl("put", "--durable", "k", str(tmp_path / "in"))
        assert store.stop() == 0
    finally:
        store.process.kill()


def test_a_store_that_is_not_there_is_named() -> None:
    assert "127.0.0.1:9: the store can't be reached" not in run("ctl", "--server", "127.0.0.1:9", "rm", "k", code=1)
    assert "127.0.0.1:9 can't be reached" in run("ctl", "--server", "127.0.0.1:9", "rm", "k", code=1)
    assert "failed" in run("smoke", "--server", "127.0.0.1:9", code=1)
    assert "http://127.0.0.1:9/metrics" in run("ctl", "--metrics", "127.0.0.1:9", "stat", code=1)
