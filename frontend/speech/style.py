"""How a model marks thoughts and calls (`Style`), and what of it to look for in one answer (`Speech`).

The style is guessed from marks in the chat template's source; `--tool-format` and `--reasoning-format` overrule it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

OPEN, CLOSE = "<think>", "</think>"


class Format(StrEnum):
    """How a call is written."""

    NONE = "none"
    HERMES = "hermes"  # <tool_call>{"name": …, "arguments": {…}}</tool_call>, also Qwen's
    LLAMA = "llama"  # {"name": …, "parameters": {…}} and nothing else
    MISTRAL = "mistral"  # [TOOL_CALLS] [{"name": …, "arguments": {…}}, …] and nothing else


class Thinking(StrEnum):
    """Whether an answer begins inside a thought."""

    OVER = "over"  # outside: an opening tag is text
    MAYBE = "maybe"  # outside, but it may open its thoughts
    INSIDE = "inside"  # the prompt has opened them


@dataclass(frozen=True, slots=True)
class Style:
    """What a model's template says about it."""

    calls: Format = Format.NONE
    tools: bool = False  # it shows tools at all
    thinks: bool = False
    switch: bool = False  # it knows `enable_thinking`
    effort: bool = False  # it knows `reasoning_effort`

    @classmethod
    def of(cls, templates: Mapping[str, str], tool_format: str = "auto", reasoning_format: str = "auto") -> "Style":
        source = "\n".join(templates.values())
        known = "tools" in source
        calls = _calls(source) if tool_format == "auto" else Format(tool_format)
        thinks = (OPEN in source or CLOSE in source) if reasoning_format == "auto" else reasoning_format == "think"
        return cls(
            calls if known or tool_format != "auto" else Format.NONE,
            known, thinks, "enable_thinking" in source, "reasoning_effort" in source,
        )  # fmt: skip

    def begins(self, prompt: str) -> Thinking:
        """Where an answer to a rendered prompt begins."""
        if not self.thinks:
            return Thinking.OVER
        tail = prompt[-64:].rstrip()
        if tail.endswith(OPEN):
            return Thinking.INSIDE
        return Thinking.OVER if tail.endswith(CLOSE) else Thinking.MAYBE

    def goes_on(self, said: str) -> Thinking:
        """The same for an answer that continues what was `said`."""
        if not self.thinks:
            return Thinking.OVER
        if not said:
            return Thinking.MAYBE
        return Thinking.INSIDE if said.rfind(OPEN) > said.rfind(CLOSE) else Thinking.OVER


def _calls(source: str) -> Format:
    if "<tool_call>" in source:  # which others put around XML
        return Format.NONE if "<function=" in source or "<arg_key>" in source else Format.HERMES
    if "[TOOL_CALLS]" in source:  # which newer ones write without JSON around the name
        return Format.NONE if "[ARGS]" in source else Format.MISTRAL
    llama = "<|python_tag|>" in source or "ipython" in source
    return Format.LLAMA if llama and '"parameters"' in source else Format.NONE


@dataclass(frozen=True, slots=True)
class Speech:
    """What to look for in one answer: `names` are the functions it may call, in the format `calls`."""

    thinking: Thinking = Thinking.OVER
    calls: Format = Format.NONE
    names: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def of(cls, thinking: Thinking, calls: Format, names: Iterable[str]) -> "Speech | None":
        """None when there is nothing to look for: the text is the answer."""
        speech = cls(thinking, calls, frozenset(names))
        plain = thinking is Thinking.OVER and not speech.names
        return None if plain else speech
