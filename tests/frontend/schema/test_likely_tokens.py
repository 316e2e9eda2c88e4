"""The limit on alternatives that are reported for each token, in each format with log-probabilities."""

from types import ModuleType
from typing import Any

import pytest

from frontend.api.llama_cpp.completion import COMPLETION as completion
from frontend.api.openai import chat, completions, responses
from frontend.api.request_builder import MOST, TokenLimits, allowed, check_total
from frontend.errors import Unprocessable
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from shared.config.frontend import FrontendConfig
from tests.fakes import context
from tests.frontend.api.harness import parse

USER = [{"role": "user", "content": "hi"}]
COUNTED: list[tuple[ModuleType, dict[str, Any], str]] = [
    (completions, {"prompt": "ab"}, "logprobs"),
    (completions, {"prompt": "ab"}, "prompt_logprobs"),
    (chat, {"messages": USER, "logprobs": True}, "top_logprobs"),
    (chat, {"messages": USER}, "prompt_logprobs"),
    (responses, {"input": "hi"}, "top_logprobs"),
    (completion, {"prompt": "ab"}, "n_probs"),
]


async def parsed(tokenizer: Tokenizer, format: ModuleType, body: dict[str, Any], most: int) -> GenerationRequest:
    limit = "max_output_tokens" if format is responses else "max_tokens"
    made = context(tokenizer, config=FrontendConfig(max_logprobs=most))
    return await parse(format, {limit: 2} | body, made)


@pytest.mark.parametrize(
    ("format", "body", "field"), COUNTED, ids=lambda value: value if isinstance(value, str) else ""
)
async def test_number_up_to_the_flag_arrives_and_one_more_is_refused(
    tokenizer: Tokenizer, format: ModuleType, body: dict[str, Any], field: str
) -> None:
    for most in (0, 20, 33):
        sampling = (await parsed(tokenizer, format, body | {field: most}, most)).sampling
        assert max(sampling.logprobs or 0, sampling.prompt_top) == most
        with pytest.raises(Unprocessable, match=rf"`{field}` must be at most {most}, the server's `--max-logprobs`"):
            await parsed(tokenizer, format, body | {field: most + 1}, most)
    sampling = (await parsed(tokenizer, format, body | {field: 1 << 30}, -1)).sampling
    assert max(sampling.logprobs or 0, sampling.prompt_top) == 269, "no more than there are tokens"


@pytest.mark.parametrize(("format", "body", "field"), COUNTED[:-1], ids=lambda one: one if isinstance(one, str) else "")
async def test_minus_one_is_the_whole_vocabulary_where_the_flag_allows_it(
    tokenizer: Tokenizer, format: ModuleType, body: dict[str, Any], field: str
) -> None:
    for most in (-1, 269):
        sampling = (await parsed(tokenizer, format, body | {field: -1}, most)).sampling
        assert max(sampling.logprobs or 0, sampling.prompt_top) == 269
    with pytest.raises(Unprocessable, match=r"got -1 \(the whole vocabulary, 269 tokens\)") as refused:
        await parsed(tokenizer, format, body | {field: -1}, 268)
    assert refused.value.param == field


@pytest.mark.parametrize(("prompts", "n"), [(974, 1), (48, 20), (1, 128)])
async def test_places_of_a_request_are_counted_together(tokenizer: Tokenizer, prompts: int, n: int) -> None:
    fits = MOST // 269 // (prompts * n)  # the most tokens that an answer may have
    body = {"prompt": [[5, 6]] * prompts, "n": n, "max_tokens": fits, "logprobs": -1}
    assert (await parsed(tokenizer, completions, body, -1)).sampling.logprobs == 269
    over = body | {"max_tokens": fits + 1}
    with pytest.raises(Unprocessable, match=r"`logprobs` of 269 in .* places makes .*: lower `logprobs`"):
        await parsed(tokenizer, completions, over, -1)
    few = over | {"logprobs": 20}
    assert (await parsed(tokenizer, completions, few, -1)).sampling.logprobs == 20, "as OpenAI allows in any place"


async def test_echoed_prompt_counts(tokenizer: Tokenizer) -> None:
    body = {"prompt": [[5] * 40] * 100, "max_tokens": 1, "logprobs": -1}
    assert (await parsed(tokenizer, completions, body, -1)).sampling.logprobs == 269
    with pytest.raises(Unprocessable, match="in 4100 places"):
        await parsed(tokenizer, completions, body | {"echo": True}, -1)
    with pytest.raises(Unprocessable, match="`prompt_logprobs` of 269 in 4000 places"):
        await parsed(tokenizer, completions, body | {"logprobs": None, "prompt_logprobs": -1}, -1)


def test_total_is_exact() -> None:
    check_total(1 << 10, MOST >> 10, "logprobs", False)
    with pytest.raises(Unprocessable, match=f"at most {MOST} in all"):
        check_total(1 << 10, (MOST >> 10) + 1, "logprobs", False)
    assert allowed(-1, "logprobs", TokenLimits(7, 7)) == 7
