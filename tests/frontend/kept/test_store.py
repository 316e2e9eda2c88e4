"""The store: whose it is, what is deleted, and what happens when its file cannot be used."""

import asyncio
import random
import sqlite3
import stat
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from frontend.kept import answers
from frontend.kept.answers import KeptAnswer, Piece, Recipe, Record
from frontend.kept.database import Connection, StoreError
from frontend.kept.kept import Kept
from frontend.kept.sqlite import open_file
from frontend.kept.store import Store, check_store, sweep
from frontend.turns import tenant
from shared.config.declaration import ConfigError
from shared.config.frontend import FrontendConfig
from tests.frontend.api.scripted import openai_sdk
from tests.frontend.kept.harness import KeptStore, blocks, keeping, opened
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S

RECIPE = Recipe([[1, 2]], [7], "fp", "0", 1, {})
ASKED: dict[str, Any] = {"model": "tiny", "input": "A", "max_output_tokens": 400}


def answer(id: str, **more: Any) -> KeptAnswer:
    fields: dict[str, Any] = {
        "tenant": "", "stream_id": None, "path": "/v1/responses", "created": 1, "status": "queued", "ended": None,
        "background": True, "listed": True, "body": b"{}", "recipe": RECIPE, "response": b"{}", "owner": "me",
        "epoch": 1, "cancelled": False, **more,
    }  # fmt: skip
    return KeptAnswer(id, **fields)


@pytest.fixture(name="open_store")
async def fixture_of_open_store(store: KeptStore) -> AsyncIterator[Store]:
    made = await opened(store, "me")
    yield made
    await made.close()


def test_what_is_no_store_keeps_its_permissions(tmp_path: Path) -> None:
    folder, notes, old = tmp_path / "folder", tmp_path / "notes.txt", tmp_path / "old.db"
    folder.mkdir()
    notes.write_text("not a database")
    open_file(old).close()
    for path, mode in ((folder, 0o755), (notes, 0o644), (old, 0o644)):
        path.chmod(mode)
    for path in (folder, notes):
        with pytest.raises((OSError, sqlite3.Error)):
            open_file(path)
    open_file(old).close()
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (folder, notes, old)]
    assert modes == [0o755, 0o644, 0o600]


@pytest.mark.parametrize(("place", "problem"), [("", "it is a folder"), ("/dev/null", "it is no regular file")])
async def test_folder_or_device_is_refused_before_the_start_and_later_is_a_store_that_cannot_be_used(
    tmp_path: Path, place: str, problem: str
) -> None:
    path = place or str(tmp_path)
    with pytest.raises(ConfigError, match=f"--store {path}: {problem}"):
        check_store(path)
    kept = Kept(FrontendConfig(store=path))  # as a frontend that is restarted
    kept.store.start()
    with pytest.raises(StoreError, match=problem):
        await kept.store.read(lambda db: None)
    await kept.store.close()


async def test_only_the_owner_writes(open_store: Store) -> None:
    piece = Piece(1, 0, b"data: x\n\ndata: y\n\n", [[(0, [5, 6], False)], [(1, [], True), (0, [7], True)]])
    records = [
        Record("a", 1, 0, 0, b"data: x\n\n", [(0, [5, 6], False)]),
        Record("a", 1, 1, 9, b"data: y\n\n", [(1, [], True), (0, [7], True)]),
        Record("a", 2, 2, 18, b"of another epoch", []),
        Record("a", 1, 3, 18, b"behind one that is missing", []),
    ]
    await open_store.write(partial(answers.insert, one=answer("a")))
    for _ in range(2):
        await open_store.write(partial(answers.extend, owner="me", records=lambda id: records))
        assert await open_store.read(partial(answers.pieces_of, id="a")) == [piece]
    assert await open_store.write(partial(answers.claim, id="a", owner="other")) is None
    await open_store.write(lambda db: db.execute("UPDATE owners SET seen = 0"))
    assert await open_store.write(partial(answers.left_by, id="a", owner="other")) == "me"
    claimed = await open_store.write(partial(answers.claim, id="a", owner="other"))
    assert claimed is not None and claimed.epoch == 2 and claimed.recipe == RECIPE
    end = partial(answers.end, id="a", status="completed", response=None)
    whole = Piece(9, 0, b"all", [])
    assert not await open_store.write(partial(end, epoch=1, stream=whole))
    await open_store.write(partial(answers.release, id="a", epoch=1, shown=99))
    await open_store.write(partial(answers.extend, owner="me", records=lambda id: None))
    assert await open_store.read(partial(answers.pieces_of, id="a")) == [piece]
    assert await open_store.write(partial(end, epoch=2, stream=whole))
    assert await open_store.read(partial(answers.pieces_of, id="a")) == [whole]
    assert await open_store.write(partial(answers.claim, id="a", owner="third")) is None


async def test_old_and_large_answers_are_deleted_but_no_running_one(open_store: Store) -> None:
    def fill(db: Connection) -> None:
        for number in range(200):
            ended = None if number == 0 else float(number)
            answers.insert(db, answer(str(number), ended=ended, response=random.Random(number).randbytes(10240)))

    await open_store.write(fill)
    most, database = 1 << 20, open_store.database

    def ids(db: Connection) -> list[str]:
        return [id for (id,) in db.execute("SELECT id FROM answers ORDER BY CAST(id AS INTEGER)")]

    await open_store.read(lambda db: sweep(database, db, 0, most))
    left = await open_store.read(ids)
    assert await open_store.read(database.used_bytes) <= most
    assert left[0] == "0" and left[-1] == "199" and 20 < len(left) < 120
    await open_store.read(lambda db: sweep(database, db, 60, 0))
    assert await open_store.read(ids) == ["0"]


async def test_one_failing_write_does_not_undo_the_others(open_store: Store) -> None:
    def broken(db: Connection) -> None:
        answers.insert(db, answer("b"))
        raise ValueError("no")

    open_store.post(partial(answers.insert, one=answer("a")), lambda value, error: None)
    with pytest.raises(StoreError, match="no"):
        await open_store.write(broken)
    assert await open_store.read(partial(answers.find, id="a", tenant=""))
    assert await open_store.read(partial(answers.find, id="b", tenant="")) is None


def corrupt(path: Path) -> None:
    path.write_bytes(b"no database at all" * 1000)


def newer(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()


def unreachable(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("spoil", [corrupt, newer, unreachable])
async def test_unusable_store_answers_unkept_and_says_so(qwen: Model, tmp_path: Path, spoil: Any) -> None:
    spoil(path := tmp_path / "answers.db")
    qwen.says = ["One", "Two", "Three", "Four"]
    async with (
        keeping(qwen.pool, qwen.tokenizer, path) as url,
        openai_sdk(url) as sdk,
        httpx.AsyncClient(base_url=url) as http,
    ):
        made = await sdk.responses.create(**ASKED)
        assert made.output_text == "One" and made.store is False
        async with sdk.responses.stream(**ASKED) as stream:
            ends = [event async for event in stream][-1]
        assert ends.type == "response.completed" and ends.response.store is False
        named = {"X-Conversation-Id": "a"}
        streamed = await http.post("/v1/completions", json={"prompt": "A", "stream": True}, headers=named)
        assert "answers.db" in streamed.headers["X-Sluice-Not-Kept"] and blocks(streamed.content)[-1].endswith(
            b"[DONE]"
        )
        for refused in (
            await http.get(f"/v1/responses/{made.id}"),
            await http.get("/v1/stream/a"),
            await http.post("/v1/responses", json={**ASKED, "previous_response_id": made.id}),
            await http.post("/v1/responses", json={**ASKED, "background": True}),
        ):
            assert refused.status_code == 503 and "store" in refused.json()["error"]["message"]
        assert (await http.post("/v1/completions", json={"prompt": "A"})).status_code == 200


async def test_process_that_was_seen_in_the_future_lives_no_longer_than_others(
    open_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.store.BEAT_S", 0.01)
    await open_store.write(lambda db: db.execute("INSERT INTO owners SELECT '2-gone', clock() + 3600"))
    late = "SELECT 1 FROM owners WHERE seen > clock() + 60"
    async with asyncio.timeout(PATIENCE_S):
        while await open_store.read(lambda db: db.execute(late).fetchall()):
            await asyncio.sleep(0.01)
    assert await open_store.read(partial(answers.lives, owner="2-gone"))


@pytest.mark.parametrize("when", ["full", "read-only"])
async def test_store_that_fails_while_a_stream_is_kept(qwen: Model, tmp_path: Path, when: str) -> None:
    """What was kept before can still be read; the stream that is cut off from the store says so, and goes on."""
    draw = random.Random(0)
    long = " ".join(draw.randbytes(6).hex() for _ in range(800))
    qwen.says, path = ["One", long, long], tmp_path / "answers.db"
    spoil = {"full": "PRAGMA max_page_count = 1", "read-only": "PRAGMA query_only = 1"}[when]
    apps: list[Starlette] = []
    async with (
        keeping(qwen.pool, qwen.tokenizer, path, apps) as url,
        openai_sdk(url) as sdk,
        httpx.AsyncClient(base_url=url) as http,
    ):
        before = await sdk.responses.create(**ASKED)
        await apps[0].state.kept.store.read(lambda db: db.execute(spoil).fetchall())
        made = await sdk.responses.create(**ASKED)
        assert made.output_text == long and made.store is False
        assert (await sdk.responses.retrieve(before.id)).output_text == "One"
        named = {"X-Conversation-Id": "a"}
        streamed = await http.post("/v1/completions", json={"prompt": "A", "stream": True}, headers=named)
        assert blocks(streamed.content)[-1].endswith(b"[DONE]")
        assert "X-Sluice-Not-Kept" in streamed.headers or b"\n: this answer is not kept" in b"\n" + streamed.content


@pytest.mark.parametrize("number", range(5))
def test_many_open_a_new_file_at_the_same_time(tmp_path: Path, number: int) -> None:
    together = threading.Barrier(6)

    def opened(one: int) -> int:
        together.wait()
        db = open_file(tmp_path / "answers.db")
        db.execute("INSERT INTO owners VALUES (?, 0)", (str(one),))
        db.close()
        return one

    with ThreadPoolExecutor(6) as threads:
        assert list(threads.map(opened, range(6))) == list(range(6))
    db = open_file(tmp_path / "answers.db")
    assert db.execute("SELECT count(*) FROM owners").fetchone() == (6,)
    db.close()


# the thread is shared


async def test_tenant_with_much_work_leaves_turns_to_others(open_store: Store) -> None:
    done: list[str] = []
    all_wait = threading.Event()

    def work(name: str, db: Connection) -> None:
        all_wait.wait(PATIENCE_S)
        time.sleep(0.02)
        done.append(name)

    async def asked(name: str, *, writes: bool) -> None:
        tenant.set(name)
        await (open_store.write if writes else open_store.read)(partial(work, name))

    for writes in (True, False):
        done.clear()
        all_wait.clear()
        tasks = [asyncio.create_task(asked(name, writes=writes)) for name in [*["ann"] * 50, "bob"]]
        for _ in range(3):
            await asyncio.sleep(0)
        all_wait.set()
        await asyncio.gather(*tasks)
        assert done.index("bob") < 10 and done.count("ann") == 50


async def test_process_shows_that_it_lives_while_much_is_read(
    open_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.store.BEAT_S", 0.01)
    beats: list[int] = []
    monkeypatch.setattr(open_store.database, "check", lambda db: beats.append(1))

    def work(db: Connection) -> int:
        time.sleep(0.02)
        return len(beats)

    found = await asyncio.gather(*(open_store.read(work) for _ in range(100)))
    assert found[-1] - found[0] >= 5


async def test_read_comes_after_the_writes_of_its_tenant_that_were_before_it(open_store: Store) -> None:
    written: list[int] = []

    def work(number: int, db: Connection) -> None:
        time.sleep(0.02)
        written.append(number)

    writes = [asyncio.create_task(open_store.write(partial(work, number))) for number in range(20)]
    read = asyncio.create_task(open_store.read(lambda db: list(written)))
    assert await read == list(range(20))
    await asyncio.gather(*writes)


async def test_those_who_ask_for_a_sync_at_the_same_time_share_one(
    open_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs: list[int] = []
    monkeypatch.setattr(open_store.database, "sync", lambda db: syncs.append(1))
    held = threading.Event()
    first = asyncio.create_task(open_store.read(lambda db: held.wait(PATIENCE_S)))
    others = [asyncio.create_task(open_store.sync()) for _ in range(20)]
    await asyncio.sleep(0.01)
    held.set()
    await asyncio.gather(first, *others)
    assert len(syncs) == 1
    await open_store.sync()
    assert len(syncs) == 2


async def test_the_tenant_with_most_makes_room(open_store: Store) -> None:
    def fill(db: Connection) -> None:
        for number in range(100):
            name = "bob" if number < 10 else "ann"  # bob's are the oldest
            made = answer(f"{name}{number}", tenant=name, ended=float(number + 1))
            made.response = random.Random(number).randbytes(10240)
            answers.insert(db, made)

    await open_store.write(fill)
    await open_store.read(lambda db: sweep(open_store.database, db, 0, 700_000))
    left = await open_store.read(lambda db: dict(db.execute("SELECT tenant, count(*) FROM answers GROUP BY tenant")))
    assert left["bob"] == 10 and 10 < left["ann"] < 90


async def test_sweep_of_much_is_interrupted_and_goes_on(open_store: Store) -> None:
    def fill(db: Connection) -> None:
        for number in range(200):
            answers.insert(db, answer(str(number), ended=1.0))

    def swept(db: Connection, until: float = 0.0) -> bool:
        return sweep(open_store.database, db, 60, 0, until)

    await open_store.write(fill)
    left: list[int] = []
    while not await open_store.read(swept):
        left.append(await open_store.read(lambda db: db.execute("SELECT count(*) FROM answers").fetchone()[0]))
    assert left == [136, 72, 8, 0]
