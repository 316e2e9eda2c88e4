"""What an answer's text turns out to be, piece by piece. Pure data; folded, it is the same however it was cut."""

from typing import NamedTuple


class Text(NamedTuple):
    """Said to the user."""

    text: str


class Reasoning(NamedTuple):
    """Thought before, or between."""

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


Event = Text | Reasoning | CallStart | CallArguments | CallEnd
