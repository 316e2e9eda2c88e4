"""Calls that a model writes in another way than its format, as rows of data: the parser looks for these forms, and the
grammar takes over where one of them has named a function that the output may call.

Models drift to these forms in long prompts, or because they were trained on several formats. A form counts only where
prose hardly has it: at the beginning of a line or of the output, with the name of such a function and the word that
leads on to its arguments. All other code and JSON stays text.
"""

from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from frontend.output_parser.model_format import ToolFormat
from frontend.output_parser.tool_syntax import (
    BLANKS,
    OPENERS,
    SYNTAX,
    Form,
    Prefix,
    ToolCallSyntax,
    compiled,
    find_prefix,
    partial_tag,
    prefixes_of,
)

FENCE = "```"
WRAPPERS = ("tools", "tool", "tool_call", "function", "function_call", "function-call")  # tags that stand around JSON
CLOSING_TAGS = tuple(f"</{word}>" for word in WRAPPERS)
Parts = tuple[tuple[str, ...], ...]  # the parts of a head, one after the other, each with its alternatives
JSON_HEAD: Parts = (
    ("{",), ("", '"type" : "function" ,'), ('"name" : "NAME" ,',), ('"arguments" :', '"parameters" :'),
)  # fmt: skip
# The head that remains where a model leaves out its format's first tag, and that other models write before JSON.
FUNCTION_HEAD = "<function=NAME>"
OWN_HEADS = {
    ToolFormat.QWEN_XML: FUNCTION_HEAD, ToolFormat.SEED: FUNCTION_HEAD, ToolFormat.MINIMAX: '<invoke name="NAME">',
}  # fmt: skip
# How many functions a call within reasoning may be of, if the format's tag is text; for more, the grammar is too large.
MOST_WITHIN_THOUGHT = 16
# The formats whose output is a sequence of messages or of marks, in which all text is text.
WITHOUT_DRIFT = frozenset({ToolFormat.NONE, ToolFormat.HARMONY, ToolFormat.MISTRAL_ARGS})


@dataclass(frozen=True, slots=True)
class DriftForm:
    """One way of writing a call. Texts are sequences of words, as in `ToolCallSyntax`.

    openings: what may stand before the head at the beginning of a line; "": nothing
    head: what precedes the arguments
    arguments: how the arguments are written
    tail: what follows the arguments
    closings: the alternatives for each word that a model may write after the tail
    bare: whether the head alone begins a call, too, at the beginning of the output and after another call
    """

    openings: tuple[str, ...]
    head: Parts
    arguments: ToolCallSyntax
    tail: str
    closings: Parts
    bare: bool = False

    @property
    def heads(self) -> list[str]:
        """All alternatives for the head."""
        return [" ".join(parts) for parts in product(*self.head)]


@lru_cache
def drift_forms(tool_format: ToolFormat) -> tuple[DriftForm, ...]:
    """Returns the forms to which a model of this format drifts, except those that are its own format."""
    if tool_format in WITHOUT_DRIFT:
        return ()
    own, plain = SYNTAX[tool_format], ToolCallSyntax(())
    tags = tuple(tag for tag in (f"<{word}>" for word in WRAPPERS) if tag != own.tag)
    ends = tuple(dict.fromkeys([*CLOSING_TAGS, *_tags_of(own.tail), *_tags_of(own.closing)]))
    is_own = not own.tag and not own.needs_mark and any('"name"' in head for head in own.heads)
    written = (
        DriftForm(("",), ((OWN_HEADS[tool_format],),), own, "", (ends, ends)) if tool_format in OWN_HEADS
        else DriftForm(("",), ((FUNCTION_HEAD,),), plain, "</function>", (ends,))
    )  # fmt: skip
    return (
        DriftForm((f"{FENCE}json", FENCE), JSON_HEAD, plain, "}", ((FENCE, *ends), ends)),
        DriftForm(tags, JSON_HEAD, plain, "}", (ends, ends), bare=not is_own),
        written,
    )


def _tags_of(text: str) -> list[str]:
    return [word for word in text.split() if word.startswith("<")]


# Finds the forms in a text that may still be incomplete.


class _Group(NamedTuple):
    """Prefixes of one form.

    line: whether they may stand at the beginning of any line; False: only where a bare head may
    """

    form: DriftForm
    prefixes: tuple[Prefix, ...]
    ahead: tuple[str, ...]
    line: bool


class DriftMatch(NamedTuple):
    """A form in a text.

    at: where it begins, after white space
    name: the function's name; empty while it is incomplete
    end: where the arguments begin; None while the text is too short to decide
    """

    form: DriftForm
    at: int
    name: str
    end: int | None


@lru_cache
def _groups(tool_format: ToolFormat) -> tuple[_Group, ...]:
    found = []
    for form in drift_forms(tool_format):
        tags = form.arguments.tags
        ahead = (tags.key[0], tags.end) if tags else OPENERS[Form.JSON]
        prefixes = [compiled(f"{opening} {head}") for opening in form.openings for head in form.heads]
        found.append(_Group(form, tuple(prefixes), ahead, line=True))
        if form.bare:
            found.append(_Group(form, tuple(compiled(head) for head in form.heads), ahead, line=False))
    return tuple(found)


def find_drift(
    text: str, tool_format: ToolFormat, names: Collection[str], *, line: bool, bare: bool
) -> DriftMatch | None:
    """Returns the first form in a text that is a call of one of `names`, or may still become one; None: there is none.

    line: whether the text begins at the beginning of a line
    bare: whether it begins where a bare head may stand
    """
    at = 0
    while True:
        if (line or bare or at) and text[BLANKS.match(text, at).end() :][:1] in ("`", "<", "{"):  # type: ignore[union-attr]
            groups = [one for one in _groups(tool_format) if (line or at if one.line else bare and not at)]
            if (found := _at(text, at, groups, names)) is not None:
                return found
        at = text.find("\n", at) + 1
        if not at:
            return None


def _at(text: str, at: int, groups: list[_Group], names: Collection[str]) -> DriftMatch | None:
    undecided = None
    begins = BLANKS.match(text, at).end()  # type: ignore[union-attr]
    rest = text[begins:]
    for group in groups:
        found = find_prefix(rest, group.prefixes, group.ahead, names)
        if found is None:
            continue
        if found.end is not None:
            return DriftMatch(group.form, begins, found.name, begins + found.end)
        undecided = undecided or DriftMatch(group.form, begins, found.name, None)
    return undecided


# Finds calls within reasoning, which end it. Only the format's own form counts there, as models draft in all others.


class ThoughtCalls:
    """Looks for a call in the text of one reasoning block, as it arrives."""

    def __init__(self, tool_format: ToolFormat, names: Collection[str], shown: Collection[str]) -> None:
        """shown: the words of the format that are special tokens; one of them begins a call anywhere in a line"""
        syntax = SYNTAX[tool_format]
        self._names = names
        self._tag = syntax.tag
        self._prefixes = prefixes_of(syntax)
        self._anywhere = self._tag in shown
        self._blank = True  # whether the line is blank so far, before the text that is not `passed` yet

    def find(self, text: str) -> tuple[int, bool]:
        """Returns up to where the text is certainly no call, and whether a call begins there.

        text: what follows the text that was `passed`
        """
        at = text.find(self._tag)
        while at >= 0:
            if self._anywhere or self._begins_line(text, at):
                found = find_prefix(text[at:], self._prefixes.first, self._prefixes.ahead, self._names)
                if found is not None:
                    return at, found.end is not None
            at = text.find(self._tag, at + 1)
        return len(text) - partial_tag(text, self._tag), False

    def passed(self, text: str) -> None:
        """Takes note of text that is reasoning."""
        _, newline, last = text.rpartition("\n")
        self._blank = not last.strip() and (bool(newline) or self._blank)

    def _begins_line(self, text: str, at: int) -> bool:
        _, newline, before = text[:at].rpartition("\n")
        return not before.strip() and (bool(newline) or self._blank)


def names_within(head: str) -> bool:
    """Whether a word follows a head's name, so that the name is certain where the head ends."""
    return not head.endswith("NAME")


def thought_calls_of(tool_format: ToolFormat, names: Collection[str], shown: Collection[str]) -> ThoughtCalls | None:
    """Returns what looks for calls within reasoning; None for a format whose calls cannot stand there."""
    if tool_format in WITHOUT_DRIFT or not names or not (tag := SYNTAX[tool_format].tag):
        return None
    is_text = tag not in shown
    if is_text and (len(names) > MOST_WITHIN_THOUGHT or not all(map(names_within, SYNTAX[tool_format].heads))):
        return None
    return ThoughtCalls(tool_format, names, shown)
