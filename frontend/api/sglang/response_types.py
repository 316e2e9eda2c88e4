"""The types of the responses of SGLang's routes."""

from typing import Annotated, Literal

from msgspec import UNSET, Meta, UnsetType

from frontend.api.requests.response_types import Count, ResponseModel

Scored = Annotated[tuple[float | None, Count, str | None], Meta(description="Log-probability, id, text")]


class SglangFinish(ResponseModel):
    type: Literal["stop", "length"]
    matched: Annotated[str | int | UnsetType, Meta(description="The stop text or token id that ended it")] = UNSET
    length: Count | UnsetType = UNSET


class SglangMeta(ResponseModel):
    id: str
    finish_reason: Annotated[SglangFinish | None, Meta(description="null until the answer has ended")]
    prompt_tokens: Count
    completion_tokens: Count
    cached_tokens: Count
    weight_version: Annotated[str, Meta(description="The fingerprint of what decides the answer's bits")]
    seed: Annotated[Count | UnsetType, Meta(description="With it, the same request has the same answer")] = UNSET
    e2e_latency: Annotated[float | UnsetType, Meta(description="Seconds in the worker")] = UNSET
    input_token_logprobs: list[Scored] | UnsetType = UNSET
    output_token_logprobs: list[Scored] | UnsetType = UNSET
    input_top_logprobs: list[list[Scored] | None] | UnsetType = UNSET
    output_top_logprobs: list[list[Scored]] | UnsetType = UNSET


class SglangAnswer(ResponseModel):
    text: str
    output_ids: list[Count]
    meta_info: SglangMeta
    index: Annotated[Count | UnsetType, Meta(description="Of the answer, in streams with several")] = UNSET


class SglangModelInfo(ResponseModel):
    model_path: str
    tokenizer_path: str
    is_generation: bool
    preferred_sampling_params: dict[str, float] | None
    weight_version: str
    has_image_understanding: bool
    has_audio_understanding: Literal[False] = False


class SglangState(ResponseModel):
    last_gen_throughput: Annotated[float, Meta(description="Tokens per second, over the last 10 s")]


class SglangServerInfo(ResponseModel):
    model_path: str
    tokenizer_path: str
    served_model_name: str
    context_length: Annotated[Count | None, Meta(description="null until a worker has reported it")]
    max_running_requests: Annotated[Count, Meta(description="Sequences that can run at once")]
    is_embedding: bool
    version: str
    internal_states: Annotated[list[SglangState], Meta(description="One for each worker")]
