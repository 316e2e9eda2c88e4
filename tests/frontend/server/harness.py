"""An app behind `LimitedHttpProtocol`, and clients that write raw bytes to it."""

import asyncio
import functools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvloop

from frontend.server.http_protocol import ConnectionLimits
from frontend.text.tokenizer import Tokenizer
from tests.fakes import FakePool, sending
from tests.frontend.serving import app_over, serving
from tests.patience import PATIENCE_S

QUICK = ConnectionLimits(connections=50, header_bytes=4096, request_s=0.6, write_s=0.6, idle_s=1.2)
HELLO = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
LAST = HELLO.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
BODY = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 2}).encode()
SAY_A = sending([65], [66])


@dataclass
class Case:
    """A served app, its worker pool, and the codes of refused connections."""

    url: str
    pool: FakePool
    refused: Counter[str]
    aborted: Counter[str]
    writers: list[asyncio.StreamWriter]

    @functools.cached_property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    async def connect(self, data: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self.address)
        self.writers.append(writer)
        writer.write(data)
        return reader, writer

    async def send(self, data: bytes, seconds: float = PATIENCE_S) -> bytes:
        """Sends bytes, and returns everything that the server answers until it closes the connection."""
        reader, _ = await self.connect(data)
        try:
            return await asyncio.wait_for(reader.read(), seconds)
        except ConnectionResetError:
            return b""


def post(body: bytes = BODY, head: bytes = b"", length: object = None) -> bytes:
    size = str(len(body) if length is None else length).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: " + size + b"\r\n" + head + b"\r\n" + body


def status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def statuses(answer: bytes) -> list[int]:
    return [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]]


def on_uvloop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs the test on uvloop, as frontends do, because its transports differ from asyncio's."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


@asynccontextmanager
async def case(
    tokenizer: Tokenizer, limits: ConnectionLimits = QUICK, play: Any = SAY_A, **config: Any
) -> AsyncIterator[Case]:
    pool, refused, aborted = FakePool(play), Counter[str](), Counter[str]()
    app = app_over(pool, tokenizer, **config)
    app.state.models.first.service.metrics.aborted = lambda reason: aborted.update([reason])
    async with serving(app, limits, lambda code: refused.update([code])) as url:
        it = Case(url, pool, refused, aborted, [])
        try:
            yield it
        finally:
            for writer in it.writers:
                writer.close()
