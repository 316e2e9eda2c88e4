"""What a model makes of texts, in vLLM's format: a vector of each text, of each of its tokens, or logits of labels."""

import base64
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.pooling.classify import activated, label_request
from frontend.api.pooling.embeddings import EmbeddingRequest, embedding_request
from frontend.api.pooling.fields import SEGMENTS, PoolingUsage, VectorForm, collect, usage_of
from frontend.errors import Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import JsonArray, ResponseModel, in_slices, to_json
from frontend.schema.request_fields import doc
from frontend.schema.responses import Size
from shared.messages import PoolingKind
from shared.wire import pack_f32

NAME, PREFIX, TASKS = "pooling", "pool", ("embed", "score")
OF_TASK = {"embed": ("embed", "token_embed"), "score": ("classify",)}
# Fields of vectors that have no effect on labels: the only value besides null that is accepted with labels, and why.
OF_VECTORS: Mapping[str, tuple[Any, str]] = {
    "long_inputs": (None, "labels have no mean over segments"),
    "dimensions": (None, "there is a number for each label"),
    "prompt_name": (None, "a classifier reads a text without a prompt"),
    "normalize": (False, "labels have no length"),
}


class PoolingRequest(EmbeddingRequest):
    use_activation: Annotated[
        bool | None,
        doc("false: vectors as they are, labels as logits; else vectors as the checkpoint says, and probabilities"),
    ] = None
    task: Annotated[
        Literal["embed", "token_embed", "classify"] | None,
        doc("`token_embed`: a vector of each token; absent: `embed`, and `classify` for a model with a head"),
    ] = None


class PooledData(ResponseModel):
    index: Size
    object: Literal["pooling"] = "pooling"
    data: Annotated[
        list[float | list[float]] | str,
        Meta(description="A vector, or one for each token; or its base64, of little-endian float32"),
    ]
    segments: Annotated[Size | UnsetType, Meta(description=SEGMENTS)] = UNSET


class PooledList(ResponseModel):
    id: str
    object: Literal["list"] = "list"
    created: Size
    model: str
    data: list[PooledData]
    usage: PoolingUsage


REQUEST = PoolingRequest
status = api_status
error = completions.error


async def parse(request: PoolingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest. Raises BadRequest, Unprocessable or NotSupported."""
    check_model(request.model, context)
    known = OF_TASK[context.task.name]
    wanted = request.task or known[0]
    if wanted not in known:
        raise Unprocessable(
            f"`task` is `{wanted}`; this model can {' or '.join(known)}", param="task", code="out_of_range"
        )
    form = VectorForm(request.encoding_format == "base64", raw=request.use_activation is False)
    if wanted == "classify":
        for name, (left, why) in OF_VECTORS.items():
            if getattr(request, name) not in (None, left):
                raise Unprocessable(f"`{name}`: {why}", param=name, code="out_of_range")
        return await label_request(
            request, request.inputs, context, param="input", cut=request.cut, format_data=form,
            special=request.add_special_tokens,
        )  # fmt: skip
    return await embedding_request(
        request, request.inputs, context, dimensions=request.dimensions or 0, prompt_name=request.prompt_name,
        special=request.add_special_tokens, cut=request.cut, normalized=request.normalized, format_data=form,
        kind=PoolingKind.TOKENS if wanted == "token_embed" else None, long=request.long_inputs,
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors, task, request = await collect(context, arriving), context.tokenizer.task, context.request
    form: VectorForm = request.format_data
    kind = None if request.features.pooling is None else request.features.pooling.kind
    segments = request.features.segments
    written = JsonArray(each=4)

    def write(index: int) -> None:
        packed, numbers = vectors.packed[index], list[Any](vectors.floats(index))
        if kind is PoolingKind.LOGITS and not form.raw:
            numbers = activated(numbers, task)
            packed = pack_f32(numbers)
        data: Any = numbers
        if form.base64:
            data = base64.b64encode(packed).decode()
        elif kind is PoolingKind.TOKENS:
            width = len(numbers) // len(request.prompts[index])
            data = [numbers[at : at + width] for at in range(0, len(numbers), width)]
        parts = UNSET if segments is None else segments.counts[index]
        written.append(PooledData(index=index, data=data, segments=parts))

    await in_slices(range(len(vectors.packed)), write)
    data: Any = written.raw
    return to_json(
        PooledList(
            id=context.id, created=context.created, model=request.model, data=data, usage=usage_of(vectors.usage)
        )
    )
