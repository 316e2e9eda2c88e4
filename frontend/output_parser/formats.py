"""How a model writes reasoning and tool calls (`ModelFormat`), and what to look for in one output (`ParserConfig`).

The source of the chat template shows the format; `--tool-format` and `--reasoning-format` override it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

OPEN_TAG, CLOSE_TAG = "<think>", "</think>"


class ToolFormat(StrEnum):
    """How a model writes a call."""

    NONE = "none"
    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, also Qwen's
    LLAMA = "llama"  # {"name": …, "parameters": {…}} and nothing else
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] and nothing else


class Reasoning(StrEnum):
    """Whether a place in the output lies within reasoning."""

    DONE = "done"  # it lies after reasoning, or there is none: an opening tag is text
    UNDECIDED = "undecided"  # the output may open its reasoning here
    OPEN = "open"  # reasoning has begun, in the prompt or in the output


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """What the source of a model's chat template says about the model."""

    tool_format: ToolFormat = ToolFormat.NONE
    shows_tools: bool = False  # the template writes tools into the prompt
    has_reasoning: bool = False
    has_enable_thinking: bool = False  # the template reads the variable `enable_thinking`
    has_reasoning_effort: bool = False  # the template reads the variable `reasoning_effort`

    @classmethod
    def of(
        cls, templates: Mapping[str, str], tool_format: str = "auto", reasoning_format: str = "auto"
    ) -> "ModelFormat":
        source = "\n".join(templates.values())
        shows_tools = "tools" in source
        detected = _tool_format(source) if tool_format == "auto" else ToolFormat(tool_format)
        has_tags = OPEN_TAG in source or CLOSE_TAG in source
        return cls(
            tool_format=detected if shows_tools or tool_format != "auto" else ToolFormat.NONE,
            shows_tools=shows_tools,
            has_reasoning=has_tags if reasoning_format == "auto" else reasoning_format == "think",
            has_enable_thinking="enable_thinking" in source,
            has_reasoning_effort="reasoning_effort" in source,
        )

    def reasoning_after_prompt(self, prompt: str) -> Reasoning:
        """Returns whether the output after a rendered prompt begins inside its reasoning, after it, or may open it."""
        if not self.has_reasoning:
            return Reasoning.DONE
        tail = prompt[-64:].rstrip()
        if tail.endswith(OPEN_TAG):
            return Reasoning.OPEN
        return Reasoning.DONE if tail.endswith(CLOSE_TAG) else Reasoning.UNDECIDED

    def reasoning_within(self, text: str) -> Reasoning:
        """Returns the same for the rest of an output that has begun with `text`."""
        if not self.has_reasoning:
            return Reasoning.DONE
        if not text:
            return Reasoning.UNDECIDED
        return Reasoning.OPEN if text.rfind(OPEN_TAG) > text.rfind(CLOSE_TAG) else Reasoning.DONE


def _tool_format(source: str) -> ToolFormat:
    if "<tool_call>" in source:  # some models put this tag around XML
        return ToolFormat.NONE if "<function=" in source or "<arg_key>" in source else ToolFormat.HERMES
    if "[TOOL_CALLS]" in source:  # newer models write this mark without JSON around the name
        return ToolFormat.NONE if "[ARGS]" in source else ToolFormat.MISTRAL
    llama = "<|python_tag|>" in source or "ipython" in source
    return ToolFormat.LLAMA if llama and '"parameters"' in source else ToolFormat.NONE


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """What to look for in one output.

    reasoning: whether the output begins inside its reasoning, after it, or may open it
    tool_format: how the output writes calls
    function_names: the functions that the output may call
    """

    reasoning: Reasoning = Reasoning.DONE
    tool_format: ToolFormat = ToolFormat.NONE
    function_names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, reasoning: Reasoning, tool_format: ToolFormat, function_names: Iterable[str]) -> "ParserConfig | None":
        """Returns the configuration; None if there is nothing to look for, because all of the output is text."""
        parser_config = cls(reasoning, tool_format, frozenset(function_names))
        text_only = reasoning is Reasoning.DONE and not parser_config.function_names
        return None if text_only else parser_config
