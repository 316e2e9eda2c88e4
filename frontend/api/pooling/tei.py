"""The routes of Text Embeddings Inference: what they share, then /embed, /similarity and /predict.

https://huggingface.github.io/text-embeddings-inference
"""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling.classify import LABEL_TASKS, Labelled, activated, label_request, named
from frontend.api.pooling.embeddings import Input, embedding_request, listed_inputs
from frontend.api.pooling.fields import MAX_INPUTS, Cut, Format, LongInputs, PoolingFields, collect
from frontend.errors import BadRequest, Overloaded, SluiceError, Unprocessable
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, FieldError, JsonArray, RequestModel, ResponseModel, in_slices, to_json
from frontend.schema.request_fields import Positive, Text, doc

Texts = Annotated[list[Text], Meta(min_length=1, max_length=MAX_INPUTS)]


PromptName = Annotated[Text | None, doc("Which of the checkpoint's prompts stands before each text")]
Truncate = Annotated[bool | None, doc("true: a text that is too long is cut; absent or false: it is refused")]
Direction = Annotated[Literal["left", "right", "Left", "Right"], doc("Which end of a text is cut off")]


def cut_of(truncate: bool | None, direction: str) -> Cut | None:
    """Returns how texts that are too long are cut; None: they are refused."""
    return Cut(left=direction.lower() == "left") if truncate else None


class TeiFields(PoolingFields):
    truncate: Truncate = None
    truncation_direction: Direction = "right"

    @property
    def cut(self) -> Cut | None:
        """How texts that are too long are cut; None: they are refused."""
        return cut_of(self.truncate, self.truncation_direction)


class TeiError(ResponseModel):
    error: str
    error_type: str


def status(exc: SluiceError) -> int:
    """Returns the status: 429 while there is no room, 424 for a failure of the model, 422 for what is not accepted."""
    if isinstance(exc, Overloaded):
        return 429
    if isinstance(exc, BadRequest | Unprocessable):
        return 422
    return 424 if exc.status == 500 else exc.status


def error(exc: SluiceError, request_id: str) -> bytes:
    kinds = {422: "Validation", 424: "Backend", 429: "Overloaded"}
    return to_json(TeiError(error=exc.message, error_type=kinds.get(status(exc), "Backend")))


# Vectors in the format of Text Embeddings Inference: /embed has one for each text, and an array is all there is.

_Token = Annotated[int, EXACT]


class TeiEmbedRequest(TeiFields):
    inputs: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_INPUTS)),
    ]
    normalize: Annotated[bool, doc("Whether vectors get the length 1")] = True
    prompt_name: PromptName = None
    dimensions: Annotated[Positive | None, doc("Only so many numbers; for models trained so")] = None
    long_inputs: LongInputs = None

    def __post_init__(self) -> None:
        listed_inputs(self.inputs, "inputs")

    @property
    def listed(self) -> list[Input]:
        """The inputs as a list, even if the body has a single one."""
        return listed_inputs(self.inputs, "inputs")


async def _parse_embed(request: TeiEmbedRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    return await embedding_request(
        request, request.listed, context, dimensions=request.dimensions or 0, prompt_name=request.prompt_name,
        param="inputs", cut=request.cut, normalized=request.normalize, long=request.long_inputs,
    )  # fmt: skip


async def _complete_embed(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    written = JsonArray(each=4)
    await in_slices(range(len(vectors.packed)), lambda index: written.append(vectors.floats(index).tolist()))
    raw: Any = written.raw
    return to_json(raw)


EMBED = Format("tei embed", "embd", ("embed",), TeiEmbedRequest, _parse_embed, _complete_embed, status, error)


# How alike texts are, in the format of Text Embeddings Inference: the cosine of each pair of vectors.


class Compared(RequestModel):
    source_sentence: Text
    sentences: Texts


class SimilarityParameters(RequestModel):
    truncate: Truncate = None
    truncation_direction: Direction = "right"
    prompt_name: PromptName = None


class TeiSimilarityRequest(PoolingFields):
    inputs: Annotated[Compared, doc("`source_sentence`, and the `sentences` that it is compared with")]
    parameters: Annotated[
        SimilarityParameters | None, doc("`truncate`, `truncation_direction` and `prompt_name`, as on `/embed`")
    ] = None


async def _parse_similarity(request: TeiSimilarityRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    more = request.parameters or SimilarityParameters()
    return await embedding_request(
        request, [request.inputs.source_sentence, *request.inputs.sentences], context,
        prompt_name=more.prompt_name, param="inputs", normalized=True,
        cut=cut_of(more.truncate, more.truncation_direction),
    )  # fmt: skip


async def _complete_similarity(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    similarities: Any = [vectors.cosine(0, index) for index in range(1, len(vectors.packed))]
    return to_json(similarities)


SIMILARITY = Format(
    "tei similarity",
    "similar",
    ("embed",),
    TeiSimilarityRequest,
    _parse_similarity,
    _complete_similarity,
    status,
    error,
)


# Labels of texts in the format of Text Embeddings Inference: /predict.

_Pair = Annotated[list[Text], Meta(min_length=1, max_length=2)]
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_PAIR: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}
_ROWS: dict[str, Any] = {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": MAX_INPUTS}
SHAPES = "must be a text, two texts that are a pair, or an array of arrays of one text or two"


@dataclass(frozen=True, slots=True)
class _Predicting:
    """What the response needs. raw: whether it has logits; several: whether the body has several inputs"""

    raw: bool
    several: bool


class TeiPredictRequest(TeiFields):
    inputs: Annotated[
        Text | Annotated[list[Text | _Pair], Meta(min_length=1, max_length=MAX_INPUTS)],
        Meta(extra_json_schema={"anyOf": [_TEXT, _PAIR, _ROWS]}),
        doc("A text, a pair of texts as an array of two, or an array of arrays of one text or two"),
    ]
    raw_scores: Annotated[bool, doc("Whether scores are the head's logits")] = False

    def __post_init__(self) -> None:
        kinds = {*map(type, self.inputs)} if isinstance(self.inputs, list) else set()
        if len(kinds) > 1 or (kinds == {str} and len(self.inputs) > 2):
            raise FieldError("inputs", SHAPES)

    @property
    def listed(self) -> list[Labelled]:
        """The inputs as a list, even if the body has a single one."""
        given: Any = self.inputs
        if isinstance(given, str):
            return [given]
        rows = [given] if isinstance(given[0], str) else given
        return [row[0] if len(row) == 1 else (row[0], row[1]) for row in rows]


class Predicted(ResponseModel):
    score: float
    label: str


async def _parse_predict(request: TeiPredictRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the labels. Raises BadRequest, Unprocessable or NotSupported."""
    check_model(request.model, context)
    several = isinstance(request.inputs, list) and isinstance(request.inputs[0], list)
    asked = _Predicting(request.raw_scores, several)
    return await label_request(request, request.listed, context, param="inputs", cut=request.cut, format_data=asked)


async def _complete_predict(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors, task = await collect(context, arriving), context.tokenizer.task
    asked: _Predicting = context.request.format_data
    found = []
    for index in range(len(vectors.packed)):
        logits = vectors.floats(index).tolist()
        scores = logits if asked.raw else activated(logits, task)
        rows = [Predicted(score=score, label=named(task, label)) for label, score in enumerate(scores)]
        found.append(sorted(rows, key=lambda row: -row.score))
    return to_json(found if asked.several else found[0])


PREDICT = Format(
    "tei predict", "predict", LABEL_TASKS, TeiPredictRequest, _parse_predict, _complete_predict, status, error
)
