"""What a reader makes of an answer's text: text, reasoning, parts of calls; joined, the same however it was cut."""

from typing import NamedTuple


class Text(NamedTuple):
    """For the user."""

    text: str


class ReasoningText(NamedTuple):
    """A thought, before the answer or within it."""

    text: str


class CallStart(NamedTuple):
    """The answer's `index`-th call, of a function that was offered."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """The next part of a call's arguments: together JSON as the model wrote it, or the beginning of it."""

    call: int
    fragment: str


class CallEnd(NamedTuple):
    """Its arguments are whole. A call that was cut off has no end."""

    call: int


Event = Text | ReasoningText | CallStart | CallArguments | CallEnd
