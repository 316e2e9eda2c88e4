"""OpenAI's embeddings: https://platform.openai.com/docs/api-reference/embeddings"""

import base64
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling import fields as types
from frontend.api.pooling.fields import (
    MAX_INPUTS,
    Cut,
    CutFields,
    LongInputs,
    PoolingFields,
    SegmentedText,
    VectorForm,
    check_prompts,
    check_texts,
    collect,
    only_without,
    pooling_request,
    segmented,
    shared_beginning,
)
from frontend.errors import BadRequest, Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, FieldError, JsonArray, in_slices, to_json
from frontend.schema.request_fields import Positive, Text, doc
from shared.messages import Pooling, PoolingKind

NAME, PREFIX, TASKS = "embeddings", "embd", ("embed",)
SHAPES = "a string, an array of token ids, or an array of either"

Input = str | list[int]
_Token = Annotated[int, EXACT]
_Normalize = Annotated[bool | None, doc("Whether vectors get the length 1; absent: as the checkpoint says")]


AddSpecialTokens = Annotated[bool, doc("Whether the tokenizer adds its own tokens to a text")]


class EmbeddingRequest(CutFields):
    ONLY: ClassVar = only_without("use_activation")

    input: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_INPUTS)),
    ]
    encoding_format: Annotated[
        Literal["float", "base64"], doc("`base64`: little-endian float32, which is shorter and exact")
    ] = "float"
    dimensions: Annotated[Positive | None, doc("Only so many numbers, normalized again; for models trained so")] = None
    prompt_name: Annotated[
        Text | None, doc("Which of the checkpoint's prompts stands before each text; absent: its default, if any")
    ] = None
    add_special_tokens: AddSpecialTokens = True
    normalize: _Normalize = None
    use_activation: Annotated[
        bool | None, doc("false: vectors as they are, without the length 1; true or absent: as the checkpoint says")
    ] = None
    long_inputs: LongInputs = None

    def __post_init__(self) -> None:
        listed_inputs(self.input)
        if self.normalize is not None and self.use_activation is False:
            raise FieldError("use_activation", "cannot go with `normalize`", code="conflicting_fields")

    @property
    def normalized(self) -> bool | None:
        """Whether vectors get the length 1; None: as the checkpoint says."""
        return False if self.use_activation is False else self.normalize

    @property
    def inputs(self) -> list[Input]:
        """The inputs as a list, even if the body has a single one."""
        return listed_inputs(self.input)


def listed_inputs(given: Any, param: str = "input") -> list[Input]:
    """Returns the inputs of a request as a list, even if there is a single one. Raises FieldError for other shapes."""
    single = type(given) is str or (bool(given) and type(given[0]) is int)
    inputs: list[Input] = [given] if single else given
    if not inputs or not all(inputs):
        raise FieldError(param, "is empty", BadRequest, "empty_prompt")
    if len(inputs) > MAX_INPUTS:
        raise FieldError(param, f"may have at most {MAX_INPUTS} entries")
    kinds = {*map(type, given)} if isinstance(given, list) else set()
    if int in kinds and kinds != {int}:
        raise FieldError(param, f"must be {SHAPES}", BadRequest, "wrong_type")
    return inputs


REQUEST = EmbeddingRequest
status = api_status
error = completions.error


async def parse(request: EmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    return await embedding_request(
        request, request.inputs, context, dimensions=request.dimensions or 0, prompt_name=request.prompt_name,
        special=request.add_special_tokens, cut=request.cut, normalized=request.normalized, long=request.long_inputs,
        format_data=VectorForm(request.encoding_format == "base64"),
    )  # fmt: skip


async def embedding_request(
    fields: PoolingFields,
    inputs: Sequence[Input],
    context: ModelContext,
    *,
    dimensions: int = 0,
    prompt_name: str | None = None,
    special: bool = True,
    param: str = "input",
    format_data: Any = None,
    cut: Cut | None = None,
    normalized: bool | None = None,
    kind: PoolingKind | None = None,
    long: str | None = None,
) -> GenerationRequest:
    """Makes a GenerationRequest for one vector per input; `vectors.collect` waits for the vectors.

    dimensions: how many of a vector's numbers to return; 0: all
    prompt_name: which of the checkpoint's prompts to put before each text; None: the default. Token ids get no prompt
    special: whether the tokenizer adds its special tokens to a text
    param: the request field with the inputs, for errors
    cut: how a text that is too long is cut; None: it is refused, unless `long` says otherwise
    long: the value of `long_inputs`; it excludes `cut`
    normalized, kind: whether vectors get the length 1, and how they are made; None: as the checkpoint says
    """
    task = context.task
    if long is not None:
        _check_long(cut, kind)
    before = task.prompts.get(task.default_prompt, "") if prompt_name is None else task.prompts.get(prompt_name)
    if before is None:
        known = ", ".join(f"`{name}`" for name in task.prompts) or "none"
        raise Unprocessable(
            f"the model has no prompt `{prompt_name}`; it has {known}", param="prompt_name", code="out_of_range"
        )
    texts = [before + one for one in inputs if isinstance(one, str)]
    texts = [text.lower() for text in texts] if task.lower else texts
    check_texts(param, texts, context if cut is None and long is None else context.unlimited)
    encoded = iter(await context.tokenizer.encode_batch(texts, special) if texts else [])
    segments = None
    prompts = [next(encoded) if isinstance(one, str) else one for one in inputs]
    if cut is not None:
        own = [special and isinstance(one, str) for one in inputs]
        prompts = [cut(ids, context, around=around) for ids, around in zip(prompts, own, strict=True)]
    if long is not None:
        marks = await _repeated(before.lower() if task.lower else before, special, context)
        own = [isinstance(one, str) for one in inputs]
        found = [_as_text(ids, marks) if text else SegmentedText(ids) for ids, text in zip(prompts, own, strict=True)]
        prompts, segments = segmented(found, MAX_INPUTS, param, context)
    check_prompts(param, prompts, context)
    if dimensions > context.hidden_size > 0:
        raise Unprocessable(
            f"`dimensions` is {dimensions}, but the model's vectors have {context.hidden_size}",
            param="dimensions",
            code="out_of_range",
        )
    unit = task.normalized if normalized is None else normalized
    pooling = Pooling(kind or task.pooling, unit, dimensions)
    return pooling_request(fields, prompts, pooling, context, format_data, segments=segments)


def _check_long(cut: Cut | None, kind: PoolingKind | None) -> None:
    if cut is not None:
        raise Unprocessable(
            f"`long_inputs` and `{cut.param}` exclude each other: one says that nothing is lost, the other what is",
            param="long_inputs",
            code="out_of_range",
        )
    if kind is PoolingKind.TOKENS:
        raise Unprocessable(
            "`long_inputs`: vectors of tokens have no mean over segments", param="long_inputs", code="out_of_range"
        )


async def _repeated(prompt: str, special: bool, context: ModelContext) -> tuple[list[int], int]:
    """Returns the ids that stand before each segment of a text, and how many stand after it.

    prompt: the checkpoint's prompt. Without its last spaces, which many tokenizers join with the word behind them
    """
    after = context.tokenizer.around[1] if special else 0
    (ids,) = await context.tokenizer.encode_batch([prompt.rstrip()], special)
    return ids[: len(ids) - after], after


def _as_text(ids: Sequence[int], repeated: tuple[list[int], int]) -> SegmentedText:
    before, after = repeated
    return SegmentedText([*ids], shared_beginning(before, ids[: len(ids) - after]), after)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    form: VectorForm = context.request.format_data
    segments = context.request.features.segments
    written = JsonArray(each=4)

    def write(index: int) -> None:
        numbers = base64.b64encode(vectors.packed[index]).decode() if form.base64 else vectors.floats(index).tolist()
        parts = UNSET if segments is None else segments.counts[index]
        written.append(types.Embedding(index=index, embedding=numbers, segments=parts))

    await in_slices(range(len(vectors.packed)), write)
    data: Any = written.raw
    return to_json(
        types.Embeddings(
            id=context.id, created=context.created, model=context.request.model, data=data,
            usage=types.usage_of(vectors.usage),
        )
    )  # fmt: skip
