"""Vectors in the older format of Cohere, /v1/embed, which its older clients and LangChain's use.

A request is that of /v2/embed. Without `embedding_types` the response has bare vectors instead of an object of forms.
"""

from typing import Literal

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling.cohere import CohereEmbedRequest, CohereVectors, error, parse, status, vectors_of
from frontend.api.pooling.fields import CohereMeta, collect, meta_of
from frontend.schema.base import ResponseModel, to_json

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "cohere embed v1", "embd", ("embed",)
REQUEST = CohereEmbedRequest


class CohereEmbeddingsV1(ResponseModel):
    id: str
    embeddings: list[list[float]] | CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    request: CohereEmbedRequest = context.request.format_data
    bare = request.embedding_types is None
    floats = [vectors.floats(index).tolist() for index in range(len(vectors.packed) if bare else 0)]
    return to_json(
        CohereEmbeddingsV1(
            id=context.id, embeddings=floats if bare else vectors_of(request, vectors), texts=request.listed,
            meta=meta_of(vectors.usage, "1"), response_type="embeddings_floats" if bare else "embeddings_by_type",
        )
    )  # fmt: skip
