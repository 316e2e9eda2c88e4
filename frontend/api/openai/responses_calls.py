"""Input items of OpenAI's Responses API for calls of other tools than functions, and for their results.

A session that began with another model has such items in its history. A call that the client has answered is shown as
the call of a function with the tool's name, and its result as the result of that call. What OpenAI's servers did
themselves (searches, images, listed tools) and what only they can read (compaction) is not shown.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from frontend.api.openai.chat_request import RefusalPart
from frontend.chat.history import ChatMessage, call, chat_message
from frontend.chat.prompt import MAX_PARTS, join_text, parse_arguments
from frontend.errors import BadRequest
from frontend.output_parser.model_format import INPUT
from frontend.schema.base import FieldError, Names, RequestModel
from frontend.schema.request_fields import Text, doc
from frontend.text.chat_template import Source, found_in

# The parts of a message or of a tool's result in OpenAI's Responses API: texts, images and refusals.


class _ContentPart(RequestModel):
    UNKNOWN_TYPE = "unsupported_content"


class ResultPart(_ContentPart, tag="input_text"):
    IGNORED: ClassVar[Names] = ("prompt_cache_breakpoint", "annotations", "logprobs", "parsed")

    text: str


class OutputPart(_ContentPart, tag="output_text"):
    IGNORED: ClassVar[Names] = ("prompt_cache_breakpoint", "annotations", "logprobs", "parsed")

    text: str


class ImagePart(_ContentPart, tag="input_image"):
    IGNORED: ClassVar[Names] = ("prompt_cache_breakpoint",)
    REFUSED: ClassVar[Names] = ("file_id",)

    image_url: Annotated[str, doc("A data: URL in base64; http(s): and file: if the server allows them")]
    detail: Annotated[Literal["auto", "low", "high", "original"] | None, doc("low: an image is not cut into tiles")] = (
        None
    )

    @property
    def source(self) -> Source:
        return Source(self.image_url, self.detail or "auto")

    @property
    def text(self) -> str:
        """The text that stands for the image in the message."""
        return self.source.mark


Part = ResultPart | OutputPart | ImagePart | RefusalPart


Output = str | Annotated[list[ResultPart | ImagePart], Meta(max_length=MAX_PARTS)]


class _Item(RequestModel):
    IGNORED: ClassVar[Names] = ("status",)

    UNKNOWN_TYPE = "unsupported_content"

    id: str | None = None

    def chat_messages(self) -> list[ChatMessage]:
        """Returns the messages for the prompt; none for an item that has no place in a prompt."""
        return []


class CustomToolCall(_Item, tag="custom_tool_call"):
    """A call of a custom tool, whose input is a text."""

    ONLY: ClassVar = {"async": (False,), "caller": ({"type": "direct"},)}
    IGNORED: ClassVar[Names] = ("namespace",)

    call_id: Text
    name: Text
    input: str

    def chat_messages(self) -> list[ChatMessage]:
        return [_call(self.call_id, self.name, {INPUT: self.input})]


class CustomToolCallOutput(_Item, tag="custom_tool_call_output"):
    ONLY: ClassVar = {"caller": ({"type": "direct"},)}
    IGNORED: ClassVar[Names] = ("name",)

    call_id: Text
    output: Output

    def chat_messages(self) -> list[ChatMessage]:
        return [_result(self.call_id, self.output)]


class LocalShellCall(_Item, tag="local_shell_call"):
    call_id: Text | None = None
    action: dict[str, Any]

    def __post_init__(self) -> None:
        _check_id(self.call_id, self.id)

    def chat_messages(self) -> list[ChatMessage]:
        return [_call(self.call_id or self.id or "", "local_shell", self.action)]


class LocalShellCallOutput(_Item, tag="local_shell_call_output"):
    call_id: Annotated[Text | None, doc("Codex's name of `id`, which is the call's")] = None
    output: Output

    def __post_init__(self) -> None:
        _check_id(self.call_id, self.id)

    def chat_messages(self) -> list[ChatMessage]:
        return [_result(self.call_id or self.id or "", self.output)]


class ShellCall(_Item, tag="shell_call"):
    IGNORED: ClassVar[Names] = ("caller", "environment", "created_by")

    call_id: Text
    action: dict[str, Any]

    def chat_messages(self) -> list[ChatMessage]:
        return [_call(self.call_id, "shell", self.action)]


class ShellCallOutput(_Item, tag="shell_call_output"):
    IGNORED: ClassVar[Names] = ("caller", "max_output_length", "created_by")

    call_id: Text
    output: Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)]

    def chat_messages(self) -> list[ChatMessage]:
        return [_result(self.call_id, _json(self.output))]


class ApplyPatchCall(_Item, tag="apply_patch_call"):
    IGNORED: ClassVar[Names] = ("caller", "created_by")

    call_id: Text
    operation: dict[str, Any]

    def chat_messages(self) -> list[ChatMessage]:
        return [_call(self.call_id, "apply_patch", self.operation)]


class ApplyPatchCallOutput(_Item, tag="apply_patch_call_output"):
    IGNORED: ClassVar[Names] = ("caller", "created_by")

    call_id: Text
    status: Any = None
    output: str | None = None

    def chat_messages(self) -> list[ChatMessage]:
        return [_result(self.call_id, self.output or str(self.status or ""))]


class ComputerCall(_Item, tag="computer_call"):
    IGNORED: ClassVar[Names] = ("pending_safety_checks",)

    call_id: Text
    action: dict[str, Any] | None = None
    actions: Annotated[list[dict[str, Any]], Meta(max_length=MAX_PARTS)] | None = None

    def chat_messages(self) -> list[ChatMessage]:
        return [_call(self.call_id, "computer", self.action or {"actions": self.actions or []})]


class ComputerCallOutput(_Item, tag="computer_call_output"):
    """A screenshot. The prompt says only that there was one."""

    IGNORED: ClassVar[Names] = ("output", "acknowledged_safety_checks")

    call_id: Text

    def chat_messages(self) -> list[ChatMessage]:
        return [_result(self.call_id, "(screenshot)")]


class ToolSearchCall(_Item, tag="tool_search_call"):
    IGNORED: ClassVar[Names] = ("arguments", "execution", "created_by")

    call_id: Text | None = None


class ToolSearchOutput(_Item, tag="tool_search_output"):
    IGNORED: ClassVar[Names] = ("tools", "execution", "created_by")

    call_id: Text | None = None


class McpCall(_Item, tag="mcp_call"):
    """A call that a server of OpenAI's made, with its result."""

    IGNORED: ClassVar[Names] = ("server_label", "approval_request_id")

    name: Text
    arguments: str | None = None
    output: str | None = None
    error: Any = None

    def chat_messages(self) -> list[ChatMessage]:
        if not self.id:
            return []
        said = self.output if self.output is not None else f"Error: {_json(self.error)}" if self.error else ""
        arguments = parse_arguments(self.arguments or "{}")
        return [_call(self.id, self.name, arguments), _result(self.id, said)]


class McpListTools(_Item, tag="mcp_list_tools"):
    IGNORED: ClassVar[Names] = ("server_label", "tools", "error")


class McpApprovalRequest(_Item, tag="mcp_approval_request"):
    IGNORED: ClassVar[Names] = ("name", "arguments", "server_label")


class McpApprovalResponse(_Item, tag="mcp_approval_response"):
    IGNORED: ClassVar[Names] = ("approval_request_id", "approve", "reason")


class WebSearchCall(_Item, tag="web_search_call"):
    IGNORED: ClassVar[Names] = ("action",)


class FileSearchCall(_Item, tag="file_search_call"):
    IGNORED: ClassVar[Names] = ("queries", "results")


class ImageGenerationCall(_Item, tag="image_generation_call"):
    IGNORED: ClassVar[Names] = (
        "result", "action", "background", "error", "output_format", "quality", "revised_prompt", "size",
        "svg_usage",
    )  # fmt: skip


class CodeInterpreterCall(_Item, tag="code_interpreter_call"):
    IGNORED: ClassVar[Names] = ("code", "container_id", "outputs")


class Compaction(_Item, tag="compaction"):
    """The beginning of a conversation in a form that only OpenAI's servers can read."""

    IGNORED: ClassVar[Names] = ("encrypted_content", "created_by")


ForeignItem = (
    CustomToolCall | CustomToolCallOutput | LocalShellCall | LocalShellCallOutput | ShellCall | ShellCallOutput
    | ApplyPatchCall | ApplyPatchCallOutput | ComputerCall | ComputerCallOutput | ToolSearchCall | ToolSearchOutput
    | McpCall | McpListTools | McpApprovalRequest | McpApprovalResponse | WebSearchCall | FileSearchCall
    | ImageGenerationCall | CodeInterpreterCall | Compaction
)  # fmt: skip


def _call(id: str, name: str, arguments: Any) -> ChatMessage:
    given = (
        {key: value for key, value in arguments.items() if value is not None} if type(arguments) is dict else arguments
    )
    return chat_message("assistant", "", calls=[call(id, name, given)])


def _result(id: str, output: Output) -> ChatMessage:
    return chat_message("tool", join_text(output)) | {"tool_call_id": id} | found_in(output, "output")


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_id(call_id: str | None, id: str | None) -> None:
    if not (call_id or id):
        raise FieldError("call_id", "is missing", BadRequest, "missing_field")
