"""Sampling parameters as a worker receives them."""

from collections.abc import Mapping
from typing import Any

from frontend.api.openai import completions
from frontend.request import GenerationRequest
from frontend.text.tokenizer import Tokenizer
from tests.fakes import MODEL, context
from tests.frontend.api.harness import parse


def body(**more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 8} | more


async def parsed(tokenizer: Tokenizer, fields: Mapping[str, Any]) -> GenerationRequest:
    return await parse(completions, dict(fields), context(tokenizer))


async def test_sampling_number_too_small_for_float32_is_zero(tokenizer: Tokenizer) -> None:
    chosen = (await parsed(tokenizer, body(temperature=1e-50, min_p=1e-310))).sampling
    assert (chosen.temperature, chosen.min_p) == (0.0, 0.0)
    assert (await parsed(tokenizer, body(temperature=1e-30))).sampling.temperature == 1e-30
