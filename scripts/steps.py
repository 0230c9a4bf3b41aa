"""Setting up a virtual environment in steps that are done once.

A script makes a `Steps` for the environment whose interpreter runs it, and gives it steps in order. Rules:
1. A step is skipped while the digest of its command and of its input files is the one that it was last done with.
2. Once a step is done anew, all later ones are done anew, since they may build on it.
3. pip is quiet; each step prints one line when it starts and its time when it ends. A failing step ends the script.

Only the standard library is used: the environment may be empty.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Steps:
    """The steps of one environment; what was done is kept in a file inside it."""

    def __init__(self, title: str) -> None:
        if sys.prefix == sys.base_prefix:
            sys.exit(f"{sys.executable} belongs to no virtual environment; make one first: python3 -m venv .venv")
        self._title = title
        self._started = time.monotonic()
        self._stamps_path = Path(sys.prefix) / "kbtp-steps.json"
        self._stamps: dict[str, str] = json.loads(self._stamps_path.read_text()) if self._stamps_path.exists() else {}
        self._is_redoing = False

    def pip(self, name: str, arguments: Sequence[str], inputs: Iterable[Path] = ()) -> None:
        """Run `pip install` with `arguments`, unless nothing changed since."""
        command = [sys.executable, "-m", "pip", "install", "-qq", "--disable-pip-version-check", *arguments]
        self.call(name, lambda: subprocess.run(command, cwd=ROOT, check=True), [*arguments], inputs)

    def call(self, name: str, action: Callable[[], object], key: Sequence[str], inputs: Iterable[Path] = ()) -> None:
        """Run `action`, unless `key` and the contents of `inputs` are as they were when it last succeeded."""
        stamp = _digest(key, inputs)
        if self._stamps.get(name) == stamp and not self._is_redoing:
            return
        self._is_redoing = True
        self._stamps.pop(name, None)
        self._write_stamps()
        print(f"[{self._title} {self._elapsed()}] {name} ...", flush=True)
        begun = time.monotonic()
        try:
            action()
        except subprocess.CalledProcessError as error:
            sys.exit(f"[{self._title} {self._elapsed()}] {name} failed: exit status {error.returncode} of {' '.join(map(str, error.cmd))}")
        self._stamps[name] = stamp
        self._write_stamps()
        print(f"[{self._title} {self._elapsed()}] {name}: done in {time.monotonic() - begun:.0f} s", flush=True)

    def kbtp(self, extras: str = "") -> None:
        """Install this checkout, editable: Python files take effect at once, native files when they are compiled here.

        What compiles it is installed too and stays where it is, so that only what changed is compiled again.
        """
        self.pip("what compiles KBTP", ["scikit-build-core>=0.11", "nanobind>=2.7", "cmake>=3.26", "ninja"])
        native = [path for path in sorted((ROOT / "kbtp_core" / "native").rglob("*")) if path.suffix in {".cpp", ".hpp", ".h"}]
        build_folder = ROOT / "build" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
        self.pip(
            "kbtp from this checkout (compiles the software RNIC)",
            ["--no-build-isolation", "-e", f".{extras}", f"-Cbuild-dir={build_folder}"],
            [ROOT / "pyproject.toml", ROOT / "CMakeLists.txt", ROOT / "kbtp_core" / "__init__.py", *native],
        )

    def finish(self) -> None:
        print(f"[{self._title} {self._elapsed()}] {'set up' if self._is_redoing else 'up to date'}", flush=True)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started:4.0f} s"

    def _write_stamps(self) -> None:
        self._stamps_path.write_text(json.dumps(self._stamps, indent=1))


def _digest(key: Sequence[str], inputs: Iterable[Path]) -> str:
    digest = hashlib.sha256(json.dumps([sys.version, *key]).encode())
    for path in inputs:
        digest.update(f"\n{path.relative_to(ROOT)}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
