"""Scores of pairs of texts, in vLLM's format: one text against one or more others, or equally many on both sides.

vLLM has several names for the two sides, and its own tests and clients use all of them.
"""

from collections.abc import Sequence
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
from frontend.schema.base import FieldError, to_json
from frontend.schema.request_fields import Text, doc

NAME, PREFIX, TASKS = "score", "score", relevance.TASKS

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "items", "data_2")


class ScoreRequest(RelevanceFields):
    text_1: Annotated[Text | Texts | None, doc("A text, such as a query; or one for each of `text_2`")] = None
    text_2: Annotated[Text | Texts | None, doc("A text, such as a document, or several")] = None
    queries: Annotated[Text | Texts | None, doc("Another name of `text_1`")] = None
    documents: Annotated[Text | Texts | None, doc("Another name of `text_2`")] = None
    items: Annotated[Text | Texts | None, doc("Another name of `text_2`")] = None
    data_1: Annotated[Text | Texts | None, doc("Another name of `text_1`")] = None
    data_2: Annotated[Text | Texts | None, doc("Another name of `text_2`")] = None

    def __post_init__(self) -> None:
        for names in (FIRST, SECOND):
            self.side(names)

    def side(self, names: Sequence[str]) -> tuple[str, str | list[str]]:
        """Returns the one of these fields that is given, and its texts. Raises FieldError if none is, or several."""
        given = [name for name in names if getattr(self, name) is not None]
        if not given:
            raise FieldError(names[0], "is missing", BadRequest, "missing_field")
        if len(given) > 1:
            raise FieldError(given[1], f"cannot go with `{given[0]}`", code="conflicting_fields")
        return given[0], getattr(self, given[0])


REQUEST = ScoreRequest
status = api_status
error = completions.error


async def parse(request: ScoreRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    (first_name, first_texts), (second_name, second_texts) = request.side(FIRST), request.side(SECOND)
    first, second = _as_list(first_texts), _as_list(second_texts)
    if len(first) not in (1, len(second)):
        raise BadRequest(
            f"`{first_name}` has {len(first)} texts and `{second_name}` has {len(second)}: "
            "the first may have one, or as many",
            param=first_name,
        )
    return await relevance_request(request, Pairs(first, second, first_name, second_name), context)


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
