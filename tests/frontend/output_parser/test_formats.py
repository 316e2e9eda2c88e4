"""The format that a chat template reveals."""

from frontend.output_parser.formats import ModelFormat, ToolFormat
from tests.templates import LLAMA3, MISTRAL, QWEN3


def test_tool_format_is_detected_from_the_template() -> None:
    detected = {
        name: ModelFormat.of({"default": source}).tool_format
        for name, source in (("a", MISTRAL), ("b", QWEN3), ("c", LLAMA3))
    }
    assert detected == {"a": ToolFormat.MISTRAL, "b": ToolFormat.HERMES, "c": ToolFormat.LLAMA}
    newer = MISTRAL + "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' }}"
    assert ModelFormat.of({"default": newer}).tool_format is ToolFormat.NONE
