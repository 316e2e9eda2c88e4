"""Ollama's /api/embed: the vectors of texts."""

import time
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.ollama import types
from frontend.api.ollama.output import check_model, error, status
from frontend.api.ollama.types import KeepAlive, OllamaModelName
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import MAX_INPUTS, Cut, PoolingFields, collect
from frontend.api.pooling.segments import LongInputs
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.base import Names, RequestModel, to_json
from frontend.schema.request_fields import Positive, Text, doc

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "ollama embed", "embed", ("embed",)


@dataclass(frozen=True, slots=True)
class Begun:
    """The data of a request that its response needs."""

    model: str  # the name that the client wrote
    at: float  # when the request was read


class EmbedRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("options",)

    model: OllamaModelName
    input: Annotated[Text | Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)], doc("A text, or several")]
    dimensions: Annotated[Positive | None, doc("Only so many numbers, normalized again; for models trained so")] = None
    truncate: Annotated[
        bool | None,
        doc("A text that is too long is cut at its end; false: it is refused; absent: true, if not `long_inputs`"),
    ] = None
    long_inputs: LongInputs = None
    keep_alive: KeepAlive = None


REQUEST = EmbedRequest


async def parse(request: EmbedRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises NotFound, BadRequest or Unprocessable."""
    check_model(request.model, context)
    texts = [request.input] if isinstance(request.input, str) else request.input
    cuts = request.long_inputs is None if request.truncate is None else request.truncate
    begun = Begun(request.model, time.perf_counter())
    return await embedding_request(
        PoolingFields(), texts, context, dimensions=request.dimensions or 0, format_data=begun,
        cut=Cut() if cuts else None, long=request.long_inputs,
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    begun: Begun = context.request.format_data
    return to_json(
        types.OllamaEmbeddings(
            model=begun.model,
            embeddings=[vectors.floats(index).tolist() for index in range(len(vectors.packed))],
            total_duration=round((time.perf_counter() - begun.at) * 1e9),
            prompt_eval_count=vectors.usage.prompt_tokens,
        )
    )
