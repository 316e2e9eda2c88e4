"""A prompt that does not fit is refused in the words that clients match, and is not tokenized if it is far too long."""

import re
from dataclasses import replace
from typing import Any

import pytest

from frontend.errors import ContextLengthExceeded
from frontend.model_context import check_characters, check_length
from frontend.text.tokenizer import Tokenizer
from shared.messages import Outcome
from tests.fakes import FakePool, context, sending
from tests.frontend.serving import http_client

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
LIMIT = 512  # context length of the fake pool's worker; a character is a token
EXCEEDED = rf"This model's maximum context length is {LIMIT} tokens\. However, you requested "
TOGETHER = (
    rf"{EXCEEDED}(\d+) tokens \((\d+) in the \w+, (\d+) in the completion\)\. "
    r"Please reduce the length of the \w+ or completion\."
)
ALONE = rf"{EXCEEDED}(?:at least )?\d+ tokens in the \w+\. Please reduce the length of the \w+\."
ANTHROPIC_TOGETHER = rf"input length and `max_tokens` exceed context limit: (\d+) \+ (\d+) > {LIMIT}, "
ANTHROPIC_ALONE = rf"prompt is too long: (?:at least )?\d+ tokens > {LIMIT} maximum"


def body(path: str, characters: int, most: int) -> dict[str, Any]:
    text = "x" * characters
    match path:
        case "/v1/completions":
            return {"model": "tiny", "prompt": text, "max_tokens": most}
        case "/v1/responses":
            return {"input": text, "max_output_tokens": most}
    return {"messages": [{"role": "user", "content": text}], "max_tokens": most}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
async def test_prompt_too_long_is_refused_in_the_words_of_its_api(tokenizer: Tokenizer, path: str) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer, beyond_context="refuse") as http:
        answers = [await http.post(path, json=body(path, *one)) for one in ((300, 400), (700, 400), (50_000, 1))]
    assert pool.calls == 0
    assert [one.status_code for one in answers] == [422 if path == COMPLETIONS else 400] * 3
    together, *alone = [one.json()["error"]["message"] for one in answers]
    if path == MESSAGES:
        found = re.match(ANTHROPIC_TOGETHER, together)
        assert found and int(found[2]) == 400 and int(found[1]) >= 300
        assert all(re.fullmatch(ANTHROPIC_ALONE, message) for message in alone), alone
        return
    found = re.fullmatch(TOGETHER, together)
    assert found and int(found[1]) == int(found[2]) + int(found[3]) and int(found[3]) == 400
    assert all(re.fullmatch(ALONE, message) for message in alone), alone
    assert {one.json()["error"]["code"] for one in answers} == {"context_length_exceeded"}


# A limit on the answer that is beyond the context

TINY = {"model": "tiny"}
HI = [{"role": "user", "content": "hi"}]
LONG = [{"role": "user", "content": "x" * LIMIT}]
LOWERED = "x-sluice-lowered-fields"
FAR = 32_000  # the limit that an agent sends which knows nothing of the model
# the route, its field with the limit, a body that fits, a body that does not
CUT = [
    (CHAT, "max_tokens", {"messages": HI}, {"messages": LONG}),
    (CHAT, "max_completion_tokens", {"messages": HI}, {"messages": LONG}),
    (CHAT, "n_predict", {"messages": HI}, {"messages": LONG}),
    ("/chat/completions", "max_tokens", {"messages": HI}, {"messages": LONG}),
    (RESPONSES, "max_output_tokens", {"input": "hi"}, {"input": "x" * LIMIT}),
    ("/api/chat", "options.num_predict", TINY | {"messages": HI}, TINY | {"messages": LONG}),
    ("/api/generate", "options.num_predict", TINY | {"prompt": "hi"}, TINY | {"prompt": "x" * LIMIT}),
    ("/completion", "n_predict", {"prompt": "hi"}, {"prompt": "x" * LIMIT}),
    ("/completion", "max_tokens", {"prompt": "hi"}, {"prompt": "x" * LIMIT}),
    ("/completions", "n_predict", {"prompt": "hi"}, {"prompt": "x" * LIMIT}),
]  # fmt: skip
REFUSED = [
    (COMPLETIONS, "max_tokens", {"prompt": "hi"}, 422),
    (MESSAGES, "max_tokens", {"messages": HI}, 400),
    ("/generate", "sampling_params.max_new_tokens", {"text": "hi"}, 400),
]
ENDS = ('"finish_reason":"length"', '"incomplete_details":{"reason":"max_output_tokens"}', '"done_reason":"length"',
        '"stop_type":"limit"')  # fmt: skip


def limited(fields: dict[str, Any], name: str, limit: int) -> dict[str, Any]:
    """Returns a body with a limit in a field, which may be one of an object."""
    outer, _, inner = name.partition(".")
    return {**fields, outer: {inner: limit} if inner else limit}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("path", "name", "fits", "exceeds"), CUT, ids=[f"{one[0]}-{one[1]}" for one in CUT])
async def test_limit_beyond_the_context_is_lowered_to_what_the_prompt_leaves_and_told(
    tokenizer: Tokenizer, path: str, name: str, fits: dict[str, Any], exceeds: dict[str, Any], stream: bool
) -> None:
    pool = FakePool(sending([104], outcome=Outcome.LENGTH))
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(path, json=limited({**fits, "stream": stream}, name, FAR))
        (submitted,) = pool.submitted
        room = LIMIT - len(submitted.prompt)
        assert answer.status_code == 200 and submitted.sampling.max_tokens == room
        assert answer.headers[LOWERED] == f"{name}={room}"
        assert any(end in answer.text.replace(": ", ":") for end in ENDS), answer.text
        exact = await http.post(path, json=limited({**fits, "stream": stream}, name, room))
        assert exact.status_code == 200 and LOWERED not in exact.headers
        alone = await http.post(path, json=limited({**exceeds, "stream": stream}, name, FAR))
    assert alone.status_code == 400 and LOWERED not in alone.headers
    assert alone.json()["error"] == (await _alone(tokenizer, path, exceeds))["error"]
    assert len(pool.submitted) == 2


async def _alone(tokenizer: Tokenizer, path: str, fields: dict[str, Any]) -> dict[str, Any]:
    """Returns the error for a prompt that does not fit without any limit on the answer."""
    async with http_client(FakePool(), tokenizer) as http:
        refused: dict[str, Any] = (await http.post(path, json=fields)).json()
    return refused


@pytest.mark.parametrize(("path", "name", "fields", "status"), REFUSED)
async def test_other_routes_keep_their_error_unless_the_server_cuts(
    tokenizer: Tokenizer, path: str, name: str, fields: dict[str, Any], status: int
) -> None:
    pool = FakePool(sending([104], outcome=Outcome.LENGTH))
    body = limited(fields, name, FAR)
    async with http_client(pool, tokenizer) as http:
        refused = await http.post(path, json=body)
    assert refused.status_code == status and str(FAR) in refused.text and not pool.submitted
    async with http_client(pool, tokenizer, beyond_context="cut") as http:
        answer = await http.post(path, json=body)
    room = LIMIT - len(pool.submitted[0].prompt)
    assert answer.status_code == 200 and answer.headers[LOWERED] == f"{name}={room}"


@pytest.mark.parametrize(("path", "name", "fits", "_"), CUT, ids=[f"{one[0]}-{one[1]}" for one in CUT])
async def test_server_may_refuse_such_a_limit_everywhere(
    tokenizer: Tokenizer, path: str, name: str, fits: dict[str, Any], _: Any
) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer, beyond_context="refuse") as http:
        refused = await http.post(path, json=limited(fits, name, FAR))
    assert refused.status_code == 400 and not pool.submitted
    assert re.search(rf"{FAR} in the completion|has \d+ tokens and asks for {FAR}", refused.text), refused.text


async def test_all_choices_of_a_chat_get_the_lowered_limit(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([104], outcome=Outcome.LENGTH))
    async with http_client(pool, tokenizer) as http:
        answer = await http.post(CHAT, json={"messages": HI, "n": 3, "max_tokens": FAR})
    assert answer.status_code == 200
    assert {one.sampling.max_tokens for one in pool.submitted} == {LIMIT - len(pool.submitted[0].prompt)}


async def test_least_tokens_beyond_the_context_are_a_demand(tokenizer: Tokenizer) -> None:
    pool = FakePool()
    async with http_client(pool, tokenizer) as http:
        refused = await http.post(CHAT, json={"messages": HI, "max_tokens": FAR, "min_tokens": FAR - 1})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "min_tokens" and not pool.submitted


async def test_typed_events_have_the_same_words(tokenizer: Tokenizer) -> None:
    async with http_client(FakePool(), tokenizer) as http:
        answer = await http.post(COMPLETIONS, json=body(COMPLETIONS, 700, 1) | {"stream_format": "events"})
    assert answer.status_code == 422 and re.fullmatch(ALONE, answer.json()["error"])


async def test_truncated_prompt_may_be_of_any_length(tokenizer: Tokenizer) -> None:
    pool = FakePool(sending([104]))
    async with http_client(pool, tokenizer) as http:
        for path in (COMPLETIONS, CHAT, RESPONSES):
            answer = await http.post(path, json=body(path, 50_000, 4) | {"truncate_prompt_tokens": 9})
            assert answer.status_code == 200, answer.text
    assert [len(one.prompt) for one in pool.submitted] == [9, 9, 9]


async def test_counting_a_prompt_has_no_limit(tokenizer: Tokenizer) -> None:
    asked = body(MESSAGES, 50_000, 1)
    del asked["max_tokens"]
    async with http_client(FakePool(), tokenizer) as http:
        for path in ("/v1/messages/count_tokens", "/tokenize"):
            assert (await http.post(path, json=asked)).status_code == 200


@pytest.mark.parametrize(("prompt", "output", "fits"), [(10, 0, True), (10, 1, False), (9, 1, True), (9, 2, False)])
def test_prompt_and_answer_may_fill_the_context(tokenizer: Tokenizer, prompt: int, output: int, fits: bool) -> None:
    limited = replace(context(tokenizer), max_seq_len=10)
    if fits:
        check_length("prompt", prompt, output, limited)
        return
    with pytest.raises(ContextLengthExceeded) as refused:
        check_length("prompt", prompt, output, limited)
    assert (refused.value.prompt, refused.value.limit) == (prompt, 10)


async def test_refusal_of_a_prompt_that_fills_the_context_has_figures_that_exceed_it(tokenizer: Tokenizer) -> None:
    limited = replace(context(tokenizer), max_seq_len=10)
    with pytest.raises(
        ContextLengthExceeded, match=r"10 tokens\. .* 11 tokens \(10 in the prompt, 1 in the completion\)"
    ):
        check_length("prompt", 10, 1, limited)
    async with http_client(FakePool(), tokenizer) as http:
        one = (await http.post("/v1/messages/count_tokens", json=body(MESSAGES, 1, 1))).json()["input_tokens"]
        answer = await http.post(MESSAGES, json=body(MESSAGES, LIMIT - one + 1, 1))
    assert f"exceed context limit: {LIMIT} + 1 > {LIMIT}" in answer.json()["error"]["message"]


def test_text_is_refused_untokenized_only_if_it_cannot_fit(tokenizer: Tokenizer) -> None:
    text = "x" * 10_000
    least = tokenizer.fewest_tokens(text)
    assert 0 < least <= 10_000
    check_characters("prompt", text, replace(context(tokenizer), max_seq_len=least))
    check_characters("prompt", text, replace(context(tokenizer), max_seq_len=0))
    with pytest.raises(ContextLengthExceeded, match=f"at least {least} tokens in the prompt"):
        check_characters("prompt", text, replace(context(tokenizer), max_seq_len=least - 1))
