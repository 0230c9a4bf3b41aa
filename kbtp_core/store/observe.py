"""What others watch a store by: /metrics, /healthz and /readyz on an address of their own.

/healthz says that the process is alive and asks nothing else, so that no outage of a disk or a peer makes an orchestrator kill it.
/readyz says whether it can serve, and if not, why. A client that is slow to ask is cut off and holds up nobody else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Final

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

_log = logging.getLogger(__name__)

_REQUEST_LIMIT_S: Final = 5.0
_REQUESTS_AT_ONCE: Final = 16


class Observatory:
    """Serves from construction until `close`. `unready` returns why the store can't serve, or nothing.

    Raises OSError if the address can't be had.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, unready: Callable[[], str | None]) -> None:
        self._slots = threading.BoundedSemaphore(_REQUESTS_AT_ONCE)
        slots = self._slots

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_LATEST, generate_latest(registry))
                elif path == "/healthz":
                    self._answer(200, "text/plain; charset=utf-8", b"alive\n")
                elif path == "/readyz":
                    reason = unready()
                    self._answer(503 if reason else 200, "text/plain; charset=utf-8", f"{reason or 'ready'}\n".encode())
                else:
                    self._answer(404, "text/plain; charset=utf-8", b"there are /metrics, /healthz and /readyz\n")

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                _log.debug(format, *args)

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            allow_reuse_address = True
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def process_request(self, request: Any, client_address: Any) -> None:
                if slots.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                limit = threading.Timer(_REQUEST_LIMIT_S, _cut_off, [request])  # however little it says at a time
                limit.daemon = True
                limit.start()
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    limit.cancel()
                    slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
                _log.debug("a request of %s failed", client_address, exc_info=True)

        self._server = Server((host, port), Handler)
        self.address: Final[tuple[str, int]] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(target=self._server.serve_forever, name="kbtp-observe", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _cut_off(request: socket.socket) -> None:
    with contextlib.suppress(OSError):
        request.shutdown(socket.SHUT_RDWR)


def notify_service_manager(state: str) -> None:
    """Tell systemd (`Type=notify`) a state like READY=1; nothing where there is none."""
    path = os.environ.get("NOTIFY_SOCKET")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as out:
            out.sendto(state.encode(), "\0" + path[1:] if path.startswith("@") else path)
    except OSError as error:
        _log.warning("the service manager at %s does not hear %s: %s", path, state, error)
