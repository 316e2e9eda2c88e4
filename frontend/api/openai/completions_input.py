"""The request of OpenAI's text completions, and its prompts as token ids. Typed events use the same request."""

from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.chat.continuation_fields import ContinueFromField
from frontend.api.chat.structured_output_fields import ResponseFormatField
from frontend.api.context_length import check_characters
from frontend.api.model_context import ModelContext, check_ids
from frontend.api.requests.request_model import EXACT, FieldError
from frontend.api.requests.request_types import (
    ChoiceCount,
    Count,
    OpenAIFields,
    Positive,
    Rivals,
    Text,
    TokenDetailFields,
    doc,
)
from frontend.errors import BadRequest, Unprocessable

MAX_PROMPTS = 2048
SHAPES = "a string, an array of token ids, or an array of either"

Prompt = str | list[int]


def prompts_schema(most: int) -> dict[str, Any]:
    """Returns the JSON Schema of one prompt, or of an array of up to `most` prompts."""
    return {"anyOf": [*_one, {"type": "array", "items": {"anyOf": _one}, "minItems": 1, "maxItems": most}]}


_ids: dict[str, Any] = {"type": "array", "items": {"type": "integer"}, "minItems": 1}
_one: list[dict[str, Any]] = [{"type": "string", "minLength": 1}, _ids]
_Token = Annotated[int, EXACT]
_Off = Annotated[bool, Meta(extra_json_schema={"enum": [False]})]


class CompletionRequest(TokenDetailFields):
    ONLY: ClassVar = {
        **TokenDetailFields.ONLY,
        **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
        "thinking_token_budget": (-1,),
    }  # fmt: skip

    model: Annotated[Text | None, doc("A served name, see `/v1/models`; absent: the served model")] = None
    prompt: Annotated[
        str | list[str | _Token | list[_Token]],
        Meta(description="A text, token ids, or several of either", extra_json_schema=prompts_schema(MAX_PROMPTS)),
    ]
    max_tokens: Annotated[Count, doc("Most tokens of the answer")] = 128
    n: ChoiceCount = 1
    add_special_tokens: Annotated[bool, doc("false: without the tokenizer's special tokens, such as BOS")] = True
    best_of: Annotated[Positive | None, doc("Must equal `n`")] = None
    logprobs: Annotated[
        _Off | Rivals | None,
        doc("Log-probabilities of the answer's tokens, and of this many likeliest tokens (-1: all); false: none"),
    ] = None
    suffix: Annotated[
        str | None,
        doc("The text after the answer, for a model that was trained to fill in the middle; the prompt may be empty"),
    ] = None
    echo: Annotated[bool, doc("Return the prompt before the answer; `logprobs` then scores it, too")] = False
    continue_from: ContinueFromField = None
    response_format: ResponseFormatField = None
    stream_format: Annotated[
        Literal["openai", "events"] | None,
        doc("`events`: typed events instead of OpenAI's chunks; null: `--completions-stream-format`"),
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        prompts = self.prompts
        if not prompts or not (all(prompts) or self.suffix):
            raise FieldError("prompt", "is empty", BadRequest, "empty_prompt")
        if len(prompts) > MAX_PROMPTS:
            raise FieldError("prompt", f"may have at most {MAX_PROMPTS} entries")
        if self.logprobs is True:
            raise FieldError("logprobs", "must be an integer or false: it says how many", BadRequest, "wrong_type")
        kinds = {*map(type, self.prompt)} if isinstance(self.prompt, list) else set()
        if int in kinds and kinds != {int}:
            raise FieldError("prompt", f"must be {SHAPES}", BadRequest, "wrong_type")

    @property
    def rivals(self) -> int | None:
        """How many likeliest tokens are reported for each position of the answer; None: no log-probabilities."""
        return None if self.logprobs is False else self.logprobs

    @property
    def prompts(self) -> list[Prompt]:
        """The prompts as a list, even if the body has a single one."""
        several: Any = self.prompt
        single = type(several) is str or (bool(several) and type(several[0]) is int)
        return [several] if single else several


def check_stream_options(request: OpenAIFields, streams: bool) -> None:
    """Raises Unprocessable for stream options in a request that does not stream, as OpenAI does."""
    if request.stream_options is not None and not streams:
        raise Unprocessable("`stream_options` needs `stream: true`", param="stream_options", code="out_of_range")


def prompt_texts(prompts: list[Prompt]) -> tuple[str, ...]:
    """Returns each prompt as the client wrote it; "" for a prompt of token ids."""
    return tuple([prompt if isinstance(prompt, str) else "" for prompt in prompts])


async def tokenized(
    prompts: list[Prompt],
    context: ModelContext,
    add_special_tokens: bool,
    param: str = "prompt",
    may_be_empty: bool = False,
) -> list[list[int]]:
    """Encodes the prompts.

    param: the request field that holds the prompts
    may_be_empty: whether prompts may have no tokens, because a suffix follows

    Raises BadRequest for an empty prompt, Unprocessable for ids outside the vocabulary.
    """
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    for text in texts:
        check_characters(param, text, context)
    encoded = iter(await context.tokenizer.encode_batch(texts, add_special_tokens) if texts else [])
    tokens = [next(encoded) if isinstance(prompt, str) else prompt for prompt in prompts]
    for ids in tokens:
        if not (ids or may_be_empty):
            raise BadRequest(f"`{param}` has no tokens", param=param, code="empty_prompt")
        check_ids(param, ids, context.vocab_size)
    return tokens


class _StreamFormat(msgspec.Struct):
    stream_format: Any = None


def requested_stream_format(body: bytes) -> Any:
    """Returns the field `stream_format` of a body whose other fields may be invalid; None if it cannot be read."""
    if b"stream_format" not in body:
        return None
    try:
        return msgspec.json.decode(body, type=_StreamFormat).stream_format
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
