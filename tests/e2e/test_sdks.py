"""The official SDKs against a real server with the demo model: all chat API formats, streamed and not."""

import time
from collections.abc import Iterator
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.e2e.server import Server

QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
ASKED: dict[str, Any] = {"model": "m", "messages": QUESTION, "max_tokens": 48}
GREEDY: dict[str, Any] = {"temperature": 0}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 11}


@pytest.fixture(scope="module")
def chat(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


@pytest.fixture(scope="module")
def claude(demo: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=demo.url, api_key="none", max_retries=0) as sdk:
        yield sdk


def chat_streamed(chat: openai.OpenAI, **fields: Any) -> tuple[str, str | None, int]:
    """Returns text, finish reason and number of output tokens."""
    text, finish, tokens = "", None, 0
    for chunk in chat.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
        tokens = chunk.usage.completion_tokens if chunk.usage else tokens
    return text, finish, tokens


def chat_whole(chat: openai.OpenAI, **fields: Any) -> tuple[str, str | None, int]:
    answer = chat.chat.completions.create(**fields)
    assert answer.usage is not None
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason, answer.usage.completion_tokens


def claude_whole(claude: anthropic.Anthropic, extra: dict[str, Any], **fields: Any) -> tuple[str, str | None, int]:
    """extra: fields that not every version of the SDK offers"""
    return told(claude.messages.create(**fields, extra_body=extra))


def claude_streamed(claude: anthropic.Anthropic, extra: dict[str, Any], **fields: Any) -> tuple[str, str | None, int]:
    with claude.messages.stream(**fields, extra_body=extra) as stream:
        text = "".join(stream.text_stream)
        message = told(stream.get_final_message())
    assert message[0] == text
    return message


def response_told(response: Any) -> tuple[str, str | None, int]:
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    return response.output_text, response.status, response.usage.output_tokens


def told(message: anthropic.types.Message) -> tuple[str, str | None, int]:
    (block,) = message.content
    assert block.type == "text"
    return block.text, message.stop_reason, message.usage.output_tokens


def test_greedy_answer_is_equal_in_chat_and_messages(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    text, finish, tokens = chat_whole(chat, **ASKED, **GREEDY)
    assert "Paris" in text and finish == "stop"
    assert chat_streamed(chat, **ASKED, **GREEDY) == (text, finish, tokens)
    expected = text, "end_turn", tokens
    assert claude_whole(claude, GREEDY, **ASKED) == claude_streamed(claude, GREEDY, **ASKED) == expected


def test_seeded_answer_is_equal_in_chat_and_messages(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    text, _, tokens = chat_whole(chat, **ASKED, **SEEDED)
    assert chat_streamed(chat, **ASKED, **SEEDED)[::2] == (text, tokens)
    assert claude_streamed(claude, SEEDED, **ASKED)[::2] == (text, tokens)


def test_token_limit_and_stop_are_equal_in_chat_and_messages(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    short = ASKED | {"max_tokens": 2}
    text, finish, tokens = chat_whole(chat, **short, **GREEDY)
    assert (finish, tokens) == ("length", 2)
    assert claude_streamed(claude, GREEDY, **short) == (text, "max_tokens", 2)
    before, finish, tokens = chat_streamed(chat, **ASKED, **GREEDY, stop="Paris")
    assert "Paris" not in before and finish == "stop"
    assert chat_whole(chat, **ASKED, **GREEDY, stop="Paris") == (before, finish, tokens)
    message = claude.messages.create(**ASKED, stop_sequences=["Paris"], extra_body=GREEDY)
    assert told(message) == (before, "stop_sequence", tokens) and message.stop_sequence == "Paris"


def test_chat_logprobs_of_each_choice_cover_its_text(chat: openai.OpenAI) -> None:
    answer = chat.chat.completions.create(**ASKED, **SEEDED, n=2, logprobs=True, top_logprobs=3)
    assert answer.choices[0].message.content == chat_whole(chat, **ASKED, **SEEDED)[0]
    for choice in answer.choices:
        assert choice.logprobs is not None and choice.logprobs.content
        joined = b"".join(bytes(entry.bytes or ()) for entry in choice.logprobs.content)
        assert joined.decode() == choice.message.content
        for entry in choice.logprobs.content:
            rivals = [rival.logprob for rival in entry.top_logprobs]
            assert len(rivals) == 3 and rivals == sorted(rivals, reverse=True) and entry.logprob <= rivals[0] <= 0


def test_token_count_routes_agree_with_usage(chat: openai.OpenAI, claude: anthropic.Anthropic, demo: Server) -> None:
    more: dict[str, Any] = {"model": "m", "messages": QUESTION, "system": "You are brief."}
    count = claude.messages.count_tokens(**more).input_tokens
    assert count == claude.messages.create(**more, max_tokens=4).usage.input_tokens
    asked: list[Any] = [{"role": "system", "content": "You are brief."}, *QUESTION]
    assert demo.client.post("/tokenize", json={"messages": asked}).json()["count"] == count
    usage = chat.chat.completions.create(model="m", messages=asked, max_tokens=4).usage
    assert usage is not None and usage.prompt_tokens == count


def test_model_list_is_equal_in_both_sdks(chat: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [model.id for model in chat.models.list()] == [model.id for model in claude.models.list()] == ["m"]
    found = claude.models.retrieve("m")
    assert (found.type, found.display_name) == ("model", "m")
    # each frontend says when it started, and the clients may talk to different ones
    for created in (int(found.created_at.timestamp()), chat.models.retrieve("m").created):
        assert time.time() - 86_400 < created <= time.time()


async def test_asynchronous_clients_stream_the_same_text(demo: Server, chat: openai.OpenAI) -> None:
    text, finish, _ = chat_whole(chat, **ASKED, **GREEDY)
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(**ASKED, **GREEDY, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(choice.delta.content or "" for choice in chunks) == text
    assert [chunks[0].delta.role, chunks[-1].finish_reason] == ["assistant", finish]
    async with (
        anthropic.AsyncAnthropic(base_url=demo.url, api_key="none", max_retries=0) as other,
        other.messages.stream(**ASKED, extra_body=GREEDY) as messages,
    ):
        assert "".join([piece async for piece in messages.text_stream]) == text


# The Responses API

RESPONDED: dict[str, Any] = {"model": "m", "input": "What is the capital of France?", "max_output_tokens": 48}


def responses_streamed(sdk: openai.OpenAI, **fields: Any) -> tuple[str, str | None, int]:
    text, end = "", None
    for event in sdk.responses.create(**fields, stream=True):
        if event.type == "response.output_text.delta":
            text += event.delta
        elif event.type in ("response.completed", "response.incomplete"):
            end = response_told(event.response)
    assert end is not None and end[0] == text
    return end


def merged(kinds: list[str]) -> list[str]:
    """Merges adjacent deltas of the same kind, because the number of tokens in a delta depends on timing."""
    return [kind for i, kind in enumerate(kinds) if kind not in kinds[i - 1 : i] or not kind.endswith("delta")]


def test_responses_text_equals_chat_text(chat: openai.OpenAI) -> None:
    text, _, tokens = chat_whole(chat, **ASKED, **GREEDY)
    assert responses_streamed(chat, **RESPONDED, **GREEDY) == (text, "completed", tokens)
    assert response_told(chat.responses.create(**RESPONDED, **GREEDY)) == (text, "completed", tokens)
    drawn, _, tokens = chat_whole(chat, **ASKED, **SEEDED)
    extra = {"seed": 11}
    assert responses_streamed(chat, **RESPONDED, temperature=0.9, extra_body=extra)[::2] == (drawn, tokens)
    told = chat.responses.create(**RESPONDED, **GREEDY, extra_body={"stop": "Paris", "timings": True})
    assert told.output_text == text.partition("Paris")[0] and told.model_extra
    assert told.model_extra["stop_reason"] == "Paris" and told.model_extra["timings"]["prefill_ms"] > 0


def test_responses_at_token_limit_are_incomplete(chat: openai.OpenAI) -> None:
    short = {**RESPONDED, **GREEDY, "max_output_tokens": 2}
    whole = chat.responses.create(**short)
    assert whole.incomplete_details and whole.incomplete_details.reason == "max_output_tokens"
    assert response_told(whole) == responses_streamed(chat, **short) == (whole.output_text, "incomplete", 2)


def test_responses_output_as_history_continues_conversation(chat: openai.OpenAI) -> None:
    first = chat.responses.create(**RESPONDED, **GREEDY, instructions="You are brief.", store=False)
    history: list[Any] = [{"role": "user", "content": RESPONDED["input"]}, *first.output]
    history.append({"role": "user", "content": "And of Italy?"})
    second = chat.responses.create(**{**RESPONDED, **GREEDY, "input": history}, instructions="You are brief.")
    asked: list[Any] = [{"role": "system", "content": "You are brief."}, QUESTION[0]]
    asked += [{"role": "assistant", "content": first.output_text}, {"role": "user", "content": "And of Italy?"}]
    assert second.output_text == chat_whole(chat, **{**ASKED, **GREEDY, "messages": asked})[0]
    assert second.usage and second.usage.input_tokens_details.cached_tokens >= 0
    counted = chat.responses.input_tokens.count(model="m", input=history, instructions="You are brief.")
    assert counted.input_tokens == second.usage.input_tokens


class Capital(BaseModel):
    capital: Literal["Paris", "Rome", "Oslo"]


async def test_responses_structured_output_parses_in_every_helper(demo: Server, chat: openai.OpenAI) -> None:
    asked: dict[str, Any] = {**RESPONDED, **GREEDY, "text_format": Capital}
    expected = chat.responses.parse(**asked).output_parsed
    assert isinstance(expected, Capital)
    with chat.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_response().output_parsed == expected
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    async with openai.AsyncOpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0) as sdk:
        assert (await sdk.responses.parse(**asked)).output_parsed == expected
        async with sdk.responses.stream(**asked) as events:
            assert merged([event.type async for event in events]) == merged(kinds)
            assert (await events.get_final_response()).output_parsed == expected


def test_responses_logprobs_cover_the_text(chat: openai.OpenAI) -> None:
    answer = chat.responses.create(**RESPONDED, **GREEDY, include=["message.output_text.logprobs"], top_logprobs=3)
    (message,) = answer.output
    assert message.type == "message" and message.content[0].type == "output_text"
    entries = message.content[0].logprobs or []
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == answer.output_text
    assert all(entry.logprob == entry.top_logprobs[0].logprob and len(entry.top_logprobs) == 3 for entry in entries)
