"""The JSON types of responses on llama.cpp's routes."""

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from frontend.api.receipts.receipt import Receipt
from frontend.api.requests.response_types import Count, ResponseModel
from frontend.api.requests.telemetry import LlamaCppProgress, LlamaCppTimings

StopType = Literal["eos", "word", "limit"]
NO_SLOT = -1  # this server has no fixed slots


class LlamaCppErrorBody(ResponseModel):
    code: Count
    message: str
    type: str
    param: str | UnsetType = UNSET
    n_prompt_tokens: Count | UnsetType = UNSET
    n_ctx: Count | UnsetType = UNSET


class LlamaCppError(ResponseModel):
    error: LlamaCppErrorBody


class LlamaCppAdapter(ResponseModel):
    id: Count
    path: str
    scale: float


class LlamaCppBias(ResponseModel):
    token: Count
    bias: Annotated[float | None, Meta(description="null: the token never comes")]


class LlamaCppSettings(ResponseModel):
    """How an answer was made. `samplers` lists the samplers that had an effect, in their order."""

    n_ctx: Count
    seed: Annotated[int, Meta(description="-1: a random one")]
    temperature: float
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    top_k: Count
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
    dry_allowed_length: Count = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str]
    mirostat: Count = 0
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
    n_probs: Count
    min_keep: Count = 0
    grammar: str
    samplers: list[str]
    timings_per_token: bool
    post_sampling_probs: bool
    lora: list[LlamaCppAdapter] = msgspec.field(default_factory=list)


class LlamaCppRival(ResponseModel):
    """A token with its log-probability or, after the samplers, its probability."""

    id: Count
    token: str
    bytes: list[Count]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class LlamaCppProbability(LlamaCppRival):
    top_logprobs: list[LlamaCppRival] | UnsetType = UNSET
    top_probs: list[LlamaCppRival] | UnsetType = UNSET


class LlamaCppPart(ResponseModel):
    """An event of a stream that is not the last event of an answer."""

    index: Count
    content: str
    tokens: list[Count]
    stop: Literal[False] = False
    id_slot: int = NO_SLOT
    tokens_predicted: Count
    tokens_evaluated: Count
    completion_probabilities: list[LlamaCppProbability] | UnsetType = UNSET
    timings: LlamaCppTimings | UnsetType = UNSET
    prompt_progress: LlamaCppProgress | UnsetType = UNSET


class LlamaCppCompletion(ResponseModel):
    """A whole answer, or the last event of a stream, which has no content. `response_fields` selects some fields."""

    index: Count
    content: str
    tokens: list[Count]
    id_slot: int = NO_SLOT
    stop: Literal[True] = True
    model: str
    tokens_predicted: Count
    tokens_evaluated: Count
    generation_settings: LlamaCppSettings
    prompt: str
    has_new_line: bool
    truncated: bool
    stop_type: StopType
    stopping_word: str
    tokens_cached: Count
    timings: LlamaCppTimings
    completion_probabilities: list[LlamaCppProbability] | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class LlamaCppPrompt(ResponseModel):
    prompt: str


class LlamaCppEmbedding(ResponseModel):
    index: Count
    embedding: Annotated[list[list[float]] | str, Meta(description="One vector, in a list; or in base64")]


class LlamaCppDefaults(ResponseModel):
    id: Count = 0
    n_ctx: Count
    speculative: bool = False
    is_processing: bool = False
    params: LlamaCppSettings


class LlamaCppProps(ResponseModel):
    default_generation_settings: LlamaCppDefaults
    total_slots: Annotated[Count, Meta(description="Sequences that can run at once")]
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
    n_decoded: Count


class LlamaCppSlot(ResponseModel):
    id: Count
    n_ctx: Count
    speculative: bool = False
    is_processing: bool
    n_prompt_tokens: Count | UnsetType = UNSET
    next_token: LlamaCppNextToken | UnsetType = UNSET
