"""Build and run the native checks under the address, leak and undefined-behaviour sanitizers: `python scripts/fuzz.py [SECONDS]`.

First tests/native/leak.cpp: ten thousand connections, and nothing left of them. Then the fuzz targets of tests/fuzz.

SECONDS are shared by all targets (60 by default; a nightly run takes 1800). A finding ends the script with an error and leaves its input in
build/fuzz. What was learnt stays in build/fuzz/corpus-TARGET and is used again the next time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from debian import ensure

ROOT = Path(__file__).resolve().parent.parent
BUILD = ROOT / "build" / "fuzz"
TARGETS = ("startup", "stream", "reassembly")
FLAGS = ("-std=c++20", "-O1", "-g", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", f"-I{ROOT / 'kbtp_core' / 'native'}")
SANITIZERS = "address,undefined"
NEED_PYTHON = ("module", "baseline")  # how the names of such files begin


def main() -> None:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    ensure({"clang++": "clang"}, ("libclang-rt-14-dev",))
    BUILD.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    objects = _compile()
    for target in TARGETS:
        _run_step(["clang++", f"-fsanitize=fuzzer,{SANITIZERS}", *objects, BUILD / f"fuzz_{target}.o", "-lpthread", "-o", BUILD / target])
    _run_step(["clang++", f"-fsanitize={SANITIZERS}", *objects, BUILD / "leak.o", "-lpthread", "-o", BUILD / "leak"])
    print(f"built in {time.monotonic() - started:.0f} s", flush=True)
    _run_step([BUILD / "leak"])
    for target in TARGETS:
        _fuzz(target, max(1, round(seconds / len(TARGETS))))


def _compile() -> list[Path]:
    """The object files of the native code, made anew where a source or a header is younger."""
    native = sorted(path for path in (ROOT / "kbtp_core" / "native").glob("*.cpp") if not path.name.startswith(NEED_PYTHON))
    targets = [*(ROOT / "tests" / "fuzz").glob("*.cpp"), *(ROOT / "tests" / "native").glob("*.cpp")]
    headers = [*(ROOT / "kbtp_core" / "native").glob("*.hpp"), *(ROOT / "tests" / "fuzz").glob("*.hpp")]
    newest = max(path.stat().st_mtime for path in headers)

    def one(source: Path) -> None:
        out = BUILD / f"{source.stem}.o"
        if not out.exists() or out.stat().st_mtime < max(newest, source.stat().st_mtime):
            _run_step(["clang++", *FLAGS, f"-fsanitize=fuzzer-no-link,{SANITIZERS}", "-c", source, "-o", out])

    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(one, [*native, *targets]))
    return [BUILD / f"{source.stem}.o" for source in native]


def _fuzz(target: str, seconds: int) -> None:
    corpus = BUILD / f"corpus-{target}"
    corpus.mkdir(exist_ok=True)
    command = [
        BUILD / target,
        f"-max_total_time={seconds}",
        "-max_len=4000",
        "-timeout=20",
        "-verbosity=0",
        "-print_final_stats=1",
        f"-artifact_prefix={BUILD}/finding-{target}-",
        corpus,
    ]
    done = subprocess.run(command, cwd=BUILD, check=False, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(
            f"{done.stderr}\n{target}: a finding; its input is in {BUILD.relative_to(ROOT)}. Again: {BUILD.relative_to(ROOT) / target} FILE"
        )
    runs = next(line.split()[-1] for line in done.stderr.splitlines() if "number_of_executed_units" in line)
    print(f"{target}: {runs} inputs in {seconds} s, no finding", flush=True)


def _run_step(command: list[object]) -> None:
    step = subprocess.run([str(part) for part in command], check=False)
    if step.returncode:
        sys.exit(f"exit status {step.returncode} of {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
