"""Drafts from a text that the client expects as the output (`prediction`), such as a file in which few words change.

The drafter follows the output through the predicted text and proposes the tokens that come next there. Where the
output differs from the prediction, the last output tokens are looked up in the prediction, to find the place again.
While no place is found, NgramDrafter proposes drafts from the text of the sequence itself.
"""

from worker.schedule.features.speculation import Acceptance, Drafter, NgramDrafter
from worker.schedule.records.prediction import Prediction

EXPECTED_ACCEPTANCE = 0.7  # the acceptance rate that is assumed before the first draft
LONGEST_MATCH, SHORTEST_MATCH = 4, 2  # numbers of last output tokens to look up in the prediction, the longest first


class PredictedDrafter:
    """Proposes the next tokens of the predicted text. Implements Drafter."""

    def __init__(self, prediction: Prediction, output: int) -> None:
        """output: the index of the first output token in the sequence's tokens."""
        self._prediction, self._ids = prediction, prediction.ids
        self._acceptance = Acceptance(EXPECTED_ACCEPTANCE)
        self._other: Drafter = NgramDrafter()
        self._place: int | None = 0  # the index in the predicted text of the next output token; None: not known
        self._read = output  # tokens before this index have been matched already
        self._begin = output
        self._own = False  # whether the last proposal came from the predicted text
        self._stopped = False
        self._after = {length: _places(self._ids, length) for length in range(SHORTEST_MATCH, LONGEST_MATCH + 1)}

    def propose(self, tokens: list[int], limit: int, cost: float, repeats: int = 0) -> tuple[int, ...]:
        """Finds the place of the output in the prediction, then proposes the next tokens there. See Drafter."""
        if self._stopped:
            return ()
        self._follow(tokens)
        place = self._place
        self._own = place is not None and place < len(self._ids)
        if place is None or not self._own:
            return self._other.propose(tokens, limit, cost, repeats)
        return tuple(self._ids[place : place + self._acceptance.draft_length(limit, cost, repeats)])

    def record(self, drafted: int, accepted: int) -> None:
        if not self._own:
            self._other.record(drafted, accepted)
            return
        self._prediction.accepted += accepted
        self._prediction.rejected += drafted - accepted
        self._acceptance.record(accepted, rejected=accepted < drafted)

    def stop(self) -> None:
        self._stopped = True

    def _follow(self, tokens: list[int]) -> None:
        for at in range(self._read, len(tokens)):
            place = self._place
            if place is not None and place < len(self._ids) and self._ids[place] == tokens[at]:
                self._place = place + 1
            else:
                self._place = self._found(tokens, at + 1, place or 0)
        self._read = len(tokens)

    def _found(self, tokens: list[int], end: int, before: int) -> int | None:
        """Looks up the tokens before `end` in the prediction. Returns the index after the match, or None.

        If there are several matches, the first that ends at `before` or later counts, or else the first of all.
        """
        for length in range(LONGEST_MATCH, SHORTEST_MATCH - 1, -1):
            if end - length < self._begin:
                continue
            places = self._after[length].get(tuple(tokens[end - length : end]), ())
            if places:
                return next((place for place in places if place >= before), places[0])
        return None


def _places(ids: list[int], length: int) -> dict[tuple[int, ...], list[int]]:
    """Maps each run of `length` tokens in the text to the positions after it, in ascending order."""
    found: dict[tuple[int, ...], list[int]] = {}
    for end in range(length, len(ids) + 1):
        found.setdefault(tuple(ids[end - length : end]), []).append(end)
    return found
