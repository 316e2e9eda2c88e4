"""Stateful responses: OpenAI's SDK against the app with a store."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from frontend.chat import large_chats
from frontend.kept import conversations
from frontend.routes import kept as routes
from tests.frontend.api.scripted import openai_sdk
from tests.frontend.kept.harness import Held, KeptStore, keeping
from tests.frontend.speaking import Model

ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 500}


async def test_response_is_shown_by_its_id_and_deleted(qwen: Model, store: KeptStore) -> None:
    qwen.says = ["Hi"]
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.responses.create(input="Hello", **ASKED)
        assert made.store and made.status == "completed"
        assert await sdk.responses.retrieve(made.id) == made
        items = (await sdk.responses.input_items.list(made.id)).data
        assert [item.content[0].text for item in items] == ["Hello"]  # type: ignore[union-attr]
        await sdk.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(made.id)
    for file in store.files:
        assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("streamed", [False, True])
async def test_chain_has_the_prompt_of_the_whole_conversation(qwen: Model, store: KeptStore, streamed: bool) -> None:
    qwen.says = ["One", "Two", "Three", "Two", "Three"]
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        first = await sdk.responses.create(input="A", instructions="Be short.", **ASKED)

        async def follow(previous: str, text: str) -> Any:
            if not streamed:
                return await sdk.responses.create(input=text, previous_response_id=previous, **ASKED)
            async with sdk.responses.stream(input=text, previous_response_id=previous, **ASKED) as stream:
                async for _ in stream:
                    pass
                return await stream.get_final_response()

        second = await follow(first.id, "B")
        third = await follow(second.id, "C")
        assert third.previous_response_id == second.id
        whole: list[Any] = [{"role": "user", "content": "A"}, *first.output, {"role": "user", "content": "B"}]
        await sdk.responses.create(input=whole, **ASKED)
        await sdk.responses.create(
            input=[*whole, *second.output, {"role": "user", "content": "C"}], store=False, **ASKED
        )
    prompts = [one.prompt for one in qwen.pool.submitted]
    assert prompts[1:3] == prompts[3:5]


async def test_response_that_is_not_stored_cannot_be_followed(qwen: Model, store: KeptStore) -> None:
    qwen.says = ["One"]
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.responses.create(input="A", store=False, **ASKED)
        assert not made.store
        with pytest.raises(openai.NotFoundError) as refused:
            await sdk.responses.create(input="B", previous_response_id=made.id, **ASKED)
    assert refused.value.code == "previous_response_not_found" and refused.value.param == "previous_response_id"


async def test_other_keys_do_not_see_a_response(qwen: Model, store: KeptStore, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 ann\nk2 bob\n")
    keys.chmod(0o600)
    qwen.says = ["One", "Two"]
    async with (
        keeping(qwen.pool, qwen.tokenizer, store, api_keys=str(keys)) as url,
        openai_sdk(url).with_options(api_key="k1") as ann,
        openai_sdk(url).with_options(api_key="k2") as bob,
    ):
        made = await ann.responses.create(input="A", **ASKED)
        conversation = await ann.conversations.create()
        for refused in (
            bob.responses.retrieve(made.id), bob.responses.delete(made.id), bob.responses.cancel(made.id),
            bob.responses.create(input="B", previous_response_id=made.id, **ASKED),
            bob.responses.create(input="B", conversation=conversation.id, **ASKED),
            bob.conversations.retrieve(conversation.id),
        ):  # fmt: skip
            with pytest.raises(openai.NotFoundError):
                await refused
        assert (await ann.responses.retrieve(made.id)).id == made.id


async def test_conversation_gets_input_and_output(qwen: Model, store: KeptStore) -> None:
    qwen.says = ["One", "Two", "Two"]
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.conversations.create(metadata={"topic": "x"}, items=[{"role": "user", "content": "A"}])
        first = await sdk.responses.create(input="B", conversation=made.id, **ASKED)
        await sdk.responses.create(input="C", conversation={"id": made.id}, **ASKED)
        listed = (await sdk.conversations.items.list(made.id, order="asc")).data
        assert [item.role for item in listed] == ["user", "user", "assistant", "user", "assistant"]  # type: ignore[union-attr]
        whole: list[Any] = [{"role": "user", "content": text} for text in ("A", "B")]
        await sdk.responses.create(input=[*whole, *first.output, {"role": "user", "content": "C"}], **ASKED)
        assert (await sdk.conversations.update(made.id, metadata={"topic": "y"})).metadata == {"topic": "y"}
        await sdk.conversations.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.conversations.retrieve(made.id)
    assert qwen.pool.submitted[1].prompt == qwen.pool.submitted[2].prompt


async def test_contents_of_items_are_read_as_parts(qwen: Model, store: KeptStore) -> None:
    """The SDK's types have no texts there, and its users read `content[0].text`."""
    qwen.says = ["One"]
    roles = {"system": "A", "user": "B", "assistant": "C"}
    sent: Any = [{"role": role, "content": text} for role, text in roles.items()]
    parts = [("input_text", "A"), ("input_text", "B"), ("output_text", "C")]

    def read(items: Any) -> list[tuple[str, str]]:
        return [(part.type, part.text) for item in items for part in item.content]

    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.conversations.create(items=sent)
        added: Any = await sdk.conversations.items.create(made.id, items=sent)
        alone: Any = await sdk.conversations.items.retrieve(added.data[2].id, conversation_id=made.id)
        assert (read(added.data), read([alone])) == (parts, parts[2:])
        assert read((await sdk.conversations.items.list(made.id, order="asc")).data) == parts * 2
        first = await sdk.responses.create(input=sent, **ASKED)
        assert read((await sdk.responses.input_items.list(first.id, order="asc")).data) == parts


async def test_tokens_before_a_request_are_counted_with_it(qwen: Model, store: KeptStore) -> None:
    qwen.says = ["One"]
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        count = sdk.responses.input_tokens.count
        first = await sdk.responses.create(input="A", **ASKED)
        followed = await count(model="tiny", input="B", previous_response_id=first.id)
        whole: Any = [{"role": "user", "content": "A"}, *first.output, {"role": "user", "content": "B"}]
        made = await sdk.conversations.create(items=[{"role": "user", "content": "A"}])
        both: Any = [{"role": "user", "content": text} for text in "AB"]
        assert followed == await count(model="tiny", input=whole) != await count(model="tiny", input="B")
        assert await count(model="tiny", input="B", conversation=made.id) == await count(model="tiny", input=both)
        with pytest.raises(openai.BadRequestError, match="exclude each other"):
            await count(model="tiny", input="B", conversation=made.id, previous_response_id=first.id)
        with pytest.raises(openai.NotFoundError, match="there is no response"):
            await count(model="tiny", input="B", previous_response_id="resp_none")
    async with qwen.served() as url, openai_sdk(url) as sdk:
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await sdk.responses.input_tokens.count(model="tiny", input="B", previous_response_id=first.id)


async def test_item_of_a_conversation_is_read_and_deleted(qwen: Model, store: KeptStore) -> None:
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.conversations.create(items=[{"role": "user", "content": text} for text in ("A", "B")])
        first, second = (await sdk.conversations.items.list(made.id, order="asc")).data
        assert await sdk.conversations.items.retrieve(str(first.id), conversation_id=made.id) == first
        assert (await sdk.conversations.items.delete(str(first.id), conversation_id=made.id)).id == made.id
        for refused in (
            sdk.conversations.items.retrieve(str(first.id), conversation_id=made.id),
            sdk.conversations.items.delete(str(first.id), conversation_id=made.id),
            sdk.conversations.items.retrieve(str(second.id), conversation_id="conv_other"),
        ):
            with pytest.raises(openai.NotFoundError, match="there is no"):
                await refused
        assert (await sdk.conversations.items.list(made.id)).data == [second]


async def test_background_is_polled_streamed_again_and_cancelled(qwen: Model, store: KeptStore) -> None:
    held = Held(qwen.tokenizer, "Hello there")
    async with keeping(held.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.responses.create(input="A", background=True, **ASKED)
        assert made.status == "queued" and made.background
        held.allow(4)
        while (await sdk.responses.retrieve(made.id)).status != "in_progress":
            await asyncio.sleep(0.01)
        with pytest.raises(openai.BadRequestError, match="in_progress"):
            await sdk.responses.create(input="B", previous_response_id=made.id, **ASKED)
        stream = await sdk.responses.retrieve(made.id, stream=True)
        seen = [await anext(stream) for _ in range(5)]
        await stream.close()
        held.finish()
        rest = [event async for event in await sdk.responses.retrieve(made.id, stream=True, starting_after=2)]
        assert [event.sequence_number for event in rest] == list(range(3, 3 + len(rest)))
        assert rest[:2] == seen[3:] and rest[-1].type == "response.completed"
        assert (await sdk.responses.retrieve(made.id)).output_text == "Hello there"
        held.allowed, held.ends = 2, False
        other = await sdk.responses.create(input="A", background=True, stream=True, **ASKED)
        started = await anext(other)
        assert (await sdk.responses.cancel(started.response.id)).status == "cancelled"  # type: ignore[union-attr]
        assert held.pool.aborted
        with pytest.raises(openai.BadRequestError):
            await sdk.responses.create(input="A", background=True, store=False, **ASKED)


async def test_errors_of_a_kept_response_are_those_of_any_other(qwen: Model, store: KeptStore) -> None:
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, httpx.AsyncClient(base_url=url) as http:
        for body, name in (
            ({"input": "A", "background": 3}, "background"),
            ({"input": "A", "conversation": "c", "previous_response_id": "r"}, "conversation"),
            ({"input": "A", "temperature": -1}, "temperature"),
        ):
            refused = await http.post("/v1/responses", json={"model": "tiny", **body})
            assert refused.status_code == 400 and name in refused.json()["error"]["message"]
        assert (await http.get("/v1/responses/resp_0?stream=true")).status_code == 404


async def test_without_a_store_stateful_fields_are_refused(qwen: Model) -> None:
    async with qwen.served() as url, httpx.AsyncClient(base_url=url) as http:
        for name, value in (("previous_response_id", "a"), ("conversation", "c"), ("background", True)):
            refused = await http.post("/v1/responses", json={"model": "tiny", "input": "A", name: value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name
        assert (await http.get("/v1/responses/resp_0")).status_code == 404


async def test_what_follows_a_conversation_has_the_bounds_of_a_body(
    qwen: Model, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the store, items are compressed: a conversation may be a thousand times as large as there."""
    monkeypatch.setattr(conversations, "PAGE_BYTES", 2000)
    monkeypatch.setattr(conversations, "ITEMS_AT_ONCE", 2)
    qwen.says = ["One"]
    long: Any = {"role": "user", "content": "A" * 1000}
    async with keeping(qwen.pool, qwen.tokenizer, store, max_body_bytes=3000) as url, openai_sdk(url) as sdk:
        made = await sdk.conversations.create(items=[long])
        for _ in range(4):
            added = await sdk.conversations.items.create(made.id, items=[long, {"role": "user", "content": "B"}])
            assert len(added.data) == 2
        for order in ("asc", "desc"):
            first = await sdk.conversations.items.list(made.id, order=order)
            assert len(first.data) < 4 and first.has_more
            every = [one.id async for one in sdk.conversations.items.list(made.id, order=order)]
            assert len(set(every)) == len(every) == 9
        with pytest.raises(openai.APIStatusError, match="delete some") as refused:
            await sdk.responses.create(input="B", conversation=made.id, **ASKED)
        assert (refused.value.status_code, refused.value.code) == (413, "conversation_too_large")
        answered = await sdk.responses.create(input="A" * 2000, **ASKED)
        for ask in (sdk.responses.create, sdk.responses.input_tokens.count):
            more = ASKED if ask == sdk.responses.create else {"model": "tiny"}
            with pytest.raises(openai.APIStatusError, match="--max-body-bytes") as refused:
                await ask(input="A" * 2000, previous_response_id=answered.id, **more)
            assert (refused.value.status_code, refused.value.code) == (413, "request_too_large")


async def test_long_conversation_is_rendered_as_a_long_body_is(
    qwen: Model, store: KeptStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large_chats, "FEW_BYTES", 1000)
    monkeypatch.setattr(large_chats, "MOST_MESSAGES", 30)
    rendered, in_child = list[str](), large_chats._in_child

    def noted(field: str, *arguments: Any) -> list[str]:
        rendered.append(field)
        return in_child(field, *arguments)

    monkeypatch.setattr(large_chats, "_in_child", noted)
    items: Any = [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}] * 10
    async with keeping(qwen.pool, qwen.tokenizer, store) as url, openai_sdk(url) as sdk:
        made = await sdk.conversations.create(items=items)
        await sdk.conversations.items.create(made.id, items=items)
        assert await sdk.responses.input_tokens.count(model="tiny", input="B", conversation=made.id)
    assert rendered == ["messages"]


async def test_requests_are_joined_with_what_they_follow_beside_the_event_loop(
    qwen: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def noted(name: str) -> None:
        work = getattr(routes, name)

        def called(*arguments: Any) -> Any:
            threads.append(threading.current_thread().name)
            return work(*arguments)

        monkeypatch.setattr(routes, name, called)

    for name in ("_joined", "_items_of", "_page_of_items"):
        noted(name)
    qwen.says = ["One", "Two"]
    async with (
        keeping(qwen.pool, qwen.tokenizer, tmp_path / "a.db") as url,
        httpx.AsyncClient(base_url=url) as http,
    ):
        first = (await http.post("/v1/responses", json={"input": "A"})).json()["id"]
        second = (await http.post("/v1/responses", json={"input": "B", "previous_response_id": first})).json()["id"]
        assert len((await http.get(f"/v1/responses/{second}/input_items")).json()["data"]) == 3
    assert len(threads) == 3 and all(name.startswith("bodies") for name in threads)
