"""What a run of the bench leaves: a table on the terminal and JSON for a machine."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

import kbtp_core
from kbtp_core.cli.bench.measure import Result, Row
from kbtp_core.cli.bench.plan import Plan, format_size


def machine() -> dict[str, Any]:
    """What the figures depend on besides the code."""
    models = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def to_json(plan: Plan, result: Result) -> str:
    document = {
        "kbtp": kbtp_core.__version__,
        "machine": machine(),
        "seconds": plan.seconds,
        "pool_bytes": plan.pool_bytes,
        "stripes": plan.stripes,
        **asdict(result),
    }
    return json.dumps(document, indent=2) + "\n"


def print_result(console: Console, result: Result) -> None:
    console.print(
        f"raw TCP {result.raw_tcp_gib_per_s:.2f} GiB/s · native loop {result.native_loop_blocks_per_s:,.0f} blocks/s "
        f"(load, 4 KiB × 32) · memcpy {result.memcpy_gib_per_s:.2f} GiB/s",
        highlight=False,
    )
    console.print(result_table(result.rows))
    for line in extra_lines(result):
        console.print(line, highlight=False)


def extra_lines(result: Result) -> list[str]:
    lines = []
    if (row := result.python_target) is not None:
        lines.append(
            f"target in Python: {row.op} {format_size(row.size)} × {row.batch} at {row.blocks_per_s:,.0f} blocks/s, "
            f"{row.target_cpu_us_per_block:.1f} µs of the target's CPU a block"
        )
    if (clients := result.clients) is not None:
        lines.append(
            f"{clients.count} clients: {clients.blocks_per_s:,.0f} blocks/s together, {clients.alone_blocks_per_s:,.0f} one alone · native "
            f"loops: {clients.native_loop_blocks_per_s:,.0f}, {clients.native_loop_alone_blocks_per_s:,.0f}"
        )
    for large in result.large:
        lines.append(
            f"load {format_size(large.size)} × {large.batch} {'with' if large.has_crc else 'without'} CRCs: {large.gib_per_s:.2f} GiB/s, "
            f"{large.ratio_raw_tcp:.0%} of raw TCP; {large.cpu_s_per_gib:.2f} CPU s a GiB, {large.ratio_cpu:.2f} of raw TCP's"
        )
    if (trip := result.round_trip) is not None:
        lines.append(
            f"round trip of {trip.size} octets: raw TCP {trip.raw_tcp_us:.1f} µs, Sends {trip.send_us:.1f} µs ({trip.ratio_send:.2f}), "
            f"load {trip.load_us:.1f} µs ({trip.ratio_load:.2f})"
        )
    if (load := result.interpreter) is not None:
        lines.append(
            f"{load.batch:,} blocks of {format_size(load.size)} in one load: {load.load_ms:.1f} ms, {load.post_ms:.1f} ms until posted; "
            f"GIL held {load.gil_ms:.2f} ms ({load.gil_share:.0%}); a spinning thread makes {load.spin_share:.0%} of its progress"
        )
    return lines


def result_table(rows: tuple[Row, ...]) -> Table:
    table = Table(title="KBTP between two processes over TCP on this machine", box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("blocks/s", "GiB/s", "p50 µs", "p99 µs", "CPU µs", "target", "TCP", "loop"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.op} {format_size(row.size)} × {row.batch}",
            f"{row.blocks_per_s:,.0f}",
            f"{row.gib_per_s:.2f}",
            f"{row.p50_us:,.0f}",
            f"{row.p99_us:,.0f}",
            f"{row.cpu_us_per_block:,.{1 if row.cpu_us_per_block < 100 else 0}f}",
            f"{row.target_cpu_us_per_block:,.{1 if row.target_cpu_us_per_block < 100 else 0}f}",
            f"{row.ratio_raw_tcp:.0%}",
            f"{row.ratio_native_loop:.0%}",
        )
    table.caption = "CPU: both processes, a block; target: its share · TCP, loop: KBTP's share of the baseline's rate in the same case"
    return table
