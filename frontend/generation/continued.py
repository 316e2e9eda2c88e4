"""An output that continues an earlier one (`continue_from`). Its deltas do not repeat the earlier tokens.

The earlier tokens go through the detokenizer and the search for stop strings first, because both must see the whole
output. Some of these tokens may be held back there, and come out later together with new tokens. This module then
removes them.
"""

from collections.abc import Sequence

from frontend.generation.choice import Choice
from frontend.request import Delta
from frontend.text.detokenizer import OutputText


class Continued:
    """Removes the tokens of the earlier output from deltas, and keeps their text in `Extras.before`."""

    def __init__(self, ids: Sequence[int], text: OutputText) -> None:
        """text: the detokenizer of the choice; the ids of the earlier output are pushed into it here"""
        pushed, self._before, _ = text.push(list(ids))
        self._held = len(ids) - len(pushed)

    def __call__(self, choice: Choice, delta: Delta) -> None:
        if self._held:
            old = min(len(delta.ids), self._held)
            self._held -= old
            self._before = [*self._before, *delta.texts[:old]]
            delta.ids, delta.texts = delta.ids[old:], delta.texts[old:]
        if self._before and (delta.ids or delta.texts or delta.finish is not None):
            delta.add().before, self._before = self._before, []
