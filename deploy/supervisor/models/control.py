"""The control socket in the run folder: frontends say which models their requests need, and learn which are loaded.

Each frontend has one connection. Its last report holds until its next report or until its connection ends, so a killed
frontend keeps no model loaded. Only the user who runs the server can connect.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from shared.models.messages import SOCKET, Keep, Load, Reload, Reloaded, Seen, Sleep, Table, frame, read_from_frontend

ANSWER_S = 5.0  # time limit for a frontend's answer to a table
MOST_BUFFERED = 64 << 20  # bytes that a frontend may leave unread before its connection is closed


@dataclass(eq=False, slots=True)
class _Frontend:
    writer: asyncio.StreamWriter
    seen: Seen
    behind_since: float | None = None  # when the oldest unanswered table was sent; None: all are answered


class Control:
    """The connections of all frontends."""

    def __init__(
        self,
        on_change: Callable[[], None],
        on_order: Callable[[Keep | Load | Sleep], None],
        on_reload: Callable[[], Awaitable[str]],
    ) -> None:
        """
        on_change: called when a frontend reports that its requests need other models
        on_reload: reads the table again and sends it; returns why this failed, else ""
        """
        self._frontends: set[_Frontend] = set()
        self._on_change, self._on_order, self._on_reload = on_change, on_order, on_reload
        self._table = Table(0, ())
        self._reloads: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def open(self, folder: Path) -> None:
        path = folder / SOCKET
        path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path)
        finally:
            os.umask(before)

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for one in list(self._frontends):
            one.writer.close()

    @property
    def connected(self) -> bool:
        """Whether any frontend is connected."""
        return bool(self._frontends)

    @property
    def used(self) -> set[str]:
        return {name for one in self._frontends for name in one.seen.used}

    @property
    def wanted(self) -> list[str]:
        return [name for one in self._frontends for name in one.seen.wanted]

    def send(self, table: Table) -> None:
        """Sends the table to all frontends."""
        self._table = table
        for one in list(self._frontends):
            self._send(one)

    def all_have_seen(self, version: int) -> bool:
        """Whether every frontend acts on this version of the table or a later one, or has not answered for ANSWER_S."""
        now = time.monotonic()
        return all(
            one.seen.version >= version or (one.behind_since is not None and now > one.behind_since + ANSWER_S)
            for one in self._frontends
        )

    def _send(self, one: _Frontend) -> None:
        if one.writer.transport.get_write_buffer_size() > MOST_BUFFERED:
            one.writer.close()
            return
        one.writer.write(frame(self._table))
        if one.behind_since is None:
            one.behind_since = time.monotonic()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        one = _Frontend(writer, Seen(0))
        self._frontends.add(one)
        self._send(one)
        try:
            with contextlib.suppress(EOFError, OSError, ValueError):
                while True:
                    message = await read_from_frontend(reader)
                    match message:
                        case Seen():
                            self._has_seen(one, message)
                        case Reload():
                            self._reload(one)
                        case _:
                            self._on_order(message)
        finally:
            self._frontends.discard(one)
            writer.close()
            self._on_change()

    def _has_seen(self, one: _Frontend, seen: Seen) -> None:
        one.seen = seen
        if seen.version >= self._table.version:
            one.behind_since = None
        self._on_change()

    def _reload(self, one: _Frontend) -> None:
        async def run() -> None:
            one.writer.write(frame(Reloaded(await self._on_reload())))

        task = asyncio.create_task(run())
        self._reloads.add(task)
        task.add_done_callback(self._reloads.discard)
