"""Probabilities of tokens, before and after sampling."""

import math

import pytest

from frontend.api.llama_cpp.probabilities import LOWEST, MAX_SCORED, needed, sampled, told
from frontend.errors import Unprocessable
from frontend.request import TokenLogprob
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling

SHARES = [(65, 0.5), (64, 0.25), (66, 0.15), (67, 0.1)]
TOKEN = TokenLogprob(64, math.log(0.25), tuple((id, math.log(share)) for id, share in SHARES))


def drawn(**sampling: float) -> list[tuple[int, float]]:
    return [(id, round(share, 6)) for id, share in sampled(TOKEN, Sampling(1, **sampling))]  # type: ignore[arg-type]


def test_only_the_drawn_token_is_likely_at_temperature_0() -> None:
    assert drawn(temperature=0.0) == [(64, 1.0), (65, 0.0), (66, 0.0), (67, 0.0)]


def test_samplers_apply_in_their_order() -> None:
    assert drawn() == SHARES
    assert drawn(top_k=2) == [(65, 0.666667), (64, 0.333333)]
    assert drawn(top_k=4, top_p=0.7) == [(65, 0.666667), (64, 0.333333)]
    assert drawn(top_k=4, min_p=0.3) == [(65, 0.555556), (64, 0.277778), (66, 0.166667)]
    assert drawn(top_k=2, temperature=0.5) == [(65, 0.8), (64, 0.2)]
    assert drawn(top_k=3, top_p=0.0001) == [(65, 1.0)]


def test_worker_scores_what_is_needed() -> None:
    assert needed(5, False, Sampling(1, repetition_penalty=1.5)) == 5
    assert needed(5, True, Sampling(1, temperature=0.0, repetition_penalty=1.5)) == 5
    assert needed(5, True, Sampling(1, temperature=0.7, top_k=40)) == 40
    assert needed(5, True, Sampling(1)) == 5


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(1, temperature=0.7),
        Sampling(1, top_k=MAX_SCORED + 1),
        Sampling(1, top_k=5, repetition_penalty=1.5),
        Sampling(1, top_k=5, logit_bias=((1, 1.0),)),
        Sampling(1, top_k=5, bad_words=((1,),)),
        Sampling(1, top_k=5, grammar="{}"),
    ],
)
def test_what_cannot_be_computed_is_refused(sampling: Sampling) -> None:
    with pytest.raises(Unprocessable, match="`post_sampling_probs`"):
        needed(5, True, sampling)


def test_token_is_told_with_its_text_and_bytes(tokenizer: Tokenizer) -> None:
    (before,) = told([TOKEN], 2, False, Sampling(1), tokenizer)
    assert (before.id, before.token, before.bytes) == (64, "a", [97])
    assert isinstance(before.top_logprobs, list) and [one.id for one in before.top_logprobs] == [65, 64]
    (after,) = told([TOKEN], 2, True, Sampling(1, temperature=0.0), tokenizer)
    assert after.prob == 1.0 and isinstance(after.top_probs, list) and [one.prob for one in after.top_probs] == [1.0, 0]
    never = TokenLogprob(264, -math.inf, ((226, -math.inf),))
    (special,) = told([never], 1, False, Sampling(1), tokenizer)
    assert (special.token, special.logprob) == ("<s>", LOWEST)
    assert isinstance(special.top_logprobs, list) and special.top_logprobs[0].token == ""
    assert special.top_logprobs[0].bytes == list(tokenizer.token_bytes(226))
