"""A small P/D router: every prompt goes to a prefill server, then with what it answered to a decode server.

    python proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

It speaks the OpenAI API's completions and chat completions, streaming too, and takes several servers of each kind in turn.
The fields it passes on are those of vLLM's own P/D routers (`kv_transfer_params`), so any of them does the same job.

Losing prefill is no error: the request then goes to decode alone, which computes the prompt itself.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

from aiohttp import ClientError, ClientSession, ClientTimeout, web

logger = logging.getLogger("kbtp.proxy")

PATHS = ("/v1/completions", "/v1/chat/completions")
ONE_TOKEN = {"max_tokens": 1, "min_tokens": 1, "n": 1, "stream": False, "kv_transfer_params": {"do_remote_decode": True}}
CONNECT_S = 5.0


@dataclass(frozen=True)
class Servers:
    prefill: Iterator[str]
    decode: Iterator[str]
    prefill_timeout_s: float


SERVERS = web.AppKey("servers", Servers)
CLIENT = web.AppKey("client", ClientSession)


def headers_of(request: web.Request) -> dict[str, str]:
    """One request id on both servers; the client's authorization goes along."""
    headers = {"X-Request-Id": request.headers.get("X-Request-Id", uuid.uuid4().hex)}
    if "Authorization" in request.headers:
        headers["Authorization"] = request.headers["Authorization"]
    return headers


async def run_prefill(app: web.Application, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | None:
    """Compute the prompt on a prefill server; its kv_transfer_params, or None if it is of no use."""
    servers = app[SERVERS]
    url = next(servers.prefill) + path
    asked = {name: value for name, value in body.items() if name != "stream_options"} | ONE_TOKEN
    if "max_completion_tokens" in asked:
        asked["max_completion_tokens"] = 1
    try:
        timeout = ClientTimeout(total=servers.prefill_timeout_s, connect=CONNECT_S)
        async with app[CLIENT].post(url, json=asked, headers=headers, timeout=timeout) as answer:
            if answer.status == 200:
                params: dict[str, Any] | None = (await answer.json()).get("kv_transfer_params")
                return params
            logger.warning("%s answered %d; decode computes the prompt.", url, answer.status)
    except (ClientError, TimeoutError) as error:
        logger.warning("%s: %s; decode computes the prompt.", url, error or type(error).__name__)
    return None


async def generate(request: web.Request) -> web.StreamResponse:
    """Prefill, then decode; decode's answer is passed on as it comes."""
    try:
        body = await request.json()
    except ValueError:
        return web.json_response({"error": {"message": "the request's body is no JSON", "code": 400}}, status=400)
    headers = headers_of(request)
    body["kv_transfer_params"] = await run_prefill(request.app, request.path, body, headers)
    url = next(request.app[SERVERS].decode) + request.path
    try:
        timeout = ClientTimeout(total=None, connect=CONNECT_S)
        async with request.app[CLIENT].post(url, json=body, headers=headers, timeout=timeout) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"Content-Type": answer.headers.get("Content-Type", "application/json")}
            )
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
            await response.write_eof()
            return response
    except ClientError as error:
        logger.error("%s: %s", url, error)
        return web.json_response({"error": {"message": f"decode server {url} failed: {error}", "code": 502}}, status=502)


async def healthy(request: web.Request) -> web.Response:  # noqa: ARG001
    return web.Response(text="ok")


async def client(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession() as session:
        app[CLIENT] = session
        yield


def application(prefill: list[str], decode: list[str], prefill_timeout_s: float = 600.0) -> web.Application:
    app = web.Application(client_max_size=256 << 20)
    app[SERVERS] = Servers(itertools.cycle(prefill), itertools.cycle(decode), prefill_timeout_s)
    app.cleanup_ctx.append(client)
    app.router.add_get("/health", healthy)
    for path in PATHS:
        app.router.add_post(path, generate)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prefill", action="append", required=True, metavar="URL", help="a prefill server; may be given several times")
    parser.add_argument("--decode", action="append", required=True, metavar="URL", help="a decode server; may be given several times")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    web.run_app(application(chosen.prefill, chosen.decode), host=chosen.host, port=chosen.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
