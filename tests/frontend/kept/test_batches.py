"""Files and batches: the official SDKs against apps with a store, which may lose their lines to each other."""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from frontend.errors import Overloaded
from frontend.kept import batch_runner, batches
from frontend.kept.batch_runner import in_turns
from frontend.kept.batches import Batch
from frontend.kept.database import Connection
from frontend.kept.files import ROW_BYTES
from frontend.routes import batches as routes
from frontend.routes.batches import LOWEST
from frontend.text.tokenizer import Tokenizer
from frontend.workers.stream import Stream
from shared import messages as m
from shared.checkpoint import Task
from tests.fakes import MODEL, FakePool, pooling
from tests.fakes import tokenizer as small_tokenizer
from tests.frontend.api.scripted import anthropic_sdk, openai_sdk
from tests.frontend.kept.harness import KeptStore, keeping, opened
from tests.frontend.serving import until
from tests.frontend.speaking import Model

LIMITS = m.Limits(max_seq_len=8192, vocab_size=269, eos_token_ids=(265,))
BATCH: dict[str, Any] = {"endpoint": "/v1/completions", "completion_window": "24h"}


class Echo:
    """A worker that answers with the prompt, as fast as `delay_s` says. `held`: it does not answer."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.pool = FakePool(self._play, welcome=m.Welcome(1, 1, 4711, MODEL, "", LIMITS, fingerprint="fp_worker"))
        self.delay_s, self.held = delay_s, False
        self.streams: list[Stream] = []

    def _play(self, pool: FakePool, stream: Stream) -> None:
        self.streams.append(stream)
        pool.later(lambda: self._answer(stream), self.delay_s)

    def _answer(self, stream: Stream) -> None:
        if stream.end is not None:
            return
        if self.held:
            self.pool.later(lambda: self._answer(stream), 0.005)
            return
        self.pool.send_tokens(stream, memoryview(stream.submit.prompt).cast("I").tolist())
        self.pool.end(stream)


def line(number: int, **more: Any) -> dict[str, Any]:
    body = {"model": "tiny", "prompt": f"Line {number}", "max_tokens": 100, "temperature": 0}
    return {"custom_id": f"id-{number}", "method": "POST", "url": "/v1/completions", "body": body} | more


def jsonl(*lines: Any) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in lines)


async def begun(sdk: openai.AsyncOpenAI, *lines: Any, **more: Any) -> Any:
    file = await sdk.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    return await sdk.batches.create(input_file_id=file.id, **{**BATCH, **more})


async def ended(sdk: openai.AsyncOpenAI, id: str) -> Any:
    while (found := await sdk.batches.retrieve(id)).status not in ("completed", "failed", "cancelled", "expired"):
        await asyncio.sleep(0.01)
    return found


async def lines_of(sdk: openai.AsyncOpenAI, id: str) -> list[Any]:
    return [json.loads(one) for one in (await sdk.files.content(id)).text.splitlines()]


@asynccontextmanager
async def served(
    store: KeptStore, tokenizer: Tokenizer, **config: Any
) -> AsyncIterator[tuple[Echo, openai.AsyncOpenAI]]:
    echo = Echo()
    async with keeping(echo.pool, tokenizer, store, **config) as url, openai_sdk(url) as sdk:
        yield echo, sdk


async def test_files_are_kept_and_deleted(qwen: Model, store: KeptStore) -> None:
    data = jsonl(*map(line, range(3))) * 20_000  # several parts
    async with served(store, qwen.tokenizer) as (_, sdk):
        made = await sdk.files.create(file=("näme.jsonl", data), purpose="batch")
        assert (made.bytes, made.filename, made.purpose, made.status) == (len(data), "näme.jsonl", "batch", "processed")
        other = await sdk.files.create(
            file=b"{}", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
        )
        assert other.expires_at is not None and 3590 < other.expires_at - time.time() < 3601
        assert [one.id async for one in sdk.files.list()] == [other.id, made.id]
        assert [one.id async for one in sdk.files.list(order="asc", limit=1)] == [made.id, other.id]
        assert await sdk.files.retrieve(made.id) == made
        assert (await sdk.files.content(made.id)).content == data
        assert (await sdk.files.delete(made.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await sdk.files.content(made.id)
    assert store.rows("SELECT DISTINCT file FROM file_parts") == [(other.id,)]


async def test_form_is_read_however_it_is_cut(qwen: Model, store: KeptStore) -> None:
    content = b"\r\n--x\r\n--xy\r--xyz\r\n\r\n" * 3
    form = (
        b'--xyzw\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--xyzw \r\n'
        b'Content-Disposition: form-data; name="file"; filename="a.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
        + content + b"\r\n--xyzw--\r\n"
    )  # fmt: skip
    headers = {"Content-Type": "multipart/form-data; boundary=xyzw"}
    async with served(store, qwen.tokenizer) as (_, sdk), httpx.AsyncClient(base_url=str(sdk.base_url)) as http:

        async def send(data: bytes, size: int) -> httpx.Response:
            async def pieces() -> AsyncIterator[bytes]:
                for at in range(0, len(data), size):
                    yield data[at : at + size]

            return await http.post("files", content=pieces(), headers=headers)

        for size in (1, 2, 3, 7, 1000):
            made = await send(form, size)
            assert made.status_code == 200, made.text
            assert (await http.get(f"files/{made.json()['id']}/content")).content == content
        for cut in (form[:-12], form.replace(b"form-data; name", b"form-data; nam"), form.replace(b"xyzw ", b"xyzw !")):
            refused = await send(cut, 1000)
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "malformed_form"), refused.text
        wrong = await send(form.replace(b"\r\nbatch\r\n", b"\r\nvision\r\n"), 1000)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "purpose")
    assert store.rows("SELECT count(*) FROM files") == [(5,)]


async def test_batch_has_an_outcome_for_every_line(qwen: Model, store: KeptStore) -> None:
    wrong = line(7)
    wrong["body"] = {"model": "tiny", "prompt": "", "max_tokens": 10}
    async with served(store, qwen.tokenizer) as (echo, sdk):
        made = await begun(sdk, *map(line, range(5)), wrong, metadata={"a": "b"})
        assert made.status == "validating" and made.metadata == {"a": "b"}
        done = await ended(sdk, made.id)
        assert done.status == "completed" and done.in_progress_at and done.finalizing_at and done.completed_at
        counts = done.request_counts
        assert (counts.total, counts.completed, counts.failed) == (6, 5, 1)
        output = await lines_of(sdk, done.output_file_id)
        assert [one["custom_id"] for one in output] == [f"id-{number}" for number in range(5)]
        assert [one["response"]["body"]["choices"][0]["text"] for one in output] == [f"Line {n}" for n in range(5)]
        assert all(one["response"]["status_code"] == 200 and one["error"] is None for one in output)
        assert len({one["id"] for one in output}) == 5
        (error,) = await lines_of(sdk, done.error_file_id)
        assert error["custom_id"] == "id-7" and error["response"]["status_code"] == 400
        assert error["response"]["body"]["error"]["param"] == "prompt"
        assert {one.submit.priority for one in echo.streams} == {LOWEST}
        file = await sdk.files.retrieve(done.output_file_id)
        assert file.bytes == len((await sdk.files.content(file.id)).content) and file.purpose == "batch_output"
        assert [one.id async for one in sdk.batches.list()] == [made.id]
        async with httpx.AsyncClient(base_url=str(sdk.base_url).removesuffix("v1/")) as http:
            waits = (await http.get("stats")).json()["batches"]
            assert waits.pop("stored_bytes") > file.bytes and waits.pop("max_stored_bytes") == 512 << 20
            assert waits == {"batches": 0, "lines_waiting": 0, "lines_running": 0}
            page = (await http.get("metrics")).text
        assert 'sluice_batch_lines_total{state="succeeded"} 5.0' in page
        assert 'sluice_batch_lines_total{state="errored"} 1.0' in page
        await sdk.files.delete(done.output_file_id)
        with pytest.raises(openai.NotFoundError):
            await sdk.files.content(done.output_file_id)


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (line(0), "duplicate_custom_id"), (line(9, url="/v1/embeddings"), "mismatched_url"),
        (line(9, body={"stream": True}), "out_of_range"), (line(9, custom_id=""), "out_of_range"),
        ("no object", "invalid_json_line"), (line(9, body={"prompt": "x" * 2000}), "line_too_long"),
    ],
)  # fmt: skip
async def test_wrong_lines_fail_their_batch_by_number(qwen: Model, store: KeptStore, wrong: Any, code: str) -> None:
    async with served(store, qwen.tokenizer, max_body_bytes=1024) as (echo, sdk):
        done = await ended(sdk, (await begun(sdk, line(0), line(1), wrong, line(3))).id)
        assert done.status == "failed" and done.failed_at and not echo.pool.submitted
        assert [(one.line, one.code) for one in done.errors.data] == [(3, code)]


@pytest.mark.parametrize("endpoint", ["/v1/chat/completions", "/v1/responses"])
async def test_chats_of_a_batch_are_answered_as_requests_are(qwen: Model, store: KeptStore, endpoint: str) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
    if endpoint == "/v1/responses":
        asked = {"model": "tiny", "input": "Hi"}
    async with served(store, qwen.tokenizer) as (_, sdk):
        alone = (await sdk.post(endpoint.removeprefix("/v1"), body=asked, cast_to=httpx.Response)).json()
        done = await ended(sdk, (await begun(sdk, line(1, url=endpoint, body=asked), endpoint=endpoint)).id)
        (one,) = await lines_of(sdk, done.output_file_id)
        found = one["response"]["body"]
        assert found.keys() == alone.keys()
        assert found.get("choices") == alone.get("choices") and found["usage"] == alone["usage"]
        assert found.get("store", False) is False
    assert len(store.rows("SELECT id FROM answers")) == (endpoint == "/v1/responses")


async def test_embeddings_of_a_batch_are_those_of_requests(tmp_path: Path, store: KeptStore) -> None:
    """Lines with several texts, with fields, and one that the route refuses."""
    tokenizer = small_tokenizer(tmp_path)
    tokenizer.task = Task("embed", prompts={"query": "Q:"})
    bodies: list[dict[str, Any]] = [
        {"input": "ab"}, {"input": ["ab", [1, 2, 3]], "encoding_format": "base64"}, {"input": "c" * 9, "dimensions": 1},
        {"input": "ab", "prompt_name": "query"}, {"input": []},
    ]  # fmt: skip
    pool = FakePool(play=pooling(lambda ids: [float(sum(ids)), float(len(ids))]))
    async with (
        keeping(pool, tokenizer, store) as url, openai_sdk(url) as sdk, httpx.AsyncClient(base_url=url) as http
    ):  # fmt: skip
        alone = [await http.post("/v1/embeddings", json={"model": MODEL, **body}) for body in bodies]
        sent = [line(number, url="/v1/embeddings", body={"model": MODEL, **body}) for number, body in enumerate(bodies)]
        done = await ended(sdk, (await begun(sdk, *sent, endpoint="/v1/embeddings")).id)
        assert (done.status, done.request_counts.completed, done.request_counts.failed) == ("completed", 4, 1)
        found = await lines_of(sdk, done.output_file_id)
        (refused,) = await lines_of(sdk, done.error_file_id)
    assert [one.status_code for one in alone] == [200, 200, 200, 200, 400]
    assert [one["custom_id"] for one in found] == ["id-0", "id-1", "id-2", "id-3"] and refused["custom_id"] == "id-4"
    for one, other in zip(found, alone, strict=False):
        body, same = one["response"]["body"], other.json()
        assert (body["data"], body["usage"], body["object"]) == (same["data"], same["usage"], "list")
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["message"] == alone[-1].json()["error"]["message"]


async def test_other_keys_see_neither_files_nor_batches(qwen: Model, store: KeptStore, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    async with served(store, qwen.tokenizer, api_keys=str(keys)) as (echo, sdk):
        ann, bob = sdk.with_options(api_key="k1"), sdk.with_options(api_key="k2")
        made = await begun(ann, line(1))
        done = await ended(ann, made.id)
        assert {one.submit.tenant for one in echo.streams} == {"ann"}
        assert not [one async for one in bob.files.list()] and not [one async for one in bob.batches.list()]
        for refused in (
            bob.batches.retrieve(made.id), bob.batches.cancel(made.id), bob.files.retrieve(made.input_file_id),
            bob.files.content(done.output_file_id), bob.files.delete(made.input_file_id),
            bob.batches.create(input_file_id=made.input_file_id, **BATCH),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await refused
        stored: dict[str, int] = {}
        async with httpx.AsyncClient(base_url=str(sdk.base_url).removesuffix("v1/")) as http:
            for key in ("k1", "k2"):
                told = await http.get("stats", headers={"Authorization": f"Bearer {key}"})
                stored[key] = told.json()["batches"]["stored_bytes"]
        assert stored["k1"] > len(jsonl(line(1))) and stored["k2"] == 0


async def test_cancelled_batch_keeps_what_was_answered(qwen: Model, store: KeptStore) -> None:
    async with served(store, qwen.tokenizer, batch_lines=2) as (echo, sdk):
        echo.delay_s = 0.02
        made = await begun(sdk, *map(line, range(20)))
        await until(lambda: len(echo.pool.submitted) >= 4)
        echo.held = True
        cancelling = await sdk.batches.cancel(made.id)
        assert cancelling.status in ("cancelling", "finalizing", "cancelled")
        done = await ended(sdk, made.id)
        assert done.status == "cancelled" and done.cancelled_at
        output, errors = await lines_of(sdk, done.output_file_id), await lines_of(sdk, done.error_file_id)
        assert len(output) == done.request_counts.completed and len(errors) == 20 - len(output)
        assert {one["error"]["code"] for one in errors} == {"batch_cancelled"}
        with pytest.raises(openai.BadRequestError):
            await sdk.batches.cancel(made.id)


async def test_late_lines_expire(qwen: Model, store: KeptStore) -> None:
    async with served(store, qwen.tokenizer, batch_lines=1) as (echo, sdk):
        echo.held = True
        made = await begun(sdk, line(1), line(2))
        await until(lambda: len(echo.pool.submitted) == 1)
        store.rows("UPDATE batches SET expires = 1")
        done = await ended(sdk, made.id)
        assert done.status == "expired" and done.request_counts.failed == 2
        errors = await lines_of(sdk, done.error_file_id)
        assert {one["error"]["code"] for one in errors} == {"batch_expired"} and done.output_file_id is None


async def test_overloaded_server_ends_no_line(qwen: Model, store: KeptStore) -> None:
    async with served(store, qwen.tokenizer) as (echo, sdk):
        echo.pool.refusals[0] = Overloaded("full", code="queue_full", retry_after=1.0)
        done = await ended(sdk, (await begun(sdk, line(1), line(2))).id)
        assert done.request_counts.completed == 2 and len(echo.pool.submitted) >= 2


async def test_one_line_runs_beside_clients(qwen: Model, store: KeptStore) -> None:
    async with served(store, qwen.tokenizer) as (echo, sdk):
        echo.held = True
        live = asyncio.create_task(sdk.completions.create(model="tiny", prompt="Live", max_tokens=20))
        await until(lambda: len(echo.pool.submitted) == 1)
        made = await begun(sdk, *map(line, range(20)))
        await until(lambda: len(echo.pool.submitted) == 2)
        await asyncio.sleep(0.1)
        assert len(echo.pool.submitted) == 2
        echo.held = False
        assert (await live).choices[0].text == "Live"
        assert (await ended(sdk, made.id)).request_counts.completed == 20


async def test_processes_share_a_batch_and_lose_lines_without_a_trace(qwen: Model, store: KeptStore) -> None:
    """Both lose the lines that they work on, again and again, as if they had been killed and started anew."""
    rng = random.Random(7)
    undisturbed = [f"Line {number}" for number in range(40)]
    one, two = Echo(0.06), Echo(0.06)
    async with (
        keeping(one.pool, qwen.tokenizer, store, batch_lines=3) as url,
        keeping(two.pool, qwen.tokenizer, store, batch_lines=3),
        openai_sdk(url) as sdk,
    ):
        made = await begun(sdk, *map(line, range(40)))
        while (await sdk.batches.retrieve(made.id)).status != "completed":
            lost = "state = 'waiting' AND owner != '' AND number % 3 = ?"
            store.rows(f"UPDATE batch_lines SET owner = 'gone' WHERE {lost}", rng.randrange(3))
            await asyncio.sleep(rng.random() * 0.05)
        done = await sdk.batches.retrieve(made.id)
        output = await lines_of(sdk, done.output_file_id)
    assert [line["custom_id"] for line in output] == [f"id-{number}" for number in range(40)]
    assert [line["response"]["body"]["choices"][0]["text"] for line in output] == undisturbed
    assert one.pool.submitted and two.pool.submitted
    asked = Counter(tuple(sent.prompt) for pool in (one.pool, two.pool) for sent in pool.submitted)
    assert len(asked) == 40 and max(asked.values()) > 1  # some were computed twice, and written once


async def test_next_process_goes_on_with_what_a_dead_one_left(qwen: Model, store: KeptStore) -> None:
    """The first ends in the middle of its lines, and once more while it reads the input."""
    async with served(store, qwen.tokenizer, batch_lines=2) as (echo, sdk):
        echo.held = True
        first = await begun(sdk, *map(line, range(5)))
        await until(lambda: len(echo.pool.submitted) == 1 + 1)
    store.rows("UPDATE batch_lines SET owner = 'gone' WHERE number = 2")
    store.rows("UPDATE batches SET status = 'validating', owner = 'gone'")
    async with served(store, qwen.tokenizer) as (_, sdk):
        done = await ended(sdk, first.id)
        assert done.request_counts.completed == 5 and len(await lines_of(sdk, done.output_file_id)) == 5


async def test_bounds_are_refused_by_name(qwen: Model, store: KeptStore) -> None:
    async with served(store, qwen.tokenizer, max_file_bytes=2000, store_max_key_bytes=3000 + 2 * ROW_BYTES) as (_, sdk):
        with pytest.raises(openai.APIStatusError, match="--max-file-bytes") as refused:
            await sdk.files.create(file=b"x" * 2001, purpose="batch")
        assert refused.value.status_code == 413
        await sdk.files.create(file=b"x" * 2000, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="--store-max-key-bytes"):
            await sdk.files.create(file=b"x" * 1001, purpose="batch")
        file = await sdk.files.create(file=b"x" * 600, purpose="batch")
        with pytest.raises(openai.APIStatusError, match="--store-max-key-bytes"):
            await sdk.batches.create(input_file_id=file.id, **BATCH)
    assert store.rows("SELECT count(*) FROM files") == [(2,)]


async def test_uploads_and_batches_at_the_same_time_pass_no_limit_together(
    qwen: Model, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(*asked: Any) -> list[Any]:
        found = await asyncio.gather(*asked, return_exceptions=True)
        refused = [one for one in found if isinstance(one, Exception)]
        assert all(isinstance(one, openai.APIStatusError) and one.code == "storage_limit" for one in refused), refused
        return [one for one in found if not isinstance(one, Exception)]

    monkeypatch.setattr(batch_runner, "MOST_READING", 0)  # no lines take the place of their file
    async with served(store, qwen.tokenizer, store_max_key_bytes=4700) as (_, sdk):
        files = await at_once(*(sdk.files.create(file=b"x" * 1000, purpose="batch") for _ in range(6)))
        assert len(files) == 3
        for one in files[1:]:
            await sdk.files.delete(one.id)
        found = await at_once(*(sdk.batches.create(input_file_id=files[0].id, **BATCH) for _ in range(6)))
        assert len(found) == 2
        monkeypatch.setattr(routes, "MOST_OPEN", 2)
        with pytest.raises(openai.BadRequestError, match="cancel some"):
            await sdk.batches.create(input_file_id=files[0].id, **BATCH)


@pytest.mark.parametrize("seconds", ["0000036009999", "000003600" + "0" * 400, "000003600" + "0" * 5000])
async def test_time_to_keep_a_file_is_a_short_number(qwen: Model, store: KeptStore, seconds: str) -> None:
    async with served(store, qwen.tokenizer) as (_, sdk):
        after: Any = {"anchor": "created_at", "seconds": seconds}
        with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\]"):
            await sdk.files.create(file=b"{}", purpose="batch", expires_after=after)


@pytest.mark.parametrize("metadata", [{"a" * 65: "b"}, {"a": "b" * 513}, {str(n): "" for n in range(17)}])
async def test_metadata_has_the_limits_of_openai(qwen: Model, store: KeptStore, metadata: dict[str, str]) -> None:
    async with served(store, qwen.tokenizer) as (_, sdk):
        made = await sdk.conversations.create(metadata={"a" * 64: "b" * 512})
        for refused in (
            sdk.conversations.create(metadata=metadata), sdk.conversations.update(made.id, metadata=metadata),
            sdk.batches.create(input_file_id="file-a", metadata=metadata, **BATCH),
        ):  # fmt: skip
            with pytest.raises(openai.BadRequestError, match="metadata"):
                await refused


async def test_server_without_a_store_names_the_flag(qwen: Model) -> None:
    async with qwen.served() as url, openai_sdk(url) as sdk, anthropic_sdk(url) as claude:
        for refused in (sdk.files.list(), sdk.batches.list(), sdk.files.create(file=b"x", purpose="batch")):
            with pytest.raises(openai.NotFoundError, match="--store"):
                await refused
        with pytest.raises(Exception, match="--store"):
            await claude.messages.batches.list()


def message(number: int, **params: Any) -> Any:
    asked = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": f"Line {number}"}]}
    return {"custom_id": f"id-{number}", "params": asked | params}


async def test_message_batches_have_results(qwen: Model, store: KeptStore) -> None:
    echo = Echo()
    async with keeping(echo.pool, qwen.tokenizer, store) as url, anthropic_sdk(url) as sdk:
        made = await sdk.messages.batches.create(requests=[message(1), message(2), message(3, max_tokens=0)])
        assert made.processing_status == "in_progress" and made.results_url is None
        assert made.request_counts.processing == 3
        while (found := await sdk.messages.batches.retrieve(made.id)).processing_status != "ended":
            await asyncio.sleep(0.01)
        assert (found.request_counts.succeeded, found.request_counts.errored) == (2, 1) and found.ended_at
        results = [one async for one in await sdk.messages.batches.results(made.id)]
        assert [one.custom_id for one in results] == ["id-1", "id-2", "id-3"]
        assert [one.result.type for one in results] == ["succeeded", "succeeded", "errored"]
        assert results[0].result.type == "succeeded" and results[0].result.message.role == "assistant"
        assert results[2].result.type == "errored" and results[2].result.error.error.type == "invalid_request_error"
        assert [one.id async for one in sdk.messages.batches.list()] == [made.id]
        assert {one.submit.priority for one in echo.streams} == {LOWEST}
        await sdk.messages.batches.delete(made.id)
        assert not [one.id async for one in sdk.messages.batches.list()]
        echo.held = True
        second = await sdk.messages.batches.create(requests=[message(1), message(2)])
        with pytest.raises(Exception, match="has not ended"):
            await sdk.messages.batches.delete(second.id)
        assert (await sdk.messages.batches.cancel(second.id)).processing_status in ("canceling", "ended")
        while (found := await sdk.messages.batches.retrieve(second.id)).processing_status != "ended":
            await asyncio.sleep(0.01)
        assert [one.result.type async for one in await sdk.messages.batches.results(second.id)] == ["canceled"] * 2
        with pytest.raises(Exception, match="custom_id"):
            await sdk.messages.batches.create(requests=[message(1), message(1)])


def test_tenants_take_turns() -> None:
    made = [Batch(id, id[0], "", "", 0, 0.0, None, "", "", None, {}, []) for id in ("a1", "a2", "a3", "b1", "c1")]
    assert [one.id for one in in_turns(made)] == ["a1", "b1", "c1", "a2", "a3"]


async def test_batches_of_a_key_are_read_by_the_page(store: KeptStore) -> None:
    def made_of(id: str, tenant: str) -> Batch:
        return Batch(id, tenant, "openai", "completed", 1, 0.0, 1.0, "", "", None, {}, [])

    def fill(db: Connection) -> None:
        for number in range(9):
            batches.insert(db, made_of(str(number), "ann"))
        batches.insert(db, made_of("other", "bob"))

    made = await opened(store, "me")
    try:
        await made.write(fill)
        listed = partial(batches.listed, tenant="ann", format="openai")
        assert await made.read(partial(listed, most=3)) == ["8", "7", "6"]
        assert await made.read(partial(listed, most=3, after="6")) == ["5", "4", "3"]
        assert await made.read(partial(listed, most=3, before="3")) == ["6", "5", "4"]
        assert await made.read(partial(listed, most=9, after="0")) == []
        assert await made.read(partial(listed, most=9, after="other")) is None
    finally:
        await made.close()
