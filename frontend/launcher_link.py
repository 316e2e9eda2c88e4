"""The connection to the launcher, which says which models are loaded and learns which models requests need.

This module counts, for each model, the requests that use it and the requests that wait for it. It tells the launcher
when one of these numbers becomes zero or ceases to be zero. A model counts as used for LINGER_S after its last request,
so a client that sends one request after another causes no messages. Knows no tokenizer.
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
MOST_SLEEP_WAIT_S = 300.0  # how long to wait until all models are unloaded
POLL_S = 0.05
LOST = "there is no connection to the launcher; try again"


class LauncherLink:
    """The connection to the launcher. `states` has the launcher's last report about each model, by name; `reading` is
    how often the launcher has read the table of models; `asleep` is whether the launcher loads no models."""

    def __init__(self, folder: Path, changed: Callable[[], None]) -> None:
        """folder: the run folder, which holds the launcher's socket; changed: called after each report"""
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
        self._reloads: deque[asyncio.Future[str]] = deque()  # answered by the launcher in this order

    async def run(self) -> None:
        """Connects, and connects again after every loss, until cancelled."""
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
        """Counts a request that computes with a model. Each call needs a call of `release`."""
        self._used[name] += 1
        self._tell()

    def release(self, name: str) -> None:
        asyncio.get_running_loop().call_later(LINGER_S, self._release, name)

    def _release(self, name: str) -> None:
        self._used[name] -= 1
        self._tell()

    @contextlib.contextmanager
    def wanting(self, name: str) -> Iterator[None]:
        """Counts a request that waits for a model, during a `with` block."""
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
        """Has the launcher read the table again, and waits for its models. Returns the problem, or "" on success."""
        if self._writer is None:
            return LOST
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._reloads.append(answer)
        self._writer.write(frame(Reload()))
        return await answer

    async def sleep(self, asleep: bool) -> str:
        """Has the launcher unload all models, or wake up, and waits for it. Returns the problem, or "" on success."""
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
    if not answer.done():  # done (cancelled) means that the client has left
        answer.set_result(problem)
