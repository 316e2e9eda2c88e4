"""A server that does no work per token: bare ASGI under uvicorn, and the same through sse-starlette.

python -m bench.micro.asgi_floor PORT

Then GET /bare/N or /sse/N returns N chunks as large as a completion's. Each chunk takes one turn of the event loop.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

import uvicorn
from sse_starlette import EventSourceResponse
from starlette.types import Receive, Scope, Send

CHUNK = (
    b'{"id":"cmpl-0123456789abcdef01234567","object":"text_completion","created":1700000000,"model":"demo",'
    b'"choices":[{"index":0,"text":" word","logprobs":null,"finish_reason":null}]}'
)
DONE = b"[DONE]"
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] != "http":
        return
    _, kind, count = scope["path"].split("/")
    if kind == "sse":
        return await EventSourceResponse(_events(int(count)))(scope, receive, send)
    await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
    for _ in range(int(count)):
        await send({"type": "http.response.body", "body": b"data: " + CHUNK + b"\n\n", "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def _events(count: int) -> AsyncIterator[dict[str, str]]:
    text = CHUNK.decode()
    for _ in range(count):
        yield {"data": text}
        await asyncio.sleep(0)
    yield {"data": DONE.decode()}


if __name__ == "__main__":
    uvicorn.run(
        app, host="127.0.0.1", port=int(sys.argv[1]), loop="uvloop", http="httptools", lifespan="off", log_config=None
    )
