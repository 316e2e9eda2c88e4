"""An output that goes on from an earlier one (`continue_from`): the tokens of that one are not told again.

They go through the detokenizer and the search for stop strings before the first new token, because both know only whole
outputs. What is held back of them comes out with new tokens, and is taken out of the deltas here.
"""

from collections.abc import Sequence

from frontend.generation.choice import Choice
from frontend.request import Delta
from frontend.text.detokenizer import OutputText


class Continued:
    """Takes the tokens of the earlier output out of deltas, and tells their texts in `Extras.before`."""

    def __init__(self, ids: Sequence[int], text: OutputText) -> None:
        """text: of the choice, into which the ids are pushed"""
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
