"""The JSON types of the responses with vectors or scores."""

from typing import Annotated, Literal, NamedTuple

from msgspec import UNSET, Meta, UnsetType

from frontend.api.openai import response_types as openai
from frontend.api.requests.response_types import Count, ResponseModel
from frontend.request import Usage


class PoolingUsage(ResponseModel):
    prompt_tokens: Count
    total_tokens: Count


class Embedding(ResponseModel):
    object: Literal["embedding"] = "embedding"
    index: Count
    embedding: Annotated[list[float] | str, Meta(description="Numbers, or the base64 of little-endian float32")]


class Embeddings(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[Embedding]
    usage: PoolingUsage


class Score(ResponseModel):
    index: Count
    object: Literal["score"] = "score"
    score: float


class Scores(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[Score]
    usage: PoolingUsage


class ScoredTokens(ResponseModel):
    """A row: arrays with an entry for each token (null for a prompt's first token), or each array's bytes in base64."""

    index: Count
    token_ids: list[Count] | str | UnsetType = UNSET
    token_logprobs: list[float | None] | str
    top_token_ids: list[list[Count] | None] | str | UnsetType = UNSET
    top_logprobs: list[list[float] | None] | str | UnsetType = UNSET


class ScoredTokensList(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Count
    model: str
    data: list[ScoredTokens]
    usage: openai.Usage


class Binary(NamedTuple):
    """A response that is not JSON, with additional headers."""

    data: bytes
    headers: dict[str, str]


class RankedText(ResponseModel):
    text: str


class Ranked(ResponseModel):
    index: Annotated[Count, Meta(description="Of the document in the request")]
    relevance_score: float
    document: RankedText | UnsetType = UNSET


class RankedInput(ResponseModel):
    """An entry of the response to a body with `texts`."""

    index: Annotated[Count, Meta(description="Of the text in the request")]
    score: float
    text: str | UnsetType = UNSET


class Ranking(ResponseModel):
    id: str
    model: str
    results: Annotated[list[Ranked], Meta(description="The most relevant one first")]
    usage: PoolingUsage


def usage_of(usage: Usage) -> PoolingUsage:
    return PoolingUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
