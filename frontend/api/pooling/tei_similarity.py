"""How alike texts are, in the format of Text Embeddings Inference: the cosine of each pair of vectors."""

from typing import Annotated, Any

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.pooling.embeddings import embedding_request
from frontend.api.pooling.fields import PoolingFields, collect
from frontend.api.pooling.tei import Direction, PromptName, Texts, Truncate, cut_of, error, status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import RequestModel, to_json
from frontend.schema.request_fields import Text, doc

__all__ = ["NAME", "PREFIX", "REQUEST", "TASKS", "complete", "error", "parse", "status"]

NAME, PREFIX, TASKS = "tei similarity", "similar", ("embed",)


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


REQUEST = TeiSimilarityRequest


async def parse(request: TeiSimilarityRequest, context: ModelContext) -> GenerationRequest:
    """Makes a GenerationRequest for the vectors. Raises BadRequest or Unprocessable, which name the field."""
    check_model(request.model, context)
    more = request.parameters or SimilarityParameters()
    return await embedding_request(
        request, [request.inputs.source_sentence, *request.inputs.sentences], context,
        prompt_name=more.prompt_name, param="inputs", normalized=True,
        cut=cut_of(more.truncate, more.truncation_direction),
    )  # fmt: skip


async def complete(context: ResponseContext, arriving: AsyncDeltas) -> bytes:
    vectors = await collect(context, arriving)
    similarities: Any = [vectors.cosine(0, index) for index in range(1, len(vectors.packed))]
    return to_json(similarities)
