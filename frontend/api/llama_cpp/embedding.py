"""llama.cpp's /embedding and /embeddings: an array of vectors, normalized as the client asks."""

import base64
from array import array
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from frontend.api.llama_cpp import response_types as types
from frontend.api.llama_cpp.envelope import error, status
from frontend.api.llama_cpp.prompts import SCHEMA, AnyPrompt, PromptObject, several, tokenized
from frontend.api.model_context import ModelContext, check_model
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import PoolingFields
from frontend.api.pooling.vectors import VectorForm, collect
from frontend.api.requests.encoding import to_json
from frontend.api.requests.request_model import FieldError
from frontend.api.requests.request_types import doc
from frontend.api.response_context import AsyncDeltas, ResponseContext
from frontend.errors import BadRequest
from frontend.request import GenerationRequest

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "llama.cpp embedding", "embd", ("embed",)
NONE, LARGEST, EUCLIDEAN = -1, 0, 2
INT16 = 32760.0  # the largest absolute value of a vector that is scaled with `embd_normalize` 0
_Inputs = Annotated[AnyPrompt | None, Meta(extra_json_schema=SCHEMA), doc("A text, token ids, a mixture, or several")]


class LlamaCppEmbeddingRequest(PoolingFields):
    content: _Inputs = None
    input: Annotated[_Inputs, doc("Another name of `content`, which goes before it")] = None
    encoding_format: Annotated[Literal["float", "base64"], doc("`base64`: little-endian float32")] = "float"
    embd_normalize: Annotated[
        Annotated[int, Meta(ge=NONE, le=1000)] | None,
        doc(
            "-1: not; 0: the largest becomes 32760; 1: taxicab; 2: Euclidean; p: p-norm; absent: as the checkpoint says"
        ),
    ] = None

    def __post_init__(self) -> None:
        if self.content is None and self.input is None:
            raise FieldError("content", "is missing", BadRequest, "missing_field")
        several(self.prompt, self.param)

    @property
    def param(self) -> str:
        return "content" if self.input is None else "input"

    @property
    def prompt(self) -> AnyPrompt:
        given = self.content if self.input is None else self.input
        assert given is not None
        return given


REQUEST = LlamaCppEmbeddingRequest


async def parse(request: LlamaCppEmbeddingRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    inputs: list[str | list[int]] = []
    for one in several(request.prompt, request.param):
        text = one.prompt_string if isinstance(one, PromptObject) else one
        inputs.append(text if isinstance(text, str) else (await tokenized([text], request.param, context))[0].ids)
    norm = request.embd_normalize
    form = VectorForm(request.encoding_format == "base64", norm)
    made = await embedding_request(request, inputs, context, param=request.param, format_data=form)
    pooling = made.features.pooling
    if norm is None or pooling is None:
        return made
    scaled = msgspec.structs.replace(pooling, normalized=norm == EUCLIDEAN)
    return replace(made, features=replace(made.features, pooling=scaled))


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    form: VectorForm = context.request.format_data
    scaled = [_scaled(vectors.floats(index), form.norm) for index in range(len(vectors.packed))]
    return to_json([
        types.LlamaCppEmbedding(index=index, embedding=_in_base64(one) if form.base64 else [one.tolist()])
        for index, one in enumerate(scaled)
    ])  # fmt: skip


def _scaled(vector: "array[float]", norm: int | None) -> "array[float]":
    if norm in (None, NONE, EUCLIDEAN):  # if the vector shall be normalized, the worker has done it
        return vector
    peak = max(map(abs, vector))
    length = (
        peak / INT16 if norm == LARGEST else peak and peak * sum((abs(x) / peak) ** norm for x in vector) ** (1 / norm)
    )
    return array("f", [x / length for x in vector]) if length else vector


def _in_base64(vector: "array[float]") -> str:
    return base64.b64encode(vector.tobytes()).decode()
