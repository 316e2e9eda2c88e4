"""A prompt that does not fit is refused in the words that clients match, and is not tokenized if it is far too long."""

import re
from dataclasses import replace
from typing import Any

import pytest

from frontend.errors import ContextLengthExceeded
from frontend.model_context import check_characters, check_length
from frontend.text.tokenizer import Tokenizer
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
    async with http_client(pool, tokenizer) as http:
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
