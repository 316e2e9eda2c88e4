"""Ollama's older /api/embeddings: the vector of one text."""

from typing import Annotated, Any

from frontend.api.model_context import ModelContext
from frontend.api.ollama import response_types as types
from frontend.api.ollama.envelope import check_model, error, status
from frontend.api.ollama.options import OllamaModelName
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import PoolingFields
from frontend.api.pooling.vectors import collect
from frontend.api.requests.encoding import to_json
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Ignored, Text, doc
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.request import GenerationRequest

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "ollama embeddings", "embed", ("embed",)


class OneEmbeddingRequest(RequestModel):
    model: OllamaModelName
    prompt: Annotated[Text, doc("The text")]
    options: Ignored = None
    keep_alive: Annotated[Any, doc("How long the model stays loaded, where there are many")] = None


REQUEST = OneEmbeddingRequest


async def parse(request: OneEmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vector. Raises NotFound, BadRequest or Unprocessable."""
    check_model(request.model, context)
    return await embedding_request(PoolingFields(), [request.prompt], context, param="prompt")


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    return to_json(types.OllamaEmbedding(embedding=vectors.floats(0).tolist()))
