"""Labels of texts, in vLLM's format: https://docs.vllm.ai/en/latest/models/pooling_models/"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.answer import AsyncDeltas, ResponseContext
from frontend.api.openai import completions
from frontend.api.openai.completions import prompts_schema
from frontend.api.pooling import labels
from frontend.api.pooling.embeddings import Input, listed_inputs
from frontend.api.pooling.fields import MAX_INPUTS, CutFields, PoolingUsage, collect, usage_of
from frontend.api.pooling.labels import activated, label_request, named
from frontend.errors import api_status
from frontend.model_context import ModelContext, check_model
from frontend.request import GenerationRequest
from frontend.schema.base import EXACT, ResponseModel, to_json
from frontend.schema.request_fields import doc
from frontend.schema.responses import Size

NAME, PREFIX, TASKS = "classify", "classify", labels.TASKS
_Token = Annotated[int, EXACT]


class ClassifyRequest(CutFields):
    ONLY: ClassVar = {"embed_dtype": ("float32",), "endianness": ("native", "little")}

    input: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_INPUTS)),
    ]
    use_activation: Annotated[bool, doc("false: `probs` are the head's logits")] = True

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
        request, request.inputs, context, param="input", cut=request.cut, format_data=request.use_activation
    )


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
