"""The JSON types of Anthropic's responses and events. `seed`, `timings` and `receipt` are additions."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Raw, UnsetType

from frontend.api.receipts import Receipt
from frontend.schema.base import ResponseModel
from frontend.schema.responses import Size, Timings

StopReason = Literal["end_turn", "stop_sequence", "max_tokens", "tool_use"]


class AnthropicErrorBody(ResponseModel):
    type: str
    message: str
    details: dict[str, Any] | UnsetType = UNSET


class AnthropicError(ResponseModel):
    type: Literal["error"] = "error"
    error: AnthropicErrorBody
    request_id: str


class MessageUsage(ResponseModel):
    """Token counts. Input tokens from the prefix cache count only in `cache_read_input_tokens`, not in
    `input_tokens`."""

    input_tokens: Size
    cache_creation_input_tokens: Size = 0
    cache_read_input_tokens: Size
    output_tokens: Size


class TextBlock(ResponseModel, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(ResponseModel, tag_field="type", tag="thinking"):
    thinking: str
    signature: str


class ToolUseBlock(ResponseModel, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Annotated[Raw, Meta(extra_json_schema={"type": "object"})]


ContentBlock = TextBlock | ThinkingBlock | ToolUseBlock


class Message(ResponseModel):
    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    seed: Size | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class TextDelta(ResponseModel, tag_field="type", tag="text_delta"):
    text: str


class ThinkingDelta(ResponseModel, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(ResponseModel, tag_field="type", tag="signature_delta"):
    signature: str


class InputJsonDelta(ResponseModel, tag_field="type", tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(ResponseModel, tag_field="type", tag="message_start"):
    message: Message


class ContentBlockStart(ResponseModel, tag_field="type", tag="content_block_start"):
    index: Size
    content_block: ContentBlock


class Ping(ResponseModel, tag_field="type", tag="ping"):
    pass


class ContentBlockDelta(ResponseModel, tag_field="type", tag="content_block_delta"):
    index: Size
    delta: BlockDelta
    usage: MessageUsage | UnsetType = UNSET


class ContentBlockStop(ResponseModel, tag_field="type", tag="content_block_stop"):
    index: Size


class MessageEnd(ResponseModel):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseModel, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessageUsage
    seed: Size | None
    timings: Timings | UnsetType = UNSET
    receipt: Receipt | UnsetType = UNSET


class MessageStop(ResponseModel, tag_field="type", tag="message_stop"):
    pass


MessageEvent = (
    MessageStart | ContentBlockStart | Ping | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
)


class InputTokenCount(ResponseModel):
    input_tokens: Size
