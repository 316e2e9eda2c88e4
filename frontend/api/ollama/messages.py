"""Ollama's chat messages, and the prompt made from them.

A tool result need not name its call, so results without an id are assigned to the calls in order.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from frontend.api.chat.call_history import ChatMessage, call, chat_message
from frontend.api.chat.chat_prompt import Prompt, render_prompt
from frontend.api.model_context import ModelContext
from frontend.api.requests.request_model import RequestModel
from frontend.api.requests.request_types import Ignored, Text, doc
from frontend.output_parser.tool_choice import Function
from frontend.text.picture_marks import Source, base64_source, found_in, within

MAX_CALLS = 128
MAX_IMAGES = 1024
Images = Annotated[
    Annotated[list[str], Meta(max_length=MAX_IMAGES)] | None, doc("Pictures in base64, which stand before the text")
]


class CalledTool(RequestModel):
    name: Text
    arguments: dict[str, Any] = msgspec.field(default_factory=dict)
    index: Ignored = None
    description: Ignored = None


class ToolCall(RequestModel):
    function: CalledTool
    id: Text | None = None
    type: Literal["function"] | None = None


class Message(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    images: Images = None
    thinking: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_CALLS)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    name: str | None = None


async def messages_prompt(
    messages: Sequence[Message], functions: Sequence[Function], arguments: dict[str, Any], context: ModelContext
) -> Prompt:
    """Renders the prompt of a conversation. If the last message is the assistant's, the answer continues it."""
    resume = messages[-1].role == "assistant" and not messages[-1].tool_calls
    return await render_prompt(chat_messages(messages), context, arguments, functions, not resume, resume)


def chat_messages(messages: Sequence[Message]) -> list[ChatMessage]:
    """Returns the messages for chat templates: every call gets an id, and every result gets the id of its call."""
    open_calls: list[tuple[str, str]] = []  # ids and names of calls without a result
    shown: list[ChatMessage] = []
    for place, one in enumerate(messages):
        calls = [
            call(each.id or f"call_{place}_{index}", each.function.name, each.function.arguments)
            for index, each in enumerate(one.tool_calls or ())
        ]
        open_calls += [(each["id"], each["function"]["name"]) for each in calls]
        also = _answered(one, open_calls) if one.role == "tool" else {}
        text, pictures = with_images(one.images, one.content)
        shown.append(chat_message(one.role, text, one.thinking, calls) | also | within(pictures, f"messages[{place}]"))
    return shown


def with_images(images: Sequence[str] | None, text: str) -> tuple[str, ChatMessage]:
    """Returns the text with a mark for each picture at its beginning, and the message fields that hold the pictures."""
    parts = [Image(Source(image) if image.startswith("data:") else base64_source(image)) for image in images or ()]
    return "".join(part.source.mark for part in parts) + text, found_in(parts, "images")


class Image(NamedTuple):
    source: Source


def _answered(result: Message, open_calls: list[tuple[str, str]]) -> ChatMessage:
    """Returns the fields that assign a result to its call, and removes the call from the open ones."""
    said = result.tool_name or result.name
    fitting = [
        one for one in open_calls if result.tool_call_id in (None, "", one[0]) and said in (None, "", one[1])
    ] or open_calls[:1]
    if not fitting:
        return {"name": said} if said else {}
    open_calls.remove(fitting[0])
    id, name = fitting[0]
    return {"tool_call_id": result.tool_call_id or id, "name": said or name}
