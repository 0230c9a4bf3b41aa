"""What a run of `kbtp bench` measures: cases, and how long and against which memory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from kbtp_core.errors import ConfigError

WARM_UP_S = 0.1
UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30}


class BenchOp(str, Enum):
    LOAD = "load"
    ALLOC_STORE = "alloc_store"


@dataclass(frozen=True)
class Case:
    """One row: blocks of `block_bytes`, `batch` of them in flight at once."""

    op: BenchOp
    block_bytes: int
    batch: int


@dataclass(frozen=True)
class Plan:
    cases: tuple[Case, ...]
    seconds: float  # measured time of each side of each case
    pool_bytes: int  # working set on both ends; over the caches' size, so that memory is cold
    congestion_control: str  # of every TCP connection where the kernel allows it; empty: the system's
    stripes: int = 1  # connections of a session; each side's device has as many threads, but no more than there are cores
    has_extras: bool = True  # besides the cases: the target in Python, two clients, and what a large load costs the interpreter

    def __post_init__(self) -> None:
        for case in self.cases:
            if case.batch * case.block_bytes > self.pool_bytes:
                raise ConfigError(
                    f"{case.batch} blocks of {case.block_bytes} octets do not fit into the pool of {self.pool_bytes} octets; "
                    "make --pool larger, or the batch smaller"
                )
        if not 1 <= self.stripes <= 64:
            raise ConfigError(f"--stripes is {self.stripes}; it must be between 1 and 64")
        if self.seconds <= 0:
            raise ConfigError(f"--seconds is {self.seconds}; it must be more than zero")


def parse_size(text: str) -> int:
    """Octets of '4KiB', '1 MiB' or '512'. Raises ConfigError."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in UNITS or int(match[1]) == 0:
        raise ConfigError(f"{text!r} is no size; write it as 4KiB, 1MiB or 65536")
    return int(match[1]) * UNITS[match[2].upper()]


def format_size(octets: int) -> str:
    for unit in ("GiB", "MiB", "KiB"):
        if octets % UNITS[unit.upper()] == 0:
            return f"{octets // UNITS[unit.upper()]} {unit}"
    return f"{octets} B"


def parse_cases(ops: str, sizes: str, batches: str) -> tuple[Case, ...]:
    """Every combination of the comma-separated lists. Raises ConfigError."""
    return tuple(
        Case(op, size, batch)
        for op in (_parse_op(text) for text in ops.split(","))
        for size in (parse_size(text) for text in sizes.split(","))
        for batch in (_parse_batch(text) for text in batches.split(","))
    )


def _parse_op(text: str) -> BenchOp:
    try:
        return BenchOp(text.strip())
    except ValueError:
        raise ConfigError(f"{text!r} is no operation to measure; there are {', '.join(op.value for op in BenchOp)}") from None


def _parse_batch(text: str) -> int:
    if not text.strip().isdigit() or int(text) == 0:
        raise ConfigError(f"{text!r} is no batch; it is a count of blocks, from 1")
    return int(text)
