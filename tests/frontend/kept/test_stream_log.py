"""The logs of running streams: what is read of them, what a process that is gone has left, and who may show what."""

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette

from frontend.errors import NotFound
from frontend.kept import answers, stream_log
from frontend.kept.answers import Record
from frontend.kept.store import Damaged, Store, StoreError
from frontend.kept.stream_log import HEAD, Logs, StreamLog, frame_of
from tests.frontend.kept.harness import Held, keeping
from tests.frontend.kept.test_store import answer
from tests.frontend.kept.test_streams import NAMED, TEXT, again, head
from tests.frontend.serving import until
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S

EVENT = b"data: %d\n\n"


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    made = Store(tmp_path / "answers.db", "1-me", max_age_s=0, max_bytes=0)
    made.start()
    yield made
    await made.close()


@pytest.fixture
async def logs(store: Store) -> AsyncIterator[Logs]:
    made = Logs(store.path, store.owner, lambda: store.problem)
    yield made
    await made.close()


def record(number: int, id: str = "a", epoch: int = 1) -> Record:
    data = EVENT % number
    return Record(id, epoch, number, number * len(data), data, [(0, [number], False)])


class User:
    """Waits for a record."""

    def __init__(self) -> None:
        self.result: asyncio.Future[tuple[bool, StoreError | None]] = asyncio.get_running_loop().create_future()

    def committed(self, record: Record, owned: bool, error: StoreError | None) -> None:
        self.result.set_result((owned, error))


async def written(log: StreamLog, *records: Record) -> list[tuple[bool, StoreError | None]]:
    users = [User() for _ in records]
    for one, user in zip(records, users, strict=True):
        log.add(one, user)
    async with asyncio.timeout(PATIENCE_S):
        return [await user.result for user in users]


async def begun(store: Store, log: StreamLog, *ids: str) -> None:
    await store.write(lambda db: log.prepare())
    for id in ids:
        await store.write(partial(answers.insert, one=answer(id, owner=store.owner)))


async def stored(store: Store, id: str = "a") -> bytes:
    return b"".join([piece.data for piece in await store.read(partial(answers.pieces_of, id=id))])


def left(store: Store, data: bytes, *, owner: str = "2-gone") -> Path:
    """Writes the log of a process that is gone."""
    fence = store.path.with_name(f"{store.path.name}-streams-{owner}-0")
    fence.touch()
    (file := fence.with_name(f"{fence.name}.0")).write_bytes(data)
    return file


async def test_streams_of_a_turn_are_one_frame_and_another_process_reads_them(store: Store, logs: Logs) -> None:
    log = logs.current()
    await begun(store, log, "a", "b")
    assert await written(log, record(0), record(0, "b"), record(1)) == [(True, None)] * 3
    (file,) = store.path.parent.glob("*-streams-*.0")
    assert file.read_bytes() == frame_of([record(0), record(0, "b"), record(1)])
    assert file.stat().st_mode & 0o777 == 0o600
    other = Logs(store.path, "3-other", lambda: "")
    whole = EVENT % 0 + EVENT % 1
    for start in (0, 3, len(EVENT % 0), len(whole), len(whole) + 9):
        read = partial(answers.bytes_of, id="a", start=start, records=other.records)
        assert await store.read(read) == whole[start:]
    assert await stored(store) == b""


@pytest.mark.parametrize("cut", [1, HEAD.size, HEAD.size + 9, 40])
async def test_frame_without_its_end_was_never_shown_and_is_left_out(store: Store, logs: Logs, cut: int) -> None:
    await store.write(partial(answers.insert, one=answer("a", owner="2-gone")))
    file = left(store, frame_of([record(0), record(1)]) + frame_of([record(2), record(3)])[:cut])
    claimed = await store.write(partial(logs.claim, id="a", log=logs.current()))
    assert claimed is not None and claimed.epoch == 2
    assert await stored(store) == EVENT % 0 + EVENT % 1
    paths = await store.write(logs.tidy)
    assert file in paths and not file.with_name(file.name.removesuffix(".0")).exists()


@pytest.mark.parametrize("at", [2, 5, HEAD.size + 1, 30])
async def test_changed_bytes_of_a_log_damage_the_answers_in_it(store: Store, logs: Logs, at: int) -> None:
    """It is not known which streams the frame has, and up to where their readers have got."""
    for id in "ab":
        await store.write(partial(answers.insert, one=answer(id, owner="2-gone")))
    frame = bytearray(frame_of([record(1)]))
    frame[at] ^= 1
    left(store, frame_of([record(0), record(0, "b")]) + bytes(frame) + frame_of([record(2)]))
    with pytest.raises(Damaged):
        await store.read(partial(answers.bytes_of, id="a", start=0, records=logs.records))
    await store.write(partial(logs.claim, id="a", log=logs.current()))
    for id in "ab":
        with pytest.raises(Damaged):
            await stored(store, id)


async def test_process_that_was_taken_over_from_may_show_nothing_more(store: Store, logs: Logs) -> None:
    log = logs.current()
    await begun(store, log, "a", "b")
    await written(log, record(0), record(0, "b"))
    await store.write(lambda db: db.execute("UPDATE owners SET seen = 0"))
    other = Logs(store.path, "3-other", lambda: "")
    assert await store.write(partial(other.claim, id="a", log=other.current()))
    assert await written(log, record(1), record(1, "b")) == [(False, None)] * 2
    assert log.ended and logs.current() is not log
    assert await store.read(partial(answers.bytes_of, id="b", start=0, records=other.records)) == EVENT % 0
    for id in "ab":  # `a` has another owner; `b` has all that was shown
        await store.write(partial(logs.release, id=id, epoch=1, shown=len(EVENT % 0)))
    assert (await stored(store, "a"), await stored(store, "b")) == (EVENT % 0, EVENT % 0 + EVENT % 1)
    await other.close()


async def test_answer_is_damaged_if_less_than_was_shown_is_left(store: Store, logs: Logs) -> None:
    log = logs.current()
    await begun(store, log, "a")
    await written(log, record(0))
    for file in store.path.parent.glob("*-streams-*"):
        file.unlink()
    assert await written(log, record(1)) == [(False, None)]
    await store.write(partial(logs.release, id="a", epoch=1, shown=len(EVENT % 0)))
    with pytest.raises(Damaged):
        await stored(store)


async def test_full_files_are_moved_to_the_store(store: Store, logs: Logs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_log, "FILE_BYTES", 100)
    log = logs.current()
    await begun(store, log, "a")
    for number in range(20):
        await written(log, record(number))
    assert log.file and logs.due()
    stream_log.delete_files(await store.write(logs.tidy))
    assert not logs.due()
    names = [path.name.rpartition("-")[2] for path in store.path.parent.glob("*-streams-*")]
    assert sorted(names)[0] == "0" and len(names) <= 2
    await written(log, record(20))
    read = partial(answers.bytes_of, id="a", start=0, records=Logs(store.path, "3-other", lambda: "").records)
    assert await store.read(read) == b"".join([EVENT % number for number in range(21)])


async def test_write_that_fails_leaves_no_half_of_a_frame(
    store: Store, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "RETRY_S", 0.0)
    log = logs.current()
    await begun(store, log, "a", "b")
    await written(log, record(0), record(0, "b"))
    write = os.write

    def full(file: int, data: bytes) -> int:
        if len(data) < 60:
            raise OSError(28, "No space left on device")
        return write(file, data[:20])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        ((_, error),) = await written(log, record(1))
    assert error is not None and "No space left" in error.message
    assert await written(log, record(1, "b")) == [(True, None)]
    read = partial(answers.bytes_of, start=0, records=Logs(store.path, "3-other", lambda: "").records)
    assert await store.read(partial(read, id="a")) == EVENT % 0
    assert await store.read(partial(read, id="b")) == EVENT % 0 + EVENT % 1


async def test_tidying_leaves_the_logs_of_processes_that_live(store: Store, logs: Logs) -> None:
    file = left(store, frame_of([record(0)]), owner="2-lives")
    await store.write(lambda db: db.execute("INSERT INTO owners VALUES ('2-lives', 9e9)"))
    assert await store.write(logs.tidy) == []
    await store.write(lambda db: db.execute("DELETE FROM owners WHERE id = '2-lives'"))
    assert await store.write(logs.tidy) == [file.with_name(file.name.removesuffix(".0")), file]


async def test_offset_beyond_what_is_kept_is_refused_by_every_frontend(qwen: Model, tmp_path: Path) -> None:
    held, other_held = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    path, tokenizer = tmp_path / "answers.db", qwen.tokenizer
    async with (
        keeping(held.pool, tokenizer, path) as one,
        keeping(other_held.pool, tokenizer, path) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(held, http, "/v1/completions", 2)
        await until(lambda: len(held.streams[0].output) == 9)
        for client in (http, other):
            refused = await client.get("/v1/stream/chat 1::tiny", params={"from": 100_000})
            assert refused.status_code == 400 and "from" in refused.json()["error"]["message"]
        reading = asyncio.create_task(again(other, len(seen)))
        held.finish()
        assert seen + await reading == await again(http) == await again(other)
        assert not other_held.streams
    assert [file.name for file in tmp_path.glob("*-streams-*")] == []


async def test_stream_deleted_by_another_frontend_ends(
    qwen: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.kept.WATCH_S", 0.05)
    held, tokenizer = Held(qwen.tokenizer, TEXT), qwen.tokenizer
    path, apps = tmp_path / "answers.db", list[Starlette]()
    async with (
        keeping(held.pool, tokenizer, path) as one,
        keeping(Held(tokenizer, TEXT).pool, tokenizer, path, apps) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        await head(held, http, "/v1/completions", 2)
        kept = apps[0].state.kept
        found = await kept.find_stream(NAMED["X-Conversation-Id"], "")
        await kept.store.write(partial(answers.delete, id=found.id))
        await until(lambda: bool(held.pool.aborted))
        with pytest.raises(NotFound):
            await kept.find_stream(NAMED["X-Conversation-Id"], "")
        assert (await other.get("/v1/stream/chat 1::tiny")).status_code == 404
