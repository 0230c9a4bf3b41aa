"""Run the tests of the native code under a sanitizer: `python scripts/sanitize.py thread|address [PYTEST ARGUMENTS]`.

The extension is built a second time, into build/SANITIZER, and takes the place of the installed one inside this process. A report fails
the run. What NumPy copies beside the device is no report of the thread sanitizer: scripts/tsan.supp says why.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARIES = {"thread": ("libtsan.so",), "address": ("libasan.so", "libstdc++.so")}
SUPPRESSIONS = ROOT / "scripts" / "tsan.supp"
# Of the disk engine not those that fork: the thread sanitizer does not follow.
DISKS = tuple(f"tests/store/test_{name}.py" for name in ("disk_contract", "disk_group", "slab_faults", "slab_room"))
CLIENTS = ("tests/store/test_client.py", "tests/store/test_client_calls.py")
TESTS = ("tests/conformance", "tests/fabric", "tests/transfer", "tests/session", "tests/executor", *CLIENTS, *DISKS)
RUN = """
import importlib.util, sys
import kbtp_core
spec = importlib.util.spec_from_file_location("kbtp_core._native", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["kbtp_core._native"] = module
spec.loader.exec_module(module)
kbtp_core._native = module
import pytest
sys.exit(pytest.main(sys.argv[2:]))
"""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] not in LIBRARIES:
        sys.exit("usage: python scripts/sanitize.py thread|address [PYTEST ARGUMENTS]")
    kind, arguments = sys.argv[1], sys.argv[2:]
    module = _build(kind)
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder) / "report"
        quiet = f"print_suppressions=0 suppressions={SUPPRESSIONS}"
        environment = {
            **os.environ,
            "KBTP_TEST_PATIENCE": "8",
            "LD_PRELOAD": ":".join(_library(name) for name in LIBRARIES[kind]),
            "TSAN_OPTIONS": f"halt_on_error=0 report_signal_unsafe=0 exitcode=0 {quiet} log_path={logs}",
            "ASAN_OPTIONS": f"detect_leaks=0 halt_on_error=1 log_path={logs}",
        }
        tests = arguments or [*TESTS]
        command = [*_fixed_addresses(kind), sys.executable, "-c", RUN, module, "-q", "-p", "no:cacheprovider", *tests]
        done = subprocess.run(command, cwd=ROOT, env=environment, check=False)
        reports = [path.read_text() for path in sorted(Path(folder).glob("report*"))]
    if reports:
        sys.exit("\n".join(reports) + f"\n{len(reports)} processes with reports of the {kind} sanitizer")
    sys.exit(done.returncode)


def _build(kind: str) -> Path:
    """The extension under this sanitizer."""
    build = ROOT / "build" / kind
    nanobind = subprocess.run([sys.executable, "-m", "nanobind", "--cmake_dir"], capture_output=True, text=True, check=True).stdout.strip()
    python = [
        f"-DPython_EXECUTABLE={sys.executable}",
        f"-Dnanobind_DIR={nanobind}",
        f"-DKBTP_SANITIZE={kind}",
        "-DCMAKE_BUILD_TYPE=RelWithDebInfo",  # a report names functions and lines
    ]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *python], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", build, "--target", "_native"], check=True, stdout=subprocess.DEVNULL)
    return next(build.glob("_native*.so"))


def _fixed_addresses(kind: str) -> list[str]:
    """The thread sanitizer of GCC 12 ends now and then where the kernel places memory at random over more bits than it knows of."""
    command = ["setarch", "-R"]
    works = kind == "thread" and shutil.which(command[0]) and subprocess.run([*command, "true"], check=False).returncode == 0
    return command if works else []


def _library(name: str) -> str:
    return subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
