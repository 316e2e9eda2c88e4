"""Requests that a server may refuse or adjust: long prompts, unknown fields, values for "off", other names."""

import typing
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest
from anthropic.types.message_create_params import MessageCreateParamsNonStreaming
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming

from tests.e2e.server import Server, serving

LIMIT = 64
HELLO: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
LONG: list[Any] = [{"role": "user", "content": "word " * LIMIT}]
FAR: list[Any] = [{"role": "user", "content": "word " * 50_000}]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LEAST: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "The capital of France is", "max_tokens": 4},
    CHAT: {"messages": HELLO, "max_tokens": 4},
    RESPONSES: {"input": "What is the capital of France?", "max_output_tokens": 4},
    MESSAGES: {"messages": HELLO, "max_tokens": 4},
}
NEWER = (CHAT, RESPONSES, MESSAGES)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("tolerance")
    names = ("--served-model-name", "second", "third")
    with serving("demo", folder / "log", "--max-seq-len", str(LIMIT), *names, name="first") as one:
        yield one


@pytest.fixture(scope="module")
def sdk(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def post(server: Server, path: str, **more: Any) -> httpx.Response:
    return server.client.post(path, json=LEAST[path] | {"temperature": 0} | more)


# A prompt that is too long


@pytest.mark.parametrize("messages", [LONG, FAR], ids=["long", "far"])
def test_sdks_raise_bad_request_for_a_prompt_too_long(
    sdk: openai.OpenAI, claude: anthropic.Anthropic, messages: list[Any]
) -> None:
    words = f"This model's maximum context length is {LIMIT} tokens. However, you requested"
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        sdk.chat.completions.create(model="first", messages=messages)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    with pytest.raises(openai.BadRequestError, match=words) as refused:
        sdk.responses.create(model="first", input=messages[0]["content"])
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    with pytest.raises(anthropic.BadRequestError, match=rf"prompt is too long: .*tokens > {LIMIT} maximum"):
        claude.messages.create(model="first", messages=messages, max_tokens=4)


def test_limit_beyond_the_context_is_lowered_or_told_with_both_numbers(
    sdk: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    raw = sdk.chat.completions.with_raw_response.create(
        model="first", messages=HELLO, max_tokens=LIMIT, temperature=0, extra_body={"ignore_eos": True}
    )
    answer, (name, _, lowered) = raw.parse(), raw.headers["x-sluice-lowered-fields"].partition("=")
    assert answer.choices[0].finish_reason == "length" and answer.usage is not None
    assert (name, int(lowered)) == ("max_tokens", answer.usage.completion_tokens)
    assert answer.usage.total_tokens == LIMIT
    with pytest.raises(anthropic.BadRequestError, match=rf"exceed context limit: \d+ \+ {LIMIT} > {LIMIT}"):
        claude.messages.create(model="first", messages=HELLO, max_tokens=LIMIT)


@pytest.mark.parametrize("more", [{}, {"stream_format": "events"}], ids=["openai", "events"])
def test_completions_keep_422_with_the_same_words(server: Server, more: dict[str, Any]) -> None:
    answer = post(server, COMPLETIONS, prompt="word " * LIMIT, **more)
    assert answer.status_code == 422
    assert f"This model's maximum context length is {LIMIT} tokens. However, you requested" in answer.text


# Unknown fields


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", NEWER)
def test_unknown_field_changes_nothing_and_is_told_in_a_header(server: Server, path: str, stream: bool) -> None:
    answer = post(server, path, stream=stream, foo={"bar": 1}, baz=None)
    assert answer.status_code == 200 and answer.headers["x-sluice-ignored-fields"] == "foo, baz"
    assert "x-sluice-ignored-fields" not in post(server, path, stream=stream).headers
    server.until(lambda _: server.log.read_text().count("the unknown field baz") == 1)


def test_completions_refuse_an_unknown_field(server: Server) -> None:
    for value in (1, None):
        assert post(server, COMPLETIONS, foo=value).status_code == 422


# values for "off", and names


OFF: list[dict[str, Any]] = [
    {"top_k": 0}, {"top_k": -1}, {"top_k": None}, {"user": ""}, {"n": None}, {"logprobs": False}, {"stop": None},
    {"tools": [], "tool_choice": None}, {"tools": None, "tool_choice": None}, {"temperature": None, "top_k": 1},
    {"model": None}, {"model": "first"}, {"model": "third"}, {"stream": None}, {"metadata": None},
]  # fmt: skip
OWN_OFF: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"reasoning_effort": "high"}), (CHAT, {"reasoning_effort": "none"}), (CHAT, {"stop": []}),
    (CHAT, {"logprobs": False, "top_logprobs": 0}), (RESPONSES, {"reasoning": {"effort": "high"}}),
    (MESSAGES, {"thinking": {"type": "enabled", "budget_tokens": 2}}), (MESSAGES, {"thinking": {"type": "disabled"}}),
    (MESSAGES, {"stop_sequences": []}), (MESSAGES, {"system": None}),
]  # fmt: skip


@pytest.mark.parametrize(("path", "more"), [*((path, more) for path in NEWER for more in OFF), *OWN_OFF], ids=str)
def test_value_for_off_gives_the_plain_answer(server: Server, path: str, more: dict[str, Any]) -> None:
    plain, answer = post(server, path), post(server, path, **more)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["model"] == "first"
    for key in ("choices", "content"):
        assert strip(told.get(key)) == strip(plain.json().get(key))


def strip(choices: Any) -> Any:
    return [{key: one[key] for key in one if key != "seed"} for one in choices or ()]


def optional_fields(*kinds: Any) -> Iterator[tuple[str, str]]:
    for path, kind in zip((CHAT, RESPONSES, MESSAGES), kinds, strict=True):
        for name in typing.get_type_hints(kind):
            if name not in LEAST[path] or name == "max_output_tokens":
                yield path, name


@pytest.mark.parametrize(
    ("path", "name"),
    list(
        optional_fields(
            CompletionCreateParamsNonStreaming, ResponseCreateParamsNonStreaming, MessageCreateParamsNonStreaming
        )
    ),
)
def test_every_optional_field_of_the_sdks_takes_null(server: Server, path: str, name: str) -> None:
    answer = post(server, path, **{name: None})
    assert answer.status_code == 200, answer.text


def test_completions_keep_their_table(server: Server) -> None:
    assert [post(server, COMPLETIONS, **{"top_k": value}).status_code for value in (0, -1, None)] == [200, 200, 200]
    assert [post(server, COMPLETIONS, model=value).status_code for value in ("x", None, "second")] == [422, 200, 200]


def test_model_has_several_names_and_no_other(server: Server, sdk: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    assert [one.id for one in sdk.models.list().data] == ["first", "second", "third"]
    assert sdk.models.retrieve("second").id == "second"
    assert sdk.chat.completions.create(model="second", messages=HELLO, max_tokens=1).model == "first"
    for unknown in (
        lambda: sdk.chat.completions.create(model="gpt", messages=HELLO),
        lambda: sdk.models.retrieve("gpt"),
    ):
        with pytest.raises(openai.NotFoundError) as refused:
            unknown()
        assert refused.value.code == "model_not_found"
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="claude", messages=HELLO, max_tokens=1)


# log-probabilities


def test_drawn_token_is_among_the_top_of_completions(sdk: openai.OpenAI) -> None:
    hot: dict[str, Any] = {"model": "first", "prompt": "A", "max_tokens": 24, "temperature": 2.0, "seed": 3}
    for most in (0, 1, 2):
        scores = sdk.completions.create(**hot, logprobs=most, extra_body={"ignore_eos": True}).choices[0].logprobs
        assert scores and scores.tokens and scores.top_logprobs and scores.token_logprobs
        tops = scores.top_logprobs
        assert all(token in top for token, top in zip(scores.tokens, tops, strict=True))
        assert {len(top) for top in tops} == ({1} if most == 0 else {most, most + 1})


def test_drawn_token_is_among_the_top_of_chats(sdk: openai.OpenAI) -> None:
    hot: dict[str, Any] = {"model": "first", "messages": HELLO, "max_tokens": 24, "temperature": 2.0, "seed": 3}
    for most in (None, 0, 1, 2):
        asked = hot | ({} if most is None else {"top_logprobs": most})
        logprobs = (
            sdk.chat.completions.create(**asked, logprobs=True, extra_body={"ignore_eos": True}).choices[0].logprobs
        )
        assert logprobs and logprobs.content and len(logprobs.content) == 24
        if not most:
            assert all(entry.top_logprobs == [] for entry in logprobs.content)
            continue
        assert all((e.token, e.logprob) in [(t.token, t.logprob) for t in e.top_logprobs] for e in logprobs.content)
        assert {len(entry.top_logprobs) for entry in logprobs.content} == {most, most + 1}
