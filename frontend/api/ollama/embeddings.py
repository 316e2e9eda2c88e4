"""Ollama's older /api/embeddings: the vector of one text."""

from typing import Annotated, ClassVar

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.ollama import types
from frontend.api.ollama.output import check_model, error, status
from frontend.api.ollama.types import KeepAlive, OllamaModelName
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import Cut, PoolingFields, collect
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.base import Names, RequestModel, to_json
from frontend.schema.request_fields import doc

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "ollama embeddings", "embed", ("embed",)


class OneEmbeddingRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("options",)

    model: OllamaModelName
    prompt: Annotated[str, doc("The text; an empty one loads the model")]
    keep_alive: KeepAlive = None


REQUEST = OneEmbeddingRequest


async def parse(request: OneEmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vector. Raises NotFound, BadRequest or Unprocessable."""
    check_model(request.model, context)
    texts = [request.prompt] if request.prompt else []
    return await embedding_request(PoolingFields(), texts, context, param="prompt", cut=Cut())


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    return to_json(types.OllamaEmbedding(embedding=vectors.floats(0).tolist() if vectors.packed else []))
