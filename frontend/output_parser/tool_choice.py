"""Which functions an answer may or must call, whatever the dialect that says so. Data only."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Mode(StrEnum):
    NONE = "none"  # they are shown, and none is called
    AUTO = "auto"
    REQUIRED = "required"


@dataclass(frozen=True, slots=True)
class Function:
    """`param` is where the client wrote its parameters; `shown` is what a chat template reads."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    strict: bool
    param: str
    shown: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`names` are those that may be called, of all `functions` that are shown; `several` of them in one answer."""

    functions: tuple[Function, ...] = ()
    mode: Mode = Mode.AUTO
    names: frozenset[str] = frozenset()
    several: bool = True

    @property
    def callable(self) -> list[Function]:
        return [] if self.mode is Mode.NONE else [one for one in self.functions if one.name in self.names]
