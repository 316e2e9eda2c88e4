"""Finds calls in an output: text with calls in it or, where `tool_syntax` says so, calls and nothing else."""

from collections.abc import Callable, Mapping
from typing import Protocol

from frontend.output_parser.drift import FENCE, DriftMatch, drift_forms, find_drift
from frontend.output_parser.events import CallArguments, CallEnd, CallStart, Event, Text
from frontend.output_parser.json_arguments import JsonObjectScanner, TaggedArguments
from frontend.output_parser.literal_arguments import BARE, PYTHON, LiteralArguments
from frontend.output_parser.model_format import Kind, ParserConfig
from frontend.output_parser.tool_syntax import (
    SYNTAX,
    Form,
    Prefix,
    PrefixMatch,
    ToolCallSyntax,
    find_prefix,
    partial_tag,
    prefixes_of,
)


class CallParser:
    """Parses an output that may call functions, except its reasoning."""

    def __init__(self, parser_config: ParserConfig) -> None:
        syntax = SYNTAX[parser_config.tool_format]
        self._names = parser_config.function_names
        self._must_call = parser_config.must_call
        self._tag = syntax.tag
        self._prefixes = prefixes_of(syntax)
        self._after_call: list[tuple[str, ...]] = [(word,) for word in f"{syntax.tail} {syntax.closing}".split()]
        self._config = parser_config
        self._drift: DriftMatch | None = None  # the last call, if its form is another than the format's
        self._line = self._bare = True  # whether `_text` begins a line, and begins where a call may need no opening
        self._fence = False  # whether a call began in a block of code whose end has not been found
        self.stray = ""  # a closing tag that may follow the call that ended the reasoning
        self._text = ""  # text that may still turn out to be a call
        # words of the syntax that may still follow the last call, each with its alternatives
        self._suffix: list[tuple[str, ...]] = []
        self._within = False  # whether the list of calls goes on, in which a call needs no tag
        self._any_text = False  # whether the output has text outside calls
        self._after_a_call = False  # whether nothing but white space has followed the last call
        self.calls = Calls(lambda name: scanner_of(syntax, parser_config.kinds, name))

    def feed(self, text: str) -> list[Event]:
        self._text += text
        events: list[Event] = []
        while self._step(events):
            pass
        return events

    def finish(self) -> list[Event]:
        text, self._text = self._text, ""
        if self.calls.open:
            return self.calls.held()
        if self._suffix or (self._after_a_call and not text.strip()):
            return []
        return self._cut_off(text)

    def _cut_off(self, text: str) -> list[Event]:
        """Ends an output that may end within a call's prefix. Such a call is dropped, unless it already has a name."""
        at, prefixes = self._candidate(text)
        certain = self._must_call or self.calls.begun > 0  # whether unfinished text counts as a call
        if at is None and certain:
            at = len(text) - len(text.lstrip())
        found = find_prefix(text[at:], prefixes, self._prefixes.ahead) if at is not None else None
        certain = certain or bool(self._tag and text.startswith(self._tag, at))
        if at is None or found is None or not certain:
            return [Text(text)] if text else []
        events: list[Event] = [Text(before)] if (before := text[:at].rstrip()) else []
        return events + ([self.calls.begin(found.name)] if found.name in self._names else [])

    def _step(self, events: list[Event]) -> bool:
        """Parses the next part; returns whether another step may find more."""
        if self.calls.open:
            return self._feed_arguments(events)
        if self._suffix:
            return self._skip_suffix()
        return self._find_call(events)

    def _find_call(self, events: list[Event]) -> bool:
        if self._after_a_call and (not self._text.strip() or self._skips_stray()):
            return False
        at, prefixes = self._candidate(self._text)
        found = None if at is None else find_prefix(self._text[at:], prefixes, self._prefixes.ahead)
        if self._config.drifts:
            own = found is not None and (found.end is None or found.name in self._names)
            drift = find_drift(
                self._text, self._config.tool_format, self._names, line=self._line, bare=self._bare
            )  # fmt: skip
            if drift is not None and (at is None or drift.at < at or (drift.at == at and not own)):
                return self._find_drift(drift, events)
        if at is None:
            held = _blanks_and_partial_tag(self._text, self._tag)
            if self._config.drifts and not self._tag:
                held = len(self._text) - len(self._text.rstrip())
            return self._emit_text(len(self._text) - held, events)
        if found is not None and found.end is None:
            return self._emit_text(len(self._text[:at].rstrip()), events)
        if found is None or found.name not in self._names:
            self._within = False
            no_call = len(self._tag) if self._tag and self._text.startswith(self._tag, at) else 1
            return self._emit_text(at + no_call, events, more=True)
        self._begin(at, found, events)
        return True

    def _find_drift(self, drift: DriftMatch, events: list[Event]) -> bool:
        """Begins a call in another form, or passes on the text before what may become one."""
        if drift.end is None:
            return self._emit_text(len(self._text[: drift.at].rstrip()), events)
        before, rest = self._text[: drift.at].rstrip(), self._text[drift.end :]
        self._text = before
        self._emit_text(len(before), events)
        self._text, self._drift = rest, drift
        events.append(self.calls.begin(drift.name, self._scanner(drift)))
        return True

    def _scanner(self, drift: DriftMatch) -> "ArgumentScanner":
        return scanner_of(drift.form.arguments, self._config.kinds, drift.name)

    def _skips_stray(self) -> bool:
        """Drops the tag that closes reasoning after a call that had ended it. Returns whether more text is needed."""
        text = self._text.lstrip()
        if self.stray and text.startswith(self.stray):
            self._text, self.stray = text[len(self.stray) :], ""
            return not self._text.strip()
        return bool(self.stray) and self.stray.startswith(text)

    def _begin(self, at: int, found: PrefixMatch, events: list[Event]) -> None:
        before, rest = self._text[:at].rstrip(), self._text[at:]
        self._text = before
        self._emit_text(len(before), events)
        self._text, self._drift = rest[found.end :], None
        events.append(self.calls.begin(found.name))

    def _candidate(self, text: str) -> tuple[int | None, tuple[Prefix, ...]]:
        """Returns where a call may begin (None: nowhere), and the prefixes that it may have. A call may begin right
        after another call, at a tag or, in a format without tags, at the beginning of the output."""
        start = len(text) - len(text.lstrip())
        if self._within and find_prefix(text[start:], self._prefixes.later, self._prefixes.ahead) is not None:
            return start, self._prefixes.later
        if not self._tag:
            return (None if self._any_text or self.calls.begun else start), self._prefixes.first
        at = text.find(self._tag)
        return (at if at >= 0 else None), self._prefixes.first

    def _emit_text(self, end: int, events: list[Event], more: bool = False) -> bool:
        text, self._text = self._text[:end], self._text[end:]
        if text:
            self._any_text, self._within, self._after_a_call = True, False, False
            self._line = self._bare = self._fence = False
            self.stray = ""
            events.append(Text(text))
        return more

    def _feed_arguments(self, events: list[Event]) -> bool:
        found, self._text = self.calls.feed(self._text)
        events += found
        if self.calls.open:
            return False
        self._any_text = self._any_text or self.calls.broke
        self._after_a_call = self._line = self._bare = not self.calls.broke
        self._within = self._after_a_call and self._drift is None
        self._suffix = [] if self.calls.broke else self._words_after_call()
        return True

    def _words_after_call(self) -> list[tuple[str, ...]]:
        if self._drift is None:
            return list(self._after_call)
        form, fenced = self._drift.form, drift_forms(self._config.tool_format)[0]
        self._fence = self._fence or form is fenced
        return [*[(word,) for word in form.tail.split()], *(fenced if self._fence else form).closings]

    def _skip_suffix(self) -> bool:
        """Drops the next word of the syntax after the last call, or gives up if other text follows the call. Returns
        False if it needs more text."""
        text, alternatives = self._text.lstrip(), self._suffix[0]
        if (word := next((one for one in alternatives if text.startswith(one)), None)) is not None:
            if word == FENCE and self._drift is not None:
                if text == FENCE:
                    return False
                if not text[len(FENCE)].isspace():  # another block begins
                    self._suffix.clear()
                    return True
            self._text = text[len(word) :]
            self._suffix.pop(0)
            if self._drift is None:
                self._within = bool(self._suffix) or not self._after_call
            elif word not in self._drift.form.tail:
                self._line = self._line and word in self._config.shown
                self._bare = self._line or word == FENCE
                self._fence = self._fence and word != FENCE
            return True
        if any(word.startswith(text) for word in alternatives):
            return False
        self._suffix.clear()
        return True


def _blanks_and_partial_tag(text: str, tag: str) -> int:
    """Returns the length of a partial tag at the end of `text` with the white space before it; 0 for an empty `tag`."""
    return len(text) - len(text[: len(text) - partial_tag(text, tag)].rstrip()) if tag else 0


# Turns a call's arguments into JSON as they arrive. Each format writes arguments in one of a few forms.


class ArgumentScanner(Protocol):
    """Scans the arguments of one call; `feed` returns the JSON of the part that is certain.

    done: whether the arguments are complete
    broken: whether the text does not have the form
    rest: the text after the arguments, or from the place where they broke
    held: the JSON to add for text that was held back, if the output ends here
    """

    @property
    def done(self) -> bool: ...
    @property
    def broken(self) -> bool: ...
    @property
    def rest(self) -> str: ...
    @property
    def held(self) -> str: ...
    def feed(self, text: str) -> str: ...


def scanner_of(syntax: ToolCallSyntax, kinds: Mapping[str, Mapping[str, Kind]], function: str) -> ArgumentScanner:
    """Creates the scanner of a call to `function`, whose parameters have these kinds."""
    match syntax.form:
        case Form.PYTHON:
            return LiteralArguments(PYTHON)
        case Form.BARE:
            return LiteralArguments(BARE)
        case Form.TAGS if syntax.tags is not None:
            return TaggedArguments(syntax.tags, kinds.get(function, {}))
    return JsonObjectScanner()


# Counts the calls of one output, and follows the arguments of the open call.


class Calls:
    """The calls of one output.

    begun, completed: how many calls have begun, and how many have complete arguments
    open: whether the arguments of the last call may go on
    broke: whether the arguments of the last call are not JSON
    """

    __slots__ = ("_scanner", "_scanner_of", "begun", "broke", "completed")

    def __init__(self, scanner_of: Callable[[str], ArgumentScanner] = lambda _: JsonObjectScanner()) -> None:
        """scanner_of: creates the scanner of the arguments of a function"""
        self._scanner_of = scanner_of
        self.begun = 0
        self.completed = 0
        self.broke = False
        self._scanner: ArgumentScanner | None = None

    @property
    def open(self) -> bool:
        return self._scanner is not None

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self.completed > 0 and self._scanner is None

    def begin(self, name: str, scanner: ArgumentScanner | None = None) -> Event:
        """Begins a call. Its arguments follow. scanner: of its arguments, if they are not in the usual form"""
        self._scanner = scanner or self._scanner_of(name)
        self.begun += 1
        return CallStart(self.begun - 1, name)

    def feed(self, text: str) -> tuple[list[Event], str]:
        """Feeds arguments of the open call; returns their events, and the text after them or from where they broke."""
        scanner = self._scanner
        if scanner is None:
            return [], text
        events: list[Event] = []
        if fragment := scanner.feed(text):
            events.append(CallArguments(self.begun - 1, fragment))
        if scanner.done:
            events.append(CallEnd(self.begun - 1))
            self.completed += 1
        if scanner.done or scanner.broken:
            self._scanner, self.broke = None, scanner.broken
        return events, scanner.rest

    def held(self) -> list[Event]:
        """Returns the arguments that were held back. Called when the output ends within the open call."""
        rest = self._scanner.held if self._scanner else ""
        return [CallArguments(self.begun - 1, rest)] if rest else []

    def drop(self) -> None:
        """Abandons the open call, whose arguments other output interrupts."""
        self._scanner = None
