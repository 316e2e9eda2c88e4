"""The request of OpenAI's Responses API, and the prompt made from its input items.

The reasoning, text and calls of one assistant turn are separate items. `merge_same_role` joins them to one message.
"""

from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.openai.responses_calls import ForeignItem, ImagePart, Part, ResultPart
from frontend.chat.history import ChatMessage, call, chat_message, merge_same_role
from frontend.chat.prompt import MAX_MESSAGES, MAX_PARTS, ROLES, Prompt, join_text, parse_arguments, render_prompt
from frontend.chat.reasoning import Degree, MaxThinkingTokens, OtherBudgetName, effort
from frontend.chat.tool_fields import FlatFunctionTools, FlatToolChoice, ParallelToolCalls
from frontend.errors import BadRequest, ContextLengthExceeded
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import Function
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import (
    UNLIMITED,
    Count,
    IncludeReasoning,
    ModelName,
    OpenAIFields,
    Positive,
    ResponseStreamOptions,
    SeparateReasoning,
    TemplateArguments,
    Text,
    TokenLimit,
    TopLogprobs,
    doc,
    limit_of,
)
from frontend.structured_output.fields import TextOptions
from frontend.text.chat_template import found_in, within

if TYPE_CHECKING:  # imported only for a conversation with images
    from frontend.chat.image_decoding import Decoded

SCORES = "message.output_text.logprobs"

# the input items


class SummaryPart(RequestModel):
    type: Literal["summary_text"]
    text: str


class ReasoningPart(RequestModel):
    type: Literal["reasoning_text"]
    text: str


class _Item(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"

    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None


class Message(_Item, tag="message"):
    DEFAULT_TYPE = True

    SCHEMA: ClassVar = (
        {"anyOf": [{"properties": {"role": {"const": "assistant"}}}, {"properties": {"content": {"minItems": 1}}}]},
    )

    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Meta(max_length=MAX_PARTS)]
    phase: Literal["commentary", "final_answer"] | None = None

    def __post_init__(self) -> None:
        if self.content == [] and self.role != "assistant":  # an answer that had no text yet has no part
            raise FieldError("content", "is empty", BadRequest, "empty_prompt")


class FunctionCall(_Item, tag="function_call"):
    ONLY: ClassVar = {"async": (False,), "caller": ({"type": "direct"},)}
    # `namespace`: set for functions in a namespace; the prompt does not show them
    # `parsed_arguments`: added by OpenAI's SDK
    IGNORED: ClassVar[Names] = ("namespace", "parsed_arguments")

    call_id: Text
    name: Text
    arguments: str | None = None


class FunctionCallOutput(_Item, tag="function_call_output"):
    ONLY: ClassVar = {"caller": ({"type": "direct"},)}

    call_id: Text
    output: str | Annotated[list[ResultPart | ImagePart], Meta(max_length=MAX_PARTS)]
    name: Text | None = None


class Reasoning(_Item, tag="reasoning"):
    summary: Annotated[list[SummaryPart], Meta(max_length=MAX_PARTS)] | None = None
    content: Annotated[list[ReasoningPart], Meta(max_length=MAX_PARTS)] | None = None
    encrypted_content: str | None = None  # not read, because this server cannot decrypt it


Item = Message | FunctionCall | FunctionCallOutput | Reasoning | ForeignItem


def chat_messages(item: Item) -> list[ChatMessage]:
    """Returns the messages for the prompt; none for an item that has no place in a prompt."""
    match item:
        case Message(role=role, content=content):
            return [chat_message(ROLES.get(role, role), join_text(content)) | found_in(content, "content")]
        case FunctionCall(call_id=id, name=name, arguments=arguments):
            return [chat_message("assistant", "", calls=[call(id, name, parse_arguments(arguments or "{}"))])]
        case FunctionCallOutput(call_id=id, output=output):
            return [chat_message("tool", join_text(output)) | {"tool_call_id": id} | found_in(output, "output")]
        case Reasoning(content=content, summary=summary):
            parts = content or summary or ()
            return [chat_message("assistant", "", "\n".join([part.text for part in parts]))]
        case _:
            return item.chat_messages()


# the request


class ReasoningOptions(RequestModel):
    ONLY: ClassVar = {"context": ("auto",), "mode": ("standard",)}

    effort: Degree | None = None
    max_tokens: Count | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


Input = Annotated[
    Annotated[str, Meta(extra_json_schema={"minLength": 1})]
    | Annotated[list[Item], Meta(min_length=1, max_length=MAX_MESSAGES)],
    doc("A user's text, or all items of the conversation, oldest first"),
]
Instructions = Annotated[str | None, doc("Instructions for the conversation")]
ReasoningField = Annotated[
    ReasoningOptions | None,
    doc(
        "`effort`: as `reasoning_effort`; `max_tokens`: as `max_thinking_tokens`; `summary` has no effect: thoughts "
        "are sent as they are"
    ),
]
TextField = Annotated[TextOptions | None, doc("`format`: as `response_format`; `verbosity`: as in a chat")]
Included = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
_COUNT_ONLY: dict[str, Sequence[Any]] = {"truncation": ("disabled",)}
_ONLY: dict[str, Sequence[Any]] = {
    "access_programs": ({}, {"cyber": "standard"}),
    "image": ({}, {"context_compression": "auto"}, {"context_compression": "disabled"}),
}


def _check_input(value: str | list[Item]) -> None:
    if value == "":
        raise FieldError("input", "is empty", BadRequest, "empty_prompt")


class ConversationId(RequestModel):
    id: Text


PreviousResponse = Annotated[
    Text | None, doc("With `--store`: the kept response that this one follows, whose items come first")
]


class ResponseCountRequest(RequestModel):
    ONLY: ClassVar = _COUNT_ONLY
    REFUSED: ClassVar[Names] = ("personality",)

    input: Input
    model: ModelName = None
    instructions: Instructions = None
    chat_template_kwargs: TemplateArguments = None
    tools: FlatFunctionTools = None
    tool_choice: FlatToolChoice = None
    parallel_tool_calls: ParallelToolCalls = True
    reasoning: ReasoningField = None
    text: TextField = None
    previous_response_id: PreviousResponse = None
    conversation: Annotated[
        Text | ConversationId | None, doc("With `--store`: the id of a conversation, whose items come first")
    ] = None

    def __post_init__(self) -> None:
        _check_input(self.input)


STATEFUL = ("previous_response_id", "conversation", "background")  # fields that need a store


class ResponseRequest(OpenAIFields):
    ONLY: ClassVar = {
        **OpenAIFields.ONLY, **_ONLY, "context_management": ([],),
        "stream_reasoning": (True,), "enable_response_messages": (False,),
        **dict.fromkeys(("return_token_ids", "return_tokens_as_token_ids"), (False,)),
    }  # fmt: skip
    IGNORED: ClassVar[Names] = ("client_metadata",)
    REFUSED: ClassVar[Names] = (
        "prompt", "prompt_logprobs", "moderation", "previous_input_messages",
        # the names that other routes have for fields of this one: without them, the answer would be another
        "max_tokens", "max_completion_tokens", "response_format", "reasoning_effort", "json_schema", "grammar",
        "regex", "ebnf",
    )  # fmt: skip

    input: Input
    model: ModelName = None
    instructions: Instructions = None
    max_output_tokens: Annotated[
        TokenLimit | None, doc("Most tokens of the answer, reasoning included; absent, -1 and -2: to the context's end")
    ] = None
    include: Annotated[
        Annotated[list[Included], Meta(max_length=8)] | None,
        doc(f"`{SCORES}`: log-probabilities of the text's tokens; the rest has no effect"),
    ] = None
    top_logprobs: TopLogprobs = None
    truncation: Annotated[
        Literal["auto", "disabled"] | None,
        doc("`auto`: a conversation that is too long loses its first items, and is else refused"),
    ] = None
    stream_options: Annotated[ResponseStreamOptions | None, doc("Accepted, no effect")] = None
    chat_template_kwargs: TemplateArguments = None
    tools: FlatFunctionTools = None
    tool_choice: FlatToolChoice = None
    parallel_tool_calls: ParallelToolCalls = True
    reasoning: ReasoningField = None
    max_thinking_tokens: MaxThinkingTokens = None
    thinking_budget: OtherBudgetName = None
    thinking_token_budget: OtherBudgetName = None
    include_reasoning: IncludeReasoning = True
    separate_reasoning: SeparateReasoning = True
    text: TextField = None
    max_tool_calls: Annotated[
        Positive | None, doc("No effect: a limit for built-in tools, of which there are none")
    ] = None
    metadata: Annotated[Any, doc("Returned in the answer, no other effect")] = None
    user: Annotated[Any, doc("Returned in the answer, no other effect")] = None
    store: Annotated[Any, doc("false: the response is not kept; no effect without `--store`")] = None
    previous_response_id: PreviousResponse = None
    conversation: Annotated[
        Text | ConversationId | None,
        doc("With `--store`: the id of a conversation, whose items come first and which gets input and output"),
    ] = None
    background: Annotated[
        bool | None, doc("With `--store`: answer at once; the response is then asked for by its id")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_input(self.input)
        limit_of("max_output_tokens", self.max_output_tokens)

    @property
    def most_tokens(self) -> int | None:
        """The limit on new tokens; None: that of the model's name; UNLIMITED: the context's end."""
        return limit_of("max_output_tokens", self.max_output_tokens)


def check_stateless(request: ResponseRequest | ResponseCountRequest) -> None:
    """Raises BadRequest for a field that only a server with a store can heed; such a server has replaced it before."""
    for name in STATEFUL:
        if getattr(request, name, None):
            raise BadRequest(
                f"`{name}` is not supported: this server keeps no responses (--store)", param=name,
                code="unsupported_field",
            )  # fmt: skip


async def response_prompt(
    request: ResponseRequest | ResponseCountRequest, functions: Sequence[Function], context: ModelContext
) -> Prompt:
    """Renders the prompt of a request's items. Raises BadRequest or Unprocessable."""
    instructions = [chat_message("system", request.instructions)] if request.instructions else []
    items = request.input
    if isinstance(items, str):
        shown = [[chat_message("user", items)]]
    else:
        shown = [[within(one, f"input[{place}]") for one in chat_messages(item)] for place, item in enumerate(items)]
    arguments = effort(request.reasoning.effort if request.reasoning else None, context)
    if request.text and request.text.verbosity:
        arguments["verbosity"] = request.text.verbosity
    arguments |= request.chat_template_kwargs or {}

    images: dict[str, Decoded] = {}  # those of the first rendering serve all others
    cut_off = not isinstance(items, str) and _is_cut_off(items[-1])

    async def rendered(kept: Sequence[Sequence[ChatMessage]]) -> Prompt:
        messages = merge_same_role([*instructions, *chain.from_iterable(kept)])
        resume = cut_off and bool(messages[-1]["content"]) and "tool_calls" not in messages[-1]
        return await render_prompt(messages, context, arguments, functions, not resume, resume, "input", images)

    if not isinstance(request, ResponseRequest) or request.truncation != "auto" or not context.max_seq_len:
        return await rendered(shown)
    return await _fitting(shown, rendered, request.most_tokens, context.max_seq_len)


def _is_cut_off(item: Item) -> bool:
    """Whether an item is a text of the assistant that its status says is not complete, which the answer continues."""
    match item:
        case Message(role="assistant", status="in_progress" | "incomplete"):
            return True
    return False


# `truncation: "auto"`: a conversation that is too long for the context loses its first items.


async def _fitting(
    shown: Sequence[Sequence[ChatMessage]],
    rendered: Callable[[Sequence[Sequence[ChatMessage]]], Awaitable[Prompt]],
    asked: int | None,
    longest: int,
) -> Prompt:
    """Returns the prompt of the most items that leave room for the answer; of the fewest possible if none do.

    The room is `asked`, at most half of the context; a quarter of it if there is no limit on the answer. Instructions
    at the beginning stay, and so does the call of each result. The prompt is rendered once for each halving.
    """
    try:
        whole = await rendered(shown)
        if len(whole.ids) < longest:
            return whole
    except ContextLengthExceeded:
        pass
    first, starts = _places_to_begin(shown)
    most = longest - (longest // 4 if asked in (None, UNLIMITED) else min(asked, longest // 2))
    found: Prompt | None = None
    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        try:
            prompt = await rendered([*shown[:first], *shown[starts[middle] :]])
        except ContextLengthExceeded:
            low = middle + 1
            continue
        if len(prompt.ids) <= most:
            found, high = prompt, middle
        else:
            low = middle + 1
    return found or await rendered([*shown[:first], *shown[starts[-1] :]])


def _places_to_begin(shown: Sequence[Sequence[ChatMessage]]) -> tuple[int, list[int]]:
    """Returns how many items are instructions at the beginning, and the items behind them at which a conversation can
    begin: no result that follows has its call before."""
    first = 0
    while first < len(shown) - 1 and all(one["role"] == "system" for one in shown[first]):
        first += 1
    missing: set[str] = set()
    starts: list[int] = []
    for place in range(len(shown) - 1, first - 1, -1):
        for one in shown[place]:
            missing -= {call["id"] for call in one.get("tool_calls", ())}
            if (id := one.get("tool_call_id")) is not None:
                missing.add(id)
        if not missing and shown[place]:
            starts.append(place)
    return first, starts[::-1] or [first]
