"""Sampling parameters as a worker receives them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from frontend.api.llama_cpp.completion import COMPLETION
from frontend.api.ollama.chat import CHAT as OLLAMA_CHAT
from frontend.api.openai import chat, completions, responses
from frontend.api.sglang import generate
from frontend.errors import Unprocessable
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from frontend.workers.pool import rejection_error
from shared import messages as m
from tests.fakes import MODEL, FakePool, context
from tests.frontend.api.harness import parse
from tests.frontend.serving import http_client


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> GenerationRequest:
    return await parse(completions, dict(fields), context(tokenizer))


async def test_sampling_number_too_small_for_float32_is_zero(tokenizer: Tokenizer) -> None:
    chosen = (await parsed(tokenizer, body(temperature=1e-50, min_p=1e-310))).sampling
    assert (chosen.temperature, chosen.min_p) == (0.0, 0.0)
    assert (await parsed(tokenizer, body(temperature=1e-30))).sampling.temperature == 1e-30


async def test_limit_of_a_models_name_is_the_default_of_every_route(tokenizer: Tokenizer) -> None:
    texts = context(tokenizer, max_seq_len=256)
    named = replace(texts, most_new=4)

    async def limits(api_format: Any, body: dict[str, Any]) -> list[int]:
        return [(await parse(api_format, body, one)).sampling.max_tokens for one in (texts, named)]

    prompt, text = {"model": MODEL, "prompt": "abc"}, {"model": MODEL, "text": "abc"}
    assert await limits(completions, prompt) == [128, 4]
    assert await limits(completions, prompt | {"max_tokens": 128}) == [128, 128]
    assert await limits(completions, prompt | {"n_predict": 9}) == [9, 9]
    assert await limits(generate, text) == [128, 4]
    assert await limits(generate, text | {"sampling_params": {"max_new_tokens": 128}}) == [128, 128]
    for field in ("max_tokens", "n_predict"):
        unlimited = await limits(completions, prompt | {field: -1})
        assert unlimited == unlimited[:1] * 2 and unlimited[0] > 200
    messages = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}]}
    for api_format, asked in (
        (chat, messages | {"max_completion_tokens": -2}),
        (responses, {"model": MODEL, "input": "abc", "max_output_tokens": -1}),
        (OLLAMA_CHAT, messages | {"options": {"num_predict": -1}}), (COMPLETION, {"prompt": "abc", "n_predict": -1}),
    ):  # fmt: skip
        unlimited = await limits(api_format, asked)
        assert unlimited == unlimited[:1] * 2 and unlimited[0] > 100


@pytest.mark.parametrize("share", [0, 0.0, 1e-50])
async def test_top_p_of_zero_is_the_least_share_that_keeps_a_token(tokenizer: Tokenizer, share: float) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "abc"}], "top_p": share}
    assert 0 < (await parse(chat, asked, context(tokenizer))).sampling.top_p < 1e-30


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"logit_bias": {"3": 1, "99999": 1}}, "`logit_bias` has the token id 99999, outside 0 to "),
        ({"stop_token_ids": [3, 99999]}, "`stop_token_ids` has the token id 99999, outside 0 to "),
        ({"allowed_token_ids": [99999]}, "`allowed_token_ids` has the token id 99999, outside 0 to "),
        ({"prompt": [3, 99999]}, "`prompt` has the token id 99999, outside 0 to "),
    ],
)
async def test_token_id_outside_the_vocabulary_is_named(
    tokenizer: Tokenizer, fields: dict[str, Any], problem: str
) -> None:
    with pytest.raises(Unprocessable) as refused:
        await parsed(tokenizer, body(**fields))
    assert refused.value.message.startswith(problem) and refused.value.param == next(iter(fields))


async def test_bad_word_outside_the_vocabulary_is_named(tokenizer: Tokenizer) -> None:
    """A tokenizer may have more ids than the model, and a word may need one of them."""
    small = replace(context(tokenizer), vocab_size=max(tokenizer.encode_now(["a"], False)[0]) + 1)
    with pytest.raises(Unprocessable, match=r"`bad_words\[1\]` has the token id") as refused:
        await parse(completions, body(prompt=[1], bad_words=["a", "zebra"]), small)
    assert refused.value.param == "bad_words[1]"


REFUSALS = {  # what a worker answers → the field and the beginning of the text that clients get, by route
    "`bad_words` has the token id 7, outside 0 to 5": dict.fromkeys(
        ("/v1/completions", "/v1/chat/completions"), ("bad_words", "`bad_words` has the token id 7")
    ),
    "`prompt` and `max_tokens` are 9 tokens": {
        "/v1/completions": ("prompt", "`prompt` and `max_tokens` are"),
        "/v1/chat/completions": ("messages", "`messages` and `max_tokens` are"),
        "/v1/responses": ("input", "`input` and `max_tokens` are"),
    },
    "the server is odd": {"/v1/completions": (None, "the server is odd")},
}


@pytest.mark.parametrize("told", REFUSALS)
async def test_refusal_of_a_worker_names_the_field_as_the_client_calls_it(tokenizer: Tokenizer, told: str) -> None:
    said = {"messages": [{"role": "user", "content": "a"}]}
    bodies = {"/v1/completions": {"prompt": "a"}, "/v1/chat/completions": said, "/v1/responses": {"input": "a"}}
    for path, (param, text) in REFUSALS[told].items():
        pool = FakePool(refusals={0: rejection_error(m.Rejected(1, m.Refusal.INVALID, told))})
        async with http_client(pool, tokenizer) as http:
            answer = await http.post(path, json={"model": MODEL, **bodies[path]})
        error = answer.json()["error"]
        assert answer.status_code in (400, 422) and (error["param"], error["message"][: len(text)]) == (param, text)
