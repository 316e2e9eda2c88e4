"""A store in a Postgres: who may use it, what a start refuses, and what happens while it is away."""

import asyncio
import logging
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import httpx
import psutil
import pytest
from starlette.applications import Starlette

from frontend.kept import answers, batches
from frontend.kept.database import StoreError
from frontend.kept.store import check_store, database_of
from frontend.kept.stream_log import Logs
from shared.config.declaration import ConfigError
from tests import postgres
from tests.frontend.kept.harness import Held, PostgresStore, blocks, keeping, opened, rows_of
from tests.frontend.kept.test_store import ASKED, answer
from tests.frontend.kept.test_stream_log import record, written
from tests.frontend.kept.test_streams import NAMED, TEXT, again, body, head
from tests.frontend.serving import until
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S
from tests.postgres import PASSWORD, PostgresServer


@pytest.fixture
def url(postgres_server: PostgresServer) -> str:
    return postgres_server.emptied()


@pytest.fixture
def own_server() -> Iterator[PostgresServer]:
    """A server that the test may stop."""
    if problem := postgres.missing():
        pytest.skip(problem)
    with postgres.postgres() as server:
        yield server


def test_many_make_the_tables_at_the_same_time(url: str) -> None:
    together = threading.Barrier(6)

    def made(one: int) -> None:
        together.wait()
        db = database_of(url).open()
        db.execute("INSERT INTO owners VALUES (?, 0)", (str(one),))
        db.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(made, range(6)))
    assert rows_of(url, "SELECT count(*) FROM owners") == [(6,)]
    check_store(url)


@pytest.mark.parametrize(
    ("user", "password", "database", "problem"),
    [
        (postgres.USER, "wrong-password", "postgres", "password authentication failed"),
        ("nobody-there", "wrong-password", "postgres", "password authentication failed"),
        (postgres.USER, PASSWORD, "absent", '"absent" does not exist'),
        ("guest", "guests-password", "postgres", "permission denied for "),
    ],
)
def test_database_that_refuses_is_an_error_of_the_flag_without_the_password(
    postgres_server: PostgresServer, user: str, password: str, database: str, problem: str
) -> None:
    if user == "guest":
        postgres_server.execute("DROP ROLE IF EXISTS guest", f"CREATE ROLE guest LOGIN PASSWORD '{password}'")
    with pytest.raises(ConfigError, match=f"^--store postgresql://{user}@/.*{problem}") as error:
        check_store(postgres_server.url(database, user, password))
    assert password not in str(error.value) and "password%" not in str(error.value)


@pytest.mark.parametrize(
    "place",
    ["u:p@secret@host/db", "u:p/secret@host/db", "u:1/secret@host/db", "u:p%secret@host/db", "u:secret@host:port/db"],
)
def test_url_whose_password_is_not_encoded_is_refused_and_not_shown(place: str) -> None:
    if problem := postgres.missing():
        pytest.skip(problem)
    with pytest.raises(ConfigError, match=r"^--store: this is no URL of Postgres.*%40") as error:
        check_store(f"postgresql://{place}")
    assert "secret" not in str(error.value)


def test_missing_package_is_an_error_of_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    monkeypatch.delitem(sys.modules, "frontend.kept.postgres", raising=False)
    with pytest.raises(ConfigError, match=r"^--store .* needs `pip install 'sluice-llm\[postgres\]'`"):
        check_store("postgresql://host/db")


def test_newer_tables_are_refused(url: str) -> None:
    database_of(url).open().close()
    rows_of(url, "UPDATE sluice.version SET number = 99")
    with pytest.raises(ConfigError, match="version 99"):
        check_store(url)


def indexes(url: str) -> set[str]:
    """Asks without opening the store, which would make them."""
    import psycopg  # it is optional

    with psycopg.connect(url) as db:
        return {name for (name,) in db.execute("SELECT indexname FROM pg_indexes WHERE schemaname = 'sluice'")}


def test_tables_of_an_earlier_release_get_their_indexes(postgres_server: PostgresServer, url: str) -> None:
    database_of(url).open().close()
    found, later = indexes(url), {"answers_oldest", "batch_lines_states", "answers_stored"}
    postgres_server.execute(*(f"DROP INDEX sluice.{name}" for name in later))
    assert indexes(url) == found - later
    database_of(url).open().close()
    assert indexes(url) == found


def test_store_without_an_index_serves_who_does_not_own_its_tables(postgres_server: PostgresServer, url: str) -> None:
    database_of(url).open().close()
    postgres_server.execute(
        "DROP INDEX sluice.answers_oldest",
        "CREATE ROLE writer LOGIN PASSWORD 'writes'",
        "GRANT USAGE ON SCHEMA sluice TO writer",
        "GRANT ALL ON ALL TABLES IN SCHEMA sluice TO writer",
    )
    database_of(postgres_server.url("postgres", "writer", "writes")).open().close()
    assert "answers_oldest" not in indexes(url)


async def test_texts_may_have_any_character(url: str) -> None:
    store = await opened(PostgresStore(url), "me")
    ids = ["a\0b", "a\x01", "a\x010", "a\x01\0", "ä€𝄞"]
    for id in ids:
        await store.write(partial(answers.insert, one=answer(id, stream_id=id)))
        found = await store.read(partial(answers.find_stream, stream_id=id, tenant=""))
        assert found is not None and found.id == found.stream_id == id
    assert sorted(id for (id,) in await store.read(lambda db: db.execute("SELECT id FROM answers").fetchall())) == (
        sorted(ids)
    )
    await store.close()


async def test_writers_of_two_processes_take_turns(url: str) -> None:
    """Each line is taken once, because no transaction begins before the other has ended."""
    one, two = [await opened(PostgresStore(url), name) for name in ("one", "two")]
    lines = [(number, str(number), b"") for number in range(60)]
    batch = batches.Batch("b", "", "openai", batches.VALIDATING, 1, 9e9, None, "/", "", {}, {}, [], owner="one")

    await one.write(partial(batches.insert, one=batch))
    assert await one.write(partial(batches.add_lines, id="b", owner="one", lines=lines))
    await one.write(partial(batches.validated, id="b", owner="one", errors=[], total=60, size=0))
    taking = [
        store.write(partial(batches.take, id="b", owner=store.owner, most=1)) for _ in range(30) for store in (one, two)
    ]
    taken = [line.number for found in await asyncio.gather(*taking) for line in found]
    assert len(taken) == len(set(taken))
    await one.close()
    await two.close()


async def test_frontend_follows_and_ends_the_stream_of_another(qwen: Model, url: str) -> None:
    held, tokenizer, store = Held(qwen.tokenizer, TEXT), qwen.tokenizer, PostgresStore(url)
    async with (
        keeping(held.pool, tokenizer, store) as one,
        keeping(Held(tokenizer, TEXT).pool, tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(held, http, "/v1/completions", 2)
        reading = asyncio.create_task(again(other, len(seen)))
        held.finish()
        assert seen + await reading == await again(http) == await again(other)
        stats = (await http.get("/stats")).text + (await http.get("/metrics")).text
    assert PASSWORD not in stats and "s3cret" not in stats
    assert rows_of(url, "SELECT count(*) FROM log_parts") == rows_of(url, "SELECT count(*) FROM log_frames") == [(0,)]


async def test_server_that_is_stopped_is_given_up_and_used_again_when_it_goes_on(
    own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.store.RETRY_S", 0.1)
    monkeypatch.setattr("frontend.kept.postgres.SILENT_S", 0.5)
    store = await opened(PostgresStore(own_server.emptied() + "?connect_timeout=2"), "me")
    log = Logs(store.database.logbook(), store.owner, lambda: "").current()
    await store.write(lambda db: log.prepare())
    with stopped(own_server):
        for work in (store.read, store.write):
            with pytest.raises(StoreError):
                await asyncio.wait_for(work(answers.orphans), PATIENCE_S)
        assert store.problem
        ((owned, error),) = await written(log, record(0))
        assert error is not None and owned and log.is_over()
    await until(lambda: not store.problem)
    assert await store.read(answers.orphans) == []
    await log.close()
    await store.close()


@contextmanager
def stopped(server: PostgresServer) -> Iterator[None]:
    """Stops all processes of a server, as a machine does that swaps."""
    assert server.process is not None
    first = psutil.Process(server.process.pid)
    processes = [first, *first.children(recursive=True)]
    for one in processes:
        one.suspend()
    try:
        yield
    finally:
        for one in processes:
            one.resume()


@pytest.mark.parametrize("how", ["fast", pytest.param("immediate", marks=pytest.mark.slow)])
async def test_stream_goes_on_while_the_server_is_away_and_the_next_one_is_kept_again(
    qwen: Model, own_server: PostgresServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    monkeypatch.setattr("frontend.kept.store.RETRY_S", 0.1)
    monkeypatch.setattr("frontend.kept.stream_log.RETRY_S", 0.1)
    caplog.set_level(logging.INFO)
    url = own_server.emptied()
    held, apps = Held(qwen.tokenizer, TEXT), list[Starlette]()
    held.allowed = 9
    async with (
        keeping(held.pool, qwen.tokenizer, PostgresStore(url), apps) as one,
        httpx.AsyncClient(base_url=one, timeout=PATIENCE_S) as http,
    ):
        kept = apps[0].state.kept
        data = b""
        async with http.stream("POST", "/v1/completions", json=body("/v1/completions"), headers=NAMED) as streamed:
            assert "X-Sluice-Not-Kept" not in streamed.headers
            async for piece in streamed.aiter_bytes():
                data += piece
                if held.allowed == 9 and blocks(data):
                    await asyncio.to_thread(own_server.stop, how)
                    held.finish()
        assert b"this answer is not kept" in data and data.endswith(b"data: [DONE]\n\n")
        made = (await http.post("/v1/responses", json=ASKED)).json()
        assert made["store"] is False and made["status"] == "completed"
        refused = await http.post("/v1/responses", json={**ASKED, "background": True})
        assert refused.status_code == 503
        await asyncio.to_thread(own_server.start)
        await until(lambda: not kept.store.problem)
        assert (await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"]})).status_code == 404
        streamed_again = await http.post("/v1/completions", json=body("/v1/completions"), headers=NAMED)
        assert "X-Sluice-Not-Kept" not in streamed_again.headers and await again(http) == streamed_again.content
    assert "s3cret" not in caplog.text and "can be used again" in caplog.text
