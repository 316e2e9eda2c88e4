"""Vectors in the format of Text Embeddings Inference: /embed has one for each text, and an array is all there is."""

from typing import Annotated, Any

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling.embeddings import Input, embedding_request, listed_inputs
from frontend.api.pooling.fields import MAX_INPUTS, LongInputs, collect
from frontend.api.pooling.tei import PromptName, TeiFields, error, status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, JsonArray, in_slices, to_json
from frontend.schema.request_fields import Positive, doc

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "tei embed", "embd", ("embed",)
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


REQUEST = TeiEmbedRequest


async def parse(request: TeiEmbedRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    return await embedding_request(
        request, request.listed, context, dimensions=request.dimensions or 0, prompt_name=request.prompt_name,
        param="inputs", cut=request.cut, normalized=request.normalize, long=request.long_inputs,
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    written = JsonArray(each=4)
    await in_slices(range(len(vectors.packed)), lambda index: written.append(vectors.floats(index).tolist()))
    raw: Any = written.raw
    return to_json(raw)
