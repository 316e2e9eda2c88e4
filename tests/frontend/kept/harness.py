"""Servers over fake pools that share a store, and models whose tokens come one by one when the test says so."""

import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette

from frontend.kept.store import Store, database_of
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from tests.fakes import MODEL, FakePool
from tests.frontend.serving import app_over, serving

LIMITS = m.Limits(max_seq_len=8192, vocab_size=269, eos_token_ids=(265,))


class KeptStore(Protocol):
    """A store as --store names it (`str`). files: what nobody else may read"""

    files: tuple[Path, ...]

    def rows(self, query: str, *values: Any) -> list[Any]:
        """Runs a statement beside the server, and returns what it finds."""

    def gone(self) -> None:
        """Has the store, and the logs of streams, say that the process of all running answers is gone."""


class SQLiteStore:
    def __init__(self, path: Path) -> None:
        self.path, self.files = path, (path,)

    def __str__(self) -> str:
        return str(self.path)

    def rows(self, query: str, *values: Any) -> list[Any]:
        return rows_of(str(self), query, *values)

    def gone(self) -> None:
        for path in self.path.parent.glob("answers.db-streams-*"):
            path.rename(path.with_name(re.sub("streams-.*-", "streams-gone-", path.name)))
        self.rows("UPDATE answers SET owner = 'gone' WHERE ended IS NULL")


class PostgresStore:
    files = ()

    def __init__(self, url: str) -> None:
        self.url = url

    def __str__(self) -> str:
        return self.url

    def rows(self, query: str, *values: Any) -> list[Any]:
        return rows_of(self.url, query, *values)

    def gone(self) -> None:
        """The process may not say any more that it lives. The one that takes over removes its fences."""
        self.rows("CREATE FUNCTION nothing() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'")
        for (owner,) in self.rows("SELECT DISTINCT owner FROM answers WHERE ended IS NULL"):
            self.rows(
                f"CREATE TRIGGER \"{owner}\" BEFORE INSERT OR UPDATE ON owners FOR EACH ROW WHEN (NEW.id = '{owner}') "
                "EXECUTE FUNCTION nothing()"
            )
            self.rows("DELETE FROM owners WHERE id = ?", owner)


async def opened(store: KeptStore, owner: str) -> Store:
    """Opens the store of a process. The caller closes it."""
    made = Store(database_of(str(store)), owner, max_age_s=0, max_bytes=0)
    made.start()
    await made.read(lambda db: None)
    return made


def rows_of(store: str, query: str, *values: Any) -> list[Any]:
    with closing(database_of(store).open()) as db:
        found = db.execute(query, values)
        return found.fetchall() if query.startswith("SELECT") else []


class Held:
    """A worker that computes the same tokens for every sequence, and sends as many as the test allows."""

    def __init__(self, tokenizer: Tokenizer, text: str) -> None:
        (self.ids,) = tokenizer.encode_now([text], False)
        self.pool = FakePool(self._play, welcome=m.Welcome(1, 1, 4711, MODEL, "", LIMITS, fingerprint="fp_worker"))
        self.streams: list[Stream] = []
        self.allowed = 0
        self.ends = False
        self.at_once = False

    def _play(self, pool: FakePool, stream: Stream) -> None:
        self.streams.append(stream)
        self._send(stream)

    def _send(self, stream: Stream) -> None:
        """Sends a token in each turn of the loop, or all that are allowed."""
        at, allowed = len(stream.output), min(self.allowed, len(self.ids))
        if at < allowed:
            self.pool.send_tokens(stream, self.ids[at : allowed if self.at_once else at + 1])
        elif self.ends and at == len(self.ids):
            self.pool.end(stream)
        if stream.end is None:
            self.pool.later(lambda: self._send(stream), 0.001)

    def allow(self, count: int) -> None:
        self.allowed = count

    def finish(self) -> None:
        self.ends, self.allowed = True, len(self.ids)


@asynccontextmanager
async def keeping(
    pool: FakePool,
    tokenizer: Tokenizer,
    store: Path | KeptStore,
    apps: list[Starlette] | None = None,
    **config: Any,
) -> AsyncIterator[str]:
    """Serves an app with a store, and yields its URL. apps: gets the app"""
    app = app_over(pool, tokenizer, store=str(store), **config)
    if apps is not None:
        apps.append(app)
    async with serving(app) as url:
        yield url


def blocks(data: bytes) -> list[bytes]:
    """Returns the events of a stream, without comments."""
    return [block for block in data.split(b"\n\n") if block and not block.startswith(b":")]


def ids_of(data: bytes) -> Iterable[int]:
    return [int(block.split(b"\n")[0].removeprefix(b"id: ")) for block in blocks(data)]
