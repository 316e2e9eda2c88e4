"""The events that the parser emits: text, reasoning, parts of tool calls.

If adjacent fragments are joined, the events of an output do not depend on the pieces in which its text arrived.
"""

from typing import NamedTuple


class Text(NamedTuple):
    """Text for the user."""

    text: str


class ReasoningText(NamedTuple):
    """A part of the model's reasoning."""

    text: str


class CallStart(NamedTuple):
    """The beginning of the `call`-th call of the output (from 0), to the offered function `name`."""

    call: int
    name: str


class CallArguments(NamedTuple):
    """The next fragment of a call's arguments. All fragments joined are JSON, or its beginning in a cut-off call."""

    call: int
    fragment: str


class CallEnd(NamedTuple):
    """The end of a call whose arguments are complete. A call that was cut off has no end."""

    call: int


Event = Text | ReasoningText | CallStart | CallArguments | CallEnd
