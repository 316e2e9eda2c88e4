"""The relevance of one text to another, as a number. /v1/score and /v1/rerank share this.

The server's task decides how it is computed. An embedding model gives the cosine of two vectors. A classification head
gives the sigmoid of its logit for both texts, encoded as a pair. Any other model gets a question in words, and gives
the probability of "yes" against "no" as the next token. The question is that of Qwen3-Reranker:
https://huggingface.co/Qwen/Qwen3-Reranker-0.6B
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import (
    Cut,
    CutFields,
    Prompt,
    Vectors,
    check_prompts,
    check_seconds,
    check_texts,
    collect,
    only_without,
    pooling_request,
)
from frontend.chat.prompt import encode_pairs, encode_texts
from frontend.errors import Unprocessable
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest, Usage
from frontend.schema.request_fields import Count, Text, doc
from shared.messages import Pooling, PoolingKind

TASKS = ("embed", "score")
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
QUESTION = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class RelevanceFields(CutFields):
    ONLY: ClassVar = only_without("use_activation")

    use_activation: Annotated[
        bool | None, doc("false: scores are a classification head's logits; true or absent: between 0 and 1")
    ] = None
    instruction: Annotated[Text | None, doc("What makes a document relevant, for models that are asked")] = None
    max_tokens_per_query: Annotated[
        Count | None, doc("A query with more tokens, without the tokenizer's own, is cut at its end; 0: it is not")
    ] = None
    max_tokens_per_doc: Annotated[
        Count | None, doc("A document with more tokens, without the tokenizer's own, is cut at its end; 0: it is not")
    ] = None


@dataclass(frozen=True, slots=True)
class Pairs:
    """The pairs of texts of a request. first: one text for all of `second`, or as many texts as `second` has"""

    first: Sequence[str]
    second: Sequence[str]
    first_field: str
    second_field: str

    def __iter__(self) -> "zip[tuple[str, str]]":
        first = [*self.first] * len(self.second) if len(self.first) == 1 else self.first
        return zip(first, self.second, strict=True)


@dataclass(frozen=True, slots=True)
class Judged:
    """The data of a request that its response needs. All fields except `pairs` are options of /v1/rerank."""

    pairs: Pairs
    top: int = 0  # how many of the most relevant documents to report; 0: all
    shown: bool = False  # whether the response repeats the documents' texts
    bare: bool = False  # whether the response is an array instead of an object
    raw: bool = False  # whether scores are logits of a classification head


def in_words(context: ModelContext) -> bool:
    """Whether the model is asked a question in words, which is not cut."""
    return context.task.name == "score" and not context.task.labels


async def shortened(fields: RelevanceFields, pairs: Pairs, context: ModelContext) -> Pairs:
    """Returns the pairs with each text cut to as many tokens as `fields` leave it. Raises Unprocessable."""
    return replace(
        pairs,
        first=await _beginnings(pairs.first_field, pairs.first, fields.max_tokens_per_query or 0, context),
        second=await _beginnings(pairs.second_field, pairs.second, fields.max_tokens_per_doc or 0, context),
    )


async def _beginnings(param: str, texts: Sequence[str], most: int, context: ModelContext) -> Sequence[str]:
    """Returns the beginnings of texts, of at most so many tokens; 0: the texts. param: the field with the texts"""
    if not most:
        return texts
    check_texts(param, texts, context.unlimited)
    return await context.tokenizer.beginnings(texts, most)


async def relevance_request(
    fields: RelevanceFields, pairs: Pairs, context: ModelContext, cut: Cut | None = None
) -> GenerationRequest:
    """Makes the request whose vectors or logits `scores` turns into one score per pair. Raises Unprocessable.

    cut: how texts that are too long are cut; None: as `fields` say
    """
    task, asked = context.task, in_words(context)
    if fields.instruction is not None and not asked:
        raise Unprocessable(
            "`instruction`: this model is not asked in words, so it takes no instruction",
            param="instruction",
            code="unsupported_field",
        )
    if fields.use_activation is False and (asked or task.name == "embed"):
        raise Unprocessable(
            "`use_activation`: only scores of a classification head have logits", param="use_activation",
            code="unsupported_field",
        )  # fmt: skip
    raw = fields.use_activation is False
    cut = cut or fields.cut
    if task.name == "embed":
        texts = [*pairs.first, *pairs.second]
        return await embedding_request(
            fields, texts, context, param=pairs.second_field, format_data=Judged(pairs), cut=cut
        )
    if cut is not None and asked:
        raise Unprocessable(
            f"`{cut.param}`: this model is asked in words, and a question is not cut", param=cut.param,
            code="unsupported_field",
        )  # fmt: skip
    measured = context if cut is None else context.unlimited
    check_texts(pairs.first_field, pairs.first, measured)
    check_texts(pairs.second_field, pairs.second, measured)
    ids: tuple[int, ...]
    seconds: Sequence[int] = ()
    if asked:
        prompts = await _questions(pairs, fields.instruction or INSTRUCTION, context)
        ids = context.tokenizer.yes_no
    elif task.labels > 1:
        raise Unprocessable(
            f"this model tells {task.labels} labels apart, so it gives no single score; /v1/classify has its labels",
            param="model",
            code="unsupported_field",
        )
    else:
        prompts, seconds = await pair_prompts(list(pairs), context)
        if cut is not None:
            places = seconds or [0] * len(prompts)
            prompts = [cut(ids, context, second=place) for ids, place in zip(prompts, places, strict=True)]
        ids = tuple(range(task.labels))
    check_prompts(pairs.second_field, prompts, context)
    check_seconds(pairs.first_field, prompts, seconds, context)
    pooling = Pooling(PoolingKind.LOGITS, token_ids=ids)
    return pooling_request(fields, prompts, pooling, context, Judged(pairs, raw=raw), seconds)


async def pair_prompts(pairs: Sequence[tuple[str, str]], context: ModelContext) -> tuple[list[Prompt], Sequence[int]]:
    """Returns the ids of each pair, and for an encoder where its second text begins."""
    if not context.task.encoder:
        return await encode_texts(pairs, True, context), ()
    if context.task.lower:
        pairs = [(first.lower(), second.lower()) for first, second in pairs]
    found = await encode_pairs(pairs, context)
    return [ids for ids, _ in found], [second for _, second in found]


async def _questions(pairs: Pairs, instruction: str, context: ModelContext) -> list[Prompt]:
    questions = [QUESTION.format(instruction=instruction, query=first, document=second) for first, second in pairs]
    before, after = await context.tokenizer.encode_batch([BEFORE, AFTER], False)
    between = await encode_texts(questions, False, context)
    return [before + ids + after for ids in between]


async def scores(context: ResponseContext, arriving: AsyncDeltas) -> tuple[list[float], Usage]:
    """Waits for the vectors or logits of a request, and returns one score per pair."""
    vectors = await collect(context, arriving)
    return scores_of(context.request, vectors), vectors.usage


def scores_of(request: GenerationRequest, vectors: Vectors) -> list[float]:
    """Returns one score per pair of a request."""
    pooling = request.features.pooling
    if pooling is not None and pooling.kind is PoolingKind.LOGITS:
        judge = request.format_data
        raw = isinstance(judge, Judged) and judge.raw
        found = [vectors.floats(index) for index in range(len(vectors.packed))]
        return [one[0] if raw and len(one) == 1 else _probability(one) for one in found]
    judged: Judged = request.format_data
    pairs = judged.pairs
    first = len(pairs.first)
    return [vectors.cosine(0 if first == 1 else index, first + index) for index in range(len(pairs.second))]


def _probability(logits: Sequence[float]) -> float:
    """Returns the softmax of the first of two logits, or the sigmoid of a single logit."""
    yes, no = (*logits, 0.0)[:2]
    return 1 / (1 + math.exp(no - yes)) if no - yes < 700 else 0.0
