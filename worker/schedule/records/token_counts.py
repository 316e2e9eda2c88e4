"""Counts the tokens of a sequence for penalties. New tokens are added to the counts, so none is counted twice."""

from array import array


class TokenCounts:
    """The distinct tokens of a prompt and of the first `outputs` tokens of its output.

    ids: the distinct token ids, in the order of their first occurrence, as C int64.
    counts: for each of `ids`, how often it occurs in the output (0: only in the prompt), as C int64.
    """

    def __init__(self, prompt: list[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.ids = array("q", self._places)
        self.counts = array("q", bytes(self.ids.itemsize * len(self.ids)))
        self.outputs = 0

    def add(self, output: list[int]) -> None:
        """Adds the next tokens of the output."""
        self.outputs += len(output)
        for token in output:
            place = self._places.setdefault(token, len(self.ids))
            if place == len(self.ids):
                self.ids.append(token)
                self.counts.append(0)
            self.counts[place] += 1
