"""The request of Anthropic's Messages API, and the prompt made from its messages and content blocks.

One message may become several chat messages, because each tool result becomes a chat message of its own.
"""

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

from frontend.chat.history import ChatMessage, call, chat_message, merge_same_role
from frontend.chat.prompt import MAX_MESSAGES, MAX_PARTS, Prompt, join_text, render_prompt
from frontend.chat.reasoning import ThinkingField, thinking
from frontend.chat.tool_fields import CustomToolChoice, CustomTools
from frontend.model_context import ModelContext
from frontend.output_parser.model_format import Function
from frontend.schema.base import FieldError, Names, RequestModel, out_of_range
from frontend.schema.request_fields import (
    STOPS,
    GenerationFields,
    ModelName,
    Positive,
    StopTexts,
    TemplateArguments,
    Text,
    check_stops,
    doc,
)
from frontend.structured_output.fields import OutputConfig, OutputFormat
from frontend.text.chat_template import IMAGE_SOURCES, Source, base64_source, found_in, joined, within

# the content blocks


class PlainTextBlock(RequestModel):
    """A text block where no other kind of block is accepted."""

    IGNORED: ClassVar[Names] = ("cache_control",)

    UNKNOWN_TYPE = "unsupported_content"
    ONLY: ClassVar = {"citations": ([],)}

    type: Literal["text"]
    text: str


class SystemTextBlock(PlainTextBlock):
    IGNORED: ClassVar[Names] = ("parsed_output",)


class _Block(RequestModel):
    IGNORED: ClassVar[Names] = ("parsed_output",)

    UNKNOWN_TYPE = "unsupported_content"


class TextBlock(_Block, tag="text"):
    ONLY: ClassVar = {"citations": ([],)}
    IGNORED: ClassVar[Names] = ("cache_control",)

    text: str


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
    IGNORED: ClassVar[Names] = ("cache_control",)
    REFUSED: ClassVar[Names] = ("transformations",)

    given: Base64Image | ImageAtURL = msgspec.field(name="source")

    @property
    def source(self) -> Source:
        return self.given.source

    @property
    def text(self) -> str:
        """The text that stands for the image in the message."""
        return self.source.mark


class TextSource(RequestModel, tag_field="type", tag="text"):
    data: str
    media_type: Literal["text/plain"] | None = None

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        return [TextBlock(text=self.data)]


class Base64Text(RequestModel, tag_field="type", tag="base64"):
    """A text file in base64. PDF files are refused, because nothing here reads them."""

    data: str
    media_type: Literal["text/plain"]

    def __post_init__(self) -> None:
        try:
            base64.b64decode(self.data, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError, ValueError):
            raise FieldError("data", "must be base64 of a text in UTF-8", code="out_of_range") from None

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        return [TextBlock(text=base64.b64decode(self.data).decode())]


class ContentSource(RequestModel, tag_field="type", tag="content"):
    content: str | Annotated[list[TextBlock | ImageBlock], Meta(max_length=MAX_PARTS)]

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content


class DocumentBlock(_Block, tag="document"):
    """A document, of which the prompt has the title, the context and the text."""

    ONLY: ClassVar = {"citations": ({"enabled": False},)}
    IGNORED: ClassVar[Names] = ("cache_control",)

    given: TextSource | Base64Text | ContentSource = msgspec.field(name="source")
    title: str | None = None
    context: str | None = None

    @property
    def parts(self) -> list[TextBlock | ImageBlock]:
        return [*(TextBlock(text=one) for one in (self.title, self.context) if one), *self.given.parts]


class ToolUseBlock(_Block, tag="tool_use"):
    IGNORED: ClassVar[Names] = ("caller", "toolset_name", "cache_control")

    id: Text
    name: Text
    input: dict[str, Any]


class ThinkingBlock(_Block, tag="thinking"):
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Block, tag="redacted_thinking"):
    data: str  # encrypted reasoning, which this server cannot read


class ToolResultBlock(_Block, tag="tool_result"):
    IGNORED: ClassVar[Names] = ("toolset_name", "cache_control")

    tool_use_id: Text
    content: str | Annotated[list[TextBlock | ImageBlock | DocumentBlock], Meta(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


UserBlock = TextBlock | ImageBlock | DocumentBlock | ToolResultBlock
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
                messages.append(chat_message("user", join_text(_flat(said))) | _image_sources(said, place))
            place += len(run)
        return messages


def _result(block: ToolResultBlock) -> ChatMessage:
    content = block.content if isinstance(block.content, str) else _flat(block.content or ())
    text = join_text(content)
    result = chat_message("tool", f"Error: {text}" if block.is_error else text)
    return result | {"tool_call_id": block.tool_use_id} | _image_sources(block.content or ())


def _flat(blocks: Iterable[TextBlock | ImageBlock | DocumentBlock]) -> list[TextBlock | ImageBlock]:
    """Returns the blocks with the parts of documents in their places."""
    return [part for one in blocks for part in (one.parts if isinstance(one, DocumentBlock) else (one,))]


def _image_sources(blocks: str | Sequence[TextBlock | ImageBlock | DocumentBlock], first: int = 0) -> ChatMessage:
    """Does the same as `found_in` for blocks of `content`, also for the images of documents."""
    found: dict[str, Source] = {}
    for place, block in enumerate(() if isinstance(blocks, str) else blocks, first):
        if isinstance(block, DocumentBlock):
            shown = within(found_in(block.given.parts, "source.content"), f"content[{place}]")
        else:
            shown = found_in([block], "content", place)
        found = shown.get(IMAGE_SOURCES, {}) | found
    return {IMAGE_SOURCES: found} if found else {}


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
        return [chat_message("assistant", joined(texts), "\n".join(thoughts), calls)]


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
CacheControl = Annotated[
    dict[str, Any] | None,
    doc("Equal beginnings are always found; the K/V store keeps the prompt for the `ttl`: `5m` (default) or `1h`"),
]
OutputField = Annotated[
    OutputConfig | None,
    doc("`format`: a JSON schema that the answer keeps to; `effort`: passed to templates that know degrees"),
]
OlderOutputField = Annotated[OutputFormat | None, doc("The beta's name of `output_config.format`")]
BILLING = re.compile(r"x-anthropic-billing-header:[^\n]*\n?")
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
    output_format: OlderOutputField = None


class MessageRequest(GenerationFields):
    ONLY: ClassVar = {**GenerationFields.ONLY, **_ONLY, "watermarking": (False,)}
    IGNORED: ClassVar[Names] = ("inference_geo", "diagnostics", "vllm_xargs", "return_mm_kwargs", "mm_payload")
    # OpenAI's `stop` and `response_format` have other names here: without them, the answer would be another
    REFUSED: ClassVar[Names] = (
        "thread", "container", "stop", "response_format", "kv_transfer_params", "ec_transfer_params",
    )  # fmt: skip

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
    output_format: OlderOutputField = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_stops("stop_sequences", self.stop_sequences)

    @property
    def stops(self) -> tuple[str, ...]:
        return tuple(self.stop_sequences or ())


_TTL_S = {"5m": 300, "1h": 3600}


def cached_for(request: MessageRequest) -> int:
    """Returns for how many seconds a request wants its prompt cached: the longest `ttl` of any `cache_control`; 0 if
    there is none."""
    marks = [mark for part in _parts(request) if (mark := getattr(part, "cache_control", None)) is not None]
    named = [mark.get("ttl") if isinstance(mark, dict) else None for mark in marks]
    return max([_TTL_S.get(ttl, _TTL_S["5m"]) if isinstance(ttl, str) else _TTL_S["5m"] for ttl in named], default=0)


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

    Raises BadRequest or Unprocessable.
    """
    messages = [
        within(shown, f"messages[{place}]")
        for place, message in enumerate(request.messages)
        for shown in message.chat_messages()
    ]
    if messages[0]["role"] == "system":
        raise out_of_range("messages[0].role", "system", "user or assistant: what stands before is `system`")
    system = _system_text(request.system)
    messages = merge_same_role([*([chat_message("system", system)] if system else []), *messages])
    resume = messages[-1]["role"] == "assistant"
    arguments = _template_arguments(request, context) | (request.chat_template_kwargs or {})
    return await render_prompt(messages, context, arguments, functions, not resume, resume)


def _system_text(system: str | list[PlainTextBlock] | None) -> str:
    """Returns the text of `system`, without Claude Code's first block, which differs in each request.

    It has no meaning for a model, and with it no two requests would have a common prefix.
    """
    if isinstance(system, list) and system and BILLING.fullmatch(system[0].text):
        system = system[1:]
    return join_text(system)


def _template_arguments(request: MessageRequest | MessageCountRequest, context: ModelContext) -> dict[str, Any]:
    """Returns the template's variables. Without `thinking`, reasoning is off. The type `adaptive` turns reasoning on
    if the model can reason."""
    style = context.style
    kind = request.thinking.type if request.thinking else "disabled"
    wanted = kind == "enabled" or (kind == "adaptive" and (style.has_reasoning or bool(style.thinking_switch)))
    degree = request.output_config.effort if request.output_config else None
    effort = {"reasoning_effort": style.degree(degree)} if degree is not None and style.has_reasoning_effort else {}
    return effort | thinking(wanted, context)
