"""The probabilities of an answer's tokens: the model's or, with `post_sampling_probs`, those after the samplers.

The worker reports log-probabilities from before penalties, biases and samplers, for the likeliest tokens only. This
module applies the samplers to them. That is possible only without penalties and rules about tokens, and with a small
`top_k`. At temperature 0, the drawn token always has the probability 1.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from frontend.api.llama_cpp import response_types as types
from frontend.errors import Unprocessable
from frontend.request import TokenLogprob
from frontend.text.tokenizer import Tokenizer
from shared.messages import Sampling

MAX_SCORED = 128
LOWEST = -3.4028234663852886e38  # llama.cpp's value for minus infinity: the lowest float32

Ranked = Sequence[tuple[int, float]]  # (id, log-probability or probability), likeliest first


def needed(wanted: int, after: bool, sampling: Sampling) -> int:
    """Returns how many likeliest tokens the worker must score.

    wanted: how many the response reports
    after: whether it reports the probabilities after the samplers

    Raises Unprocessable if the probabilities after the samplers cannot be computed.
    """
    if not after or not sampling.temperature:
        return wanted
    adjusted = (
        sampling.penalized or sampling.has_token_rules or sampling.logit_bias or sampling.grammar or sampling.chain
    )
    if not adjusted and 0 < sampling.top_k <= MAX_SCORED:
        return max(wanted, sampling.top_k)
    if not adjusted and _is_plain(sampling):
        return wanted
    raise Unprocessable(
        "`post_sampling_probs` needs `temperature` 0 or, without penalties, biases, grammars and further samplers, "
        f"`top_k` from 1 to {MAX_SCORED} or only a temperature of 1",
        param="post_sampling_probs", code="unsupported_field",
    )  # fmt: skip


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
        return [(id, math.exp(value)) for id, value in token.top]
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
