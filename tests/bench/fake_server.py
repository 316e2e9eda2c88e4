"""A small HTTP server that sends the bytes that a test gives it, piece by piece."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from bench.client.load_client import Target
from tests.patience import PATIENCE_S

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str | None = None, usage: int | None = None, finish: str | None = None) -> bytes:
    """Returns one event of OpenAI's stream. Without `text`, it is the last event, which has only the usage."""
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": finish}]
    told = usage and {"prompt_tokens": 7, "completion_tokens": usage, "prompt_tokens_details": {"cached_tokens": 4}}
    return b"data: " + json.dumps({"choices": choices, "usage": told}).encode() + b"\n\n"


def stream(*events: bytes) -> list[bytes]:
    """Returns the writes of a complete streamed answer."""
    return [HEAD, *map(chunk, events), chunk(DONE) + END]


@dataclass
class Server:
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    active: int = 0
    most: int = 0

    @property
    def target(self) -> Target:
        return Target(self.url, "m")


@asynccontextmanager
async def serving(script: Callable[[dict[str, Any]], Sequence[bytes]], pause: float = 0.0) -> AsyncIterator[Server]:
    """Answers each POST with the writes of `script(body)`, waits `pause` seconds before each write, and closes."""
    server = Server()
    idle = asyncio.Event()
    idle.set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        body = json.loads(await reader.readexactly(length))
        server.bodies.append(body)
        idle.clear()
        server.active += 1
        server.most = max(server.most, server.active)
        pieces = script(body)
        for piece in pieces[:-1]:
            await asyncio.sleep(pause)
            writer.write(piece)
        await asyncio.sleep(pause)
        server.active -= 1
        writer.writelines(pieces[-1:])
        writer.close()
        await writer.wait_closed()
        if not server.active:
            idle.set()

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        await asyncio.wait_for(idle.wait(), PATIENCE_S)
        listener.close()
        await listener.wait_closed()
