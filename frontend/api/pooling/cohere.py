"""Vectors in Cohere's format: https://docs.cohere.com/reference/embed"""

import base64
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import (
    MAX_INPUTS,
    CohereMeta,
    Cut,
    Format,
    LongInputs,
    PoolingFields,
    Vectors,
    collect,
    meta_of,
)
from frontend.errors import BadRequest, SluiceError, Unprocessable, api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import FieldError, Names, RequestModel, ResponseModel, to_json
from frontend.schema.request_fields import Positive, Text, doc

# Cohere's names of the purposes of texts → the names that checkpoints give the prompts for them
PROMPTS = {
    "search_query": ("query", "search_query"), "search_document": ("document", "passage", "search_document"),
    "classification": ("classification", "Classification"), "clustering": ("clustering", "Clustering"),
}  # fmt: skip
Form = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
LARGEST = 127  # the largest absolute value of a number in int8


class CohereContent(RequestModel):
    type: Literal["text"]
    text: Text


class CohereInput(RequestModel):
    content: Annotated[list[CohereContent], Meta(min_length=1)]


_MANY = Meta(min_length=1, max_length=MAX_INPUTS)


class CohereEmbedRequest(PoolingFields):
    REFUSED: ClassVar[Names] = ("images",)

    texts: Annotated[Annotated[list[Text], _MANY] | None, doc("The texts")] = None
    inputs: Annotated[
        Annotated[list[CohereInput], _MANY] | None,
        doc("In place of `texts`: each input is the texts of its `content`, one on a line"),
    ] = None
    input_type: Annotated[
        Literal["search_document", "search_query", "classification", "clustering"] | None,
        doc("What the vectors are for: the checkpoint's prompt for it, if it has one, stands before each text"),
    ] = None
    embedding_types: Annotated[list[Form] | None, doc("The forms of the vectors; `float` if absent")] = None
    output_dimension: Annotated[Positive | None, doc("Only so many numbers, normalized again")] = None
    truncate: Annotated[
        Literal["NONE", "START", "END"] | None,
        doc("Which end of a text that is too long is cut off; NONE: it is refused; absent: END, if not `long_inputs`"),
    ] = None
    max_tokens: Annotated[Positive | None, doc("A text is too long if it has more tokens")] = None
    long_inputs: LongInputs = None

    def __post_init__(self) -> None:
        if self.texts is None and self.inputs is None:
            raise FieldError("texts", "is missing", BadRequest, "missing_field")
        if self.texts is not None and self.inputs is not None:
            raise FieldError("inputs", "cannot go with `texts`", code="conflicting_fields")

    @property
    def listed(self) -> list[str]:
        """The texts, however the body states them."""
        return self.texts or ["\n".join(part.text for part in one.content) for one in self.inputs or ()]


class CohereVectors(ResponseModel):
    float: list[list[Any]] | UnsetType = UNSET
    int8: list[list[int]] | UnsetType = UNSET
    uint8: list[list[int]] | UnsetType = UNSET
    binary: list[list[int]] | UnsetType = UNSET
    ubinary: list[list[int]] | UnsetType = UNSET
    base64: list[str] | UnsetType = UNSET


class CohereEmbeddings(ResponseModel):
    id: str
    embeddings: CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"


class CohereError(ResponseModel):
    id: str
    message: str


def error(exc: SluiceError, request_id: str) -> bytes:
    return to_json(CohereError(id=request_id, message=exc.message))


async def _parse(request: CohereEmbedRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    names = PROMPTS.get(request.input_type or "", ())
    param, most = "texts" if request.inputs is None else "inputs", request.max_tokens
    made = await embedding_request(
        request, request.listed, context, dimensions=request.output_dimension or 0, cut=_cut(request, context),
        param=param, prompt_name=next((name for name in names if name in context.task.prompts), None),
        format_data=request, long=request.long_inputs,
    )  # fmt: skip
    for index, ids in enumerate(made.prompts if most is not None else ()):
        if most is not None and len(ids) > most:
            raise Unprocessable(
                f"`{param}[{index}]` has {len(ids)} tokens, and `max_tokens` is {most}", param=param,
                code="context_length_exceeded",
            )  # fmt: skip
    return made


def _cut(request: CohereEmbedRequest, context: ModelContext) -> Cut | None:
    """Returns how texts that are too long are cut; None: they are refused, or read in segments."""
    side = request.truncate or ("END" if request.long_inputs is None else "NONE")
    if request.long_inputs is not None and request.max_tokens is not None:
        return Cut(request.max_tokens, param="max_tokens")  # which `long_inputs` excludes, whatever `truncate` says
    if side == "NONE":
        return None
    param = "truncate" if request.max_tokens is None else "max_tokens"
    return Cut(min(request.max_tokens or -1, context.max_seq_len), side == "START", param)


async def _complete_v2(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    request: CohereEmbedRequest = context.request.format_data
    return to_json(
        CohereEmbeddings(
            id=context.id, embeddings=vectors_of(request, vectors), texts=request.listed,
            meta=meta_of(vectors.usage, "2"),
        )
    )  # fmt: skip


def vectors_of(request: CohereEmbedRequest, vectors: Vectors) -> CohereVectors:
    """Returns the vectors in the forms that a request names, or as numbers."""
    floats = [vectors.floats(index) for index in range(len(vectors.packed))]
    forms: dict[str, Any] = {
        "float": lambda: [one.tolist() for one in floats],
        "int8": lambda: [in_int8(one) for one in floats],
        "uint8": lambda: [[number + 128 for number in in_int8(one)] for one in floats],
        "binary": lambda: [[byte - 128 for byte in signs(one)] for one in floats],
        "ubinary": lambda: [signs(one) for one in floats],
        "base64": lambda: [base64.b64encode(packed).decode() for packed in vectors.packed],
    }
    return CohereVectors(**{form: forms[form]() for form in request.embedding_types or ("float",)})


def in_int8(vector: "array[float] | Sequence[float]") -> list[int]:
    """Returns the numbers of a vector as integers from -127 to 127, such that the largest of them becomes 127 or -127.

    Each vector has a scale of its own, which the response does not state. Cosines of vectors therefore stay as they
    are, except for the rounding, but their lengths and dot products do not. A scale that other vectors decided would
    make an answer depend on the other texts of its request.
    """
    peak = max(map(abs, vector))
    return [round(number / peak * LARGEST) for number in vector] if peak else [0] * len(vector)


def signs(vector: "array[float] | Sequence[float]") -> list[int]:
    """Returns which numbers are positive, as bits: eight in a byte, the first one the highest."""
    bits = [number > 0 for number in vector] + [False] * (-len(vector) % 8)
    return [sum(bit << (7 - place) for place, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]


EMBED_V2 = Format("cohere embed", "embd", ("embed",), CohereEmbedRequest, _parse, _complete_v2, api_status, error)


# Vectors in the older format of Cohere, /v1/embed, which its older clients and LangChain's use.
#
# A request is that of /v2/embed. Without `embedding_types` the response has bare vectors instead of an object of forms.


class CohereEmbeddingsV1(ResponseModel):
    id: str
    embeddings: list[list[float]] | CohereVectors
    texts: list[str]
    meta: CohereMeta
    response_type: Literal["embeddings_floats", "embeddings_by_type"]


async def _complete_v1(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    request: CohereEmbedRequest = context.request.format_data
    bare = request.embedding_types is None
    floats = [vectors.floats(index).tolist() for index in range(len(vectors.packed) if bare else 0)]
    return to_json(
        CohereEmbeddingsV1(
            id=context.id, embeddings=floats if bare else vectors_of(request, vectors), texts=request.listed,
            meta=meta_of(vectors.usage, "1"), response_type="embeddings_floats" if bare else "embeddings_by_type",
        )
    )  # fmt: skip


EMBED_V1 = Format("cohere embed v1", "embd", ("embed",), CohereEmbedRequest, _parse, _complete_v1, api_status, error)
