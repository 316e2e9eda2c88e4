"""Cohere's /v2/rerank: as /v1/rerank, but documents that the model cannot read are cut, as Cohere does by default."""

from frontend.api.pooling.rerank import NAME, PREFIX, REQUEST, TASKS, RerankRequest, complete, error, ranking, status
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]


async def parse(request: RerankRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    return await ranking(request, context, cuts=request.documents is not None)
