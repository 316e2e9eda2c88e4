"""How a model marks thoughts and calls (`ModelFormat`), and what of it to look for in one answer (`ParserConfig`).

The style is guessed from marks in the chat template's source; `--tool-format` and `--reasoning-format` overrule it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

OPEN, CLOSE = "<think>", "</think>"


class ToolFormat(StrEnum):
    """How a call is written."""

    NONE = "none"
    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, also Qwen's
    LLAMA = "llama"  # {"name": …, "parameters": {…}} and nothing else
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] and nothing else


class Reasoning(StrEnum):
    """Whether an answer begins inside a thought."""

    OVER = "over"  # outside: an opening tag is text
    MAYBE = "maybe"  # outside, but it may open its thoughts
    INSIDE = "inside"  # the prompt has opened them


@dataclass(frozen=True, slots=True)
class ModelFormat:
    """What a model's template says about it."""

    calls: ToolFormat = ToolFormat.NONE
    tools: bool = False  # it shows tools at all
    thinks: bool = False
    switch: bool = False  # it knows `enable_thinking`
    effort: bool = False  # it knows `reasoning_effort`

    @classmethod
    def of(
        cls, templates: Mapping[str, str], tool_format: str = "auto", reasoning_format: str = "auto"
    ) -> "ModelFormat":
        source = "\n".join(templates.values())
        known = "tools" in source
        calls = _calls(source) if tool_format == "auto" else ToolFormat(tool_format)
        thinks = (OPEN in source or CLOSE in source) if reasoning_format == "auto" else reasoning_format == "think"
        return cls(
            calls if known or tool_format != "auto" else ToolFormat.NONE,
            known, thinks, "enable_thinking" in source, "reasoning_effort" in source,
        )  # fmt: skip

    def begins(self, prompt: str) -> Reasoning:
        """Where an answer to a rendered prompt begins."""
        if not self.thinks:
            return Reasoning.OVER
        tail = prompt[-64:].rstrip()
        if tail.endswith(OPEN):
            return Reasoning.INSIDE
        return Reasoning.OVER if tail.endswith(CLOSE) else Reasoning.MAYBE

    def goes_on(self, said: str) -> Reasoning:
        """The same for an answer that continues what was `said`."""
        if not self.thinks:
            return Reasoning.OVER
        if not said:
            return Reasoning.MAYBE
        return Reasoning.INSIDE if said.rfind(OPEN) > said.rfind(CLOSE) else Reasoning.OVER


def _calls(source: str) -> ToolFormat:
    if "<tool_call>" in source:  # which others put around XML
        return ToolFormat.NONE if "<function=" in source or "<arg_key>" in source else ToolFormat.HERMES
    if "[TOOL_CALLS]" in source:  # which newer ones write without JSON around the name
        return ToolFormat.NONE if "[ARGS]" in source else ToolFormat.MISTRAL
    llama = "<|python_tag|>" in source or "ipython" in source
    return ToolFormat.LLAMA if llama and '"parameters"' in source else ToolFormat.NONE


@dataclass(frozen=True, slots=True)
class ParserConfig:
    """What to look for in one answer: `names` are the functions it may call, in the format `calls`."""

    thinking: Reasoning = Reasoning.OVER
    calls: ToolFormat = ToolFormat.NONE
    names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, thinking: Reasoning, calls: ToolFormat, names: Iterable[str]) -> "ParserConfig | None":
        """None when there is nothing to look for: the text is the answer."""
        parser_config = cls(thinking, calls, frozenset(names))
        plain = thinking is Reasoning.OVER and not parser_config.names
        return None if plain else parser_config
