"""How much a key has in the store: what is counted, who makes room, who is refused, and who sees it."""

import asyncio
import random
import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from frontend.kept import answers, batch_runner, usage
from frontend.kept.answers import KeptAnswer, Piece
from frontend.kept.database import SCHEMA, Connection, Damaged
from frontend.kept.files import ROW_BYTES
from frontend.kept.sqlite import open_file
from frontend.kept.store import Store
from frontend.kept.usage import HeldStreams
from tests.frontend.kept.harness import Held, keeping
from tests.frontend.kept.test_store import answer, fixture_of_open_store  # noqa: F401
from tests.frontend.serving import until
from tests.frontend.speaking import Model

ASKED: dict[str, Any] = {"model": "tiny", "input": "A", "max_output_tokens": 400}
BODY = random.Random(0).randbytes(1000)


def filled(db: Connection, one: KeptAnswer) -> None:
    answers.insert(db, one)
    answers.end(db, one.id, 1, "completed", None, Piece(0, 0, BODY, [[(0, [5], True)]]))


async def test_oldest_answers_of_the_key_alone_make_room(open_store: Store) -> None:
    for number in range(4):
        await open_store.write(partial(filled, one=answer(f"a{number}", tenant="ann")))
    await open_store.write(partial(filled, one=answer("b", tenant="bob/team")))
    each = await open_store.read(partial(usage.of_tenant, tenant="bob/team"))
    assert 1000 < each < 1200
    assert await open_store.read(partial(usage.of_tenant, tenant="ann")) == 4 * each
    found = await usage.of_all(open_store)
    assert found == {"ann": usage.Stored(4 * each, 4), "bob": usage.Stored(each, 1)}
    assert await usage.Usage(open_store, each).problem("bob/team", 0) == ""
    tight = usage.Usage(open_store, each - 1)
    # all answers are as old as one another within the clock's resolution, and at most 64 go at a time
    assert "--store-max-key-bytes" not in await tight.problem("ann", 0)
    assert await open_store.read(partial(usage.of_tenant, tenant="ann")) == 0
    assert await open_store.read(partial(answers.find, id="b", tenant="bob/team"))


async def test_what_cannot_make_room_is_not_kept_and_the_background_is_refused(
    qwen: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WATCH_S", "REFRESH_S"):
        monkeypatch.setattr(f"frontend.kept.kept.{name}", 0.02)
    keys = tmp_path / "keys"
    admins = tmp_path / "admins"
    keys.write_text("k1 ann\nk2 bob\n")
    admins.write_text("k3 admin\n")
    for file in (keys, admins):
        file.chmod(0o600)
    qwen.says = ["One", "Two", "Three", "Four"]
    flags = {"api_keys": str(keys), "admin_keys": str(admins), "store_max_key_bytes": 1000}
    async with keeping(qwen.pool, qwen.tokenizer, tmp_path / "a.db", **flags) as url:  # type: ignore[arg-type]
        ann, bob, admin = (
            httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer k{number}"}) for number in (1, 2, 3)
        )
        async with ann, bob, admin:
            item = {"type": "message", "role": "user", "content": "x" * 20 + random.Random(1).randbytes(800).hex()}
            large = await ann.post("/v1/conversations", json={"items": [item]})
            assert large.status_code == 413 and "--store-max-key-bytes" in large.json()["error"]["message"]
            assert (await ann.post("/v1/conversations", json={"items": [item | {"content": "y" * 400}]})).is_success
            stored = (await ann.get("/stats")).json()["batches"]["stored_bytes"]
            data = {"file": ("a", "x" * (1000 - stored - ROW_BYTES - 20))}
            assert (await ann.post("/v1/files", files=data, data={"purpose": "batch"})).is_success
            kept = await ann.post("/v1/responses", json=ASKED)
            assert kept.json()["store"] is False
            named = {"X-Conversation-Id": "a"}
            streamed = await ann.post("/v1/completions", json={"prompt": "A", "stream": True}, headers=named)
            assert "--store-max-key-bytes" in streamed.headers["X-Sluice-Not-Kept"]
            assert streamed.content.endswith(b"data: [DONE]\n\n")
            refused = await ann.post("/v1/responses", json={**ASKED, "background": True})
            assert refused.status_code == 413 and refused.json()["error"]["code"] == "storage_limit"
            assert (await bob.post("/v1/responses", json=ASKED)).json()["store"] is True
            async with asyncio.timeout(60):
                while 'key_kept_answers{key="bob"' not in (page := (await admin.get("/metrics")).text):
                    await asyncio.sleep(0.02)
            assert 'sluice_key_storage_refused_total{key="ann"} 4.0' in page
            assert 'sluice_key_stored_bytes{key="ann"' in page
            own = (await bob.get("/metrics")).text
            assert 'key_stored_bytes{key="bob"' in own and "ann" not in own


@pytest.mark.parametrize("column", ["data", "tokens"])
async def test_changed_bytes_of_a_piece_are_found(open_store: Store, column: str) -> None:
    await open_store.write(partial(filled, one=answer("a")))
    assert len(await open_store.read(partial(answers.pieces_of, id="a"))) == 1
    await open_store.write(lambda db: db.execute(f"UPDATE pieces SET {column} = ?", (b"\0",)))
    with pytest.raises(Damaged):
        await open_store.read(partial(answers.pieces_of, id="a"))


@pytest.mark.parametrize("column", ["body", "recipe", "response"])
async def test_changed_texts_of_an_answer_are_found(open_store: Store, column: str) -> None:
    await open_store.write(partial(filled, one=answer("a")))
    changed = bytes.fromhex("78010203040506")
    await open_store.write(lambda db: db.execute(f"UPDATE answers SET {column} = ?", (changed,)))
    with pytest.raises(Damaged) as error:
        await open_store.read(partial(answers.find, id="a", tenant=""))
    assert error.value.status == 500


def test_file_of_version_1_is_read_and_counted(tmp_path: Path) -> None:
    old = SCHEMA.replace(", bytes INTEGER NOT NULL DEFAULT 0", "").replace("crc INTEGER, ", "")
    with sqlite3.connect(tmp_path / "a.db") as db:
        db.executescript(f"{old} PRAGMA user_version = 1;")
        db.execute(
            "INSERT INTO answers VALUES ('a', '', NULL, '/p', 1, 'completed', 2.0, 0, 1, ?, ?, ?, '', 1, 0)",
            (answers.packed(b"{}"), answers.packed(b'{"prompts":[],"seeds":[],"fingerprint":"","nonce":"",'
             b'"created":1,"admission":{}}'), b'{"a":1}'),
        )  # fmt: skip
        db.execute("INSERT INTO pieces VALUES ('a', 0, 0, x'6162', x'')")
    db.close()
    db = open_file(tmp_path / "a.db")
    found = answers.find(db, "a", "")
    assert found is not None and found.response == b'{"a":1}' and answers.pieces_of(db, "a")[0].data == b"ab"
    assert usage.of_tenant(db, "") > 20
    db.close()


async def test_empty_conversations_files_and_batches_fill_a_key_too(
    qwen: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_runner, "LOOK_S", 3600.0)
    async with (
        keeping(qwen.pool, qwen.tokenizer, tmp_path / "a.db", store_max_key_bytes=20_000) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):

        async def stored() -> int:
            return int((await http.get("/stats")).json()["batches"]["stored_bytes"])

        metadata = {f"{number:064d}": "x" * 512 for number in range(8)}
        made = (await http.post("/v1/conversations", json={})).json()["id"]
        assert (before := await stored()) >= ROW_BYTES
        assert (await http.post(f"/v1/conversations/{made}", json={"metadata": metadata})).is_success
        assert await stored() - before > 8 * 576
        empty = await http.post("/v1/files", files={"file": ("a", "")}, data={"purpose": "batch"})
        assert empty.is_success
        before = await stored()
        asked = {"input_file_id": empty.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        assert (await http.post("/v1/batches", json={**asked, "metadata": metadata})).is_success
        assert await stored() - before > ROW_BYTES + 8 * 576
        before = await stored()
        one: dict[str, Any] = {"requests": [{"custom_id": f"{number:064d}", "params": {}} for number in range(10)]}
        assert (await http.post("/v1/messages/batches", json=one)).is_success
        assert await stored() - before > 10 * (ROW_BYTES + 64)
        for _ in range(100):
            last = await http.post("/v1/conversations", json={})
            if last.status_code == 413:
                break
        assert last.json()["error"]["code"] == "storage_limit" and await stored() <= 20_000 + ROW_BYTES
        grows = await http.post(f"/v1/conversations/{made}", json={"metadata": {**metadata, "more": "x" * 500}})
        assert grows.status_code == 413
        assert (await http.post(f"/v1/conversations/{made}", json={"metadata": {}})).is_success


async def test_room_of_a_key_with_many_answers_is_made_without_counting_them_again_and_again(
    open_store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(300):
        await open_store.write(partial(filled, one=answer(f"a{number}", tenant="ann")))
    counts: list[int] = []
    count = usage.of_tenant

    def counted(db: Connection, tenant: str) -> int:
        counts.append(1)
        return count(db, tenant)

    monkeypatch.setattr(usage, "of_tenant", counted)
    stored = await open_store.write(partial(usage.delete_oldest, tenant="ann", most=20_000))
    monkeypatch.undo()
    assert len(counts) == 1 and stored <= 20_000
    assert await open_store.read(partial(usage.of_tenant, tenant="ann")) == stored


async def test_stream_that_fills_the_memory_of_its_key_ends_with_an_error_and_others_go_on(
    qwen: Model, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    held, apps = Held(qwen.tokenizer, "abc" * 100), list[Starlette]()  # a stream of some 80 KB
    held.finish()
    async with keeping(held.pool, qwen.tokenizer, tmp_path / "a.db", apps, api_keys=str(keys)) as url:
        counted = apps[0].state.kept.held = HeldStreams(400_000)

        async def asked(key: str, number: int) -> bytes:
            headers = {"Authorization": f"Bearer {key}", "X-Conversation-Id": str(number)}
            body = {"prompt": "A", "max_tokens": 400, "stream": True}
            return (await http.post("/v1/completions", json=body, headers=headers)).content

        async with httpx.AsyncClient(base_url=url) as http:
            *full, fits = await asyncio.gather(*(asked("k1", number) for number in range(8)), asked("k2", 0))
            assert fits.endswith(b"data: [DONE]\n\n") and b"error" not in fits
            assert any(b"streams_full" in one for one in full)
            assert b"error" not in await asked("k1", 0)  # what has ended counts no more
            await until(lambda: counted.fits("ann", 200_000))
