"""What /v1/chat/completions takes and refuses, and how it words an answer."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.api.decoding import convert
from frontend.api.openai import chat
from frontend.api.openai.chat_input import ChatRequest, TokenizeRequest
from frontend.api.tokenize import tokenize
from frontend.errors import BadRequest, SluiceError, Unprocessable
from frontend.request import Delta, Finish, GenerationRequest, TokenLogprob, Usage
from frontend.text.chat_template import ChatTemplate
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse
from tests.frontend.test_protocols_fields import JSON
from tests.frontend.test_protocols_streams import FakeDeltas, last, lines, parse_sse, response_context

HEAD = '{"id":"chatcmpl-0","object":"chat.completion.chunk","created":1,"model":"tiny","system_fingerprint":null'
HELLO = [{"role": "user", "content": "hi"}]


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": HELLO, "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, **more: Any) -> GenerationRequest:
    return await parse(chat, body(**more), context(tokenizer, max_seq_len=100))


async def shown(tokenizer: Tokenizer, *messages: Any, **more: Any) -> str:
    """The prompt as text."""
    request = await parsed(tokenizer, messages=list(messages), **more)
    return tokenizer.decode(request.prompts[0], skip_special=False)


async def refusal(tokenizer: Tokenizer, **more: Any) -> SluiceError:
    with pytest.raises(SluiceError) as refused:
        await parsed(tokenizer, **more)
    return refused.value


# fields


async def test_defaults_are_those_of_the_contract(tokenizer: Tokenizer) -> None:
    request = await parse(chat, {"model": MODEL, "messages": HELLO}, context(tokenizer))
    (ids,) = request.prompts
    assert tokenizer.decode(ids, skip_special=False) == "<user>hi\n<assistant>"
    assert request.sampling == Sampling(max_tokens=64 - len(ids)), "to the context's end"
    assert await parse(chat, {"messages": HELLO}, context(tokenizer)) == request, "there is one model"
    assert (request.n, request.stream, request.echo, request.timings, request.stops) == (1, False, (), False, ())


async def test_every_field_arrives(tokenizer: Tokenizer) -> None:
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
    assert (request.n, request.stops, request.stream, request.timings) == (2, ("x",), True, True)
    assert request.include_usage and request.continuous_usage


async def test_logprobs_without_rivals(tokenizer: Tokenizer) -> None:
    assert (await parsed(tokenizer, logprobs=True)).sampling.logprobs == 0
    assert (await parsed(tokenizer, logprobs=False, top_logprobs=0)).sampling.logprobs is None


async def test_roles_and_parts_become_the_templates_prompt(tokenizer: Tokenizer) -> None:
    text = await shown(
        tokenizer,
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "jo"},
        {"role": "assistant", "content": "c", "tool_calls": None, "refusal": None, "annotations": [], "audio": None},
        {"role": "tool", "content": "d", "tool_call_id": "1"},
    )
    assert text == "<system>be brief\n<user>ab\n<assistant>c\n<tool>d\n<assistant>"


async def test_the_prompts_end_is_the_clients_choice(tokenizer: Tokenizer) -> None:
    said = [*HELLO, {"role": "assistant", "content": "I "}]
    assert await shown(tokenizer, *said) == "<user>hi\n<assistant>I \n<assistant>"
    assert await shown(tokenizer, *said, add_generation_prompt=False) == "<user>hi\n<assistant>I \n"
    assert await shown(tokenizer, *said, continue_final_message=True) == "<user>hi\n<assistant>I "


async def test_the_template_gets_its_arguments(tokenizer: Tokenizer) -> None:
    thinking = ChatTemplate({"default": "{{ enable_thinking }} {{ messages[0].content }}"}, {})
    request = await parse(
        chat, body(chat_template_kwargs={"enable_thinking": False}), context(tokenizer, template=thinking)
    )
    assert tokenizer.decode(request.prompts[0]) == "False hi"


async def test_tokenize_gives_what_chat_sends(tokenizer: Tokenizer) -> None:
    fields = {"messages": [{"role": "developer", "content": [{"type": "text", "text": "x"}]}, *HELLO]}
    found = await tokenize(convert(fields, TokenizeRequest), context(tokenizer))
    assert found["tokens"] == (await parsed(tokenizer, **fields)).prompts[0]
    with pytest.raises(Unprocessable):
        await tokenize(convert(fields | {"add_special_tokens": True}, TokenizeRequest), context(tokenizer))


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("messages", "hi", "messages"), ("messages", [], "messages"), ("messages", None, "messages"),
    ("messages", ["hi"], "messages[0]"), ("messages", [{"role": "user"}], "messages[0].content"),
    ("messages", [*HELLO, {"role": "assistant", "content": None}], "messages[1].content"),
    ("messages", [{"content": "x"}], "messages[0].role"),
    ("messages", [{"role": 1, "content": ""}], "messages[0].role"),
    ("messages", [{"role": "user", "content": 5}], "messages[0].content"),
    ("messages", [{"role": "user", "content": []}], "messages[0].content"),
    ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
    ("messages", [{"role": "user", "content": [{"text": "x"}]}], "messages[0].content[0].type"),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ("model", 5, "model"), ("max_tokens", "8", "max_tokens"), ("logprobs", 5, "logprobs"),
    ("top_logprobs", True, "top_logprobs"), ("chat_template_kwargs", [], "chat_template_kwargs"),
    ("parallel_tool_calls", "no", "parallel_tool_calls"), ("n", 1.5, "n"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "param"), WRONG_TYPES)
async def test_wrong_types_and_empty_prompts_are_400(tokenizer: Tokenizer, name: str, value: Any, param: str) -> None:
    refused = await refusal(tokenizer, **{name: value})
    assert (refused.status, refused.param) == (400, param) and f"`{param}`" in refused.message


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
NOT_ACCEPTABLE: list[tuple[str, Any, str]] = [
    ("messages", [{"role": "function", "content": "x"}], "messages[0].role"),
    ("messages", [*HELLO, {"role": "user", "content": [{"type": "text", "text": ""}, IMAGE]}],
     "messages[1].content[1].type"),
    ("messages", [{"role": "user", "content": "x", "weight": 1}], "messages[0].weight"),
    ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
     "messages"),
    ("tools", [{"type": "function", "function": {"name": "f"}}], "tools"), ("tool_choice", "required", "tool_choice"),
    ("functions", [{}], "functions"), ("response_format", {"type": "xml"}, "response_format.type"),
    ("reasoning_effort", "low", "reasoning_effort"), ("modalities", ["text", "audio"], "modalities"),
    ("max_tokens", 0, "max_tokens"), ("max_completion_tokens", 9, "max_completion_tokens"),
    ("top_logprobs", 3, "top_logprobs"), ("top_logprobs", 21, "top_logprobs"), ("min_tokens", 9, "min_tokens"),
    ("max_tokens", 90, "messages"), ("continue_final_message", True, "continue_final_message"),
    ("prompt", "x", "prompt"), ("echo", True, "echo"), ("suffix", "x", "suffix"), ("best_of", 1, "best_of"),
    ("stream_options", {"foo": True}, "stream_options.foo"), ("stop", [""], "stop"), ("n", 0, "n"),
    ("model", "gpt-4", "model"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "param"), NOT_ACCEPTABLE)
async def test_what_is_not_acceptable_is_422(tokenizer: Tokenizer, name: str, value: Any, param: str) -> None:
    more = {"add_generation_prompt": True} if name == "continue_final_message" else {}
    refused = await refusal(tokenizer, **{name: value}, **more)
    assert (refused.status, refused.param) == (422, param) and f"`{param}`" in refused.message


async def test_codes_that_clients_look_for(tokenizer: Tokenizer) -> None:
    assert (await refusal(tokenizer, model="gpt-4")).code == "model_not_found"
    assert (await refusal(tokenizer, max_tokens=90)).code == "context_length_exceeded"
    long = [{"role": "user", "content": "x" * 120}]
    assert (await refusal(tokenizer, messages=long, max_tokens=None)).code == "context_length_exceeded"
    assert "not offered" in (await refusal(tokenizer, functions=[{}])).message


async def test_a_model_without_a_template_cannot_chat(tokenizer: Tokenizer) -> None:
    where = context(tokenizer, template=ChatTemplate({}, {}))
    for call in (parse(chat, body(), where), tokenize(convert({"messages": HELLO}, TokenizeRequest), where)):
        with pytest.raises(Unprocessable, match="no chat template"):
            await call


async def test_a_template_that_refuses_the_messages_says_why(tokenizer: Tokenizer) -> None:
    strict = ChatTemplate({"default": "{{ raise_exception('roles must alternate') }}"}, {})
    with pytest.raises(BadRequest, match="roles must alternate"):
        await parse(chat, body(), context(tokenizer, template=strict))


async def test_a_message_that_the_template_hides_cannot_be_continued(tokenizer: Tokenizer) -> None:
    hiding = ChatTemplate({"default": "nothing"}, {})
    with pytest.raises(Unprocessable, match="continued"):
        await parse(chat, body(continue_final_message=True), context(tokenizer, template=hiding))


@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.sampled_from(sorted({*ChatRequest.__struct_fields__, *ChatRequest.ONLY})), JSON, max_size=4),
    st.none() | st.lists(JSON, max_size=2),
)
async def test_no_body_whatever_raises_anything_but_a_refusal(
    tokenizer: Tokenizer, more: dict[str, Any], content: Any
) -> None:
    spoken = {} if content is None else {"messages": [{"role": "user", "content": content}]}
    try:
        request = await parsed(tokenizer, **(more | spoken))
    except (BadRequest, Unprocessable) as refused:
        assert refused.message
    else:
        assert all(request.prompts)


# answers


def asked(tokenizer: Tokenizer, **more: Any) -> Any:
    return replace(response_context(tokenizer, **more), prefix=chat.PREFIX)


async def streamed(tokenizer: Tokenizer, *story: Any, **more: Any) -> list[Any]:
    return parse_sse("".join(lines(chat.stream_writer(asked(tokenizer, stream=True, **more)), FakeDeltas(*story))))


async def test_transcript(tokenizer: Tokenizer) -> None:
    story = FakeDeltas([Delta(0, [5], [' "é"\n'])], [Delta(0, [6], [""])], [last(ids=(7, 8), texts=("b", ""))])
    assert lines(chat.stream_writer(asked(tokenizer, stream=True)), story) == [
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"role":"assistant","content":"","refusal":null}},'
        '"logprobs":null,"finish_reason":null}]}\n\n'
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"content":" \\"é\\"\\n"}},'
        '"logprobs":null,"finish_reason":null}]}\n\n',
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{"content":"b"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'data: {HEAD},"choices":[{{"index":0,"delta":{{}},"logprobs":null,"finish_reason":"stop",'
        '"stop_reason":null,"seed":7}]}\n\n',
        "data: [DONE]\n\n",
    ]


async def test_usage_chunk_has_no_choices(tokenizer: Tokenizer) -> None:
    chunks = await streamed(tokenizer, [Delta(0, [5], ["a"])], [last()], include_usage=True, timings=True)
    *chunks, usage, end = chunks
    assert end == "[DONE]" and [chunk["usage"] for chunk in chunks] == [None] * 3
    assert usage["choices"] == [] and usage["timings"]["decode_ms"] == 3.0
    assert usage["usage"] == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2},
    }  # fmt: skip


async def test_running_usage(tokenizer: Tokenizer) -> None:
    chunks = await streamed(tokenizer, [Delta(0, [5], ["a"], usage=Usage(3, 1))], [last()], continuous_usage=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks[1:-1]] == [1, 4]


@pytest.mark.parametrize(("finish", "word"), [(Finish.EOS, "stop"), (Finish.STOP, "stop"), (Finish.LENGTH, "length")])
async def test_finish_reasons(tokenizer: Tokenizer, finish: Finish, word: str) -> None:
    chunks = await streamed(tokenizer, [last(finish=finish)])
    assert chunks[-2]["choices"][0]["finish_reason"] == word
    whole = json.loads(await chat.complete(asked(tokenizer), FakeDeltas([last(finish=finish)])))
    assert whole["choices"][0]["finish_reason"] == word


async def test_whole_answers_equal_folded_streams(tokenizer: Tokenizer) -> None:
    scores = [TokenLogprob(66, -1.5, ((66, -1.5), (265, float("-inf"))))]
    story = [
        [Delta(1, [65, 66], ["a", "b"], logprobs=scores * 2), Delta(0, [68], [""], logprobs=scores)],
        [Delta(0, [69], ["é"], logprobs=scores)],
        [last(0, stop="END", finish=Finish.STOP, logprobs=[])],
        [last(1, (70,), ("c",), logprobs=scores, finish=Finish.LENGTH)],
    ]
    more: Any = {"n": 2, "include_usage": True, "sampling": Sampling(max_tokens=9, logprobs=2)}
    whole = json.loads(await chat.complete(asked(tokenizer, **more), FakeDeltas(*story)))
    chunks = await streamed(tokenizer, *story, **more)
    assert fold(chunks[:-1]) == whole
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["é", "abc"]
    text = tokenizer.token_text(66)
    entry = {"token": text, "logprob": -1.5, "bytes": list(text.encode())}
    rival = {"token": "</s>", "logprob": -9999.0, "bytes": None}
    assert whole["choices"][1]["logprobs"]["content"] == [entry | {"top_logprobs": [entry, rival]}] * 3


def fold(chunks: list[Any]) -> dict[str, Any]:
    """What a client makes of a stream."""
    choices: dict[int, dict[str, Any]] = {}
    for piece in [piece for chunk in chunks for piece in chunk["choices"]]:
        choice = choices.setdefault(piece["index"], {"index": piece["index"], "message": {}, "logprobs": None})
        delta, message = piece["delta"], choice["message"]
        choice["message"] = message | delta | {"content": message.get("content", "") + delta.get("content", "")}
        if piece["logprobs"]:
            found = (choice["logprobs"] or {"content": []})["content"] + piece["logprobs"]["content"]
            choice["logprobs"] = {"content": found, "refusal": None}
        choice |= {key: piece[key] for key in ("finish_reason", "stop_reason", "seed") if key in piece}
    head = {key: chunks[0][key] for key in ("id", "created", "model", "system_fingerprint")}
    ordered = [choices[i] for i in sorted(choices)]
    return head | {"object": "chat.completion", "choices": ordered, "usage": chunks[-1]["usage"]}


def test_stream_writer_before_the_last_delta_writes_no_end(tokenizer: Tokenizer) -> None:
    written = chat.stream_writer(asked(tokenizer)).write([Delta(0, [5], ["a"])])
    assert written and b"DONE" not in written and b'"finish_reason":"' not in written
