"""The JSON types of responses on llama.cpp's routes."""

import math
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, structs

from frontend.api.receipts import Receipt
from frontend.api.telemetry import LlamaCppProgress, LlamaCppTimings
from frontend.request import TokenLogprob
from frontend.schema.base import ResponseModel
from frontend.schema.responses import Size
from frontend.text.tokenizer import Tokenizer
from shared.messages import SamplerChain, Sampling

StopType = Literal["eos", "word", "limit"]
NO_SLOT = -1  # this server has no fixed slots


class LlamaCppErrorBody(ResponseModel):
    code: Size
    message: str
    type: str
    param: str | UnsetType = UNSET
    n_prompt_tokens: Size | UnsetType = UNSET
    n_ctx: Size | UnsetType = UNSET


class LlamaCppError(ResponseModel):
    error: LlamaCppErrorBody


class LlamaCppAdapter(ResponseModel):
    id: Size
    path: str
    scale: float


class LlamaCppBias(ResponseModel):
    token: Size
    bias: Annotated[float | None, Meta(description="null: the token never comes")]


class LlamaCppSettings(ResponseModel):
    """How an answer was made. `samplers` lists the samplers that had an effect, in their order."""

    n_ctx: Size
    seed: Annotated[int, Meta(description="-1: a random one")]
    temperature: float
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: Size
    top_p: float
    min_p: float
    top_n_sigma: float = -1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    typical_p: float = 1.0
    repeat_last_n: int = -1
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: Size = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str]
    mirostat: Size = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    adaptive_target: float = -1.0
    adaptive_decay: float = 0.9
    stop: list[str]
    max_tokens: int
    n_predict: int
    n_keep: int = 0
    ignore_eos: bool
    stream: bool
    logit_bias: list[LlamaCppBias]
    n_probs: Size
    min_keep: Size = 0
    grammar: str
    samplers: list[str]
    timings_per_token: bool
    post_sampling_probs: bool
    lora: list[LlamaCppAdapter] = msgspec.field(default_factory=list)


class LlamaCppTopToken(ResponseModel):
    """A token with its log-probability or, after the samplers, its probability."""

    id: Size
    token: str
    bytes: list[Size]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class LlamaCppProbability(LlamaCppTopToken):
    top_logprobs: list[LlamaCppTopToken] | UnsetType = UNSET
    top_probs: list[LlamaCppTopToken] | UnsetType = UNSET


class LlamaCppPart(ResponseModel):
    """An event of a stream that is not the last event of an answer."""

    index: Size
    content: str
    tokens: list[Size]
    stop: Literal[False] = False
    id_slot: int = NO_SLOT
    tokens_predicted: Size
    tokens_evaluated: Size
    completion_probabilities: list[LlamaCppProbability] | UnsetType = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    prompt_progress: LlamaCppProgress | UnsetType = UNSET


class LlamaCppCompletion(ResponseModel):
    """A whole answer, or the last event of a stream, which has no content. `response_fields` selects some fields."""

    index: Size
    content: str
    tokens: list[Size]
    id_slot: int = NO_SLOT
    stop: Literal[True] = True
    model: str
    tokens_predicted: Size
    tokens_evaluated: Size
    generation_settings: LlamaCppSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: Size
    timings: LlamaCppTimings
    completion_probabilities: list[LlamaCppProbability] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class LlamaCppPrompt(ResponseModel):
    prompt: str


class LlamaCppEmbedding(ResponseModel):
    index: Size
    embedding: Annotated[
        list[list[float]] | str, Meta(description="One vector, or one for each token; or their base64")
    ]


class LlamaCppDefaults(ResponseModel):
    id: Size = 0
    n_ctx: Size
    speculative: bool = False
    is_processing: bool = False
    params: LlamaCppSettings


class LlamaCppProps(ResponseModel):
    default_generation_settings: LlamaCppDefaults
    total_slots: Annotated[Size, Meta(description="Sequences that can run at once")]
    model_alias: str
    model_path: str
    modalities: dict[str, bool]
    chat_template: str
    bos_token: str
    eos_token: str
    build_info: str
    endpoint_slots: bool = True
    endpoint_props: bool = False
    endpoint_metrics: bool = True
    is_sleeping: bool = False


class LlamaCppNextToken(ResponseModel):
    n_decoded: Size


class LlamaCppSlot(ResponseModel):
    id: Size
    n_ctx: Size
    speculative: bool = False
    is_processing: bool
    n_prompt_tokens: Size | UnsetType = UNSET
    next_token: LlamaCppNextToken | UnsetType = UNSET


# The probabilities of an answer's tokens: the model's or, with `post_sampling_probs`, those after the samplers.
#
# The worker reports log-probabilities from before penalties, biases and samplers, for the likeliest tokens only.
# Without penalties, rules about tokens and further samplers, and with a small `top_k`, this module applies the
# samplers to them. Otherwise the request asks the worker for the log-probabilities after a chain of samplers. At
# temperature 0, the drawn token always has the probability 1.

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
) -> list[LlamaCppProbability]:
    """Returns the response's entry for each token. after: whether entries have the probabilities after the samplers"""
    return [_after(one, wanted, sampling, tokenizer) if after else _before(one, wanted, tokenizer) for one in tokens]


def _before(token: TokenLogprob, wanted: int, tokenizer: Tokenizer) -> LlamaCppProbability:
    top = [LlamaCppTopToken(**_named(id, tokenizer), logprob=_finite(value)) for id, value in token.top[:wanted]]
    return LlamaCppProbability(**_named(token.token_id, tokenizer), logprob=_finite(token.logprob), top_logprobs=top)


def _after(token: TokenLogprob, wanted: int, sampling: Sampling, tokenizer: Tokenizer) -> LlamaCppProbability:
    drawn = sampled(token, sampling)
    top = [LlamaCppTopToken(**_named(id, tokenizer), prob=share) for id, share in drawn[:wanted]]
    prob = dict(drawn).get(token.token_id, math.exp(min(0.0, token.logprob)))
    return LlamaCppProbability(**_named(token.token_id, tokenizer), prob=prob, top_probs=top)


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
