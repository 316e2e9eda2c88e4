"""Counts the tokens of a sequence for penalties, by adding those that are new since the last time."""

from array import array


class TokenCounts:
    """The distinct tokens of a prompt and of the first `outputs` tokens of its output.

    ids, counts: for each distinct token its id, and how often it occurs in the output (0: only in the prompt), as
    C int64. They are in the order in which the tokens first occur.
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
