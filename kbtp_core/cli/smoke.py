"""`kbtp smoke`: does a store do what it should? Puts, gets, looks up, removes, and compares every octet."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import typer
from rich.console import Console

from kbtp_core.client import Client, ItemStatus
from kbtp_core.errors import KbtpError
from kbtp_core.store.identity import Namespace, PoolKind
from kbtp_core.store.link import LinkOptions

_COUNT = 64


def smoke(
    server: str = typer.Option("127.0.0.1:7400", help="The store.", envvar="KBTP_SERVER"),
    secret_file: Path | None = typer.Option(None, help="The trust domain's secret, where the store asks for one."),
    trust_domain: str = typer.Option("", help="Name of the secret."),
    tenant: str = typer.Option("", help="Whose values to put; the trust domain's own if not given."),
    durable: bool = typer.Option(False, help="Also wait for the disk."),
) -> None:
    """Check a store in a second: values of several sizes are put, read back octet by octet, and removed."""
    console = Console(highlight=False)
    secret = None if secret_file is None else secret_file.read_bytes().strip()
    options = LinkOptions(secret=secret, trust_domain=trust_domain, client_name="kbtp smoke")
    namespace = _namespace(tenant or trust_domain)
    begun = time.monotonic()
    try:
        with Client(server, namespace, options=options, ttl_s=600) as client:
            for name, step in _steps(client, durable):
                step()
                console.print(f"ok  {name}")
    except (KbtpError, AssertionError, ValueError) as error:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"failed: {error}", markup=False)
        raise typer.Exit(1) from None
    console.print(f"{server} works ({time.monotonic() - begun:.2f} s)", markup=False)


def _namespace(tenant: str) -> bytes | Namespace:
    """One that nobody has: of this tenant, or of one of its own."""
    name = "kbtp-smoke-" + secrets.token_hex(8)
    if not tenant:
        return name.encode()
    return Namespace(tenant, name, "", PoolKind.CUSTOM, "smoke", "uint8", 1, 1, 0, 0, 1)


def _steps(client: Client, durable: bool) -> list[tuple[str, Callable[[], None]]]:
    draw = np.random.default_rng(secrets.randbits(64))
    keys = [f"value-{at}" for at in range(_COUNT)]
    values = [draw.integers(0, 256, int(size), np.uint8) for size in np.geomspace(1, 1 << 18, _COUNT)]
    buffers = [np.zeros(value.size, np.uint8) for value in values]

    def put() -> None:
        _all(ItemStatus.OK, client.put(keys, values, durable=durable))

    def put_again() -> None:
        _all(ItemStatus.EXISTS, client.put(keys, values[::-1]))

    def get() -> None:
        _all(ItemStatus.OK, client.get(keys, buffers).status)
        wrong = [key for key, buffer, value in zip(keys, buffers, values, strict=True) if not np.array_equal(buffer, value)]
        if wrong:
            raise AssertionError(f"wrong octets in {', '.join(wrong[:5])}")

    def look() -> None:
        found = client.lengths([*keys, "none"]).tolist()
        if found != [*(value.size for value in values), 0]:
            raise AssertionError("a lookup gave a wrong length")

    def remove() -> None:
        if (count := client.remove_all()) != _COUNT:
            raise AssertionError(f"{count} of {_COUNT} values were removed")
        _all(ItemStatus.MISSING, client.get(keys, buffers).status)

    return [
        (f"put {_COUNT} values of 1 octet to 256 KiB{', durable' if durable else ''}", put),
        ("a second put leaves the first value", put_again),
        ("get them, every octet compared", get),
        ("look them up", look),
        ("remove them", remove),
    ]


def _all(wanted: ItemStatus, statuses: np.ndarray[tuple[int, ...], np.dtype[np.uint8]]) -> None:
    others = [ItemStatus(status).name for status in statuses.tolist() if status != wanted]
    if others:
        raise AssertionError(f"{len(others)} of {len(statuses)} items are {others[0]} instead of {wanted.name}")
