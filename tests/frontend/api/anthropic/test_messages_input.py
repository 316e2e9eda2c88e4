"""Requests that /v1/messages accepts and refuses, and the prompt that messages become."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages import Asked
from frontend.api.anthropic.messages_request import (
    MessageCountRequest,
    MessageRequest,
    TextBlock,
    UserMessage,
    cached_for,
)
from frontend.errors import (
    BadRequest,
    SluiceError,
    Unprocessable,
)
from frontend.request import GenerationRequest
from frontend.schema.decoding import convert
from frontend.text.chat_template import PARTED, ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import MODEL, context
from tests.frontend.api.harness import (
    JSON,
    FakeDeltas,
    last,
    parse,
    response_context,
)
from tests.growth import growth

HELLO = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, **more: Any) -> GenerationRequest:
    return await parse(messages, body(**more), context(tokenizer, max_seq_len=200))


async def shown(tokenizer: Tokenizer, *said: Any, **more: Any) -> str:
    """Returns the prompt as text."""
    request = await parsed(tokenizer, messages=list(said), **more)
    return tokenizer.decode(request.prompts[0], skip_special=False)


async def test_message_defaults(tokenizer: Tokenizer) -> None:
    request = await parsed(tokenizer)
    assert tokenizer.decode(request.prompts[0], skip_special=False) == "<user>hi\n<assistant>"
    assert request.sampling == Sampling(max_tokens=8)
    assert (request.n, request.stream, request.shown.timings, request.stops, request.shown.continuous_usage) == (
        1,
        False,
        False,
        (),
        False,
    )


async def test_message_every_field_arrives(tokenizer: Tokenizer) -> None:
    request = await parsed(
        tokenizer, temperature=0, top_p=0.5, top_k=7, seed=3, min_tokens=3, ignore_eos=True, stop_token_ids=[4],
        stop_sequences=["x", "y"], stream=True, stream_options={"continuous_usage_stats": True}, timings=True,
        user="u", metadata={"user_id": "b"}, store=True, service_tier="auto", tools=[], tool_choice={"type": "none"},
        thinking={"type": "disabled"},
    )  # fmt: skip
    assert request.sampling == Sampling(
        8, temperature=0.0, top_p=0.5, top_k=7, seed=3, min_tokens=3, ignore_eos=True, stop_token_ids=(4,)
    )
    assert (request.stops, request.stream) == (("x", "y"), True)
    assert (request.shown.timings, request.shown.continuous_usage) == (True, True)


async def test_system_and_blocks_become_the_prompt(tokenizer: Tokenizer) -> None:
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    said = [
        {"role": "user", "content": [block, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    expected = "<system>be brief\n<user>a\nb\n<assistant>c\n<user>d\n<assistant>"
    assert await shown(tokenizer, *said, system="be brief") == expected
    assert await shown(tokenizer, *said, system=[{"type": "text", "text": "be brief"}]) == expected
    assert await shown(tokenizer, *said, system="") == expected.removeprefix("<system>be brief\n")


async def test_later_system_message_becomes_a_users_if_the_template_refuses_it(tokenizer: Tokenizer) -> None:
    said = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    assert await shown(tokenizer, *said) == "<user>hi\n<system>be brief\n<assistant>"
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    strict += "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    where = replace(context(tokenizer, max_seq_len=100), template=ChatTemplate({"default": strict}, {}))
    request = await parse(messages, body(messages=said, system="a"), where)
    assert tokenizer.decode(request.prompts[0], skip_special=False) == "<system>a<user>hi\nbe brief"


DOCUMENTS: dict[str, dict[str, Any]] = {
    "text": {"type": "text", "media_type": "text/plain", "data": "AAA"},
    "base64": {"type": "base64", "media_type": "text/plain", "data": "QUFB"},
    "content": {"type": "content", "content": "AAA"},
    "content blocks": {"type": "content", "content": [{"type": "text", "text": "AAA"}]},
}


@pytest.mark.parametrize("source", DOCUMENTS.values(), ids=DOCUMENTS)
async def test_document_is_text(tokenizer: Tokenizer, source: dict[str, Any]) -> None:
    document = {"type": "document", "source": source, "title": "T", "context": "C", "cache_control": None}
    said = {"role": "user", "content": [document, {"type": "text", "text": "b"}]}
    assert await shown(tokenizer, said) == "<user>T\nC\nAAA\nb\n<assistant>"
    bare = {"type": "document", "source": source, "citations": {"enabled": False}}
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}, bare]}
    assert "a\nAAA\n<assistant>" in await shown(tokenizer, *HELLO, called, {"role": "user", "content": [result]})


async def test_claude_codes_billing_header_is_dropped(tokenizer: Tokenizer) -> None:
    def block(text: str) -> dict[str, Any]:
        return {"type": "text", "text": text}

    header = block("x-anthropic-billing-header: cc_version=2.1.197.0d9; cc_entrypoint=cli; cch=1a2b3;")
    expected = "<system>be brief\n<user>hi\n<assistant>"
    assert await shown(tokenizer, *HELLO, system=[header, block("be brief")]) == expected
    assert await shown(tokenizer, *HELLO, system=[header]) == expected.removeprefix("<system>be brief\n")
    counted = {"model": MODEL, "messages": HELLO, "system": [header, block("be brief")]}
    count = await messages.count_tokens(convert(counted, MessageCountRequest), context(tokenizer, max_seq_len=200))
    assert count.input_tokens == len((await parsed(tokenizer, system="be brief")).prompts[0])
    for kept in ([block("be brief"), header], [block(header["text"] + "\nbe brief")], [block("see " + header["text"])]):
        assert "x-anthropic-billing-header" in await shown(tokenizer, *HELLO, system=kept)


async def test_neighbours_of_one_role_are_one_message(tokenizer: Tokenizer) -> None:
    assert await shown(tokenizer, *HELLO, *HELLO) == "<user>hi\nhi\n<assistant>"


async def test_last_assistant_message_is_continued(tokenizer: Tokenizer) -> None:
    assert await shown(tokenizer, *HELLO, {"role": "assistant", "content": "I "}) == "<user>hi\n<assistant>I "


async def test_count_tokens_is_the_length_of_the_prompt(tokenizer: Tokenizer) -> None:
    fields = {"model": MODEL, "messages": HELLO, "system": "be brief"}
    count = await messages.count_tokens(convert(fields, MessageCountRequest), context(tokenizer))
    assert count.input_tokens == len((await parsed(tokenizer, **fields)).prompts[0])
    with pytest.raises(Unprocessable) as refused:
        await messages.count_tokens(convert(fields | {"max_tokens": 5}, MessageCountRequest), context(tokenizer))
    assert refused.value.param == "max_tokens"


REFUSED: list[tuple[str, Any, int, str]] = [
    ("max_tokens", None, 400, "max_tokens"), ("messages", None, 400, "messages"), ("messages", [], 400, "messages"),
    ("messages", "hi", 400, "messages"), ("messages", [{"role": "user"}], 400, "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], 400, "messages[0].content"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], 400, "messages[0].content[0].text"),
    ("system", 5, 400, "system"), ("stop_sequences", "x", 400, "stop_sequences"), ("stream", 1, 400, "stream"),
    ("messages", [{"role": "system", "content": "x"}], 422, "messages[0].role"),
    ("messages", [{"role": "user", "content": "x", "name": "y"}], 422, "messages[0].name"),
    ("messages", [*HELLO, {"role": "user", "content": [{"type": "search_result"}]}], 422,
     "messages[1].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": {}}]}], 400,
     "messages[0].content[0].source.type"),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": {
        "type": "base64", "media_type": "application/pdf", "data": ""}}]}], 422,
     "messages[0].content[0].source.media_type"),
    ("messages", [{"role": "user", "content": [{"type": "document", "source": {
        "type": "base64", "media_type": "text/plain", "data": "/w=="}}]}], 422, "messages[0].content[0].source.data"),
    ("messages", [{"role": "user", "content": [{"type": "document", "citations": {"enabled": True}, "source": {
        "type": "text", "data": "a"}}]}], 422, "messages[0].content[0].citations"),
    ("system", [{"type": "document"}], 422, "system[0].type"), ("max_tokens", 0, 422, "max_tokens"),
    ("model", "claude", 422, "model"), ("tools", [{}], 400, "tools[0].name"),
    ("tool_choice", {"type": "any"}, 422, "tool_choice"), ("stop_sequences", ["x" * 16_385], 422, "stop_sequences"),
    ("stop_sequences", ["x", ""], 422, "stop_sequences[1]"),
    ("n", 1, 422, "n"), ("logprobs", True, 422, "logprobs"), ("min_p", 0.1, 422, "min_p"), ("stop", "x", 422, "stop"),
    ("kv_transfer_params", {"do_remote_decode": True}, 422, "kv_transfer_params"),
    ("watermarking", True, 422, "watermarking"),
    ("temperature", -1, 422, "temperature"), ("top_k", -2, 422, "top_k"), ("container", "x", 422, "container"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "status", "param"), REFUSED)
async def test_message_refusal_names_the_field(
    tokenizer: Tokenizer, name: str, value: Any, status: int, param: str
) -> None:
    with pytest.raises(SluiceError) as refused:
        await parsed(tokenizer, **{name: value})
    assert (refused.value.status, refused.value.param) == (status, param)
    assert f"`{param}`" in refused.value.message


async def test_message_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unprocessable, match="no chat template"):
        await parse(messages, body(), context(tokenizer, template=ChatTemplate({}, {})))


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*MessageRequest.__struct_fields__, *MessageRequest.ONLY})), JSON, max_size=4
    ),
    st.lists(JSON, max_size=2),
)
async def test_any_body_is_parsed_or_refused(tokenizer: Tokenizer, more: dict[str, Any], content: list[Any]) -> None:
    try:
        request = await parsed(tokenizer, **{"messages": [{"role": "user", "content": content}], **more})
    except (BadRequest, Unprocessable) as refused:
        assert refused.message
    else:
        assert all(request.prompts)


@pytest.mark.parametrize("where", [
    {"cache_control": {"type": "ephemeral"}},
    {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"ttl": "5m"}}]}]},
    {"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]},
])  # fmt: skip
async def test_cached_tokens_are_reported_if_cache_control_is_set(tokenizer: Tokenizer, where: dict[str, Any]) -> None:
    kept = cached_for(convert(body(**where), MessageRequest))
    asked = response_context(tokenizer, format_data=Asked(caches=kept == 300))
    told = json.loads(await messages.complete(asked, FakeDeltas([last()])))["usage"]
    assert (told["input_tokens"], told["cache_read_input_tokens"]) == (1, 2)
    assert not cached_for(convert(body(system="x", tools=None, cache_control=None), MessageRequest))
    assert (await parsed(tokenizer, cache_control={"type": "ephemeral"})).format_data.caches


@pytest.mark.parametrize(("marks", "seconds"), [
    ([], 0), (["5m"], 300), ([None], 300), (["1h"], 3600), (["5m", "1h", None], 3600), ([7, ["1h"], "2d"], 300),
])  # fmt: skip
async def test_the_longest_ttl_says_how_long_the_prompt_is_kept(
    tokenizer: Tokenizer, marks: list[Any], seconds: int
) -> None:
    parts = [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": ttl}} for ttl in marks]
    content = [*parts, {"type": "text", "text": "b"}]
    request = await parsed(tokenizer, messages=[{"role": "user", "content": content}])
    assert request.admission.keep_s == seconds


def test_text_blocks_of_one_message_are_joined_in_linear_time() -> None:
    def prepared(count: int) -> Callable[[], Any]:
        return UserMessage(content=[TextBlock(text="x" * 800) for _ in range(count)]).chat_messages

    assert growth(prepared, 1250) < 24
    (joined,) = prepared(10_000)()
    assert (joined["content"] == PARTED.join(["x" * 800] * 10_000)) is True
