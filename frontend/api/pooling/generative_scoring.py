"""/generative_scoring: the probabilities of given tokens after a query and each of several items, in vLLM's format.

https://docs.vllm.ai/en/latest/serving/openai_compatible_server/
"""

import math
from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions, response_types
from frontend.api.pooling.fields import MAX_INPUTS, PoolingFields, check_prompts, check_texts, collect, pooling_request
from frontend.errors import api_status
from frontend.model_context import ModelContext, check_ids, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, Names, ResponseModel, to_json
from frontend.schema.request_fields import MAX_STOP_IDS, Count, doc
from frontend.schema.responses import Size
from shared.messages import Pooling, PoolingKind

NAME, PREFIX, TASKS = "generative scoring", "generative-scoring", ("generate",)

_Token = Annotated[int, EXACT]
_ITEM = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]}


class GenerativeScoringRequest(PoolingFields):
    IGNORED: ClassVar[Names] = (*PoolingFields.IGNORED, "request_id")

    query: Annotated[str | list[_Token], doc("A text, or its token ids")]
    items: Annotated[
        Annotated[
            list[str | list[_Token]],
            Meta(min_length=1, max_length=MAX_INPUTS, extra_json_schema={"items": _ITEM}),
        ],
        doc("Texts, or their token ids, each of which follows the query in a prompt of its own"),
    ]
    label_token_ids: Annotated[
        Annotated[list[Count], Meta(min_length=1, max_length=MAX_STOP_IDS)],
        doc("Token ids; the score of an item is the probability of the first one as the next token"),
    ]
    apply_softmax: Annotated[bool, doc("true: probabilities among these tokens; false: among all tokens")] = True
    item_first: Annotated[bool, doc("true: the query follows the item")] = False
    add_special_tokens: Annotated[bool, doc("Whether the tokenizer adds its own tokens before a prompt")] = True


class ItemScore(ResponseModel):
    index: Size
    object: Literal["score"] = "score"
    score: float


class ItemScores(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[ItemScore]
    usage: response_types.Usage


REQUEST = GenerativeScoringRequest
status = api_status
error = completions.error


async def parse(request: GenerativeScoringRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the probabilities. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    check_ids("label_token_ids", request.label_token_ids, context.vocab_size)
    prompts = await _prompts(request, context)
    check_prompts("items", prompts, context)
    labels = tuple(dict.fromkeys(request.label_token_ids))
    return pooling_request(request, prompts, Pooling(PoolingKind.LOGPROBS, token_ids=labels), context, request)


async def _prompts(request: GenerativeScoringRequest, context: ModelContext) -> list[list[int]]:
    """Returns the ids of the query and of each item together. Both are tokenized alone, as in vLLM."""
    (query,) = await _encoded("query", [request.query], not request.item_first, request, context)
    items = await _encoded("items", request.items, request.item_first, request, context)
    return [item + query if request.item_first else query + item for item in items]


async def _encoded(
    param: str, given: list[str | list[int]], first: bool, request: GenerativeScoringRequest, context: ModelContext
) -> list[list[int]]:
    """Returns the ids of texts. first: whether they begin a prompt, so that the tokenizer's own tokens precede them"""
    texts = [one for one in given if isinstance(one, str)]
    check_texts(param, texts, context)
    tokenizer, special = context.tokenizer, request.add_special_tokens
    encoded = iter(await (tokenizer.encode_batch(texts, special) if first else tokenizer.encode_following(texts)))
    ids = [next(encoded) if isinstance(one, str) else one for one in given]
    for one in ids:
        check_ids(param, one, context.vocab_size)
    return ids


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    request: GenerativeScoringRequest = context.request.format_data
    scores = []
    for index in range(len(context.request.prompts)):
        *logprobs, _ = vectors.floats(index)  # the last number is the likeliest token's id
        # With one label's weight taken as 1, the sum is not 0 when all labels are very unlikely.
        total = math.fsum(math.exp(one - max(logprobs)) for one in logprobs)
        scale = max(logprobs) + math.log(total) if request.apply_softmax else 0.0
        scores.append(math.exp(logprobs[0] - scale))
    usage = vectors.usage
    return to_json(
        ItemScores(
            id=context.id, created=context.created, model=context.request.model,
            data=[ItemScore(index=index, score=score) for index, score in enumerate(scores)],
            usage=response_types.Usage(
                prompt_tokens=usage.prompt_tokens, completion_tokens=0, total_tokens=usage.prompt_tokens,
                prompt_tokens_details=response_types.PromptTokensDetails(cached_tokens=usage.cached_tokens),
            ),
        )
    )  # fmt: skip
