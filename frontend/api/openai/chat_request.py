"""The request of OpenAI's chat completions, and the prompt made from its messages. `/tokenize` uses the same prompt."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from frontend.api.chat.call_history import COMMON_ROLES, ChatMessage, call, chat_message, left_open
from frontend.api.chat.chat_prompt import (
    MAX_MESSAGES,
    MAX_PARTS,
    ROLES,
    Prompt,
    Rendered,
    encoded,
    join_text,
    parse_arguments,
    render,
)
from frontend.api.chat.continuation_fields import ContinueFromField
from frontend.api.chat.large_chats import prepared
from frontend.api.chat.own_template import CHILDREN, check_roles, document_arguments
from frontend.api.chat.structured_output_fields import ResponseFormatField, Verbosity
from frontend.api.chat.thinking_fields import (
    Degree,
    MaxThinkingTokens,
    OtherBudgetName,
    ReasoningEffort,
    effort,
    thinking,
)
from frontend.api.chat.tool_fields import FunctionToolChoice, FunctionTools, ParallelToolCalls
from frontend.api.model_context import ModelContext
from frontend.api.openai.content_parts import Content, thoughts_in
from frontend.api.openai.message_rules import RULES
from frontend.api.openai.prediction import PredictionField
from frontend.api.requests.request_model import FieldError, RequestModel
from frontend.api.requests.request_types import (
    ChoiceCount,
    Count,
    Ignored,
    IncludeReasoning,
    ModelName,
    Refused,
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
from frontend.errors import BadRequest, Unprocessable
from frontend.output_parser.tool_choice import INPUT, Function
from frontend.text.picture_marks import found_in, within

MAX_CALLS = 128


class CalledFunction(RequestModel):
    name: Text
    arguments: str | None = None
    parsed_arguments: Ignored = None  # added by OpenAI's SDK


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
    """A call of a custom tool, which the model sees as the call of a function with one parameter."""

    id: Text
    custom: CalledCustomTool
    index: Count | None = None

    def chat_call(self) -> ChatMessage:
        return call(self.id, self.custom.name, {INPUT: self.custom.input})


class MessageParam(RequestModel):
    """A message. Its content may be missing only if the assistant's message has tool calls, reasoning or a refusal."""

    ONLY: ClassVar = {"type": ("text", "message")}  # sent by lm-evaluation-harness, and by the Responses API
    SCHEMA: ClassVar = RULES

    role: Annotated[str, Meta(min_length=1, max_length=64)]
    content: Content | None = None
    name: Text | None = None
    tool_call_id: Text | None = None
    tool_calls: Annotated[list[ToolCall | CustomToolCall], Meta(max_length=MAX_CALLS)] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: Refused = None
    refusal: str | None = None  # the model sees it as the text of the message
    audio: Refused = None
    annotations: Ignored = None
    parsed: Ignored = None  # added by OpenAI's SDK

    def __post_init__(self) -> None:
        if self.tool_calls and self.role != "assistant":
            raise FieldError("tool_calls", "belong to the assistant")
        if isinstance(self.content, list) and self.role != "assistant" and thoughts_in(self.content) is not None:
            raise FieldError("content", "has thoughts, which belong to the assistant")
        if self.content is None and not (
            self.role == "assistant" and (self.tool_calls or self.thought or self.refusal)
        ):
            raise FieldError("content", "is missing", BadRequest, "missing_field")

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
    }

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
    audio: Refused = None
    moderation: Refused = None
    web_search_options: Refused = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_tokens", "max_completion_tokens"):
            limit_of(name, getattr(self, name))

    @property
    def limits(self) -> set[int | None]:
        """The limits on new tokens that the request sets, by either name; None: up to the context's end."""
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        return {limit_of("max_tokens", one) for one in given}


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


class TokenizeRequest(TemplateFields):
    prompt: Annotated[str | None, doc("A text")] = None
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
    if context.template.blocks:
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
