"""A server with a scripted model, in its own thread: a browser test cannot be asynchronous."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.frontend.serving import app_over, serving


@contextmanager
def served(model: Any, port: int = 0, **config: Any) -> Iterator[str]:
    """Yields the base URL and raises errors of the thread.

    model: a Model, or another object with a pool and a tokenizer; port: 0 for any free port
    """
    url: Future[str] = Future()
    stop: Future[asyncio.Event] = Future()

    async def serve() -> None:
        event = asyncio.Event()
        async with serving(app_over(model.pool, model.tokenizer, **config), port=port) as address:
            stop.set_result(event)
            url.set_result(address)
            await event.wait()

    def run() -> None:
        try:
            loop.run_until_complete(serve())
        except BaseException as error:
            if url.done():
                raise
            url.set_exception(error)

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield url.result(30)
    finally:
        if stop.done():
            loop.call_soon_threadsafe(stop.result().set)
        thread.join(30)
        loop.close()
