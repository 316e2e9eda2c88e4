"""Matches the beginning of a call, whose text may still be incomplete."""

import re
from collections.abc import Iterable
from enum import Enum, auto
from functools import lru_cache
from typing import NamedTuple

from frontend.output_parser.calls.tool_syntax import Form, ToolCallSyntax

BLANKS = re.compile(r"\s*")
NAME_CHARS = re.compile(r"[\w.-]*")
DIGITS = re.compile(r"[0-9]*")
OPENERS = {Form.JSON: ("{",), Form.BARE: ("{",), Form.PYTHON: ("(",)}


class Slot(Enum):
    """A variable part between the fixed words of a prefix."""

    BLANKS = auto()
    NAME = auto()
    INDEX = auto()


Prefix = tuple[str | Slot, ...]


class PrefixMatch(NamedTuple):
    """A call's prefix in a text.

    name: the function's name; empty while the name is incomplete
    end: where the arguments begin; None while the text is too short to decide
    """

    name: str = ""
    end: int | None = None


class Prefixes(NamedTuple):
    """The prefixes that may precede a call's arguments.

    first: the prefixes of the first call
    later: the prefixes of a call that follows another call
    ahead: the texts with which the arguments may begin
    """

    first: tuple[Prefix, ...]
    later: tuple[Prefix, ...]
    ahead: tuple[str, ...]


@lru_cache
def prefixes_of(syntax: ToolCallSyntax) -> Prefixes:
    openings = (syntax.opening, f"{syntax.mark} {syntax.opening}") if syntax.mark else (syntax.opening,)
    ahead = (syntax.tags.key[0], syntax.tags.end) if syntax.tags else OPENERS[syntax.form]
    return Prefixes(
        tuple(_compiled(f"{opening} {head}") for opening in openings for head in syntax.heads),
        tuple(_compiled(f"{syntax.between} {head}") for head in syntax.heads),
        ahead,
    )


def _compiled(text: str) -> Prefix:
    atoms: list[str | Slot] = []
    for word in text.split():
        parts = re.split("(NAME|INDEX)", word)
        atoms += [Slot.BLANKS, *[Slot[part] if part in ("NAME", "INDEX") else part for part in parts if part]]
    return tuple(atoms)


def find_prefix(text: str, prefixes: Iterable[Prefix], ahead: tuple[str, ...]) -> PrefixMatch | None:
    """Returns the match of the first prefix that `text` begins with.

    If there is none, returns an incomplete match of the first prefix that `text` may still become, or else None.
    """
    undecided = None
    for prefix in prefixes:
        found = _match(text, prefix, ahead)
        if found is not None and found.end is not None:
            return found
        undecided = undecided or found
    return undecided


def _match(text: str, prefix: Prefix, ahead: tuple[str, ...]) -> PrefixMatch | None:
    at, name = 0, ""
    for atom in prefix:
        if atom is Slot.BLANKS:
            at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
        elif isinstance(atom, Slot):
            end = (NAME_CHARS if atom is Slot.NAME else DIGITS).match(text, at).end()  # type: ignore[union-attr]
            if end in (at, len(text)):
                return PrefixMatch(name) if end == len(text) else None
            name, at = text[at:end] if atom is Slot.NAME else name, end
        elif text.startswith(atom, at):
            at += len(atom)
        else:
            return PrefixMatch(name) if atom.startswith(text[at:]) else None
    at = BLANKS.match(text, at).end()  # type: ignore[union-attr]
    if any(text.startswith(word, at) for word in ahead):
        return PrefixMatch(name, at)
    return PrefixMatch(name) if any(word.startswith(text[at:]) for word in ahead) else None


def partial_tag(text: str, tag: str) -> int:
    """Returns the length of the longest suffix of `text` that may become `tag`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)
