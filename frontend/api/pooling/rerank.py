"""Sorts documents by their relevance to a query, in the format of Cohere and Jina.

A body with `texts` instead of `documents` is in the format of Text Embeddings Inference, whose response is an array.
https://docs.cohere.com/reference/rerank, https://jina.ai/reranker,
https://huggingface.github.io/text-embeddings-inference
"""

from dataclasses import replace
from typing import Annotated, ClassVar

from msgspec import UNSET, Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.pooling import fields as types
from frontend.api.pooling import relevance
from frontend.api.pooling.fields import MAX_INPUTS, Cut, check_texts
from frontend.api.pooling.relevance import Judged, Pairs, RelevanceFields, in_words, relevance_request
from frontend.api.pooling.tei import Direction, cut_of
from frontend.errors import BadRequest, api_status
from frontend.model_context import ModelContext, check_length, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, Names, RequestModel, to_json
from frontend.schema.request_fields import Count, Positive, Text, doc

NAME, PREFIX, TASKS = "rerank", "rerank", relevance.TASKS


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
        Positive | None,
        doc(
            "A document with more tokens, without the tokenizer's own, is cut at its end, and one that the model "
            "cannot read even so to what it can"
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


REQUEST = RerankRequest
status = api_status
error = completions.error


async def parse(request: RerankRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. Raises BadRequest or Unprocessable, which name the field."""
    return await ranking(request, context, cuts=request.max_tokens_per_doc is not None)


async def ranking(request: RerankRequest, context: ModelContext, *, cuts: bool) -> GenerationRequest:
    """Makes a GenerationRequest for the scores. cuts: whether a document that the model cannot read is cut"""
    check_model(request.model, context)
    bare = request.texts is not None
    documents = [one if isinstance(one, str) else one.text for one in request.texts or request.documents or ()]
    pairs = Pairs([request.query], documents, "query", "texts" if bare else "documents")
    asked, cut = pairs, request.cut
    if request.max_tokens_per_doc is not None:
        check_texts(pairs.second_field, documents, context.unlimited)
        asked = replace(pairs, second=await context.tokenizer.beginnings(documents, request.max_tokens_per_doc))
    if cut is None and cuts:
        cut = await _cut_of_documents(request, context)
    scored = await relevance_request(request, asked, context, cut)
    shown = request.return_text if bare else request.return_documents
    raw = request.raw_scores or request.use_activation is False
    judged = Judged(pairs, request.top_n or len(documents), shown, bare, raw)
    return replace(scored, format_data=judged)


async def _cut_of_documents(request: RerankRequest, context: ModelContext) -> Cut | None:
    """Returns how to cut documents that do not fit together with the query; None if nothing is cut (`in_words`).

    Raises ContextLengthExceeded for a query that does not fit alone.
    """
    if in_words(context):
        return None
    check_texts("query", [request.query], context)
    (query,) = await context.tokenizer.encode_batch([request.query], True)
    check_length("query", len(query), 0, context)
    return Cut(param="max_tokens_per_doc")


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
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
