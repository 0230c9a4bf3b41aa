"""Get and put of whole values, KBTP's store beside others on this machine: `python compare.py --help`.

For every case the peers are measured in turn, forwards and backwards (A B C, C B A), each in processes of its own that do nothing while
others are measured; a figure is the median of its slices. Ratios are KBTP's rate divided by the best other peer's of the same case.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ByteSize, TypeAdapter

FOLDER = Path(__file__).resolve().parent
PEERS = ("kbtp", "redis", "mooncake", "lmcache")
OPERATIONS = ("put", "hot", "cold")


class Process:
    """A peer's worker."""

    def __init__(self, name: str, folder: Path, python: str) -> None:
        self.name = name
        folder.mkdir()
        self._log = (folder / "worker.log").open("wb")
        self._process = subprocess.Popen(
            [python, str(FOLDER / "worker.py"), name, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=FOLDER,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(FOLDER), str(FOLDER.parent.parent)]), "LMCACHE_TRACK_USAGE": "false"},
        )
        self._folder = folder
        self._answer()

    def order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            log = (self._folder / "worker.log").read_text(errors="replace")
            raise SystemExit(f"{self.name} has failed:\n{log[-3000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._log.close()


@dataclass
class Figure:
    peer: str
    op: str
    size: int
    batch: int
    values_per_s: float
    gib_per_s: float
    p50_us: float
    p99_us: float


def measure(processes: list[Process], op: str, size: int, batch: int, rounds: int, seconds: float) -> list[Figure]:
    slices: dict[str, list[dict[str, Any]]] = {process.name: [] for process in processes}
    for turn in range(rounds):
        for process in processes if turn % 2 == 0 else reversed(processes):
            slices[process.name].append(process.order(do=op, size=size, batch=batch, seconds=seconds))
    figures = []
    for name, found in slices.items():
        rate = statistics.median(one["values"] / one["seconds"] for one in found)
        p50, p99 = (statistics.median(one[key] for one in found) for key in ("p50_us", "p99_us"))
        figures.append(Figure(name, op, size, batch, rate, rate * size / (1 << 30), p50, p99))
    return figures


def row(figures: list[Figure]) -> str:
    first = figures[0]
    cells = [f"{f.values_per_s:,.0f} ({f.p50_us:,.0f} µs)" for f in figures]
    others = [f.values_per_s for f in figures if f.peer != "kbtp"]
    ours = [f.values_per_s for f in figures if f.peer == "kbtp"]
    cells.append(f"{ours[0] / max(others):.2f}" if ours and others else "")
    return f"| {first.op} {_size(first.size)} × {first.batch} | " + " | ".join(cells) + " |"


def _size(octets: int) -> str:
    return f"{octets / (1 << 20):g} MiB" if octets >= 1 << 20 else f"{octets >> 10} KiB"


def main() -> None:
    sizes = TypeAdapter(list[ByteSize])
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--sizes", default="4KiB,64KiB,1MiB,2816KiB")
    parser.add_argument("--batches", default="1,32")
    parser.add_argument("--ops", default=",".join(OPERATIONS))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=1.0, help="measured time of each slice")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the peers' packages")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        processes = []
        for name in options.peers.split(","):
            processes.append(Process(name, Path(folder) / name, options.python))
            stack.callback(processes[-1].close)
        print("| case | " + " | ".join(f"{process.name}, values/s (p50)" for process in processes) + " | ratio |")
        print("| --- |" + " ---: |" * (len(processes) + 1))
        for op in options.ops.split(","):
            for size in sizes.validate_python(options.sizes.split(",")):
                for batch in map(int, options.batches.split(",")):
                    found = measure(processes, op, int(size), batch, options.rounds, options.seconds)
                    figures += found
                    print(row(found), flush=True)
    if options.json:
        machine = {"python": platform.python_version(), "system": platform.release(), "cores": os.cpu_count()}
        options.json.write_text(json.dumps({"machine": machine, "figures": [asdict(figure) for figure in figures]}, indent=1))


if __name__ == "__main__":
    main()
