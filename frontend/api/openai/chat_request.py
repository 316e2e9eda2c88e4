"""The request of OpenAI's chat completions, and the prompt made from its messages. `/tokenize` uses the same prompt."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.receipts import ContinueFromField
from frontend.api.request_builder import ParsedRequest
from frontend.chat.history import COMMON_ROLES, ChatMessage, call, chat_message, left_open
from frontend.chat.large_chats import prepared
from frontend.chat.prompt import (
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    Prompt,
    Rendered,
    check_roles,
    document_arguments,
    encoded,
    join_text,
    parse_arguments,
    render,
)
from frontend.chat.reasoning import Degree, MaxThinkingTokens, OtherBudgetName, ReasoningEffort, effort, thinking
from frontend.chat.template_sandbox import CHILDREN
from frontend.chat.tool_fields import FunctionToolChoice, FunctionTools, ParallelToolCalls
from frontend.errors import BadRequest, Unprocessable
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import INPUT, Function
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import (
    ChoiceCount,
    Count,
    IncludeReasoning,
    ModelName,
    SeparateReasoning,
    StreamReasoning,
    TemplateArguments,
    Text,
    TokenDetailFields,
    TokenLimit,
    TopLogprobs,
    doc,
    limit_of,
)
from frontend.structured_output.fields import ResponseFormatField, Verbosity
from frontend.text.chat_template import Source, found_in, within

# The parts of a message of OpenAI's chat: texts, images, and an assistant's reasoning and refusals.
#
# Clients of other servers send parts without `type`, and texts as plain strings. These forms are accepted, too.


class _Part(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"


class TextPart(_Part, tag="text"):
    KNOWN_BY: ClassVar = "text"
    FROM_TEXT: ClassVar = "text"
    IGNORED: ClassVar[Names] = ("cache_control", "prompt_cache_breakpoint")

    text: str


class InputTextPart(TextPart, tag="input_text"):
    """A text part under the name that it has in the Responses API. Chats accept it, too, as in vLLM."""

    KNOWN_BY: ClassVar = ""
    FROM_TEXT: ClassVar = ""


class OutputTextPart(InputTextPart, tag="output_text"):
    IGNORED: ClassVar[Names] = ("annotations", "logprobs")


class ImageURL(RequestModel):
    FROM_TEXT: ClassVar = "url"

    url: Annotated[str, doc("A data: URL in base64; http(s): and file: if the server allows them")]
    detail: Annotated[Literal["auto", "low", "high", "original"] | None, doc("low: an image is not cut into tiles")] = (
        None
    )


class ImagePart(_Part, tag="image_url"):
    KNOWN_BY: ClassVar = "image_url"
    # `uuid`: vLLM's cache key for the image
    IGNORED: ClassVar[Names] = ("prompt_cache_breakpoint", "cache_control", "uuid")

    image_url: ImageURL

    @property
    def source(self) -> Source:
        return Source(self.image_url.url, self.image_url.detail or "auto")

    @property
    def text(self) -> str:
        """The text that stands for the image in the message."""
        return self.source.mark


class InputImagePart(ImagePart, tag="input_image"):
    """An image in the form of the Responses API, with `detail` next to the URL."""

    KNOWN_BY: ClassVar = ""

    detail: Literal["auto", "low", "high", "original"] | None = None

    @property
    def source(self) -> Source:
        return Source(self.image_url.url, self.detail or self.image_url.detail or "auto")


class RefusalPart(_Part, tag="refusal"):
    """An assistant's refusal to answer. The prompt has it as an ordinary text."""

    KNOWN_BY: ClassVar = "refusal"

    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ThinkingPart(_Part, tag="thinking"):
    """An assistant's reasoning: a string from vLLM's clients, text parts from Mistral's clients."""

    IGNORED: ClassVar[Names] = ("closed", "signature")

    thinking: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]
    text: ClassVar = ""

    @property
    def thought(self) -> str:
        if isinstance(self.thinking, str):
            return self.thinking
        return "".join([part.text for part in self.thinking])  # the pieces of a stream, not texts of their own


class ReasoningPart(_Part, tag="reasoning"):
    """An assistant's reasoning: in `reasoning` from LangChain, in `text` from Vercel's AI SDK."""

    SCHEMA: ClassVar = (
        {"anyOf": [{"properties": {name: {"type": "string"}}, "required": [name]} for name in ("reasoning", "text")]},
    )

    reasoning: str | None = None
    spoken: str | None = msgspec.field(name="text", default=None)
    text: ClassVar = ""

    def __post_init__(self) -> None:
        if self.reasoning is None and self.spoken is None:
            raise FieldError("reasoning", "is missing", BadRequest, "missing_field")

    @property
    def thought(self) -> str:
        return self.reasoning or self.spoken or ""


Texts = TextPart | InputTextPart | OutputTextPart
Part = Texts | ImagePart | InputImagePart | RefusalPart | ThinkingPart | ReasoningPart
Content = str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]


def thoughts_in(content: Content | None) -> str | None:
    """Returns the text of the reasoning parts of a message; None if it has no such parts."""
    if content is None or isinstance(content, str):
        return None
    thoughts = [part.thought for part in content if isinstance(part, ThinkingPart | ReasoningPart)]
    return "\n".join(thoughts) if thoughts else None


# Rules for a message of OpenAI's chat beyond the types of its fields, for the API description.

Schema = Mapping[str, Any]  # JSON Schema
# An assistant's message may have one of these fields instead of `content`.
INSTEAD_OF_CONTENT = ("reasoning_content", "reasoning", "refusal")


def _having(name: str, schema: Schema) -> Schema:
    return {"required": [name], "properties": {name: schema}}


_FROM_ASSISTANT: Schema = {"properties": {"role": {"const": "assistant"}}}
_SPOKEN = [_having(name, {"type": "string", "minLength": 1}) for name in INSTEAD_OF_CONTENT]
_CALLED_OR_SPOKEN: Schema = {"anyOf": [_having("tool_calls", {"type": "array", "minItems": 1}), *_SPOKEN]}
_THOUGHT = {"type": "object", **_having("type", {"enum": ["thinking", "reasoning"]})}
_NO_THOUGHTS: Schema = {"properties": {"content": {"not": {"type": "array", "contains": _THOUGHT}}}}
RULES: Sequence[Schema] = (
    {"anyOf": [_having("content", {"not": {"enum": [None, []]}}), {"allOf": [_FROM_ASSISTANT, _CALLED_OR_SPOKEN]}]},
    {"anyOf": [_FROM_ASSISTANT, {"properties": {"tool_calls": {"maxItems": 0}}}]},
    {"anyOf": [_FROM_ASSISTANT, _NO_THOUGHTS]},
)


# `prediction`: a text that the client expects as the answer. It speeds up the answer without changing it.


class Prediction(RequestModel):
    type: Literal["content"]
    content: str | Annotated[list[TextPart], Meta(max_length=MAX_PARTS)]


PredictionField = Annotated[
    Prediction | None,
    doc("A text that the answer will mostly repeat. It speeds up the answer without changing it"),
]


async def with_prediction(
    reading: ParsedRequest, prediction: Prediction | None, context: ModelContext
) -> ParsedRequest:
    """Returns `reading` with the ids of the expected answer, cut to the length of the context."""
    if prediction is None:
        return reading
    said = prediction.content
    text = said if isinstance(said, str) else "".join([part.text for part in said])
    ids = await context.tokenizer.encode(text, add_special_tokens=False)
    known = tuple(id for id in ids[: context.max_seq_len] if id < context.vocab_size)
    return replace(reading, features=replace(reading.features, predicted=known))


MAX_CALLS = 1024  # a model that repeats itself makes hundreds, and a client sends them back


class CalledFunction(RequestModel):
    # `parsed_arguments`: added by OpenAI's SDK
    IGNORED: ClassVar[Names] = ("parsed_arguments",)

    name: Text
    arguments: str | None = None


class ToolCall(RequestModel, tag="function"):
    DEFAULT_TYPE = True

    id: Text
    function: CalledFunction
    index: Count | None = None  # copied by clients from the chunks of a stream

    def chat_call(self) -> ChatMessage:
        return call(self.id, self.function.name, parse_arguments(self.function.arguments or "{}"))


class CalledCustomTool(RequestModel):
    name: Text
    input: str = ""


class CustomToolCall(RequestModel, tag="custom"):
    """A call of a custom tool, which the prompt has as the call of a function with one parameter."""

    id: Text
    custom: CalledCustomTool
    index: Count | None = None

    def chat_call(self) -> ChatMessage:
        return call(self.id, self.custom.name, {INPUT: self.custom.input})


class MessageParam(RequestModel):
    """A message. Only an assistant's may be without content, and only with tool calls, reasoning or a refusal."""

    ONLY: ClassVar = {"type": ("text", "message")}  # sent by lm-evaluation-harness, and by the Responses API
    SCHEMA: ClassVar = RULES
    # `parsed`: added by OpenAI's SDK
    IGNORED: ClassVar[Names] = ("annotations", "parsed")
    REFUSED: ClassVar[Names] = ("function_call", "audio")

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Content | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[ToolCall | CustomToolCall], Meta(max_length=MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None  # becomes the text of the message in the prompt

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "belong to the assistant")
        if isinstance(self.content, list) and self.role != "assistant" and thoughts_in(self.content) is not None:
            raise FieldError("content", "has thoughts, which belong to the assistant")
        if self.content in (None, []) and not (
            self.role == "assistant" and (self.tool_calls or self.thought or self.refusal)
        ):
            missing = self.content is None
            raise FieldError(
                "content", "is missing" if missing else "is empty", BadRequest,
                "missing_field" if missing else "empty_prompt",
            )  # fmt: skip

    @property
    def thought(self) -> str | None:
        return self.reasoning_content or self.reasoning or thoughts_in(self.content)

    def chat_message(self) -> ChatMessage:
        """Returns the message for chat templates. Call arguments become an object if they are the JSON of one."""
        calls = [one.chat_call() for one in self.tool_calls or ()]
        also = {key: value for key in ("name", "tool_call_id") if (value := getattr(self, key)) is not None}
        said = join_text(self.content or self.refusal)
        message = chat_message(ROLES.get(self.role, self.role), said, self.thought, calls)
        return message | also | found_in(self.content or (), "content")


Messages = Annotated[
    list[MessageParam], Meta(min_length=1, max_length=MAX_MESSAGES), doc("The conversation, oldest first")
]
Template = Annotated[str | None, doc("A chat template in place of the model's; needs `--trust-request-chat-template`")]
Documents = Annotated[
    Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None,
    doc("Passed to the chat template; refused if the template shows no documents"),
]
AddGenerationPrompt = Annotated[bool | None, doc("true: open an assistant's turn even after another; false: open none")]
ContinueFinalMessage = Annotated[bool, doc("Continue the last message, as is the default for an assistant's text")]


class ReasoningOptions(RequestModel):
    """OpenRouter's field `reasoning`."""

    effort: Degree | None = None
    max_tokens: Count | None = None
    exclude: bool = False
    enabled: bool | None = None


ReasoningField = Annotated[
    ReasoningOptions | None,
    doc("`effort`: as `reasoning_effort`; `max_tokens`: as `max_thinking_tokens`; `exclude`: leave it out"),
]


class ChatRequest(TokenDetailFields):
    ONLY: ClassVar = {
        **TokenDetailFields.ONLY,
        "add_special_tokens": (False,),  # the chat template writes the special tokens
        "modalities": (["text"],),
        "functions": ([],),  # the old name of `tools`
        "function_call": ("none",),  # the old name of `tool_choice`
        "echo": (False,),
        "best_of": (1,),
    }
    # `max_output_tokens`: the name of a limit on responses; `input_ids`: what SGLang computes in place of the messages
    REFUSED: ClassVar[Names] = ("audio", "moderation", "web_search_options", "max_output_tokens", "input_ids")

    messages: Messages
    model: ModelName = None
    max_tokens: Annotated[
        TokenLimit | None, doc("Most tokens of the answer; absent, -1 and -2: to the context's end")
    ] = None
    max_completion_tokens: Annotated[TokenLimit | None, doc("The newer name of `max_tokens`")] = None
    n: ChoiceCount = 1
    logprobs: Annotated[bool, doc("Log-probabilities of the answer's tokens")] = False
    top_logprobs: TopLogprobs = None
    continue_from: ContinueFromField = None
    response_format: ResponseFormatField = None
    chat_template: Template = None
    documents: Documents = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    tools: FunctionTools = None
    tool_choice: FunctionToolChoice = None
    parallel_tool_calls: ParallelToolCalls = True
    reasoning_effort: ReasoningEffort = None
    reasoning: ReasoningField = None
    max_thinking_tokens: MaxThinkingTokens = None
    thinking_budget: OtherBudgetName = None
    thinking_token_budget: OtherBudgetName = None
    include_reasoning: IncludeReasoning = True
    separate_reasoning: SeparateReasoning = True
    stream_reasoning: StreamReasoning = True
    verbosity: Verbosity = None
    prediction: PredictionField = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_tokens", "max_completion_tokens"):
            limit_of(name, getattr(self, name))

    @property
    def limits(self) -> set[int | None]:
        """The limits on new tokens that the request sets, by either name."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        return {limit_of("max_tokens", one) for one in given}

    @property
    def limit_name(self) -> str:
        """The name of the field with that limit."""
        newer = "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
        return newer if self.n_predict is None else "n_predict"


class TemplateFields(RequestModel):
    """The fields besides messages that affect the prompt of a chat, for routes that only render it."""

    model: ModelName = None
    chat_template: Template = None
    documents: Documents = None
    chat_template_kwargs: TemplateArguments = None
    add_generation_prompt: AddGenerationPrompt = None
    continue_final_message: ContinueFinalMessage = False
    tools: FunctionTools = None
    tool_choice: FunctionToolChoice = None
    parallel_tool_calls: ParallelToolCalls = True
    reasoning_effort: ReasoningEffort = None
    reasoning: ReasoningField = None
    verbosity: Verbosity = None


MAX_TEXTS = 2048  # that /tokenize takes at once


class TokenizeRequest(TemplateFields):
    prompt: Annotated[str | Annotated[list[str], Meta(max_length=MAX_TEXTS)] | None, doc("A text, or several")] = None
    add_special_tokens: Annotated[bool | None, doc("false: without the tokenizer's special tokens")] = None
    messages: Messages | None = None


class TemplateRequest(TemplateFields):
    messages: Messages


Asked = ChatRequest | TokenizeRequest | TemplateRequest


def _thinking_arguments(request: Asked, context: ModelContext) -> dict[str, Any]:
    options = request.reasoning or ReasoningOptions()
    wanted = request.reasoning_effort or options.effort
    if options.effort not in (None, wanted):
        raise Unprocessable(
            "`reasoning_effort` and `reasoning.effort` differ", param="reasoning.effort", code="conflicting_fields"
        )
    if options.enabled is None or (wanted and options.enabled):
        return effort(wanted, context)
    return thinking(options.enabled, context)


async def chat_prompt(request: Asked, functions: Sequence[Function], context: ModelContext) -> Prompt:
    """Renders and tokenizes the messages of a request. Raises BadRequest or Unprocessable."""
    return await encoded(await rendered_chat(request, functions, context), context)


async def rendered_chat(request: Asked, functions: Sequence[Function], context: ModelContext) -> Rendered:
    """Renders a request's messages. Raises BadRequest or Unprocessable."""
    if context.template.is_slow:
        return await CHILDREN.threads.run(_rendered, request, functions, context)
    values = {
        "chat_template_kwargs": request.chat_template_kwargs, "documents": request.documents,
        "tools": [one.definition for one in functions],
    }  # fmt: skip
    return await prepared(partial(_rendered, request, functions), context, request.messages or (), values)


def _rendered(request: Asked, functions: Sequence[Function], context: ModelContext) -> Rendered:
    generate, resume = request.add_generation_prompt, request.continue_final_message
    if generate and resume:
        raise Unprocessable(
            "`continue_final_message` cannot go with `add_generation_prompt`",
            param="continue_final_message", code="out_of_range",
        )  # fmt: skip
    values = _thinking_arguments(request, context) | document_arguments(request.documents, context)
    values |= {"verbosity": request.verbosity} if request.verbosity else {}
    values |= request.chat_template_kwargs or {}
    messages = [within(one.chat_message(), f"messages[{place}]") for place, one in enumerate(request.messages or ())]
    if any(one["role"] not in COMMON_ROLES for one in messages):
        check_roles(messages, context, values, functions)
    return render(messages, context, values, functions, generate is not False, resume or left_open(messages, generate))
