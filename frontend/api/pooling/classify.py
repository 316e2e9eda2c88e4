"""Labels of texts, in vLLM's format: https://docs.vllm.ai/en/latest/models/pooling_models/"""

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling.embeddings import AddSpecialTokens, Input, listed_inputs
from frontend.api.pooling.fields import (
    MAX_INPUTS,
    Cut,
    CutFields,
    PoolingFields,
    PoolingUsage,
    Prompt,
    check_prompts,
    check_seconds,
    check_texts,
    collect,
    only_without,
    pooling_request,
    usage_of,
)
from frontend.api.pooling.relevance import pair_prompts
from frontend.chat.prompt import encode_texts
from frontend.errors import NotSupported, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, ResponseModel, to_json
from frontend.schema.request_fields import doc
from frontend.schema.responses import Size
from shared.checkpoint import Task
from shared.messages import Pooling, PoolingKind

# The labels of texts, by a classification head. /classify, /predict and /pooling share this.
#
# The head gives a logit for each label. Labels that exclude each other have the softmax of their logits; a single
# label, and labels that do not exclude each other (`problem_type` in config.json), have the sigmoid of each.

LABEL_TASKS = ("score",)
Labelled = str | tuple[str, str] | list[int]  # a text, a pair of texts, or token ids


async def label_request(
    fields: PoolingFields, inputs: Sequence[Labelled], context: ModelContext, *, param: str, cut: Cut | None = None,
    format_data: Any = None, special: bool = True,
) -> GenerationRequest:  # fmt: skip
    """Makes a GenerationRequest for the logits of each input. Raises Unprocessable, and NotSupported without a head.

    cut: how an input that is too long is cut; None: it is refused. The second text of a pair is cut.
    special: whether the tokenizer adds its own tokens to a text; it always adds them to a pair
    """
    task = context.task
    if not task.labels:
        raise NotSupported("the model has no classification head", param="model", code="unsupported_field")
    measured = context if cut is None else context.unlimited
    pairs = [one for one in inputs if isinstance(one, tuple)]
    texts = [one for one in inputs if isinstance(one, str)]
    check_texts(param, [*texts, *(text for pair in pairs for text in pair)], measured)
    texts = [text.lower() for text in texts] if task.lower else texts
    encoded_pairs, seconds = await pair_prompts(pairs, context) if pairs else ([], ())
    encoded = iter(await encode_texts(texts, special, context) if texts else [])
    of_pairs, places = iter(encoded_pairs), iter(seconds or [0] * len(pairs))
    prompts: list[Prompt] = []
    second: list[int] = []
    for one in inputs:
        prompts.append(next(of_pairs) if isinstance(one, tuple) else next(encoded) if isinstance(one, str) else one)
        second.append(next(places) if isinstance(one, tuple) else 0)
    if cut is not None:
        around = [isinstance(one, tuple) or (isinstance(one, str) and special) for one in inputs]
        prompts = [
            cut(ids, context, around=own, second=place) for ids, own, place in zip(prompts, around, second, strict=True)
        ]
    check_prompts(param, prompts, context)
    check_seconds(param, prompts, second, context)
    pooling = Pooling(PoolingKind.LOGITS, token_ids=tuple(range(task.labels)))
    return pooling_request(fields, prompts, pooling, context, format_data, second)


def activated(logits: Sequence[float], task: Task) -> list[float]:
    """Returns the probabilities of the labels."""
    if task.multi_label or len(logits) == 1:
        return [sigmoid(logit) for logit in logits]
    most = max(logits)
    shares = [math.exp(logit - most) for logit in logits]
    total = sum(shares)
    return [share / total for share in shares]


def sigmoid(logit: float) -> float:
    return 1 / (1 + math.exp(-logit)) if logit > -700 else 0.0


def named(task: Task, index: int) -> str:
    """Returns the name of a label."""
    return task.label_names[index] if index < len(task.label_names) else f"LABEL_{index}"


NAME, PREFIX, TASKS = "classify", "classify", LABEL_TASKS
_Token = Annotated[int, EXACT]


class ClassifyRequest(CutFields):
    ONLY: ClassVar = only_without("use_activation")

    input: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_INPUTS)),
    ]
    use_activation: Annotated[bool, doc("false: `probs` are the head's logits")] = True
    add_special_tokens: AddSpecialTokens = True

    def __post_init__(self) -> None:
        listed_inputs(self.input)

    @property
    def inputs(self) -> list[Input]:
        """The inputs as a list, even if the body has a single one."""
        return listed_inputs(self.input)


class Classified(ResponseModel):
    index: Size
    label: Annotated[str, Meta(description="The name of the most probable label")]
    probs: Annotated[list[float], Meta(description="One for each label")]
    num_classes: Size


class Classification(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[Classified]
    usage: PoolingUsage


REQUEST = ClassifyRequest
status = api_status
error = completions.error


async def parse(request: ClassifyRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the labels. Raises BadRequest, Unprocessable or NotSupported."""
    check_model(request.model, context)
    return await label_request(
        request, request.inputs, context, param="input", cut=request.cut, format_data=request.use_activation,
        special=request.add_special_tokens,
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors, task = await collect(context, arriving), context.tokenizer.task
    data: list[Any] = []
    for index in range(len(vectors.packed)):
        logits = vectors.floats(index).tolist()
        probs = activated(logits, task) if context.request.format_data else logits
        best = max(range(len(logits)), key=logits.__getitem__)
        data.append(Classified(index=index, label=named(task, best), probs=probs, num_classes=len(logits)))
    return to_json(
        Classification(
            id=context.id,
            created=context.created,
            model=context.request.model,
            data=data,
            usage=usage_of(vectors.usage),
        )
    )
