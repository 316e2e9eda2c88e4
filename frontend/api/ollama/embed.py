"""Ollama's /api/embed and the older /api/embeddings: the vectors of texts."""

import time
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.ollama import types
from frontend.api.ollama.chat import check_model, error, status
from frontend.api.ollama.types import KeepAlive, OllamaModelName
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import Cut, Format, LongInputs, PoolingFields, collect
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from frontend.schema.base import JsonArray, Names, RequestModel, in_slices, to_json
from frontend.schema.request_fields import Positive, doc

MOST_TEXTS = 16_384  # Ollama has no limit, so its clients send all the texts that they have


@dataclass(frozen=True, slots=True)
class Begun:
    """The data of a request that its response needs."""

    model: str  # the name that the client wrote
    at: float  # when the request was read


class EmbedRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("options",)

    model: OllamaModelName
    input: Annotated[
        str | Annotated[list[str], Meta(max_length=MOST_TEXTS)],
        doc("A text, or several; an empty one alone loads the model"),
    ]
    dimensions: Annotated[Positive | None, doc("Only so many numbers, normalized again; for models trained so")] = None
    truncate: Annotated[
        bool | None,
        doc("A text that is too long is cut at its end; false: it is refused; absent: true, if not `long_inputs`"),
    ] = None
    long_inputs: LongInputs = None
    keep_alive: KeepAlive = None


async def _parse_texts(request: EmbedRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises NotFound, BadRequest or Unprocessable."""
    check_model(request.model, context)
    texts = [request.input] if isinstance(request.input, str) and request.input else list(request.input)
    cuts = request.long_inputs is None if request.truncate is None else request.truncate
    begun = Begun(request.model, time.perf_counter())
    return await embedding_request(
        PoolingFields(), texts, context, dimensions=request.dimensions or 0, format_data=begun,
        cut=Cut() if cuts else None, long=request.long_inputs,
    )  # fmt: skip


async def _complete_texts(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    begun: Begun = context.request.format_data
    written = JsonArray(each=4)
    await in_slices(range(len(vectors.packed)), lambda index: written.append(vectors.floats(index).tolist()))
    embeddings: Any = written.raw
    return to_json(
        types.OllamaEmbeddings(
            model=begun.model,
            embeddings=embeddings,
            total_duration=round((time.perf_counter() - begun.at) * 1e9),
            prompt_eval_count=vectors.usage.prompt_tokens,
        )
    )


EMBED = Format("ollama embed", "embed", ("embed",), EmbedRequest, _parse_texts, _complete_texts, status, error)


# Ollama's older /api/embeddings: the vector of one text.


class OneEmbeddingRequest(RequestModel):
    IGNORED: ClassVar[Names] = ("options",)

    model: OllamaModelName
    prompt: Annotated[str, doc("The text; an empty one loads the model")]
    keep_alive: KeepAlive = None


async def _parse_text(request: OneEmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vector. Raises NotFound, BadRequest or Unprocessable."""
    check_model(request.model, context)
    texts = [request.prompt] if request.prompt else []
    return await embedding_request(PoolingFields(), texts, context, param="prompt", cut=Cut())


async def _complete_text(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    return to_json(types.OllamaEmbedding(embedding=vectors.floats(0).tolist() if vectors.packed else []))


EMBEDDINGS = Format(
    "ollama embeddings", "embed", ("embed",), OneEmbeddingRequest, _parse_text, _complete_text, status, error
)
