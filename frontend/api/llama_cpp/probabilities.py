"""The probabilities of an answer's tokens: the model's or, with `post_sampling_probs`, those after the samplers.

The worker reports log-probabilities from before penalties, biases and samplers, for the likeliest tokens only. Without
penalties, rules about tokens and further samplers, and with a small `top_k`, this module applies the samplers to them.
Otherwise the request asks the worker for the log-probabilities after a chain of samplers. At temperature 0, the drawn
token always has the probability 1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import structs

from frontend.api.llama_cpp import response_types as types
from frontend.request import TokenLogprob
from frontend.text.tokenizer import Tokenizer
from shared.messages import SamplerChain, Sampling

MAX_SCORED = 128
PLAIN_ORDER = ("temperature", "top_k", "top_p", "min_p")  # in which the samplers of a request without a chain apply
LOWEST = -3.4028234663852886e38  # llama.cpp's value for minus infinity: the lowest float32

Ranked = Sequence[tuple[int, float]]  # (id, log-probability or probability), likeliest first


def needed(wanted: int, after: bool, sampling: Sampling) -> int:
    """Returns how many likeliest tokens the worker must score.

    wanted: how many the response reports
    after: whether it reports the probabilities after the samplers
    sampling: for these, as `reporting` returns it
    """
    computed_here = after and sampling.temperature and not _reports(sampling)
    return max(wanted, sampling.top_k) if computed_here else wanted


def reporting(sampling: Sampling) -> Sampling:
    """Returns the parameters of a request for the probabilities after the samplers.

    If only the worker can compute them, its chain of samplers reports them. The tokens are the same in any case, but
    for differences of rounding: a chain computes in float64.
    """
    adjusted = (
        sampling.penalized or sampling.has_token_rules or sampling.logit_bias or sampling.grammar or sampling.chain
    )
    computed_here = not adjusted and (0 < sampling.top_k <= MAX_SCORED or _is_plain(sampling))
    if computed_here or not sampling.temperature:
        return sampling
    chain = sampling.chain or SamplerChain(
        PLAIN_ORDER, sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, min_p=sampling.min_p
    )
    return structs.replace(
        sampling, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, chain=structs.replace(chain, reports=True)
    )


def _reports(sampling: Sampling) -> bool:
    return sampling.chain is not None and sampling.chain.reports


def _is_plain(sampling: Sampling) -> bool:
    return (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (1.0, 0, 1.0, 0.0)


def told(
    tokens: Iterable[TokenLogprob], wanted: int, after: bool, sampling: Sampling, tokenizer: Tokenizer
) -> list[types.LlamaCppProbability]:
    """Returns the response's entry for each token. after: whether entries have the probabilities after the samplers"""
    return [_after(one, wanted, sampling, tokenizer) if after else _before(one, wanted, tokenizer) for one in tokens]


def _before(token: TokenLogprob, wanted: int, tokenizer: Tokenizer) -> types.LlamaCppProbability:
    top = [types.LlamaCppRival(**_named(id, tokenizer), logprob=_finite(value)) for id, value in token.top[:wanted]]
    return types.LlamaCppProbability(
        **_named(token.token_id, tokenizer), logprob=_finite(token.logprob), top_logprobs=top
    )


def _after(token: TokenLogprob, wanted: int, sampling: Sampling, tokenizer: Tokenizer) -> types.LlamaCppProbability:
    drawn = sampled(token, sampling)
    top = [types.LlamaCppRival(**_named(id, tokenizer), prob=share) for id, share in drawn[:wanted]]
    prob = dict(drawn).get(token.token_id, math.exp(min(0.0, token.logprob)))
    return types.LlamaCppProbability(**_named(token.token_id, tokenizer), prob=prob, top_probs=top)


def sampled(token: TokenLogprob, sampling: Sampling) -> Ranked:
    """Returns the probabilities of the scored tokens after temperature, top-k, top-p and min-p, in this order."""
    if not sampling.temperature:
        others = [id for id, _ in token.top if id != token.token_id]
        return [(token.token_id, 1.0), *[(id, 0.0) for id in others]]
    if _is_plain(sampling):
        return [(id, share) for id, value in token.top if (share := math.exp(value))]
    top = token.top[: sampling.top_k]
    peak = top[0][1]
    weights = [math.exp((value - peak) / sampling.temperature) for _, value in top]
    kept, reached, enough = 0, 0.0, sampling.top_p * sum(weights)
    for weight in weights:
        if (sampling.top_p < 1 and kept and reached >= enough) or weight < sampling.min_p:
            break
        kept, reached = kept + 1, reached + weight
    return [(id, weight / reached) for (id, _), weight in zip(top[:kept], weights, strict=False)]


def _named(id: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the id, its bytes, and its text without incomplete characters."""
    raw = tokenizer.token_text(id).encode() if id in tokenizer.special_ids else tokenizer.token_bytes(id)
    return {"id": id, "token": raw.decode(errors="ignore"), "bytes": list(raw)}


def _finite(logprob: float) -> float:
    return max(LOWEST, logprob) if logprob == logprob else LOWEST
