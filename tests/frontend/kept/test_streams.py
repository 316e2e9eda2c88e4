"""Streams with an id: read again from an event or a byte, in the same process and in another one."""

import asyncio
import gc
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from frontend.errors import Overloaded
from frontend.generation.generation import Generation
from frontend.kept import answers
from frontend.kept.answers import KeptAnswer
from frontend.kept.database import Connection
from frontend.kept.run import Run
from frontend.request import GenerationRequest
from frontend.routes import kept
from tests.frontend.kept.harness import Held, KeptStore, SQLiteStore, blocks, ids_of, keeping
from tests.frontend.serving import until
from tests.patience import PATIENCE_S

TEXT = "The quick brown fox jumps over it"
NAMED = {"X-Conversation-Id": "chat 1::tiny"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/completion": {"prompt": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/responses": {"input": "Hi"},
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "Hi"}],
        "stream_options": {"include_usage": True},
    },
}


def body(path: str, **more: Any) -> dict[str, Any]:
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    return {"model": "tiny", limit: 400, "stream": True, **BODIES[path], **more}


async def head(held: Held, http: httpx.AsyncClient, path: str, events: int, **more: Any) -> bytes:
    """Begins a stream with an id, and leaves it after so many events. The tokens come a few at a time."""
    held.allowed = 3
    data = b""
    async with http.stream("POST", path, json=body(path, **more), headers=NAMED) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for piece in answer.aiter_bytes():
            data += piece
            if len(blocks(data)) >= events:
                break
            held.allowed = min(9, held.allowed + 3)
    held.allowed = 9
    return data


async def again(http: httpx.AsyncClient, start: int = 0, **headers: str) -> bytes:
    answer = await http.get(
        "/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"], "from": start}, headers=headers
    )
    assert answer.status_code == 200, answer.text
    return answer.content


@pytest.mark.parametrize("path", BODIES)
async def test_stream_goes_on_without_its_client(qwen: Any, store: KeptStore, path: str) -> None:
    held = Held(qwen.tokenizer, TEXT)
    async with keeping(held.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        seen = await head(held, http, path, 2)
        held.finish()
        whole = await again(http)
        assert whole.startswith(seen) and not held.pool.aborted
        assert ids_of(whole) == list(range(len(blocks(whole))))
        assert await again(http, len(seen)) == whole[len(seen) :]
        after = await again(http, **{"Last-Event-ID": "1"})
        assert blocks(after) == blocks(whole)[2:]
        posted = await http.post(path, json=body(path), headers={**NAMED, "Last-Event-ID": "1"})
        assert posted.content == after
        past = await http.get("/v1/stream/chat 1::tiny", params={"from": len(whole) + 1})
        assert past.status_code == 400


@pytest.mark.parametrize("path", BODIES)
async def test_another_process_goes_on_with_the_same_bytes(qwen: Any, store: KeptStore, path: str) -> None:
    """The first process is not killed, but has lost the answer: it must stop, and write nothing more."""
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    async with (
        keeping(first.pool, qwen.tokenizer, store) as one,
        keeping(second.pool, qwen.tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(first, http, path, 2)
        await until(lambda: len(first.streams[0].output) == 9)
        store.gone()
        second.finish()
        whole = await again(other)
        assert second.streams[0].submit.generated and second.streams[0].seed == first.streams[0].seed
        assert whole.startswith(seen)
        first.finish()
        await until(lambda: bool(first.pool.aborted))
        assert await again(http) == whole == await again(other)
    assert TEXT in "".join(re.findall(r'"(?:text|content|delta)":"([^"]*)"', whole.decode()))


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 2}, {"n": 2, "stop": ["fox"]}])
async def test_choices_and_log_probabilities_are_computed_anew(
    qwen: Any, store: KeptStore, more: dict[str, Any]
) -> None:
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    async with (
        keeping(first.pool, qwen.tokenizer, store) as one,
        keeping(second.pool, qwen.tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(first, http, "/v1/completions", 2, **more)
        store.gone()
        second.finish()
        whole = await again(other)
        assert whole.startswith(seen) and whole.endswith(b"data: [DONE]\n\n")
        assert not second.streams[0].submit.generated
        assert await again(http) == whole


@pytest.mark.parametrize("at_once", [False, True])
async def test_other_tokens_end_the_answer_with_an_error(qwen: Any, store: KeptStore, at_once: bool) -> None:
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT.upper())
    second.at_once = at_once  # more tokens than those that were kept have come before the two are compared
    async with (
        keeping(first.pool, qwen.tokenizer, store) as one,
        keeping(second.pool, qwen.tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(first, http, "/v1/completions", 2, n=2)
        store.gone()
        second.finish()
        whole = await again(other)
        assert whole.startswith(seen) and b"became another" in whole[len(seen) :]
        assert b"QUICK" not in whole


async def test_answer_that_cannot_be_continued_now_is_refused_and_continued_later(qwen: Any, store: KeptStore) -> None:
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    async with (
        keeping(first.pool, qwen.tokenizer, store) as one,
        keeping(second.pool, qwen.tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        seen = await head(first, http, "/v1/completions", 2)
        store.gone()
        second.pool.refusals[0] = Overloaded("no worker", code="not_ready", retry_after=1.0)
        refused = await other.get("/v1/stream/chat 1::tiny")
        assert refused.status_code == 503 and refused.headers["Retry-After"]
        second.finish()
        whole = await again(other)
        assert whole.startswith(seen) and whole.endswith(b"data: [DONE]\n\n")


async def test_window_ends_a_stream_that_nobody_reads(qwen: Any, store: KeptStore) -> None:
    held = Held(qwen.tokenizer, TEXT)
    async with (
        keeping(held.pool, qwen.tokenizer, store, resume_window=0.05) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        seen = await head(held, http, "/v1/completions", 2)
        await until(lambda: bool(held.pool.aborted))
        assert (await again(http)).startswith(seen)


async def test_delete_ends_a_stream_and_a_new_one_takes_its_id(qwen: Any, store: KeptStore) -> None:
    held = Held(qwen.tokenizer, TEXT)
    async with keeping(held.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        await head(held, http, "/v1/completions", 2)
        await head(held, http, "/v1/completions", 2)
        await until(lambda: len(held.pool.aborted) == 1)
        for _ in range(2):
            assert (await http.delete("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"]})).status_code == 204
        assert len(held.pool.aborted) == 2
        assert (await http.get("/v1/stream/chat 1::tiny")).status_code == 404
        assert (await http.get("/v1/stream")).status_code == 400


async def test_another_key_finds_no_stream(qwen: Any, store: KeptStore, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    held = Held(qwen.tokenizer, TEXT)
    held.allowed, held.ends = 99, True
    async with keeping(held.pool, qwen.tokenizer, store, api_keys=str(keys)) as url:
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k1"}) as ann:
            await ann.post("/v1/completions", json=body("/v1/completions"), headers=NAMED)
            assert (await ann.get("/v1/stream/chat 1::tiny")).status_code == 200
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k2"}) as bob:
            assert (await bob.get("/v1/stream/chat 1::tiny")).status_code == 404
            assert (await bob.delete("/v1/stream/chat 1::tiny")).status_code == 204
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": "Bearer k1"}) as ann:
            assert (await ann.get("/v1/stream/chat 1::tiny")).status_code == 200


async def test_background_answer_of_a_lost_process_is_finished_unasked(qwen: Any, store: KeptStore) -> None:
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    first.allowed = 9
    asked = {"model": "tiny", "input": "Hi", "background": True, "max_output_tokens": 400}
    async with keeping(first.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        made = (await http.post("/v1/responses", json=asked)).json()
        await until(lambda: len(first.streams[0].output) == 9)
        first.pool.refusals = dict.fromkeys(range(99), Overloaded("no worker", code="not_ready", retry_after=1.0))
        store.gone()
        second.ends, second.allowed = True, 99
        async with keeping(second.pool, qwen.tokenizer, store) as two, httpx.AsyncClient(base_url=two) as other:
            async with asyncio.timeout(60):
                while (found := (await other.get(f"/v1/responses/{made['id']}")).json())["status"] != "completed":
                    await asyncio.sleep(0.02)
    assert found["output"][0]["content"][0]["text"] == TEXT


async def test_background_answer_that_is_damaged_has_failed(qwen: Any, store: KeptStore) -> None:
    """Who polls it sees its end."""
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    first.allowed = 9
    asked = {"model": "tiny", "input": "Hi", "background": True, "max_output_tokens": 400}
    async with keeping(first.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        made = (await http.post("/v1/responses", json=asked)).json()
        await until(lambda: len(first.streams[0].output) == 9)
        store.rows("INSERT INTO pieces VALUES (?, 999, 999, ?, ?, -1)", made["id"], b"", b"")
        store.gone()
        async with keeping(second.pool, qwen.tokenizer, store) as two, httpx.AsyncClient(base_url=two) as other:
            async with asyncio.timeout(60):
                while (found := (await other.get(f"/v1/responses/{made['id']}")).json())["status"] != "failed":
                    await asyncio.sleep(0.02)
    assert found["error"]["code"] == "server_error" and "damaged" in found["error"]["message"]


async def test_reader_of_a_lost_answer_is_cut_and_has_only_bytes_that_are_kept(qwen: Any, store: KeptStore) -> None:
    first, second = Held(qwen.tokenizer, TEXT), Held(qwen.tokenizer, TEXT)
    first.allowed = 9
    data = b""

    async def read(http: httpx.AsyncClient) -> None:
        nonlocal data
        async with http.stream("POST", "/v1/completions", json=body("/v1/completions"), headers=NAMED) as answer:
            async for piece in answer.aiter_raw():
                data += piece

    async with (
        keeping(first.pool, qwen.tokenizer, store) as one,
        keeping(second.pool, qwen.tokenizer, store) as two,
        httpx.AsyncClient(base_url=one) as http,
        httpx.AsyncClient(base_url=two) as other,
    ):
        reading = asyncio.create_task(read(http))
        await until(lambda: bool(first.streams) and len(first.streams[0].output) == 9 and b"data: " in data)
        store.gone()
        second.finish()
        whole = await again(other)
        first.finish()
        with pytest.raises(httpx.RemoteProtocolError):
            await reading
        assert whole.startswith(data) and whole[len(data) :] == await again(other, len(data))


async def test_background_answer_waits_for_a_store_that_cannot_be_written(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SQLiteStore(tmp_path / "answers.db")
    monkeypatch.setattr("frontend.kept.store.RETRY_S", 0.5)
    monkeypatch.setattr("frontend.kept.kept.WATCH_S", 0.1)
    held, apps = Held(qwen.tokenizer, TEXT), list[Starlette]()
    held.allowed = 9
    asked = {"model": "tiny", "input": "Hi", "background": True, "max_output_tokens": 400}
    async with keeping(held.pool, qwen.tokenizer, store, apps) as url, httpx.AsyncClient(base_url=url) as http:
        made = (await http.post("/v1/responses", json=asked)).json()
        await until(lambda: bool(held.streams) and len(held.streams[0].output) == 9)
        await apps[0].state.kept.store.read(lambda db: db.execute("PRAGMA query_only = 1").fetchall())
        held.finish()
        await until(lambda: bool(apps[0].state.kept.store.problem))
        async with asyncio.timeout(60):
            while (found := (await http.get(f"/v1/responses/{made['id']}")).json()).get("status") != "completed":
                await asyncio.sleep(0.02)
        events = await http.get(f"/v1/responses/{made['id']}", params={"stream": "true"})
        beyond = await http.get(f"/v1/responses/{made['id']}", params={"stream": "true", "starting_after": "999"})
    assert beyond.status_code == 400 and beyond.json()["error"]["param"] == "starting_after"
    assert found["output"][0]["content"][0]["text"] == TEXT and len(held.streams) == 2
    numbers = [int(number) for number in re.findall(r'"sequence_number":(\d+)', events.text)]
    assert numbers == list(range(len(numbers)))


async def test_list_has_the_streams_of_the_key_alone(qwen: Any, store: KeptStore, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    held = Held(qwen.tokenizer, TEXT)
    held.allowed, held.ends = 99, True
    path = "/v1/chat/completions"
    async with keeping(held.pool, qwen.tokenizer, store, api_keys=str(keys)) as url:
        ann, bob = (
            httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer k{number}"}) for number in (1, 2)
        )
        async with ann, bob:
            assert (await ann.get("/v1/streams")).json() == {"object": "list", "data": []}
            await ann.post(path, json=body(path), headers=NAMED)
            parts = [{"type": "text", "text": "See"}, {"type": "text", "text": "this"}]
            asked = body(path, messages=[{"role": "user", "content": parts}])
            await ann.post(path, json=asked, headers={"X-Conversation-Id": "second"})
            first, second = (await ann.get("/v1/streams")).json()["data"]
            assert first["id"] == "second" and first["question"] == "See\nthis" and first["status"] == "completed"
            assert second["id"] == NAMED["X-Conversation-Id"] and second["question"] == "Hi"
            assert (await bob.get("/v1/streams")).json()["data"] == []
            del bob.headers["Authorization"]
            assert (await bob.get("/v1/streams")).status_code == 401


async def test_list_is_refused_where_all_clients_are_one_owner(qwen: Any, store: KeptStore) -> None:
    held = Held(qwen.tokenizer, TEXT)
    async with keeping(held.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        refused = await http.get("/v1/streams")
        assert refused.status_code == 403 and "--api-keys" in refused.json()["error"]["message"]


async def test_stream_is_read_in_slices_by_those_who_are_behind(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("answers", "run"):
        monkeypatch.setattr(f"frontend.kept.{module}.SLICE_BYTES", 100)
    held, store, apps = Held(qwen.tokenizer, TEXT), SQLiteStore(tmp_path / "answers.db"), list[Starlette]()
    async with keeping(held.pool, qwen.tokenizer, store, apps) as url, httpx.AsyncClient(base_url=url) as http:
        seen = await head(held, http, "/v1/completions", 3)
        (run,) = apps[0].state.kept.runs.values()
        assert len(run.since(0)) == 100
        running = asyncio.create_task(again(http))
        held.finish()
        whole = await running
        assert whole.startswith(seen) and len(whole) > 1000
        await until(lambda: not apps[0].state.kept.runs)
        sizes = [size for (size,) in store.rows("SELECT length(data) FROM pieces ORDER BY number")]
        assert len(sizes) > 10 and max(sizes) == 100 and sum(sizes) == len(whole)
        assert await again(http) == whole and await again(http, 250) == whole[250:]
        last = len(blocks(whole)) - 3
        assert blocks(await again(http, **{"Last-Event-ID": str(last)})) == blocks(whole)[last + 1 :]
        # what is damaged far behind is found before anything is shown
        store.rows("UPDATE pieces SET data = x'00' WHERE number = (SELECT max(number) FROM pieces)")
        damaged = await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"]})
        assert damaged.status_code == 500 and damaged.json()["error"]["code"] == "answer_damaged"


async def test_list_of_streams_with_large_requests_leaves_turns_to_others(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    held, apps, order, both_wait = Held(qwen.tokenizer, TEXT), list[Starlette](), list[str](), threading.Event()
    held.finish()
    show, find = kept._listed_stream, answers.streams_of

    def shown(answer: KeptAnswer) -> dict[str, Any]:
        order.append("")
        both_wait.wait(PATIENCE_S)
        return show(answer)

    def found(db: Connection, tenant: str, most: int) -> list[str]:
        order.append(tenant)
        return find(db, tenant, most)

    monkeypatch.setattr(kept, "_listed_stream", shown)
    monkeypatch.setattr(answers, "streams_of", found)
    async with (
        keeping(held.pool, qwen.tokenizer, tmp_path / "a.db", apps, api_keys=str(keys)) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        ann, bob = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
        for number in range(8):
            names = {**ann, "X-Conversation-Id": str(number)}
            await http.post("/v1/completions", json=body("/v1/completions"), headers=names)
        first = asyncio.create_task(http.get("/v1/streams", headers=ann))
        await until(lambda: "" in order)
        second = asyncio.create_task(http.get("/v1/streams", headers=bob))
        await until(lambda: apps[0].state.kept.store._coming.qsize())
        both_wait.set()
        assert (await second).json()["data"] == [] and len((await first).json()["data"]) == 8
        assert order[0] == "ann" and order.index("bob") < 5


async def test_what_has_ended_is_freed_without_the_garbage_collector(qwen: Any, tmp_path: Path) -> None:
    held = Held(qwen.tokenizer, TEXT)
    held.finish()
    gc.collect()
    gc.disable()
    try:
        async with (
            keeping(held.pool, qwen.tokenizer, tmp_path / "a.db") as url,
            httpx.AsyncClient(base_url=url) as http,
        ):
            for stream in (True, False):
                for path in BODIES:
                    asked = {**body(path), "stream": stream}
                    asked.pop("stream_options", None)
                    assert (await http.post(path, json=asked, headers=NAMED)).is_success
                    assert (await http.post(path, json=asked)).is_success
            kinds = (Run, Generation, GenerationRequest)
            await until(lambda: not [one for one in gc.get_objects() if type(one) in kinds])
    finally:
        gc.enable()


async def test_stream_with_too_many_readers_is_refused_to_a_further_one(
    qwen: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("frontend.kept.run.MOST_READERS", 2)
    held, apps = Held(qwen.tokenizer, TEXT), list[Starlette]()
    async with (
        keeping(held.pool, qwen.tokenizer, tmp_path / "a.db", apps) as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        await head(held, http, "/v1/completions", 2)
        (run,) = apps[0].state.kept.runs.values()
        await until(lambda: not run._readers)
        readers = [asyncio.create_task(again(http)) for _ in range(2)]
        await until(lambda: run._readers == 2)
        third = await http.get("/v1/stream", params={"conv_id": NAMED["X-Conversation-Id"]})
        assert third.status_code == 503 and third.json()["error"]["code"] == "too_many_readers"
        held.finish()
        first, second = await asyncio.gather(*readers)
        assert first == second and first.endswith(b"data: [DONE]\n\n")
