"""Vectors and scores for a Python caller, with the HTTP API's own checks."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from frontend.api.model_context import check_task
from frontend.api.pooling import embeddings, relevance
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.relevance import Pairs, RelevanceFields, relevance_request
from frontend.api.pooling.vectors import Vectors
from frontend.errors import BadRequest
from frontend.offline.contexts import ContextOf
from frontend.offline.inputs import Prompt
from frontend.request import GenerationRequest, Usage

ReadRequest = Callable[[ContextOf], Awaitable[GenerationRequest]]


def embedding_reader(
    prompts: Sequence[Prompt], dimensions: int | None, prompt_name: str | None, adapter: str | None
) -> ReadRequest:
    """Returns a function that makes the request for the prompts' vectors. That function raises SluiceError."""

    async def read(context_of: ContextOf) -> GenerationRequest:
        context = context_of(adapter)
        check_task("`embed`", embeddings.TASKS, context)
        return await embedding_request(
            RelevanceFields(), prompts, context, dimensions=dimensions or 0, prompt_name=prompt_name
        )

    return read


def score_reader(
    text_1: str | Sequence[str], text_2: str | Sequence[str], instruction: str | None, adapter: str | None
) -> ReadRequest:
    """Returns a function that makes the request for the scores of pairs. That function raises SluiceError."""
    first, second = ([text] if isinstance(text, str) else list(text) for text in (text_1, text_2))

    async def read(context_of: ContextOf) -> GenerationRequest:
        context = context_of(adapter)
        check_task("`score`", relevance.TASKS, context)
        if len(first) not in (1, len(second)) or not all([*first, *second]):
            raise BadRequest("`text_1` is one text, or as many as `text_2`; no text may be empty", param="text_1")
        pairs = Pairs(first, second, "text_1", "text_2")
        return await relevance_request(RelevanceFields(instruction=instruction), pairs, context)

    return read


def one_by_one(request: GenerationRequest) -> list[GenerationRequest]:
    """Returns a request for each prompt."""
    return [replace(request, prompts=(ids,)) for ids in request.prompts]


def scores(request: GenerationRequest, packed: list[bytes]) -> list[float]:
    """Computes the scores of a request from the vectors of its prompts."""
    return relevance.scores_of(request, Vectors(packed, Usage(0, 0)))
