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
from frontend.kept.database import Damaged, LogPart, StoreError
from frontend.kept.store import Store
from frontend.kept.stream_log import HEAD, Logs, StreamLog, frame_of
from tests.frontend.kept.harness import Held, KeptStore, blocks, keeping, opened
from tests.frontend.kept.test_store import answer
from tests.frontend.kept.test_streams import NAMED, TEXT, again, body, head
from tests.frontend.serving import until
from tests.frontend.speaking import Model
from tests.patience import PATIENCE_S

EVENT = b"data: %d\n\n"


@pytest.fixture
async def open_store(store: KeptStore) -> AsyncIterator[Store]:
    made = await opened(store, "1-me")
    yield made
    await made.close()


@pytest.fixture
async def logs(open_store: Store) -> AsyncIterator[Logs]:
    made = Logs(open_store.database.logbook(), open_store.owner, lambda: open_store.problem)
    yield made
    await made.close()


@pytest.fixture
async def other(open_store: Store) -> AsyncIterator[Logs]:
    """The logs as another process has them."""
    made = Logs(open_store.database.logbook(), "3-other", lambda: "")
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


def left(store: Store, data: bytes, *, owner: str = "2-gone") -> list[LogPart]:
    """Writes the log of a process that is gone. Returns its parts."""
    writer = store.database.logbook().writer(owner, 0)
    writer.make()
    assert writer.write(0, data)
    writer.close()
    return [LogPart(owner, 0, None), LogPart(owner, 0, 0)]


async def test_streams_of_a_turn_are_one_frame_and_another_process_reads_them(
    open_store: Store, logs: Logs, other: Logs, tmp_path: Path
) -> None:
    log = logs.current()
    await begun(open_store, log, "a", "b")
    assert await written(log, record(0), record(0, "b"), record(1)) == [(True, None)] * 3
    (part,) = [one for one in await open_store.read(logs.book.parts) if one.part is not None]
    data = await open_store.read(partial(logs.book.read, part=part, start=0))
    assert data == frame_of([record(0), record(0, "b"), record(1)])
    for database in tmp_path.glob("*/answers.db"):
        assert [file.stat().st_mode & 0o777 for file in database.parent.glob("*-streams-*")] == [0o600] * 2
    whole = EVENT % 0 + EVENT % 1
    for start in (0, 3, len(EVENT % 0), len(whole), len(whole) + 9):
        read = partial(answers.bytes_of, id="a", start=start, records=other.records)
        assert await open_store.read(read) == whole[start:]
    assert await stored(open_store) == b""


@pytest.mark.parametrize("cut", [1, HEAD.size, HEAD.size + 9, 40])
async def test_frame_without_its_end_was_never_shown_and_is_left_out(open_store: Store, logs: Logs, cut: int) -> None:
    await open_store.write(partial(answers.insert, one=answer("a", owner="2-gone")))
    parts = left(open_store, frame_of([record(0), record(1)]) + frame_of([record(2), record(3)])[:cut])
    claimed = await open_store.write(partial(logs.claim, id="a", log=logs.current()))
    assert claimed is not None and claimed.epoch == 2
    assert await stored(open_store) == EVENT % 0 + EVENT % 1
    assert parts[0] not in await open_store.read(logs.book.parts)
    assert parts[1] in await open_store.write(logs.tidy)


@pytest.mark.parametrize("at", [2, 5, HEAD.size + 1, 30])
async def test_changed_bytes_of_a_log_damage_the_answers_in_it(open_store: Store, logs: Logs, at: int) -> None:
    """It is not known which streams the frame has, and up to where their readers have got."""
    for id in "ab":
        await open_store.write(partial(answers.insert, one=answer(id, owner="2-gone")))
    frame = bytearray(frame_of([record(1)]))
    frame[at] ^= 1
    left(open_store, frame_of([record(0), record(0, "b")]) + bytes(frame) + frame_of([record(2)]))
    with pytest.raises(Damaged):
        await open_store.read(partial(answers.bytes_of, id="a", start=0, records=logs.records))
    await open_store.write(partial(logs.claim, id="a", log=logs.current()))
    for id in "ab":
        with pytest.raises(Damaged):
            await stored(open_store, id)


async def test_process_that_was_taken_over_from_may_show_nothing_more(
    open_store: Store, logs: Logs, other: Logs
) -> None:
    log = logs.current()
    await begun(open_store, log, "a", "b")
    await written(log, record(0), record(0, "b"))
    await open_store.write(lambda db: db.execute("UPDATE owners SET seen = 0"))
    assert await open_store.write(partial(other.claim, id="a", log=other.current()))
    assert await written(log, record(1), record(1, "b")) == [(False, None)] * 2
    assert log.ended and logs.current() is not log
    assert await open_store.read(partial(answers.bytes_of, id="b", start=0, records=other.records)) == EVENT % 0
    for id in "ab":  # `a` has another owner; `b` has all that was shown, and perhaps what a file has got since
        await open_store.write(partial(logs.release, id=id, epoch=1, shown=len(EVENT % 0)))
    assert await stored(open_store, "a") == EVENT % 0
    assert await stored(open_store, "b") in (EVENT % 0, EVENT % 0 + EVENT % 1)


async def test_answer_is_damaged_if_less_than_was_shown_is_left(open_store: Store, logs: Logs) -> None:
    log = logs.current()
    await begun(open_store, log, "a")
    await written(log, record(0))
    await open_store.read(lambda db: logs.book.delete(db, logs.book.parts(db)))
    assert await written(log, record(1)) == [(False, None)]
    await open_store.write(partial(logs.release, id="a", epoch=1, shown=len(EVENT % 0)))
    with pytest.raises(Damaged):
        await stored(open_store)


async def test_full_parts_are_moved_to_the_store(
    open_store: Store, logs: Logs, other: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "PART_BYTES", 100)
    log = logs.current()
    await begun(open_store, log, "a")
    for number in range(20):
        await written(log, record(number))
    assert log.part and logs.due()
    done = await open_store.write(logs.tidy)
    await open_store.read(partial(logs.book.delete, parts=done))
    assert not logs.due()
    found = [part.part for part in await open_store.read(logs.book.parts)]
    assert None in found and len(found) <= 2
    await written(log, record(20))
    read = partial(answers.bytes_of, id="a", start=0, records=other.records)
    assert await open_store.read(read) == b"".join([EVENT % number for number in range(21)])


async def test_full_parts_wait_for_their_answers_and_are_deleted_unread(
    open_store: Store, logs: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "PART_BYTES", 1)  # each frame is a part
    monkeypatch.setattr(answers, "extend", None)  # an answer that has ended has been moved from memory
    log = logs.current()
    await begun(open_store, log, "a", "b")
    for one in (record(0), record(0, "b"), record(1), record(1, "b")):
        await written(log, one)

    async def left() -> set[int | None]:
        done = await open_store.write(logs.tidy)
        await open_store.read(partial(logs.book.delete, parts=done))
        return {part.part for part in await open_store.read(logs.book.parts)}

    assert await left() >= {None, 0, 1, 2, 3}
    await open_store.write(partial(answers.end, id="a", epoch=1, status="completed", response=None, stream=None))
    assert not await left() & {0, 2}
    assert await left() >= {None, 1, 3}
    assert not log.contents.keys() & {0, 2} and log.contents.keys() >= {1, 3}, "nothing is kept of deleted parts"


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
async def test_write_that_fails_leaves_no_half_of_a_frame(
    open_store: Store, logs: Logs, other: Logs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_log, "RETRY_S", 0.0)
    log = logs.current()
    await begun(open_store, log, "a", "b")
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
    read = partial(answers.bytes_of, start=0, records=other.records)
    assert await open_store.read(partial(read, id="a")) == EVENT % 0
    assert await open_store.read(partial(read, id="b")) == EVENT % 0 + EVENT % 1


async def test_tidying_leaves_the_logs_of_processes_that_live(open_store: Store, logs: Logs) -> None:
    parts = left(open_store, frame_of([record(0)]), owner="2-lives")
    await open_store.write(lambda db: db.execute("INSERT INTO owners VALUES ('2-lives', 9e9)"))
    assert await open_store.write(logs.tidy) == []
    await open_store.write(lambda db: db.execute("DELETE FROM owners WHERE id = '2-lives'"))
    assert await open_store.write(logs.tidy) == parts


async def test_offset_beyond_what_is_kept_is_refused_by_every_frontend(qwen: Model, store: KeptStore) -> None:
    held, other_held = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    path, tokenizer = store, qwen.tokenizer
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
    last = await opened(store, "last")
    assert await last.read(last.database.logbook().parts) == []
    await last.close()


@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("silent", [False, True])
async def test_stream_goes_on_unkept_when_the_store_is_deleted(
    qwen: Model, store: KeptStore, monkeypatch: pytest.MonkeyPatch, silent: bool
) -> None:
    """silent: whether the frontend has opened a new file before the stream goes on"""
    for name, value in {"kept.WATCH_S": 0.05, "store.BEAT_S": 0.05, "store.RETRY_S": 0.05}.items():
        monkeypatch.setattr(f"frontend.kept.{name}", value)
    held, (file,) = Held(qwen.tokenizer, TEXT), store.files
    held.allowed = 9
    async with (
        keeping(held.pool, qwen.tokenizer, store) as url,
        httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http,
    ):
        data = b""
        async with http.stream("POST", "/v1/completions", json=body("/v1/completions"), headers=NAMED) as streamed:
            async for piece in streamed.aiter_bytes():
                data += piece
                if held.allowed == 9 and blocks(data):
                    for path in file.parent.glob("answers.db*"):
                        path.unlink()
                    if silent:
                        await until(file.exists)
                    held.finish()
        assert b"this answer is not kept" in data and data.endswith(b"data: [DONE]\n\n")
        await until(file.exists)
        assert (await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"]})).status_code == 404
        kept = await http.post("/v1/completions", json=body("/v1/completions"), headers=NAMED)
        assert "X-Sluice-Not-Kept" not in kept.headers and await again(http) == kept.content


async def test_stream_deleted_by_another_frontend_ends(
    qwen: Model, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.kept.WATCH_S", 0.05)
    held, tokenizer = Held(qwen.tokenizer, TEXT), qwen.tokenizer
    path, apps = store, list[Starlette]()
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
