"""Says which functions the output may or must call, independent of the API format."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from frontend.errors import Unprocessable


class Mode(StrEnum):
    """Whether functions may or must be called."""

    NONE = "none"  # the prompt shows no functions, and none may be called
    AUTO = "auto"
    REQUIRED = "required"


INPUT = "input"  # the parameter of a function that stands for a custom tool


@dataclass(frozen=True, slots=True)
class Custom:
    """What a custom tool, whose input is a text, has besides its name.

    syntax: of the grammar that the input keeps to: "regex", "lark", or "" if there is none
    param: the request field that holds the grammar
    format: the format as the client sent it
    """

    syntax: str = ""
    param: str = ""
    format: Any = None


@dataclass(frozen=True, slots=True)
class Function:
    """A function that the client offers.

    parameters: a JSON schema of an object
    param: the request field that holds `parameters`
    definition: the description that a chat template reads
    custom: set if the function stands for a custom tool; its only parameter is then `INPUT`, a text
    """

    name: str
    parameters: dict[str, Any]
    strict: bool
    param: str
    definition: dict[str, Any]
    custom: Custom | None = None


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The offered functions, and which of them may be called.

    functions: all functions that the request offers
    callable_names: the names of the functions that may be called, unless `mode` forbids calls
    parallel: whether the output may have several calls
    """

    functions: tuple[Function, ...] = ()
    mode: Mode = Mode.AUTO
    callable_names: frozenset[str] = frozenset()
    parallel: bool = True

    @property
    def shown_functions(self) -> tuple[Function, ...]:
        """The functions that the prompt shows."""
        return () if self.mode is Mode.NONE else self.functions

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the functions that stand for custom tools."""
        return frozenset([one.name for one in self.functions if one.custom is not None])

    @property
    def callable_functions(self) -> list[Function]:
        if self.mode is Mode.NONE:
            return []
        return [function for function in self.functions if function.name in self.callable_names]


def check_specials(needed: Iterable[str], specials: Collection[str], tool_choice: ToolChoice) -> None:
    """Raises Unprocessable if a format's mark is not among the model's special tokens."""
    if lacking := [spelling for spelling in needed if spelling not in specials]:
        param = "tools" if tool_choice.functions else "response_format"
        raise Unprocessable(
            f"`{param}` cannot be enforced: this model's tokenizer has no special token {lacking[0]}",
            param=param, code="unsupported_field",
        )  # fmt: skip
