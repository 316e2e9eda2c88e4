"""Usage and timings of a response with several choices."""

import json

from frontend.api.openai import completions
from frontend.request import Usage
from frontend.text.tokenizer import Tokenizer
from tests.frontend.api.harness import FakeDeltas, last, response_context


async def test_totals_count_cached_tokens_of_several_choices_once(tokenizer: Tokenizer) -> None:
    asked = response_context(tokenizer, prompts=([1, 2], [3]), n=2)
    story = [[last(i, usage=Usage(2, 1, cached))] for i, cached in enumerate([0, 2, 1, 1])]
    usage = json.loads(await completions.complete(asked, FakeDeltas(*story)))["usage"]
    assert usage == {
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
