"""The connection to the launcher: what is loaded, and what the requests of this frontend need. Knows no tokenizer.

Counts for each model the requests that use it and those that wait for it. Tells the launcher when one of these numbers
becomes zero or ceases to be zero. A model counts as used for LINGER_S after its last request, so that a client with one
request after another causes no messages.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from shared.models.messages import (
    SOCKET,
    Keep,
    Load,
    ModelState,
    Reload,
    Reloaded,
    Seen,
    Sleep,
    Table,
    frame,
    read_from_launcher,
)

log = logging.getLogger("sluice.models")

LINGER_S = 0.5
RECONNECT_S = 0.2
MOST_SLEEP_WAIT_S = 300.0  # until all models are unloaded
POLL_S = 0.05
LOST = "there is no connection to the launcher; try again"


class LauncherLink:
    """`states` has what the launcher said last, by name; `reading` counts how often it read the table of models;
    `asleep` says that it loads none. `changed` calls back after each table."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        """folder: the run folder"""
        self.states: dict[str, ModelState] = {}
        self.connected = False
        self.reading = 0
        self.asleep = False
        self._path = folder / SOCKET
        self._changed = changed
        self._version = 0
        self._used: Counter[str] = Counter()
        self._wanted: Counter[str] = Counter()
        self._said: Seen | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reloads: deque[asyncio.Future[str]] = deque()  # in the order in which the launcher answers them

    async def run(self) -> None:
        """Connects, and again after every loss, until it is cancelled."""
        while True:
            with contextlib.suppress(EOFError, OSError, ValueError):
                reader, self._writer = await asyncio.open_unix_connection(self._path)
                self._said = None
                try:
                    while True:
                        message = await read_from_launcher(reader)
                        if isinstance(message, Reloaded):
                            _resolve(self._reloads.popleft(), message.problem)
                        else:
                            self._take(message)
                finally:
                    self.connected = False
                    while self._reloads:
                        _resolve(self._reloads.popleft(), LOST)
                    self._writer.close()
                    self._writer = None
            await asyncio.sleep(RECONNECT_S)

    def _take(self, table: Table) -> None:
        self.states = {model.name: model for model in table.models}
        self._version, self.reading, self.asleep, self.connected = table.version, table.reading, table.asleep, True
        self._changed()
        self._tell()

    def use(self, name: str) -> None:
        """Says that a request computes with a model; each call needs one of `release`."""
        self._used[name] += 1
        self._tell()

    def release(self, name: str) -> None:
        asyncio.get_running_loop().call_later(LINGER_S, self._release, name)

    def _release(self, name: str) -> None:
        self._used[name] -= 1
        self._tell()

    @contextlib.contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """Says, for the length of a `with`, that a request waits for a model."""
        self._wanted[name] += 1
        self._tell()
        try:
            yield
        finally:
            self._wanted[name] -= 1
            self._tell()

    def order(self, order: Keep | Load | Sleep) -> None:
        if self._writer is not None:
            self._writer.write(frame(order))

    async def reload(self) -> str:
        """Has the launcher read the table again. Returns when its models are known here, and why it failed, else ""."""
        if self._writer is None:
            return LOST
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reloads.append(answer)
        self._writer.write(frame(Reload()))
        return await answer

    async def sleep(self, asleep: bool) -> str:
        """Has the launcher unload all models, or wake up. Returns when that is done, and why it was not, else ""."""
        self.order(Sleep(asleep))
        deadline = time.monotonic() + MOST_SLEEP_WAIT_S
        while self.connected and time.monotonic() < deadline:
            loaded = [name for name, state in self.states.items() if state.state not in ("unloaded", "failed")]
            if self.asleep == asleep and not (asleep and loaded):
                return ""
            await asyncio.sleep(POLL_S)
        return "requests still need some of the models; try again" if self.connected else LOST

    def _tell(self) -> None:
        said = Seen(
            self._version,
            tuple(name for name, count in self._used.items() if count > 0),
            tuple(name for name, count in self._wanted.items() if count > 0),
        )
        if self._writer is not None and said != self._said and self._version:
            self._said = said
            self._writer.write(frame(said))


def _resolve(answer: "asyncio.Future[str]", problem: str) -> None:
    if not answer.done():  # a client that left has cancelled it
        answer.set_result(problem)
