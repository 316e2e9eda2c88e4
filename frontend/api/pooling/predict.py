"""Labels of texts in the format of Text Embeddings Inference: /predict."""

from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling import labels
from frontend.api.pooling.fields import MAX_INPUTS, collect
from frontend.api.pooling.labels import Labelled, activated, label_request, named
from frontend.api.pooling.tei import TeiFields, error, status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, ResponseModel, to_json
from frontend.schema.request_fields import Text, doc

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "tei predict", "predict", labels.TASKS
_Pair = Annotated[list[Text], Meta(min_length=1, max_length=2)]
_TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
_PAIR: dict[str, Any] = {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": 2}
_ROWS: dict[str, Any] = {"type": "array", "items": _PAIR, "minItems": 1, "maxItems": MAX_INPUTS}
SHAPES = "must be a text, two texts that are a pair, or an array of arrays of one text or two"


@dataclass(frozen=True, slots=True)
class Asked:
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


REQUEST = TeiPredictRequest


async def parse(request: TeiPredictRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the labels. Raises BadRequest, Unprocessable or NotSupported."""
    check_model(request.model, context)
    several = isinstance(request.inputs, list) and isinstance(request.inputs[0], list)
    asked = Asked(request.raw_scores, several)
    return await label_request(request, request.listed, context, param="inputs", cut=request.cut, format_data=asked)


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors, task = await collect(context, arriving), context.tokenizer.task
    asked: Asked = context.request.format_data
    found = []
    for index in range(len(vectors.packed)):
        logits = vectors.floats(index).tolist()
        scores = logits if asked.raw else activated(logits, task)
        rows = [Predicted(score=score, label=named(task, label)) for label, score in enumerate(scores)]
        found.append(sorted(rows, key=lambda row: -row.score))
    return to_json(found if asked.several else found[0])
