"""Outputs end before the first line that is indented less than wanted, however they arrive, also with stop strings."""

from itertools import product

import pytest

from frontend.text.stop_strings import IndentedLines, Search, Stops

TEXTS = (
    "x",
    "x\n    y",
    "x\n    y\n  z",
    "\n\ty",
    "x\n\n    y",
    "  x\n     y\nend",
    "a\n    \n    b\nc",
    "x\n  ",
    "x\n    EN\n  D",
    "aEN\nD",
)


def plainly(text: str, least: int, stops: tuple[str, ...]) -> tuple[str, str]:
    """Returns what is left of a whole text, and what ended it."""
    ends = [(text.find(stop), stop) for stop in stops if stop in text]
    at = text.find("\n")
    while at >= 0:
        line = text[at + 1 :]
        rest = line.lstrip(" \t")
        if rest and len(line) - len(rest) < least:
            ends.append((at, "a line"))
            break
        at = text.find("\n", at + 1)
    at, why = min(ends, default=(len(text), ""))
    return text[:at], why


def searched(pieces: list[str], least: int, stops: tuple[str, ...]) -> tuple[str, str]:
    search = IndentedLines(least, Search(Stops(stops)) if stops else None)
    text = ""
    for piece in pieces:
        text += piece
        before = search.safe
        if not search.passes(piece):
            search.feed(piece)
        assert before <= search.safe or search.stop, "no text is taken back"
        if search.decided:
            break
    if not search.stop:
        return text, ""
    return text[: search.start], "a line" if search.is_line else search.stop


@pytest.mark.parametrize("stops", [(), ("END",), ("EN\n  D", "y"), ("\n",)])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("least", [1, 4])
def test_text_ends_before_a_line_with_less_indentation(text: str, least: int, stops: tuple[str, ...]) -> None:
    wanted = plainly(text, least, stops)
    cuts = range(1, len(text))
    for first, second in product(cuts, cuts):
        pieces = [text[:first], text[first : max(first, second)], text[max(first, second) :]]
        assert searched(pieces, least, stops)[0] == wanted[0], (pieces, wanted)
    assert searched(list(text), least, stops)[0] == wanted[0]


def test_undecided_line_is_held_back() -> None:
    search = IndentedLines(4)
    assert search.passes("x = 1")
    assert not search.passes("\n   ")
    search.feed("\n   ")
    assert (search.safe, search.stop) == (5, "")
    search.feed(" y")
    assert (search.safe, search.stop) == (11, "")
    search.feed("\n z")
    assert (search.start, search.end, search.decided, search.is_line) == (11, 14, True, True)
