"""`kbtp ctl`: look into a store, and put and get values by hand.

    kbtp ctl --server 127.0.0.1:7400 put [--durable] KEY FILE
    kbtp ctl --server 127.0.0.1:7400 get KEY FILE
    kbtp ctl --server 127.0.0.1:7400 stat [--json]

Keys are in the namespace that `--namespace` names. Figures come from the store's address for metrics (`--metrics`).
"""

from __future__ import annotations

import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.live import Live
from rich.table import Table

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import KbtpError
from kbtp_core.store.identity import object_ids
from kbtp_core.store.link import LinkOptions

app = typer.Typer(help="Look into a store, and put and get values by hand.", no_args_is_help=True)
_T = TypeVar("_T")
_errors = Console(stderr=True, highlight=False, soft_wrap=True)
_out = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class _Where:
    server: str
    metrics: str
    namespace: bytes
    options: LinkOptions
    timeout_s: float


@app.callback()
def where(
    context: typer.Context,
    server: str = typer.Option("127.0.0.1:7400", help="The store, or several with commas between them.", envvar="KBTP_SERVER"),
    metrics: str = typer.Option("127.0.0.1:7401", help="Its address for metrics.", envvar="KBTP_METRICS"),
    namespace: str = typer.Option("default", help="What keys are in.", envvar="KBTP_NAMESPACE"),
    block_bytes: int = typer.Option(0, help="Which pool: the size of its blocks. 0: the store's default."),
    secret_file: Path | None = typer.Option(None, help="The trust domain's secret, where the store asks for one."),
    trust_domain: str = typer.Option("", help="Name of the secret."),
    timeout: float = typer.Option(10.0, help="Seconds for each command."),
) -> None:
    secret = None if secret_file is None else secret_file.read_bytes().strip()
    options = LinkOptions(block_bytes=block_bytes, secret=secret, trust_domain=trust_domain, client_name="kbtp ctl", quota=16)
    context.obj = _Where(server, metrics, namespace.encode(), options, timeout)


@app.command()
def put(context: typer.Context, key: str, file: Path, durable: bool = typer.Option(False, help="Wait for the disk commit.")) -> None:
    """Keep the octets of FILE under KEY; `-` is the standard input."""
    octets = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    status = _with_client(context, lambda client: ItemStatus(int(client.put([key], [octets], durable=durable)[0])))
    _say(status, key, {ItemStatus.OK: f"kept {len(octets)} octets", ItemStatus.EXISTS: "has a value already, which stays"})


@app.command()
def get(context: typer.Context, key: str, file: Path) -> None:
    """Write the value of KEY to FILE; `-` is the standard output."""

    def read(client: Client) -> tuple[ItemStatus, bytes]:
        length = int(client.lengths([key])[0])
        buffer = np.empty(length, np.uint8)
        found = client.get([key], [buffer])
        return ItemStatus(int(found.status[0])), buffer[: int(found.lengths[0])].tobytes()

    status, octets = _with_client(context, read)
    if status is ItemStatus.OK and str(file) == "-":
        sys.stdout.buffer.write(octets)
        return
    if status is ItemStatus.OK:
        file.write_bytes(octets)
    _say(status, key, {ItemStatus.OK: f"{len(octets)} octets"})


@app.command()
def exists(context: typer.Context, keys: list[str]) -> None:
    """Say which keys have a value; exit status 1 if one has none."""
    lengths = _with_client(context, lambda client: client.lengths(keys))
    for key, length in zip(keys, lengths.tolist(), strict=True):
        _out.print(f"{key}: {f'{length} octets' if length else 'no value'}", markup=False)
    raise typer.Exit(0 if (lengths > 0).all() else 1)


@app.command()
def rm(
    context: typer.Context,
    keys: list[str] | None = typer.Argument(None),
    everything: bool = typer.Option(False, "--all", help="All values of the namespace."),
) -> None:
    """Forget the values of keys, or all of the namespace."""
    if bool(keys) == everything:
        raise typer.BadParameter("give keys, or --all")
    count = _with_client(context, lambda client: client.remove_all() if everything else client.remove(keys or []))
    _out.print(f"{count} values are gone")


@app.command("ls")
def list_values(context: typer.Context, tenant: bool = typer.Option(False, help="All namespaces of the tenant.")) -> None:
    """List the values of the namespace, by object id: the store does not keep keys."""
    listed = _with_client(context, lambda client: list(client.list(whole_tenant=tenant)))
    for one in listed:
        _out.print(f"{one.object_id.hex()}  {one.length:>12}  {one.tier:<9} {f'{one.ttl_s} s left' if one.ttl_s else ''}", markup=False)


@app.command("id")
def object_id(context: typer.Context, keys: list[str]) -> None:
    """Print the object ids of keys, as `ls` shows them."""
    for key, row in zip(keys, object_ids(context.obj.namespace, keys), strict=True):
        _out.print(f"{row.tobytes().hex()}  {key}", markup=False)


@app.command()
def stat(context: typer.Context, as_json: bool = typer.Option(False, "--json", help="For programs.")) -> None:
    """Print the store's figures."""
    figures = _figures(context.obj.metrics)
    if as_json:
        _out.print_json(json.dumps(figures))
        return
    _out.print(_table(figures, {}, 0.0, show_idle=False))


@app.command()
def top(
    context: typer.Context,
    interval: float = typer.Option(1.0, min=0.1, help="Seconds between two looks."),
    count: int = typer.Option(0, min=0, help="Looks until it ends; 0: until it is interrupted."),
) -> None:
    """Show the store's figures and their rates, live."""
    before, at = _figures(context.obj.metrics), time.monotonic()
    with Live(console=_out, auto_refresh=False, screen=_out.is_terminal) as live:
        looks = 0
        while not count or looks < count:
            time.sleep(interval)
            now, now_at = _figures(context.obj.metrics), time.monotonic()
            live.update(_table(now, before, now_at - at), refresh=True)
            before, at, looks = now, now_at, looks + 1


def _figures(address: str) -> dict[str, float]:
    """Every sample of /metrics by its name, with its label's value behind a slash."""
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
            text = answer.read().decode()
    except (OSError, urllib.error.URLError, ValueError) as error:
        _errors.print(
            f"no figures from http://{address}/metrics: {error}. Is that what the store prints as its metrics address?", markup=False
        )
        raise typer.Exit(1) from None
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {"/".join((sample.name.removeprefix("kbtp_"), *sample.labels.values())): sample.value for sample in samples}


def _table(figures: dict[str, float], before: dict[str, float], seconds: float, *, show_idle: bool = True) -> Table:
    table = Table("figure", "value", *(["a second"] if seconds else []), box=None)
    for name, value in figures.items():
        is_counter = name.partition("/")[0].endswith("_total")
        rate = (value - before.get(name, value)) / seconds if seconds and is_counter else None
        if value or (show_idle and not is_counter):
            table.add_row(name, f"{value:,.0f}", *([f"{rate:,.0f}" if rate else ""] if seconds else []))
    return table


def _with_client(context: typer.Context, work: Callable[[Client], _T]) -> _T:
    place: _Where = context.obj
    try:
        with Client(place.server.split(","), place.namespace, timeout_s=place.timeout_s, options=place.options) as client:
            return work(client)
    except (KbtpError, ValueError) as error:
        _errors.print(str(error), markup=False)
        raise typer.Exit(1) from None


_TEXTS: dict[ItemStatus, str] = {
    ItemStatus.MISSING: "no value",
    ItemStatus.TOO_LARGE: "a value has 1 octet to as many as a block; ask for larger blocks with --block-bytes",
    ItemStatus.NO_SPACE: "the store has no room for it, or its tenant has as much as it may have",
    ItemStatus.TIMED_OUT: "no answer in time",
    ItemStatus.UNAVAILABLE: "the store can't be reached",
    ItemStatus.REFUSED: "the store refuses it",
}


def _say(status: ItemStatus, key: str, texts: dict[ItemStatus, str]) -> None:
    is_fine = status in texts
    (_out if is_fine else _errors).print(f"{key}: {texts.get(status) or _TEXTS[status]}", markup=False)
    if not is_fine:
        raise typer.Exit(1)
