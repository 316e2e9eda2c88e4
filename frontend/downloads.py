"""The launcher's reports, as routes read them: states of models, progress of downloads, answers to tickets."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from shared.launcher_messages import Ask, Done, Download, ModelState


class ToLauncher(Protocol):
    """The connection to the launcher, as routes use it."""

    @property
    def states(self) -> Mapping[str, ModelState]:
        """The launcher's last report about each model, by name."""

    @property
    def downloads(self) -> Mapping[str, Download]:
        """The last news of each running download, and of some that have ended, by name."""

    @property
    def news(self) -> int:
        """How many messages have come from the launcher, and how often the connection was lost."""

    async def next_news(self, seen: int) -> None:
        """Waits until `news` is more than `seen`."""

    def asking(self, make: Callable[[int], Ask], name: str = "") -> "AbstractContextManager[Asked]":
        """Asks the launcher something of the library, and yields the answer. At the end of the block, nobody waits for
        it any more.

        make: makes the message from its ticket; name: of the download whose progress belongs to the answer
        """


PULLING = "pulling manifest"  # the first line of a download


class Asked:
    """What a request waits for: the lines about a download, and the end. News of the same file replace each other, so a
    client that reads slowly keeps nothing in memory."""

    def __init__(self, name: str, running: Download | None) -> None:
        self.name = name
        self._lines = [running] if running is not None and not running.ended else []
        self._done: Done | None = None
        self._changed = asyncio.Event()

    def add(self, download: Download) -> None:
        if self._lines and self._lines[-1].digest == download.digest and self._lines[-1].status == download.status:
            self._lines.pop()
        self._lines.append(download)
        self._changed.set()

    def end(self, done: Done) -> None:
        self._done = done
        self._changed.set()

    async def lines(self, silent_s: float | None = None) -> AsyncIterator[Download]:
        """Yields the lines until the launcher has answered. `done` then has the answer.

        silent_s: if nothing new comes for so many seconds, the last line comes again
        """
        last = Download(self.name, PULLING)
        while True:
            lines, self._lines = self._lines, []
            for last in lines:
                yield last
            if self._done is not None and not self._lines:
                return
            try:
                async with asyncio.timeout(silent_s):
                    await self._changed.wait()
                self._changed.clear()
            except TimeoutError:
                yield last

    async def done(self) -> Done:
        """Waits for the answer."""
        async for _ in self.lines():
            pass
        assert self._done is not None
        return self._done
