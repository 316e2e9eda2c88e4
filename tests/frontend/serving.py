"""An app in a real server on a free port, inside the test's own event loop."""

import asyncio
import json
import math
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette

from frontend.app import create_app
from frontend.model_table import ModelTable, ServedModel
from frontend.observability.metrics import PrometheusMetrics
from frontend.server.http_protocol import ConnectionLimits, LimitedHttpProtocol, enforce_timeouts
from frontend.text.tokenizer import Tokenizer
from shared.config.frontend import FrontendConfig
from shared.messages import Outcome
from tests.fakes import MODEL, FakePool, sending
from tests.patience import PATIENCE_S

Refused = Callable[[str], None]


def app_over(pool: FakePool, tokenizer: Tokenizer | None, **config: Any) -> Starlette:
    """Returns the app over a fake pool; without a `tokenizer`, the app is still loading. Needs a running event loop."""
    loading: asyncio.Future[Tokenizer] = asyncio.get_running_loop().create_future()
    if tokenizer is not None:
        loading.set_result(tokenizer)
    settings = FrontendConfig(**{"access_log": "off", "allowed_hosts": "*", **config})
    metrics = PrometheusMetrics()
    model = ServedModel.of((MODEL,), settings, pool, loading, metrics.models[""])
    return create_app(settings, ModelTable([model]), metrics)


@asynccontextmanager
async def serving(
    app: Starlette,
    limits: ConnectionLimits | None = None,
    refused: Refused = lambda code: None,
    *,
    port: int = 0,
    certificate: Path | None = None,
) -> AsyncIterator[str]:
    """Serves an app, and yields its base URL.

    limits: serve with the frontends' own HTTP protocol and these limits
    refused: called with the code of each refused connection
    certificate: serve TLS; the file has the key, too
    """
    listener = socket.create_server(("127.0.0.1", port))
    protocol: Any = partial(LimitedHttpProtocol, limits, refused) if limits else "httptools"
    config = uvicorn.Config(
        app,
        http=protocol,
        log_config=None,
        access_log=False,
        ws="none",
        timeout_graceful_shutdown=1,
        timeout_keep_alive=math.ceil(limits.idle_s) if limits else 5,
        ssl_certfile=certificate,
    )
    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve([listener]))
    watching = asyncio.create_task(enforce_timeouts(server.server_state.connections, limits)) if limits else None
    while not server.started:
        await asyncio.sleep(0.005)
    try:
        yield f"http{'s' if certificate else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task
        if watching is not None:
            watching.cancel()


class Raw:
    """One raw HTTP/1.1 request, so that the test decides when the client reads and when it leaves."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self._writer = writer

    @classmethod
    async def post(cls, url: str, path: str, body: dict[str, Any]) -> "Raw":
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        data = json.dumps(body).encode()
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(data)}\r\n\r\n".encode()
            + data
        )
        await writer.drain()
        return cls(reader, writer)

    async def leave(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()


async def until(condition: Any, seconds: float = PATIENCE_S) -> None:
    """Waits for a condition; raises TimeoutError when it does not come true."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def http_client(pool: FakePool, tokenizer: Tokenizer | None, **config: Any) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app_over(pool, tokenizer, **config))
    async with httpx.AsyncClient(transport=transport, base_url="http://sluice") as http:
        yield http


def completing(tokenizer: Tokenizer, text: str = "hello", outcome: Outcome = Outcome.LENGTH) -> FakePool:
    """A pool whose worker completes every prompt with `text`."""
    return FakePool(sending(tokenizer.encode_now([text], False)[0], outcome=outcome))
