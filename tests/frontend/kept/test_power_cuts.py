"""A power cut: the end of what was written last is missing, of the store and of the logs of streams beside it.

Afterwards, an answer is right, is computed to the same bytes, or is honestly gone. What a test calls the disk is a copy
of the files, which a server has open, with their ends cut off.
"""

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from frontend.kept import answers, sqlite
from frontend.kept.database import Damaged
from frontend.kept.sqlite import open_file
from frontend.kept.stream_log import Logs, frame_of
from tests.frontend.kept.harness import Held, SQLiteStore, keeping, opened, rows_of
from tests.frontend.kept.test_store import answer
from tests.frontend.kept.test_stream_log import left, record, stored
from tests.frontend.kept.test_streams import NAMED, TEXT, body
from tests.frontend.serving import until

HEAD, FRAME = 32, 24 + 4096  # bytes of SQLite's log before its frames, and of a frame
BEFORE, AFTER = "11111111-1111", "22222222-2222"  # ids of runs of the machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Starts the machine: gives it the id of a run."""
    file = tmp_path / "boot_id"
    monkeypatch.setattr(sqlite, "BOOT_ID", file)

    def start(id: str) -> None:
        file.write_text(id)

    return start


def cuts(length: int, draw: random.Random) -> Iterator[Callable[[bytearray], None]]:
    """Yields what a power cut may do to a log of SQLite: it ends at a frame, within one, or in zeros."""
    frames = (length - HEAD) // FRAME
    ends = [
        0,
        HEAD,
        *(HEAD + FRAME * draw.randrange(frames) + draw.choice((0, 0, 9, 24, 3000)) for _ in range(8)),
        length,
    ]
    for end in ends:
        yield partial(_truncate, end)
    for end in ends[2:5]:
        yield partial(_zero, end)


def _truncate(end: int, data: bytearray) -> None:
    del data[end:]


def _zero(end: int, data: bytearray) -> None:
    data[end:] = bytes(len(data) - end)


def disk(source: Path, target: Path, cut: Callable[[bytearray], None], draw: random.Random) -> str:
    """Copies a store as a power cut leaves it. Returns its file."""
    shutil.copytree(source, target)
    (target / "answers.db-shm").unlink()
    log = target / "answers.db-wal"
    data = bytearray(log.read_bytes())
    cut(data)
    log.write_bytes(data)
    for part in target.glob("*-streams-*.*"):
        if part.stat().st_size:  # a fence is empty
            data = bytearray(part.read_bytes())
            draw.choice((_truncate, _zero))(draw.randrange(len(data)), data)
            part.write_bytes(data)
    return str(target / "answers.db")


async def ask(http: httpx.AsyncClient, **more: Any) -> Any:
    made = await http.post("/v1/responses", json={"model": "tiny", "input": "Hi", "max_output_tokens": 400, **more})
    assert made.status_code == 200, made.text
    return made.json()["id"]


async def test_after_a_power_cut_every_answer_is_right_or_honestly_gone(
    qwen: Any, tmp_path: Path, machine: Callable[[str], None]
) -> None:
    draw, folder = random.Random(5), tmp_path / "state"
    machine(BEFORE)
    first = Held(qwen.tokenizer, TEXT)
    async with (
        keeping(first.pool, qwen.tokenizer, folder / "answers.db") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        first.finish()
        ended = [await ask(http) for _ in range(3)]
        named = {"X-Conversation-Id": "ended"}
        whole = (await http.post("/v1/completions", json=body("/v1/completions"), headers=named)).content
        first.ends, first.allowed = False, 9
        background = await ask(http, background=True)
        streams = len(first.streams)
        async with http.stream("POST", "/v1/completions", json=body("/v1/completions"), headers=NAMED) as stream:
            pieces, data = stream.aiter_raw(), b""
            await until(lambda: len(first.streams) > streams and len(first.streams[-1].output) == 9)
            while data.count(b"data: ") < 3:
                data += await anext(pieces)
            length = (folder / "answers.db-wal").stat().st_size
            found = [disk(folder, tmp_path / str(number), cut, draw) for number, cut in enumerate(cuts(length, draw))]
        first.finish()
    machine(AFTER)
    for file in found:
        second = Held(qwen.tokenizer, TEXT)
        second.finish()
        open_file(Path(file)).close()
        rows_of(file, "DELETE FROM owners")
        async with keeping(second.pool, qwen.tokenizer, Path(file)) as url, httpx.AsyncClient(base_url=url) as http:
            for id in [*ended, background]:
                async with asyncio.timeout(60):
                    while (one := await http.get(f"/v1/responses/{id}")).json().get("status") in (
                        "queued",
                        "in_progress",
                    ):
                        await asyncio.sleep(0.02)
                assert one.status_code == 404 or one.json()["output"][0]["content"][0]["text"] == TEXT
            one = await http.get(f"/v1/responses/{background}", params={"stream": "true", "starting_after": "0"})
            assert one.status_code in (404, 500), one.text
            one = await http.get("/v1/stream", params={"conv_id": "ended"})
            assert one.status_code in (404, 500) or one.content == whole
            one = await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"], "from": len(data)})
            assert one.status_code in (404, 500), one.text


async def test_id_of_a_stream_is_not_that_of_the_one_before_again(
    qwen: Any, tmp_path: Path, machine: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader of the new stream would go on with bytes of the old one."""
    folder, kept = tmp_path / "state", tmp_path / "disk"

    def synced(path: Path) -> None:
        assert path.name == "answers.db-wal"
        shutil.copytree(folder, kept, dirs_exist_ok=True)

    monkeypatch.setattr(sqlite, "_sync", synced)
    machine(BEFORE)
    held = Held(qwen.tokenizer, TEXT)
    held.finish()
    async with (
        keeping(held.pool, qwen.tokenizer, folder / "answers.db") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        assert (await http.post("/v1/completions", json=body("/v1/completions"), headers=NAMED)).status_code == 200
        held.ends, held.allowed = False, 9
        async with http.stream("POST", "/v1/completions", json=body("/v1/completions"), headers=NAMED) as stream:
            await anext(stream.aiter_raw())
            shutil.copytree(kept, tmp_path / "after")
        held.finish()
    machine(AFTER)
    rows_of(file := str(tmp_path / "after" / "answers.db"), "DELETE FROM owners")
    async with keeping(held.pool, qwen.tokenizer, Path(file)) as url, httpx.AsyncClient(base_url=url) as http:
        one = await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"], "from": 20})
        assert one.status_code == 500 and one.json()["error"]["code"] == "answer_damaged"


async def test_stream_whose_log_may_lack_what_was_shown_is_damaged_and_the_background_begins_anew(
    tmp_path: Path, machine: Callable[[str], None]
) -> None:
    machine(AFTER)
    store = await opened(SQLiteStore(tmp_path / "answers.db"), "me")
    book = store.database.logbook()
    gone = f"2-gone.{BEFORE[:8]}"
    assert book.survived("2-gone") and book.survived(book.owner("3")) and not book.survived(gone)
    logs = Logs(book, store.owner, lambda: "")
    await store.write(partial(answers.insert, one=answer("a", owner=gone, status="in_progress")))
    await store.write(partial(answers.insert, one=answer("b", owner=gone, background=False, stream_id="b")))
    left(store, frame_of([record(0), record(0, "b")]), owner=gone)
    await store.write(partial(answers.extend, owner=gone, records=lambda id: [record(0, id)]))
    with pytest.raises(Damaged):
        await store.read(partial(answers.bytes_of, id="b", start=0, records=logs.records))
    for id in "ab":
        claimed = await store.write(partial(logs.claim, id=id, log=logs.current()))
        assert claimed is not None and claimed.recipe.restarted == (id == "a")
        assert claimed.status == "queued" and claimed.epoch == 2
    assert await stored(store, "a") == b""
    with pytest.raises(Damaged):
        await stored(store, "b")
    await logs.close()
    await store.close()
