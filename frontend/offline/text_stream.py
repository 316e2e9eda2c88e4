"""How a Python caller gets pieces of answers: as text only, awaited or not; and the progress bar."""

import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib import import_module, util
from typing import Any, Self

Piece = tuple[int, str]  # which answer, what it gained
MANY = 8  # answers; more of them get a progress bar on a terminal


class TextStream(AsyncGenerator[str]):
    """Pieces of one answer's text, as they come. Awaiting it gives itself, so that both
    `async for text in llm.generate_async(...)` and `stream = await llm.generate_async(...)` are right."""

    def __init__(self, pieces: AsyncGenerator[Piece]) -> None:
        self._pieces = pieces

    def __await__(self) -> Generator[Any, None, Self]:
        return self
        yield

    async def asend(self, value: None) -> str:
        return (await self._pieces.asend(value))[1]

    async def athrow(self, *error: Any) -> str:
        return (await self._pieces.athrow(*error))[1]

    async def aclose(self) -> None:
        await self._pieces.aclose()


def only_text(pieces: Generator[Piece]) -> Generator[str]:
    """Of a single answer."""
    with closing(pieces):
        for _, text in pieces:
            yield text


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], object]]:
    """Gives what to call after each answer; a bar if tqdm is there and it is `wanted` (None: on a terminal)."""
    if wanted is None:
        wanted = total > MANY and sys.stderr.isatty()
    if not wanted or util.find_spec("tqdm") is None:
        yield lambda: None
        return
    with import_module("tqdm").tqdm(total=total, unit=" answers", file=sys.stderr) as bar:
        yield bar.update
