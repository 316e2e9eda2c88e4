"""Token ids and the prompt's log-probabilities in answers, in vLLM's shapes."""

import json
import math

from frontend.api.openai import completions
from frontend.api.openai.chunk_writer import prompt_logprobs
from frontend.request import Extras, TokenLogprob
from frontend.schema.base import to_json
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling
from tests.frontend.api.harness import FakeDeltas, last, response_context


async def test_prompt_logprobs_have_the_token_and_the_likeliest_ones(tokenizer: Tokenizer) -> None:
    scores = [
        TokenLogprob(97, math.nan),
        TokenLogprob(98, -0.5, ((98, -0.5), (99, -2.0)), 1),
        TokenLogprob(100, -math.inf, ((98, -0.5), (99, -2.0)), 269),
    ]
    encoded = await prompt_logprobs(response_context(tokenizer), last(added=Extras(prompt_logprobs=scores)))
    told = json.loads(to_json(encoded))
    assert told[0] is None
    shown = [[(int(id), one["logprob"], one["rank"]) for id, one in entry.items()] for entry in told[1:]]
    assert shown == [[(98, -0.5, 1), (99, -2.0, 2)], [(100, -9999.0, 269), (98, -0.5, 1), (99, -2.0, 2)]]
    assert told[1]["98"]["decoded_token"] == tokenizer.token_text(98)


async def test_answer_has_ids_only_if_they_are_asked_for(tokenizer: Tokenizer) -> None:
    for asked in (False, True):
        context = response_context(tokenizer, ids=asked, sampling=Sampling(9))
        (choice,) = json.loads(await completions.complete(context, FakeDeltas([last(ids=(7, 8), texts=("a", "b"))])))[
            "choices"
        ]
        assert (choice.get("token_ids"), choice.get("prompt_token_ids")) == (
            ([7, 8], [1, 2, 3]) if asked else (None, None)
        )
        assert "prompt_logprobs" not in choice
