"""`kbtp serve`: a store, until it is told to stop."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from kbtp_core.cli.flags import with_flags
from kbtp_core.cli.log_budget import LogBudget
from kbtp_core.cli.memory import give_memory_back
from kbtp_core.errors import KbtpError
from kbtp_core.fabric.api import FabricError
from kbtp_core.store.node import StoreNode
from kbtp_core.store.observe import notify_service_manager
from kbtp_core.store.settings import StoreSettings, read_settings

_log = logging.getLogger("kbtp.serve")


@with_flags(StoreSettings)
def serve(
    flags: dict[str, Any],
    config: Path | None = typer.Option(None, "--config", help="A TOML file with settings; flags and the environment win over it."),
) -> None:
    """Run a store of KV blocks for the engines of a cluster.

    Every setting can be a flag, KBTP_STORE_NAME in the environment, or a line of the file. SIGTERM stops it in order, SIGHUP reads the
    quota file again.
    """
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    give_memory_back()
    try:
        settings, origins = read_settings(flags, config)
        logging.basicConfig(level=settings.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        for handler in logging.getLogger().handlers:
            handler.addFilter(LogBudget())
        for name, value in settings.model_dump(mode="json").items():
            _log.info("%s = %s (%s)", name, value, origins[name])
        node = StoreNode(settings)
    except (KbtpError, FabricError) as error:
        errors.print(str(error), markup=False)
        raise typer.Exit(2) from None
    if settings.is_exposed and settings.secret_file is None:
        _log.warning("%s can be reached from other machines, and asks nobody for a secret: set secret_file", settings.listen)
    _run(node)


def _run(node: StoreNode) -> None:
    stop = threading.Event()

    def reload(*_: object) -> None:
        try:
            node.reload()
            _log.info("read the quotas again")
        except KbtpError as error:
            _log.error("the quotas stay as they were: %s", error)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    signal.signal(signal.SIGHUP, reload)
    host, port = node.address
    watched = "" if node.observatory is None else f", metrics at http://{node.observatory.address[0]}:{node.observatory.address[1]}/metrics"
    _log.info("serving at %s:%d%s", host, port, watched)
    notify_service_manager("READY=1")
    while not stop.wait(1.0):
        try:
            node.check()
        except KbtpError as error:
            _log.critical("%s", error)
            node.close()
            raise typer.Exit(1) from None
    _log.info("stopping: no new clients, %g s for those that are here", node.settings.drain_s)
    notify_service_manager("STOPPING=1")
    is_written = node.close()
    raise typer.Exit(0 if is_written else 1)
