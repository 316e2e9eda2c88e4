"""Probabilities of tokens, before and after sampling."""

import math

import msgspec
import pytest

from frontend.api.llama_cpp.types import LOWEST, MAX_SCORED, needed, reporting, sampled, told
from frontend.request import TokenLogprob
from frontend.text.tokenizer import Tokenizer
from shared.messages import SamplerChain, Sampling

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


def test_worker_reports_what_cannot_be_computed_here() -> None:
    asked = Sampling(1, temperature=0.7, top_p=0.9, min_p=0.1, repetition_penalty=1.5, logit_bias=((1, 1.0),))
    made = reporting(asked)
    assert made.chain == SamplerChain(
        ("temperature", "top_k", "top_p", "min_p"), 0.7, top_p=0.9, min_p=0.1, reports=True
    )
    assert (made.temperature, made.top_p, made.min_p) == (1.0, 1.0, 0.0)
    assert (made.repetition_penalty, made.logit_bias) == (1.5, ((1, 1.0),)), "these come before the chain"
    own = SamplerChain(("xtc", "temperature"), 0.5, xtc_probability=0.5)
    assert reporting(Sampling(1, chain=own)).chain == msgspec.structs.replace(own, reports=True)
    for same in (Sampling(1), Sampling(1, temperature=0.7, top_k=40), Sampling(1, temperature=0.0, min_p=0.1)):
        assert reporting(same) == same
    dropped = TokenLogprob(65, 0.0, ((65, 0.0), (64, -math.inf)))
    assert sampled(dropped, made) == [(65, 1.0)], "a dropped token is not told"


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
def test_worker_computes_what_depends_on_more_than_the_likeliest_tokens(sampling: Sampling) -> None:
    made = reporting(sampling)
    assert made.chain is not None and made.chain.reports and needed(5, True, made) == 5


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
