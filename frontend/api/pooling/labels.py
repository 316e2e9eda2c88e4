"""The labels of texts, by a classification head. /classify, /predict and /pooling share this.

The head gives a logit for each label. Labels that exclude each other have the softmax of their logits; a single label,
and labels that do not exclude each other (`problem_type` in config.json), have the sigmoid of each.
"""

import math
from collections.abc import Sequence
from typing import Any

from frontend.api.pooling.fields import (
    Cut,
    PoolingFields,
    Prompt,
    check_prompts,
    check_seconds,
    check_texts,
    pooling_request,
)
from frontend.api.pooling.relevance import pair_prompts
from frontend.chat.prompt import encode_texts
from frontend.errors import NotSupported
from frontend.model_context import ModelContext
from frontend.request import GenerationRequest
from shared.checkpoint import Task
from shared.messages import Pooling, PoolingKind

TASKS = ("score",)
Labelled = str | tuple[str, str] | list[int]  # a text, a pair of texts, or token ids


async def label_request(
    fields: PoolingFields, inputs: Sequence[Labelled], context: ModelContext, *, param: str, cut: Cut | None = None,
    format_data: Any = None,
) -> GenerationRequest:  # fmt: skip
    """Makes a GenerationRequest for the logits of each input. Raises Unprocessable, and NotSupported without a head.

    cut: how an input that is too long is cut; None: it is refused. The second text of a pair is cut.
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
    encoded = iter(await encode_texts(texts, True, context) if texts else [])
    of_pairs, places = iter(encoded_pairs), iter(seconds or [0] * len(pairs))
    prompts: list[Prompt] = []
    second: list[int] = []
    for one in inputs:
        prompts.append(next(of_pairs) if isinstance(one, tuple) else next(encoded) if isinstance(one, str) else one)
        second.append(next(places) if isinstance(one, tuple) else 0)
    if cut is not None:
        around = [not isinstance(one, list) for one in inputs]
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
