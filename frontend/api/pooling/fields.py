"""The fields that requests for vectors and scores share, and how their inputs become prompts."""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from frontend.api.context_length import check_characters, check_length
from frontend.api.model_context import ModelContext, check_ids
from frontend.api.requests.request_model import MOST, RequestModel
from frontend.api.requests.request_types import Ignored, ModelName, Positive, Refused, SaltField, doc
from frontend.errors import BadRequest
from frontend.features import Features
from frontend.request import Admission, GenerationRequest
from shared.messages import Pooling, Sampling

MAX_INPUTS = 2048

Prompt = list[int]


class PoolingFields(RequestModel):
    # Fields for unsupported features of other servers, each with the values that leave the feature off.
    ONLY: ClassVar = {
        **dict.fromkeys(("use_activation", "activation", "softmax"), (True,)),
        "embed_dtype": ("float32",), "endianness": ("native", "little"),
    }  # fmt: skip

    model: ModelName = None
    cache_salt: SaltField = None
    priority: Annotated[
        int, Meta(ge=-MOST - 1, le=MOST), doc("Lower values run first, among requests of one API key's name")
    ] = 0
    deadline_ms: Annotated[Positive | None, doc("Time limit from the request's arrival; then 504")] = None
    user: Ignored = None
    truncate_prompt_tokens: Refused = None
    normalize: Refused = None


def pooling_request(
    fields: PoolingFields, prompts: Sequence[Prompt], pooling: Pooling, context: ModelContext, format_data: Any = None
) -> GenerationRequest:
    """Makes a GenerationRequest for one vector per prompt. format_data: data that only the response needs"""
    return GenerationRequest(
        tuple(prompts), Sampling(0), model=context.model, admission=admission(fields),
        features=Features(pooling=pooling, adapter=context.adapter), format_data=format_data,
    )  # fmt: skip


def admission(fields: PoolingFields) -> Admission:
    return Admission(fields.cache_salt or "", fields.deadline_ms or 0, fields.priority)


def check_texts(param: str, texts: Iterable[str], context: ModelContext) -> None:
    """Raises ContextLengthExceeded, without tokenizing, for a text with too many characters to fit."""
    for text in texts:
        check_characters(param, text, context)


def check_prompts(param: str, prompts: Sequence[Prompt], context: ModelContext) -> None:
    """Raises BadRequest for a prompt without tokens, Unprocessable for a prompt that is too long or has an unknown
    id."""
    for ids in prompts:
        if not ids:
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
        check_length(param, len(ids), 0, context)
