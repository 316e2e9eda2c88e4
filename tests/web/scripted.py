"""A server whose model speaks from a script, in a thread of its own: a browser test cannot be asynchronous."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from tests.frontend.serving import app_over, serving
from tests.frontend.speaking import Model


@contextmanager
def served(model: Model, port: int = 0, **config: Any) -> Iterator[str]:
    """Yields the base URL; port 0 is any that is free. What goes wrong in the thread is raised here."""
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
