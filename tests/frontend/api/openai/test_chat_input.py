"""Requests that /v1/chat/completions accepts and refuses, and the prompt that messages become."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.anthropic import messages
from frontend.api.openai import chat, completions
from frontend.api.openai.chat_request import ChatRequest, TokenizeRequest
from frontend.chat.history import left_open
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.output_parser.model_format import ModelFormat
from frontend.request import GenerationRequest
from frontend.routes.tokenize import tokenize
from frontend.schema.decoding import convert
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import MODEL, context
from tests.frontend.api.harness import JSON, parse

HELLO = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, **more: Any) -> GenerationRequest:
    return await parse(chat, body(**more), context(tokenizer, max_seq_len=100))


async def shown(tokenizer: Tokenizer, *messages: Any, **more: Any) -> str:
    """Returns the prompt as text."""
    request = await parsed(tokenizer, messages=list(messages), **more)
    return tokenizer.decode(request.prompts[0], skip_special=False)


async def refusal(tokenizer: Tokenizer, **more: Any) -> SluiceError:
    with pytest.raises(SluiceError) as refused:
        await parsed(tokenizer, **more)
    return refused.value


async def test_chat_defaults(tokenizer: Tokenizer) -> None:
    request = await parse(chat, {"model": MODEL, "messages": HELLO}, context(tokenizer))
    (ids,) = request.prompts
    assert tokenizer.decode(ids, skip_special=False) == "<user>hi\n<assistant>"
    assert request.sampling == Sampling(max_tokens=64 - len(ids)), "to the context's end"
    assert await parse(chat, {"messages": HELLO}, context(tokenizer)) == request, "there is one model"
    assert (request.n, request.stream, request.stops) == (1, False, ())
    assert (request.features.echo, request.shown.timings) == ((), False)


async def test_chat_every_field_arrives(tokenizer: Tokenizer) -> None:
    request = await parsed(
        tokenizer, max_tokens=None, max_completion_tokens=7, temperature=0, top_p=0.5, top_k=7, min_p=0.1,
        repetition_penalty=1.5, presence_penalty=-1, frequency_penalty=2, logit_bias={"5": -100}, seed=3, stop=["x"],
        stop_token_ids=[4], ignore_eos=True, min_tokens=3, n=2, logprobs=True, top_logprobs=20, stream=True,
        timings=True, stream_options={"include_usage": True, "continuous_usage_stats": True},
        user="u", metadata={"a": "b"}, store=True, service_tier="auto", response_format={"type": "text"}, tools=[],
        tool_choice="none", functions=[], function_call="none", parallel_tool_calls=True, modalities=["text"],
    )  # fmt: skip
    assert request.sampling == Sampling(
        7, 0.0, 0.5, 7, 0.1, 1.5, -1.0, 2.0, 3, 3, (4,), True, ((5, -100.0),), logprobs=20, prompt_logprobs=False
    )
    assert (request.n, request.stops, request.stream, request.shown.timings) == (2, ("x",), True, True)
    assert request.shown.usage and request.shown.continuous_usage


@pytest.mark.parametrize(
    ("asked", "running"), [({}, True), ({"include_usage": None}, True), ({"include_usage": False}, False)]
)
async def test_usage_that_is_not_wanted_is_in_no_chunk(tokenizer: Tokenizer, asked: Any, running: bool) -> None:
    options = {"continuous_usage_stats": True, **asked}
    for kind, body in ((chat, {"messages": HELLO}), (completions, {"prompt": "hi"}),
                       (messages, {"messages": HELLO})):  # fmt: skip
        request = await parse(
            kind, body | {"max_tokens": 8, "stream": True, "stream_options": options}, context(tokenizer)
        )
        assert (request.shown.usage, request.shown.continuous_usage) == (False, running)


@pytest.mark.parametrize("limit", [-1, -2])
@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_negative_limit_is_none(tokenizer: Tokenizer, field: str, limit: int) -> None:
    request = await parsed(tokenizer, **{"max_tokens": None, field: limit})
    assert request == await parsed(tokenizer, max_tokens=None), "to the context's end"
    assert request.sampling.max_tokens > 64


async def test_logprobs_without_top_logprobs(tokenizer: Tokenizer) -> None:
    assert (await parsed(tokenizer, logprobs=True)).sampling.logprobs == 0
    assert (await parsed(tokenizer, logprobs=False, top_logprobs=0)).sampling.logprobs is None


async def test_messages_of_every_role_become_the_prompt(tokenizer: Tokenizer) -> None:
    text = await shown(
        tokenizer,
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "jo"},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    )
    assert text == "<system>be brief\n<user>a\nb\n<assistant>c\n<tool>d\n<assistant>"


PARTS_OF_OTHERS: dict[str, Any] = {
    "without type": [{"text": "a"}, {"type": None, "text": "b"}],
    "plain strings beside parts": ["a", {"type": "text", "text": "b"}],
    "plain strings": ["a", "b"],
    "as in the Responses API": [{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}],
    "a refusal": [{"type": "refusal", "refusal": "a"}, {"refusal": "b"}],
}


@pytest.mark.parametrize("content", PARTS_OF_OTHERS.values(), ids=PARTS_OF_OTHERS.keys())
async def test_parts_as_other_clients_send_them_are_texts(tokenizer: Tokenizer, content: Any) -> None:
    said = [*HELLO, {"role": "assistant", "content": content}, *HELLO]
    assert await shown(tokenizer, *said) == "<user>hi\n<assistant>a\nb\n<user>hi\n<assistant>"


THOUGHTS_OF_OTHERS: dict[str, Any] = {
    "vLLM": {"type": "thinking", "thinking": "so", "closed": True},
    "Mistral": {"type": "thinking", "thinking": [{"type": "text", "text": "so"}]},
    "LangChain": {"type": "reasoning", "reasoning": "so"},
    "Vercel's AI SDK": {"type": "reasoning", "text": "so"},
}


@pytest.mark.parametrize("part", THOUGHTS_OF_OTHERS.values(), ids=THOUGHTS_OF_OTHERS.keys())
async def test_thoughts_among_the_parts_are_the_messages_reasoning(tokenizer: Tokenizer, part: Any) -> None:
    template = ChatTemplate({"default": "{{ messages[1].reasoning_content }}|{{ messages[1].content }}"}, {})
    said = [*HELLO, {"role": "assistant", "content": [part, {"type": "text", "text": "b"}]}, *HELLO]
    request = await parse(chat, body(messages=said), context(tokenizer, template=template))
    assert tokenizer.decode(request.prompts[0]) == "so|b"


@pytest.mark.parametrize("content", [None, []], ids=["null", "empty"])
async def test_message_without_content_is_what_else_the_assistant_said(tokenizer: Tokenizer, content: Any) -> None:
    said = [*HELLO, {"role": "assistant", "content": content, "refusal": "no"}, *HELLO]
    assert await shown(tokenizer, *said) == "<user>hi\n<assistant>no\n<user>hi\n<assistant>"
    thought = [*HELLO, {"role": "assistant", "content": content, "reasoning": "so"}, *HELLO]
    assert await shown(tokenizer, *thought) == "<user>hi\n<assistant>\n<user>hi\n<assistant>"


async def test_prompt_end_by_add_generation_prompt_and_continue_final_message(tokenizer: Tokenizer) -> None:
    said = [*HELLO, {"role": "assistant", "content": "I "}]
    assert await shown(tokenizer, *said) == "<user>hi\n<assistant>I "
    assert await shown(tokenizer, *said, add_generation_prompt=True) == "<user>hi\n<assistant>I \n<assistant>"
    assert await shown(tokenizer, *said, add_generation_prompt=False) == "<user>hi\n<assistant>I \n"
    assert await shown(tokenizer, *said, continue_final_message=True) == "<user>hi\n<assistant>I "


async def test_two_assistant_messages_at_the_end_are_answered_only_if_a_turn_is_asked_for(tokenizer: Tokenizer) -> None:
    twice = [*HELLO, {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}]
    refused = await refusal(tokenizer, messages=twice)
    assert (refused.status, refused.param) == (422, "messages") and "add_generation_prompt" in refused.message
    assert (await shown(tokenizer, *twice, add_generation_prompt=True)).endswith("\n<assistant>")


async def test_calls_at_the_end_are_not_continued(tokenizer: Tokenizer) -> None:
    assert not left_open([{"role": "assistant", "content": "a", "tool_calls": [{}]}])
    assert not left_open([{"role": "assistant", "content": ""}]) and not left_open([])


async def test_chat_template_kwargs_reach_the_template(tokenizer: Tokenizer) -> None:
    thinking = ChatTemplate({"default": "{{ enable_thinking }} {{ messages[0].content }}"}, {})
    request = await parse(
        chat, body(chat_template_kwargs={"enable_thinking": False}), context(tokenizer, template=thinking)
    )
    assert tokenizer.decode(request.prompts[0]) == "False hi"


async def test_verbosity_is_a_variable_of_the_template(tokenizer: Tokenizer) -> None:
    telling = ChatTemplate({"default": "{{ verbosity }} {{ messages[0].content }}"}, {})
    for fields, text in (
        ({"verbosity": "low"}, "low hi"),
        ({"verbosity": "low", "chat_template_kwargs": {"verbosity": "high"}}, "high hi"),
        ({}, " hi"),
    ):
        request = await parse(chat, body(**fields), context(tokenizer, template=telling))
        assert tokenizer.decode(request.prompts[0]) == text
    assert await parsed(tokenizer, verbosity="high") == await parsed(tokenizer), "no effect without it"


async def test_effort_none_turns_thinking_off_by_the_variable_of_the_template(tokenizer: Tokenizer) -> None:
    source = "{% if not thinking is defined %}-{% else %}{{ thinking }}{% endif %} {{ messages[0].content }}"
    told = replace(
        context(tokenizer, template=ChatTemplate({"default": source}, {})), style=ModelFormat.of({"default": source})
    )
    for fields, text in (({}, "- hi"), ({"reasoning_effort": "none"}, "False hi")):
        request = await parse(chat, body(**fields), told)
        assert tokenizer.decode(request.prompts[0]) == text


async def test_tokenize_of_messages_gives_the_chat_prompt(tokenizer: Tokenizer) -> None:
    fields = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HELLO]}
    found = await tokenize(convert(fields, TokenizeRequest), context(tokenizer))
    assert found.tokens == (await parsed(tokenizer, **fields)).prompts[0]
    with pytest.raises(Unprocessable):
        await tokenize(convert(fields | {"add_special_tokens": True}, TokenizeRequest), context(tokenizer))


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("messages", "hi", "messages"), ("messages", [], "messages"), ("messages", None, "messages"),
    ("messages", ["hi"], "messages[0]"), ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [*HELLO, {"role": "assistant", "content": None}], "messages[1].content"),
    ("messages", [*HELLO, {"role": "assistant", "content": []}], "messages[1].content"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": 1, "content": ""}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": [5]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"words": "x"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"text": "x", "image_url": "data:"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"text": 5}]}], "messages[0].content[0].text"),
    ("messages", [{"role": "user", "content": None, "refusal": "x"}], "messages[0].content"),
    ("messages", [*HELLO, {"role": "assistant", "content": [{"type": "reasoning"}]}],
     "messages[1].content[0].reasoning"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("model", 5, "model"), ("max_tokens", "8", "max_tokens"), ("logprobs", 5, "logprobs"),
    ("top_logprobs", True, "top_logprobs"), ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"), ("n", 1.5, "n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "param"), WRONG_TYPES)
async def test_chat_field_of_the_wrong_type_is_400_and_named(
    tokenizer: Tokenizer, name: str, value: Any, param: str
) -> None:
    refused = await refusal(tokenizer, **{name: value})
    assert (refused.status, refused.param) == (400, param) and f"`{param}`" in refused.message


AUDIO = {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}


NOT_ACCEPTABLE: list[tuple[str, Any, str]] = [
    ("messages", [{"role": "", "content": "x"}], "messages[0].role"),
    ("messages", [*HELLO, {"role": "user", "content": [{"type": "text", "text": ""}, AUDIO]}],
     "messages[1].content[1].type"),
    ("messages", [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}], "messages[0].content"),
    ("messages", [{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
     "messages"),
    ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"),
    ("functions", [{}], "functions"), ("response_format", {"type": "xml"}, "response_format.type"),
    ("modalities", ["text", "audio"], "modalities"),
    ("max_tokens", 0, "max_tokens"), ("max_tokens", -3, "max_tokens"),
    ("max_completion_tokens", 0, "max_completion_tokens"),
    ("max_completion_tokens", 9, "max_completion_tokens"),
    ("top_logprobs", 3, "top_logprobs"), ("top_logprobs", 21, "top_logprobs"), ("min_tokens", 9, "min_tokens"),
    ("top_k", -2, "top_k"), ("continue_final_message", True, "continue_final_message"),
    ("prompt", "x", "prompt"), ("echo", True, "echo"), ("suffix", "x", "suffix"), ("best_of", 2, "best_of"),
    ("stream_options", {"foo": True}, "stream_options.foo"), ("stop", [""], "stop[0]"), ("n", 0, "n"),
    ("model", "gpt-4", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "param"), NOT_ACCEPTABLE)
async def test_chat_field_out_of_range_or_unknown_is_422_and_named(
    tokenizer: Tokenizer, name: str, value: Any, param: str
) -> None:
    more = {"add_generation_prompt": True} if name == "continue_final_message" else {}
    refused = await refusal(tokenizer, **{name: value}, **more)
    assert (refused.status, refused.param) == (422, param) and f"`{param}`" in refused.message


async def test_chat_refusal_codes(tokenizer: Tokenizer) -> None:
    assert (await refusal(tokenizer, model="gpt-4")).code == "model_not_found"
    long = [{"role": "user", "content": "x" * 120}]
    assert (await refusal(tokenizer, messages=long, max_tokens=None)).code == "context_length_exceeded"
    assert "not supported" in (await refusal(tokenizer, functions=[{}])).message


async def test_chat_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    where = context(tokenizer, template=ChatTemplate({}, {}))
    for call in (parse(chat, body(), where), tokenize(convert({"messages": HELLO}, TokenizeRequest), where)):
        with pytest.raises(Unprocessable, match="no chat template"):
            await call


async def test_template_error_is_the_refusals_message(tokenizer: Tokenizer) -> None:
    strict = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        await parse(chat, body(), context(tokenizer, template=strict))


async def test_continued_message_that_the_template_hides_is_refused(tokenizer: Tokenizer) -> None:
    hiding = ChatTemplate({"default": "nothing"}, {})
    with pytest.raises(Unprocessable, match="continued"):
        await parse(chat, body(continue_final_message=True), context(tokenizer, template=hiding))


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.sampled_from(sorted({*ChatRequest.__struct_fields__, *ChatRequest.ONLY})), JSON, max_size=4),
    st.none() | st.lists(JSON, max_size=2),
)
async def test_any_body_is_parsed_or_refused(tokenizer: Tokenizer, more: dict[str, Any], content: Any) -> None:
    spoken = {} if content is None else {"messages": [{"role": "user", "content": content}]}
    try:
        request = await parsed(tokenizer, **(more | spoken))
    except (BadRequest, Unprocessable) as refused:
        assert refused.message
    else:
        assert all(request.prompts)
