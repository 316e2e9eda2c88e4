"""Gives a Python caller the pieces of an output's text, in an event loop or without one. Shows the progress bar."""

import sys
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextlib import closing, contextmanager
from importlib import import_module, util
from typing import Any, Self

TextPiece = tuple[int, str]  # the index of the request, and the text that its output gained
MAX_WITHOUT_BAR = 8  # with more outputs than this, a terminal shows a progress bar


class TextStream(AsyncGenerator[str]):
    """Pieces of one output's text, as they arrive.

    Awaiting the stream returns the stream itself: `async for text in llm.generate_async(...)` works, and so does
    `stream = await llm.generate_async(...)`.
    """

    def __init__(self, pieces: AsyncGenerator[TextPiece]) -> None:
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


def only_text(pieces: Generator[TextPiece]) -> Generator[str]:
    """Yields the texts of pieces that belong to one output."""
    with closing(pieces):
        for _, text in pieces:
            yield text


@contextmanager
def progress_bar(total: int, wanted: bool | None) -> Iterator[Callable[[], object]]:
    """Yields a function to call after each output.

    wanted: whether to show a bar, if tqdm is installed; None: only on a terminal, and only for many outputs
    """
    if wanted is None:
        wanted = total > MAX_WITHOUT_BAR and sys.stderr.isatty()
    if not wanted or util.find_spec("tqdm") is None:
        yield lambda: None
        return
    with import_module("tqdm").tqdm(total=total, unit=" answers", file=sys.stderr) as bar:
        yield bar.update
