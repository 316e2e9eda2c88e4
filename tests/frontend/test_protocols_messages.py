"""What /v1/messages takes and refuses, and how it words an answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.anthropic import messages
from frontend.api.anthropic.messages_input import MessageCountRequest, MessageRequest, marks_cache
from frontend.api.decoding import convert
from frontend.errors import (
    BadRequest,
    DeadlineExceeded,
    Internal,
    MethodNotAllowed,
    NotFound,
    Overloaded,
    SluiceError,
    TooLarge,
    Unauthorized,
    Unprocessable,
)
from frontend.request import Delta, Finish, GenerationRequest, Usage
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse
from tests.frontend.test_protocols_fields import JSON
from tests.frontend.test_protocols_streams import FakeDeltas, last, lines, response_context

HELLO = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, **more: Any) -> GenerationRequest:
    return await parse(messages, body(**more), context(tokenizer, max_seq_len=100))


async def shown(tokenizer: Tokenizer, *said: Any, **more: Any) -> str:
    """The prompt as text."""
    request = await parsed(tokenizer, messages=list(said), **more)
    return tokenizer.decode(request.prompts[0], skip_special=False)


# fields


async def test_defaults_are_those_of_the_contract(tokenizer: Tokenizer) -> None:
    request = await parsed(tokenizer)
    assert tokenizer.decode(request.prompts[0], skip_special=False) == "<user>hi\n<assistant>"
    assert request.sampling == Sampling(max_tokens=8)
    assert (request.n, request.stream, request.timings, request.stops, request.continuous_usage) == (
        1,
        False,
        False,
        (),
        False,
    )


async def test_every_field_arrives(tokenizer: Tokenizer) -> None:
    request = await parsed(
        tokenizer, temperature=0, top_p=0.5, top_k=7, seed=3, min_tokens=3, ignore_eos=True, stop_token_ids=[4],
        stop_sequences=["x", "y"], stream=True, stream_options={"continuous_usage_stats": True}, timings=True,
        user="u", metadata={"user_id": "b"}, store=True, service_tier="auto", tools=[], tool_choice={"type": "none"},
        thinking={"type": "disabled"},
    )  # fmt: skip
    assert request.sampling == Sampling(
        8, temperature=0.0, top_p=0.5, top_k=7, seed=3, min_tokens=3, ignore_eos=True, stop_token_ids=(4,)
    )
    assert (request.stops, request.stream, request.timings, request.continuous_usage) == (("x", "y"), True, True, True)


async def test_system_and_blocks_become_the_templates_prompt(tokenizer: Tokenizer) -> None:
    block = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "citations": None}
    said = [
        {"role": "user", "content": [block, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    expected = "<system>be brief\n<user>ab\n<assistant>c\n<user>d\n<assistant>"
    assert await shown(tokenizer, *said, system="be brief") == expected
    assert await shown(tokenizer, *said, system=[{"type": "text", "text": "be brief"}]) == expected
    assert await shown(tokenizer, *said, system="") == expected.removeprefix("<system>be brief\n")


async def test_a_systems_later_words_are_a_users_where_the_template_has_no_place_for_them(tokenizer: Tokenizer) -> None:
    said = [*HELLO, {"role": "system", "content": [{"type": "text", "text": "be brief"}]}]
    assert await shown(tokenizer, *said) == "<user>hi\n<system>be brief\n<assistant>"
    strict = "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('no') }}"
    strict += "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    where = replace(context(tokenizer, max_seq_len=100), template=ChatTemplate({"default": strict}, {}))
    request = await parse(messages, body(messages=said, system="a"), where)
    assert tokenizer.decode(request.prompts[0], skip_special=False) == "<system>a<user>hi\nbe brief"


async def test_neighbours_of_one_role_are_one_turn(tokenizer: Tokenizer) -> None:
    assert await shown(tokenizer, *HELLO, *HELLO) == "<user>hi\nhi\n<assistant>"


async def test_the_answer_goes_on_where_a_last_assistant_message_stops(tokenizer: Tokenizer) -> None:
    assert await shown(tokenizer, *HELLO, {"role": "assistant", "content": "I "}) == "<user>hi\n<assistant>I "


async def test_counting_is_what_the_prompt_has(tokenizer: Tokenizer) -> None:
    fields = {"model": MODEL, "messages": HELLO, "system": "be brief"}
    count = await messages.count_tokens(convert(fields, MessageCountRequest), context(tokenizer))
    assert count == {"input_tokens": len((await parsed(tokenizer, **fields)).prompts[0])}
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
    ("messages", [*HELLO, {"role": "user", "content": [{"type": "image", "source": {}}]}], 422,
     "messages[1].content[0].type"),
    ("system", [{"type": "document"}], 422, "system[0].type"), ("max_tokens", 0, 422, "max_tokens"),
    ("max_tokens", 90, 422, "messages"), ("model", "claude", 422, "model"), ("tools", [{}], 400, "tools[0].name"),
    ("tool_choice", {"type": "any"}, 422, "tool_choice"), ("stop_sequences", ["x"] * 17, 422, "stop_sequences"),
    ("stop_sequences", [""], 422, "stop_sequences"),
    ("thinking", {"type": "enabled", "budget_tokens": 9}, 422, "thinking"),
    ("n", 1, 422, "n"), ("logprobs", True, 422, "logprobs"), ("min_p", 0.1, 422, "min_p"), ("stop", "x", 422, "stop"),
    ("temperature", -1, 422, "temperature"), ("top_k", 0, 422, "top_k"), ("container", "x", 422, "container"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "status", "param"), REFUSED)
async def test_refusals_name_the_field(tokenizer: Tokenizer, name: str, value: Any, status: int, param: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await parsed(tokenizer, **{name: value})
    assert (refused.value.status, refused.value.param) == (status, param)
    assert f"`{param}`" in refused.value.message


async def test_a_model_without_a_template_cannot_answer(tokenizer: Tokenizer) -> None:
    with pytest.raises(Unprocessable, match="no chat template"):
        await parse(messages, body(), context(tokenizer, template=ChatTemplate({}, {})))


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(
        st.sampled_from(sorted({*MessageRequest.__struct_fields__, *MessageRequest.ONLY})), JSON, max_size=4
    ),
    st.lists(JSON, max_size=2),
)
async def test_no_body_whatever_raises_anything_but_a_refusal(
    tokenizer: Tokenizer, more: dict[str, Any], content: list[Any]
) -> None:
    try:
        request = await parsed(tokenizer, **{"messages": [{"role": "user", "content": content}], **more})
    except (BadRequest, Unprocessable) as refused:
        assert refused.message
    else:
        assert all(request.prompts)


# answers

USAGE = '"usage":{"input_tokens":3,"cache_creation_input_tokens":0,"cache_read_input_tokens":%d,"output_tokens":%d}'


async def test_transcript(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [5], ['"é"\n'])], [Delta(0, [6], [""])], [last(ids=(7, 8), texts=("b", ""))])
    assert lines(messages.stream_writer(response_context(tokenizer, stream=True)), story) == [
        'event: message_start\ndata: {"type":"message_start","message":{"id":"msg_0","type":"message",'
        '"role":"assistant","model":"tiny","content":[],"stop_reason":null,"stop_sequence":null,' + USAGE % (0, 0)
        + "}}\n\n"
        'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
        '"content_block":{"type":"text","text":""}}\n\n'
        'event: ping\ndata: {"type":"ping"}\n\n'
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"\\"é\\"\\n"}}\n\n',
        'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
        '"delta":{"type":"text_delta","text":"b"}}\n\n'
        'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn","stop_sequence":null},'
        + USAGE % (0, 4) + ',"seed":7}\n\n'
        'event: message_stop\ndata: {"type":"message_stop"}\n\n',
    ]  # fmt: skip


@pytest.mark.parametrize("where", [
    {"cache_control": {"type": "ephemeral"}},
    {"system": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"ttl": "5m"}}]}]},
    {"tools": [{"name": "f", "input_schema": {}, "cache_control": {"type": "ephemeral"}}]},
])  # fmt: skip
async def test_who_asks_for_a_cache_hears_of_it_apart(tokenizer: Tokenizer, where: dict[str, Any]) -> None:
    asked = response_context(tokenizer, format_data={"caches": marks_cache(convert(body(**where), MessageRequest))})
    told = json.loads(await messages.complete(asked, FakeDeltas([last()])))["usage"]
    assert (told["input_tokens"], told["cache_read_input_tokens"]) == (1, 2)
    assert not marks_cache(convert(body(system="x", tools=None, cache_control=None), MessageRequest))
    assert (await parsed(tokenizer, cache_control={"type": "ephemeral"})).format_data["caches"]


async def test_running_usage_and_timings(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, stream=True, continuous_usage=True, timings=True)
    story = FakeDeltas([Delta(0, [5], ["a"], usage=Usage(3, 1))], [Delta(0, [6], [""], usage=Usage(3, 2))], [last()])
    events = parse_events("".join(lines(messages.stream_writer(asked), story)))
    running = [event["usage"]["output_tokens"] for event in events if event["type"] == "content_block_delta"]
    assert running == [1, 2]
    assert events[-2]["timings"]["prefill_ms"] == 2.0


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "sequence"),
    [
        (Finish.EOS, None, "end_turn", None),
        (Finish.STOP, "END", "stop_sequence", "END"),
        (Finish.STOP, 17, "end_turn", None),  # a stop token id, which Anthropic does not know
        (Finish.LENGTH, None, "max_tokens", None),
    ],
)
async def test_whole_answers_equal_folded_streams(
    tokenizer: Tokenizer, finish: Finish, stop: str | int | None, reason: str, sequence: str | None
) -> None:
    story = [[Delta(0, [5], ["a"])], [Delta(0, [6, 7], ["", "é"])], [last(ids=(8,), finish=finish, stop=stop)]]
    asked = response_context(tokenizer)
    whole = json.loads(await messages.complete(asked, FakeDeltas(*story)))
    assert fold(parse_events("".join(lines(messages.stream_writer(asked), FakeDeltas(*story))))) == whole
    assert whole["content"] == [{"type": "text", "text": "aé"}]
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def parse_events(text: str) -> list[Any]:
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def fold(events: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream."""
    message: dict[str, Any] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": start}:
                message = start
            case {"type": "content_block_start", "content_block": block}:
                message["content"] = [*message["content"], block]
            case {"type": "content_block_delta", "index": index, "delta": {"text": text}}:
                message["content"][index]["text"] += text
            case {"type": "message_delta", "delta": delta, **rest}:
                message |= delta | {key: rest[key] for key in ("usage", "seed")}
    return message


def test_stream_writer_before_the_last_delta_writes_no_end(tokenizer: Tokenizer) -> None:
    written = messages.stream_writer(response_context(tokenizer)).write([Delta(0, [5], ["a"])])
    assert written and b"_stop" not in written.replace(b'"stop_', b"")


ERRORS = [
    (BadRequest("x"), "invalid_request_error"), (Unauthorized("x"), "authentication_error"),
    (NotFound("x"), "not_found_error"), (MethodNotAllowed("x"), "not_found_error"),
    (TooLarge("x"), "request_too_large"), (Unprocessable("x"), "invalid_request_error"),
    (Unprocessable("x", code="model_not_found"), "not_found_error"), (Overloaded("x"), "overloaded_error"),
    (Internal("x"), "api_error"), (SluiceError("x"), "api_error"), (DeadlineExceeded("x"), "timeout_error"),
]  # fmt: skip


@pytest.mark.parametrize(("exc", "kind"), ERRORS)
def test_errors_in_anthropics_words(tokenizer: Tokenizer, exc: SluiceError, kind: str) -> None:
    said = f'{{"type":"error","error":{{"type":"{kind}","message":"x"}},"request_id":"r"}}'.encode()
    assert messages.error(exc, "r") == said
    assert messages.stream_error(exc, "r", response_context(tokenizer)) == b"event: error\ndata: " + said + b"\n\n"
