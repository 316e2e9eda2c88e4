"""Knows, for each format, the marks around reasoning, and the text that ends reasoning when its budget is used up."""

from collections.abc import Mapping
from dataclasses import dataclass

from frontend.output_parser.formats import Tags, ToolFormat


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The texts that stand around reasoning. Each entry is encoded by itself, so marks become single tokens."""

    opening: tuple[str, ...]
    closing: str  # the text that ends reasoning: a single token
    forced: tuple[str, ...]  # `closing`, and the text that leads on to the answer
    anywhere: bool = False  # whether reasoning may open later than at the beginning of an output
    forbidden: tuple[str, ...] = ()  # marks that would reopen reasoning: not allowed once the budget is used up


_HARMONY = ReasoningMarks(
    opening=("<|channel|>", "analysis", "<|message|>"),
    closing="<|end|>",
    forced=("<|end|>", "<|start|>", "assistant", "<|channel|>"),
    anywhere=True,
    forbidden=("<|channel|>", "analysis"),
)
_OWN: Mapping[ToolFormat, ReasoningMarks] = {ToolFormat.HARMONY: _HARMONY}


def reasoning_marks(tool_format: ToolFormat, tags: Tags) -> ReasoningMarks:
    """Returns the marks of a model that puts its reasoning between `tags`, unless its format has marks of its own."""
    opening, closing = tags
    return _OWN.get(tool_format) or ReasoningMarks((opening,), closing, (closing,))
