"""The request of Anthropic's Messages API, and the prompt made from its messages and content blocks.

One message may become several chat messages, because each tool result becomes a chat message of its own.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.api.chat.call_history import ChatMessage, call, chat_message, merge_same_role
from frontend.api.chat.chat_prompt import (
    MAX_MESSAGES,
    MAX_PARTS,
    Prompt,
    join_text,
    render_prompt,
)
from frontend.api.chat.structured_output_fields import OutputConfig
from frontend.api.chat.thinking_fields import ThinkingField, thinking
from frontend.api.chat.tool_fields import CustomToolChoice, CustomTools
from frontend.api.model_context import ModelContext
from frontend.api.requests.request_model import RequestModel, out_of_range
from frontend.api.requests.request_types import (
    STOPS,
    GenerationFields,
    Ignored,
    ModelName,
    Positive,
    Refused,
    StopTexts,
    TemplateArguments,
    Text,
    check_stops,
    doc,
)
from frontend.output_parser.tool_choice import Function
from frontend.text.chat_template import TemplateError
from frontend.text.picture_marks import Source, base64_source, found_in, within

# the content blocks


class PlainTextBlock(RequestModel):
    """A text block where no other kind of block is accepted."""

    UNKNOWN_TYPE = "unsupported_content"
    ONLY: ClassVar = {"citations": ([],)}

    type: Literal["text"]
    text: str
    cache_control: Ignored = None


class SystemTextBlock(PlainTextBlock):
    parsed_output: Ignored = None


class _Block(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"

    parsed_output: Ignored = None


class TextBlock(_Block, tag="text"):
    ONLY: ClassVar = {"citations": ([],)}

    text: str
    cache_control: Ignored = None


class Base64Image(RequestModel, tag_field="type", tag="base64"):
    media_type: Text
    data: str

    @property
    def source(self) -> Source:
        return base64_source(self.data, self.media_type)


class ImageAtURL(RequestModel, tag_field="type", tag="url"):
    url: str

    @property
    def source(self) -> Source:
        return Source(self.url)


class ImageBlock(_Block, tag="image"):
    given: Base64Image | ImageAtURL = msgspec.field(name="source")
    transformations: Refused = None
    cache_control: Ignored = None

    @property
    def source(self) -> Source:
        return self.given.source

    @property
    def text(self) -> str:
        """The text that stands for the picture in the message."""
        return self.source.mark


class ToolUseBlock(_Block, tag="tool_use"):
    id: Text
    name: Text
    input: dict[str, Any]
    caller: Ignored = None
    toolset_name: Ignored = None
    cache_control: Ignored = None


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str  # encrypted reasoning, which this server cannot read


class ToolResultBlock(_Block, tag="tool_result"):
    tool_use_id: Text
    content: str | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None
    toolset_name: Ignored = None
    cache_control: Ignored = None


UserBlock = TextBlock | ImageBlock | ToolResultBlock
AssistantBlock = TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock
_SomeParts = Meta(min_length=1, max_length=MAX_PARTS)


# the messages


class UserMessage(RequestModel, tag_field="role", tag="user"):
    content: str | Annotated[list[UserBlock], _SomeParts]

    def chat_messages(self) -> list[ChatMessage]:
        """Returns a message for each tool result, and one for each run of other blocks between tool results."""
        if isinstance(self.content, str):
            return [chat_message("user", self.content)]
        messages: list[ChatMessage] = []
        place = 0
        for is_result, blocks in groupby(self.content, lambda block: isinstance(block, ToolResultBlock)):
            run = list(blocks)
            if is_result:
                results = [block for block in run if isinstance(block, ToolResultBlock)]
                messages += [within(_result(block), f"content[{at}]") for at, block in enumerate(results, place)]
            else:
                said = [block for block in run if not isinstance(block, ToolResultBlock)]
                messages.append(chat_message("user", join_text(said)) | found_in(said, "content", place))
            place += len(run)
        return messages


def _result(block: ToolResultBlock) -> ChatMessage:
    text = join_text(block.content)
    result = chat_message("tool", f"Error: {text}" if block.is_error else text)
    return result | {"tool_call_id": block.tool_use_id} | found_in(block.content or (), "content")


class AssistantMessage(RequestModel, tag_field="role", tag="assistant"):
    content: str | Annotated[list[AssistantBlock], _SomeParts]

    def chat_messages(self) -> list[ChatMessage]:
        """Returns one message with all texts, all reasoning and all calls, as chat templates expect it."""
        if isinstance(self.content, str):
            return [chat_message("assistant", self.content)]
        texts, thoughts, calls = [], [], []
        for block in self.content:
            match block:
                case TextBlock(text=text):
                    texts.append(text)
                case ThinkingBlock(thinking=thought):
                    thoughts.append(thought)
                case ToolUseBlock(id=id, name=name, input=arguments):
                    calls.append(call(id, name, arguments))
        return [chat_message("assistant", "".join(texts), "\n".join(thoughts), calls)]


class SystemMessage(RequestModel, tag_field="role", tag="system"):
    content: str | Annotated[list[SystemTextBlock], _SomeParts]

    def chat_messages(self) -> list[ChatMessage]:
        return [chat_message("system", join_text(self.content))]


# the request

Messages = Annotated[
    Annotated[list[UserMessage | AssistantMessage | SystemMessage], Meta(min_length=1, max_length=MAX_MESSAGES)],
    doc("The conversation, oldest first"),
]
System = Annotated[
    str | Annotated[list[PlainTextBlock], Meta(max_length=MAX_PARTS)] | None, doc("Instructions for the conversation")
]
CacheControl = Annotated[Any, doc("Accepted, no effect: equal beginnings are always found")]
OutputField = Annotated[
    OutputConfig | None,
    doc("`format`: a JSON schema that the answer keeps to; `effort`: passed to templates that know degrees"),
]
KEEP_THOUGHTS = {"type": "clear_thinking_20251015", "keep": "all"}
_ONLY: dict[str, Sequence[Any]] = {
    "mcp_servers": ([],),
    "context_management": ({"edits": []}, {"edits": [KEEP_THOUGHTS]}),  # values that keep the whole conversation
    "speed": ("standard",),
}


class MessageCountRequest(RequestModel):
    ONLY: ClassVar = _ONLY

    model: ModelName = None
    messages: Messages
    system: System = None
    chat_template_kwargs: TemplateArguments = None
    tools: CustomTools = None
    tool_choice: CustomToolChoice = None
    thinking: ThinkingField = None
    cache_control: CacheControl = None
    output_config: OutputField = None


class MessageRequest(GenerationFields):
    ONLY: ClassVar = {**GenerationFields.ONLY, **_ONLY}

    model: ModelName = None
    messages: Messages
    max_tokens: Annotated[Positive, doc("Most tokens of the answer")]
    system: System = None
    stop_sequences: Annotated[StopTexts | None, doc(STOPS)] = None
    chat_template_kwargs: TemplateArguments = None
    tools: CustomTools = None
    tool_choice: CustomToolChoice = None
    thinking: ThinkingField = None
    cache_control: CacheControl = None
    output_config: OutputField = None
    inference_geo: Ignored = None
    diagnostics: Ignored = None
    thread: Refused = None
    container: Refused = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stops("stop_sequences", self.stop_sequences)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())


def marks_cache(request: MessageRequest) -> bool:
    """Whether a request has a `cache_control` anywhere."""
    return any(getattr(part, "cache_control", None) is not None for part in _parts(request))


def _parts(request: MessageRequest) -> Iterator[RequestModel]:
    contents = (request.system, *[message.content for message in request.messages])
    yield request
    yield from request.tools or ()
    for content in contents:
        yield from content if isinstance(content, list) else ()


async def message_prompt(
    request: MessageRequest | MessageCountRequest, functions: Sequence[Function], context: ModelContext
) -> Prompt:
    """Renders the prompt of a request's messages. If the last message is the assistant's, the answer continues it.

    If the template accepts a system message only at the beginning, later system messages become user messages. Raises
    BadRequest or Unprocessable.
    """
    messages = [
        within(shown, f"messages[{place}]")
        for place, message in enumerate(request.messages)
        for shown in message.chat_messages()
    ]
    if messages[0]["role"] == "system":
        raise out_of_range("messages[0].role", "system", "user or assistant: what stands before is `system`")
    system = [chat_message("system", join_text(request.system))] if request.system else []
    messages = merge_same_role([*system, *messages])
    resume = messages[-1]["role"] == "assistant"
    arguments = _template_arguments(request, context) | (request.chat_template_kwargs or {})
    rest = arguments, functions, not resume, resume
    try:
        return await render_prompt(messages, context, *rest)
    except TemplateError:
        plain = merge_same_role(_later_systems_as_users(messages))
        if plain == messages:
            raise
        return await render_prompt(plain, context, *rest)


def _later_systems_as_users(messages: Iterable[ChatMessage]) -> list[ChatMessage]:
    return [one | {"role": "user"} if i and one["role"] == "system" else one for i, one in enumerate(messages)]


def _template_arguments(request: MessageRequest | MessageCountRequest, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables. Without `thinking`, reasoning is off. The type `adaptive` turns reasoning on
    if the model can reason."""
    style = context.style
    kind = request.thinking.type if request.thinking else "disabled"
    wanted = kind == "enabled" or (kind == "adaptive" and (style.has_reasoning or bool(style.thinking_switch)))
    degree = request.output_config.effort if request.output_config else None
    effort = {"reasoning_effort": style.degree(degree)} if degree is not None and style.has_reasoning_effort else {}
    return effort | thinking(wanted, context)
