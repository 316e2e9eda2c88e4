"""The launcher's control socket: a frontend's report counts until the frontend's connection closes."""

import asyncio
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from deploy.launcher import many_manager
from deploy.launcher.many_manager import Control
from shared.launcher_messages import (
    MOST_FRAME_BYTES,
    SOCKET,
    FromFrontend,
    Keep,
    Load,
    ModelState,
    Reload,
    Reloaded,
    Seen,
    Table,
    frame,
    read_from_launcher,
)
from tests.frontend.serving import until

TABLE = Table(1, (ModelState("a", "unloaded"),))


class Served:
    """A control socket, and frontends that connect to it."""

    def __init__(self, path: str, orders: list[Keep | Load], it: Control) -> None:
        self.path, self.orders, self.control = path, orders, it
        self._writers: list[asyncio.StreamWriter] = []

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_unix_connection(self.path)
        self._writers.append(writer)
        return reader, writer

    async def leave(self) -> None:
        for writer in self._writers:
            writer.close()
        await until(lambda: not self.control._frontends)


@pytest.fixture
async def served(socket_folder: Path) -> AsyncIterator[Served]:
    folder, orders = socket_folder, list[Keep | Load]()

    async def reload() -> str:
        return "it is gone"

    it = Control(lambda: None, orders.append, reload)
    await it.open(folder)
    here = Served(str(folder / SOCKET), orders, it)
    yield here
    await here.leave()
    it.close()


def say(writer: asyncio.StreamWriter, *messages: FromFrontend) -> None:
    writer.write(b"".join(map(frame, messages)))


async def test_needs_of_all_frontends_hold_until_their_connections_end(served: Served) -> None:
    it = served.control
    (_, one), (_, two) = [await served.connect() for _ in range(2)]
    say(one, Seen(0, ("a",), ("b",)))
    say(two, Seen(0, ("c",), ("b",)), Load("d"), Keep("a", 0.0))
    await until(lambda: it.used == {"a", "c"} and len(served.orders) == 2)
    assert (it.wanted, served.orders) == (["b", "b"], [Load("d"), Keep("a", 0.0)])
    one.close()
    await until(lambda: it.used == {"c"})
    assert it.wanted == ["b"]


async def test_a_table_counts_as_seen_when_all_have_answered_it_or_are_late(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    it = served.control
    (reader, one), _ = [await served.connect() for _ in range(2)]
    await until(lambda: len(it._frontends) == 2)
    it.send(TABLE)
    assert await read_from_launcher(reader) == Table(0, ()), "what was known when it connected"
    assert await read_from_launcher(reader) == TABLE
    say(one, Seen(1))
    await until(lambda: any(other.seen.version == 1 for other in it._frontends))
    assert not it.all_have_seen(1), "the other one has not"
    monkeypatch.setattr(many_manager, "ANSWER_S", -1.0)
    assert it.all_have_seen(1)


@pytest.mark.parametrize("data", [b"\x01\0\0\0\xc1", struct.pack("<I", MOST_FRAME_BYTES + 1)])
async def test_nonsense_ends_its_own_connection_alone(served: Served, data: bytes) -> None:
    (_, good), (bad_reader, bad) = [await served.connect() for _ in range(2)]
    say(good, Seen(0, ("a",)))
    await until(lambda: served.control.used == {"a"})
    bad.write(data)
    await read_from_launcher(bad_reader)
    assert await bad_reader.read() == b""
    assert served.control.used == {"a"}


async def test_only_the_user_of_the_server_can_connect(served: Served) -> None:
    from pathlib import Path

    assert stat.S_IMODE(Path(served.path).stat().st_mode) == 0o600


async def test_each_reload_is_answered_to_the_frontend_that_asked(served: Served) -> None:
    (reader, one), (other, _) = [await served.connect() for _ in range(2)]
    say(one, Reload())
    assert [await read_from_launcher(reader) for _ in range(2)] == [Table(0, ()), Reloaded("it is gone")]
    served.control.send(TABLE)
    assert [await read_from_launcher(other) for _ in range(2)] == [Table(0, ()), TABLE]
