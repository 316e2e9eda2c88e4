"""The JSON types of OpenAI's Responses API: complete responses and numbered events.

`stop_reason`, `seed`, `timings`, `receipt` and `system_fingerprint` are additions to OpenAI's fields.
"""

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from frontend.api.openai.response_types import ErrorBody, TokenLogprobs
from frontend.api.receipts import Receipt
from frontend.schema.base import ResponseModel
from frontend.schema.responses import Size, Timings

ItemStatus = Literal["in_progress", "completed", "incomplete"]
Status = Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]


class OutputText(ResponseModel, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprobs]


class ReasoningText(ResponseModel, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(ResponseModel, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class MessageItem(ResponseModel, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class FunctionCallItem(ResponseModel, tag_field="type", tag="function_call"):
    id: str
    status: ItemStatus
    arguments: str
    call_id: str
    name: str


class CustomToolCallItem(ResponseModel, tag_field="type", tag="custom_tool_call"):
    id: str
    status: ItemStatus
    input: str
    call_id: str
    name: str


OutputItem = ReasoningItem | MessageItem | FunctionCallItem | CustomToolCallItem


class InputTokensDetails(ResponseModel):
    cached_tokens: Size
    cache_write_tokens: Size = 0


class OutputTokensDetails(ResponseModel):
    reasoning_tokens: Size


class ResponseUsage(ResponseModel):
    input_tokens: Size
    input_tokens_details: InputTokensDetails
    output_tokens: Size
    output_tokens_details: OutputTokensDetails
    total_tokens: Size


class ResponseFailure(ResponseModel):
    code: Literal["server_error"] = "server_error"
    message: str


class IncompleteDetails(ResponseModel):
    reason: Literal["max_output_tokens"] = "max_output_tokens"


class ReasoningSettings(ResponseModel):
    effort: str | None
    summary: None = None


class TextSettings(ResponseModel):
    format: Any  # the format as the client sent it


class Response(ResponseModel):
    """A response. Its fields from `instructions` on repeat settings of the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: Size
    status: Status
    completed_at: Size | None = None
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None = None
    instructions: str | None
    max_output_tokens: Size | None
    max_tool_calls: Size | None
    metadata: Any
    parallel_tool_calls: bool
    reasoning: ReasoningSettings
    temperature: float
    text: TextSettings
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_logprobs: Size
    top_p: float
    truncation: Literal["auto", "disabled"] = "disabled"
    user: Any
    service_tier: Literal["default"] = "default"
    store: bool = False
    background: bool = False
    previous_response_id: str | None = None
    conversation: dict[str, str] | UnsetType = UNSET
    stop_reason: str | int | UnsetType | None = UNSET
    seed: Size | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET
    system_fingerprint: str | None = None
    receipt: Receipt | UnsetType = UNSET


class InputTokens(ResponseModel):
    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: Size


class Event(ResponseModel, tag_field="type"):
    """The base of all events of a stream. `sequence_number` counts the events from 0."""

    sequence_number: Size


class Created(Event, tag="response.created"):
    response: Response


class InProgress(Event, tag="response.in_progress"):
    response: Response


class Completed(Event, tag="response.completed"):
    response: Response


class Incomplete(Event, tag="response.incomplete"):
    response: Response


class Failed(Event, tag="response.failed"):
    response: Response


class OutputItemAdded(Event, tag="response.output_item.added"):
    output_index: Size
    item: OutputItem


class OutputItemDone(Event, tag="response.output_item.done"):
    output_index: Size
    item: OutputItem


class ItemEvent(Event):
    """The base of events that concern one item."""

    item_id: str
    output_index: Size


class PartEvent(ItemEvent):
    """The base of events that concern one part of an item's content."""

    content_index: Size


class ContentPartAdded(PartEvent, tag="response.content_part.added"):
    part: OutputText | ReasoningText


class ContentPartDone(PartEvent, tag="response.content_part.done"):
    part: OutputText | ReasoningText


class OutputTextDelta(PartEvent, tag="response.output_text.delta"):
    delta: str
    logprobs: list[TokenLogprobs]


class OutputTextDone(PartEvent, tag="response.output_text.done"):
    text: str
    logprobs: list[TokenLogprobs]


class ReasoningTextDelta(PartEvent, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningTextDone(PartEvent, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    arguments: str
    name: str


class InputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    delta: str


class InputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    input: str


class StreamError(Event, tag="error"):
    code: str | None
    message: str
    param: str | None
    error: ErrorBody


ResponseEvent = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | OutputItemAdded
    | OutputItemDone
    | ContentPartAdded
    | ContentPartDone
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | StreamError
)
