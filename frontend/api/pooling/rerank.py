"""Sorts documents by their relevance to a query, in the format of Cohere and Jina, and scores pairs of texts.

A body with `texts` instead of `documents` is in the format of Text Embeddings Inference, whose response is an array.
https://docs.cohere.com/reference/rerank, https://jina.ai/reranker,
https://huggingface.github.io/text-embeddings-inference
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.pooling import fields as types
from frontend.api.pooling import relevance
from frontend.api.pooling.fields import MAX_INPUTS, Cut, Format, check_texts
from frontend.api.pooling.relevance import Judged, Pairs, RelevanceFields, in_words, relevance_request, shortened
from frontend.api.pooling.tei import Direction, cut_of
from frontend.errors import BadRequest, api_status
from frontend.model_context import ModelContext, check_length, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, Names, RequestModel, to_json
from frontend.schema.request_fields import Count, Text, doc


class Document(RequestModel):
    text: Text


_MANY = Meta(min_length=1, max_length=MAX_INPUTS)


class RerankRequest(RelevanceFields):
    REFUSED: ClassVar[Names] = ("max_chunks_per_doc", "rank_fields")

    truncate: Annotated[bool | None, doc("TEI's switch: true: a text that is too long is cut")] = None
    truncation_direction: Direction = "right"
    raw_scores: Annotated[bool, doc("Whether scores are logits, with a classification head")] = False
    query: Annotated[Text, doc("What the documents are compared with")]
    documents: Annotated[
        Annotated[list[Text | Document], _MANY] | None,
        doc("Texts, or objects with a text"),
    ] = None
    texts: Annotated[
        Annotated[list[Text], _MANY] | None,
        doc("TEI's name of `documents`; the answer is an array of `index` and `score`"),
    ] = None
    return_text: Annotated[bool, doc("Whether an answer to `texts` has them")] = False
    top_n: Annotated[Count | None, doc("Only so many of the most relevant documents; 0: all")] = None
    return_documents: Annotated[bool, doc("Whether the answer has the documents' texts")] = True
    max_tokens_per_doc: Annotated[
        Count | None,
        doc(
            "A document with more tokens, without the tokenizer's own, is cut at its end, and one that the model "
            "cannot read even so to what it can; 0: it is not"
        ),
    ] = None

    @property
    def cut(self) -> Cut | None:
        """How texts that are too long are cut; None: they are refused."""
        return self.stated_cut or cut_of(self.truncate, self.truncation_direction)

    def __post_init__(self) -> None:
        if self.documents is None and self.texts is None:
            raise FieldError("documents", "is missing", BadRequest, "missing_field")
        if self.documents is not None and self.texts is not None:
            raise FieldError("texts", "cannot go with `documents`", code="conflicting_fields")


async def _parse_rerank(request: RerankRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    return await ranking(request, context, cuts=bool(request.max_tokens_per_doc))


async def _parse_cohere(request: RerankRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    return await ranking(request, context, cuts=request.documents is not None)


async def ranking(request: RerankRequest, context: ModelContext, *, cuts: bool) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. cuts: whether a document that the model cannot read is cut"""
    check_model(request.model, context)
    bare = request.texts is not None
    documents = [one if isinstance(one, str) else one.text for one in request.texts or request.documents or ()]
    pairs = Pairs([request.query], documents, "query", "texts" if bare else "documents")
    asked, cut = await shortened(request, pairs, context), request.cut
    if cut is None and cuts:
        cut = await _cut_of_documents(asked.first, context)
    scored = await relevance_request(request, asked, context, cut)
    shown = request.return_text if bare else request.return_documents
    raw = request.raw_scores or request.use_activation is False
    judged = Judged(pairs, request.top_n or len(documents), shown, bare, raw)
    return replace(scored, format_data=judged)


async def _cut_of_documents(queries: Sequence[str], context: ModelContext) -> Cut | None:
    """Returns how to cut documents that do not fit together with the query; None if nothing is cut (`in_words`).

    Raises ContextLengthExceeded for a query that does not fit alone.
    """
    if in_words(context):
        return None
    check_texts("query", queries, context)
    (query,) = await context.tokenizer.encode_batch(queries, True)
    check_length("query", len(query), 0, context)
    return Cut(param="max_tokens_per_doc")


async def _complete_rerank(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    scores, usage = await relevance.scores(context, arriving)
    judged: Judged = context.request.format_data
    documents = judged.pairs.second
    order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
    if judged.bare:
        return to_json(
            [
                types.RankedInput(index=index, score=scores[index], text=documents[index] if judged.shown else UNSET)
                for index in order[: judged.top]
            ]
        )
    results = [
        types.Ranked(
            index=index,
            relevance_score=scores[index],
            document=types.RankedText(text=documents[index]) if judged.shown else UNSET,
        )
        for index in order[: judged.top]
    ]
    return to_json(
        types.Ranking(
            id=context.id, model=context.request.model, results=results, usage=types.usage_of(usage),
            meta=types.meta_of(usage, "2"),
        )
    )  # fmt: skip


RERANK = Format(
    "rerank", "rerank", relevance.TASKS, RerankRequest, _parse_rerank, _complete_rerank, api_status, completions.error
)
# Cohere's /v2/rerank: documents that the model cannot read are cut, as Cohere does by default.
COHERE_V2 = replace(RERANK, parse=_parse_cohere)


# Scores of pairs of texts, in vLLM's format: one text against one or more others, or equally many on both sides.
#
# vLLM has several names for the two sides, and its own tests and clients use all of them.

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


FIRST = ("text_1", "queries", "data_1")
SECOND = ("text_2", "documents", "items", "data_2")


class ScoreRequest(RelevanceFields):
    REFUSED: ClassVar[Names] = ("label_token_ids",)  # by which SGLang's requests ask for probabilities of tokens

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


async def _parse_score(request: ScoreRequest, context: ModelContext) -> GenerationRequest:
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
    pairs = await shortened(request, Pairs(first, second, first_name, second_name), context)
    return await relevance_request(request, pairs, context)


async def _complete_score(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
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


SCORE = Format(
    "score", "score", relevance.TASKS, ScoreRequest, _parse_score, _complete_score, api_status, completions.error
)
