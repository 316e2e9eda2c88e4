"""Scores of pairs of texts, in vLLM's format: one text against one or more others, or equally many on both sides."""

from typing import Annotated

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.pooling import fields as types
from frontend.api.pooling import relevance
from frontend.api.pooling.fields import MAX_INPUTS
from frontend.api.pooling.relevance import Pairs, RelevanceFields, relevance_request
from frontend.errors import BadRequest, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import to_json
from frontend.schema.request_fields import Text, doc

NAME, PREFIX, TASKS = "score", "score", relevance.TASKS

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


class ScoreRequest(RelevanceFields):
    text_1: Annotated[Text | Texts, doc("A text, such as a query; or one for each of `text_2`")]
    text_2: Annotated[Text | Texts, doc("A text, such as a document, or several")]


REQUEST = ScoreRequest
status = api_status
error = completions.error


async def parse(request: ScoreRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    first, second = _as_list(request.text_1), _as_list(request.text_2)
    if len(first) not in (1, len(second)):
        raise BadRequest(
            f"`text_1` has {len(first)} texts and `text_2` has {len(second)}: the first may have one, or as many",
            param="text_1",
        )
    pairs = Pairs(first, second, "text_1", "text_2")
    return await relevance_request(request, pairs, context)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    scores, usage = await relevance.scores(context, arriving)
    return to_json(
        types.Scores(
            id=context.id, created=context.created, model=context.request.model,
            data=[types.Score(index=index, score=score) for index, score in enumerate(scores)],
            usage=types.usage_of(usage),
        )
    )  # fmt: skip


def _as_list(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts
