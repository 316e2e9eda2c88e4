"""Parses output in gpt-oss's format, harmony: messages, each with a header that names its channel.

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The channel `analysis` is reasoning. Every other channel is text for the user, also `commentary` without a recipient.
The recipient stands before or after the channel. https://cookbook.openai.com/articles/openai-harmony

Malformed output is not lost. A message to a recipient that is no offered function becomes text or, in the channel
`analysis`, reasoning; so do arguments that are not JSON. Words in the place of a header that cannot be a header become
text. Only headers are dropped, also a header that the end of the output cuts off. Messages of one kind are joined by a
line break.
"""

import re
from collections.abc import Callable

from frontend.output_parser.events import Event, ReasoningText, Text
from frontend.output_parser.model_format import (
    ARGS,
    BLANK,
    CALL,
    CALL_ID,
    CHANNEL,
    CONSTRAIN,
    END,
    HARMONY,
    MESSAGE,
    MISTRAL_ARGS,
    RETURN,
    START,
    THINK_MARK,
    THOUGHT_MARK,
    TOOL_CALLS,
    ParserConfig,
    Reasoning,
)
from frontend.output_parser.tool_calls import Calls

ENDS = frozenset({END, RETURN, CALL})
ANALYSIS = "analysis"
HARMONY_MARKS = "".join(HARMONY.values())
HARMONY_PIECES = re.compile(f"[{HARMONY_MARKS}]|[^{HARMONY_MARKS}]+")
WORD = rf"[^\s{HARMONY_MARKS}]"


def _beginnings(word: str, more: str = "") -> str:
    """Returns a regex of all beginnings of a word, and of the word with `more` after it."""
    for letter in reversed(word):
        more = f"(?:{letter}{more})?"
    return more


TO = _beginnings("to=", f"{WORD}*")
HEADER_BEGINNING = re.compile(
    rf"(?:{START}{WORD}*|{_beginnings('assistant')})\s*{TO}\s*"
    rf"(?:{CHANNEL}\s*\w*\s*{TO}\s*[\w-]*\s*(?:{CONSTRAIN}\s*[\w-]*\s*)?)?"
)
CHANNEL_NAME = re.compile(rf"{CHANNEL}\s*(\w*)")
RECIPIENT = re.compile(rf"\bto=({WORD}+)")
HEADER_WORDS = re.compile(
    rf"{START}(?:assistant\b\s*)?|{CHANNEL}\s*(?:(?:analysis|commentary|final)\b\s*)?|[{HARMONY_MARKS}]"
)
Kind = type[Text] | type[ReasoningText]


def _channel(header: str) -> str:
    return found[1] if (found := CHANNEL_NAME.search(header)) else ""


def _recipient(header: str) -> str:
    return found[1] if (found := RECIPIENT.search(header)) else ""


def _begins_again(header: str, mark: str) -> bool:
    """Whether a special token begins a new header: a header has START only as its first token, and CHANNEL once."""
    return mark == START or (mark == CHANNEL and CHANNEL in header)


class HarmonyParser:
    """Parses one output, whose special tokens are stand-ins (`marks`)."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._names = parser_config.function_names
        self._reasoning: Kind = Text if parser_config.reasoning_is_text else ReasoningText
        self._header: str | None = None  # the open header so far; None within a message's content
        self._kind: Kind = Text  # the kind of the open message
        self._feed_content: Callable[[str], list[Event]] = self._say
        self._name = ""  # the function that the open message calls
        self._messages = 0  # how many messages have begun
        self._said: dict[Kind, int] = {}  # kind → number of the last message with text of this kind
        self._calls = Calls()
        self._begin(ANALYSIS if parser_config.reasoning is Reasoning.OPEN else "")
        if parser_config.reasoning is Reasoning.UNDECIDED:
            self._header = ""

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, or may still see it begin: each message may be reasoning."""
        inside = self._header is None and self._kind is ReasoningText
        return Reasoning.OPEN if inside else Reasoning.UNDECIDED

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self._calls.called

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in HARMONY_PIECES.findall(text):
            if piece in ENDS:
                events += self._end_message()
            elif self._header is None:
                events += self._feed_within(piece)
            elif piece == MESSAGE:
                events += self._begin_after(self._header)
            elif _begins_again(self._header, piece):
                events += self._end_header(piece)
            else:
                events += self._feed_header(self._header + piece)
        return events

    def finish(self) -> list[Event]:
        return self._end_message(cut_off=True)

    # headers

    def _feed_header(self, header: str) -> list[Event]:
        if HEADER_BEGINNING.fullmatch(header):
            self._header = header
            return []
        self._begin(_channel(header))
        return self._say(HEADER_WORDS.sub("", header))

    def _begin_after(self, header: str) -> list[Event]:
        """Begins the content of the message that has this header."""
        self._begin(_channel(header))
        recipient = _recipient(header)
        self._name = recipient.removeprefix("functions.")
        if self._name in self._names:
            self._feed_content = self._feed_call
            return []
        return self._say(f"to={recipient} ") if recipient else []

    def _begin(self, channel: str) -> None:
        self._header, self._feed_content, self._name = None, self._say, ""
        self._kind = self._reasoning if channel == ANALYSIS else Text
        self._messages += 1

    def _end_header(self, following: str = "") -> list[Event]:
        """Ends a header that has no content. A header without special tokens becomes text, unless it is blank."""
        header, self._header = self._header or "", following
        if not header or header[0] in HARMONY_MARKS or CHANNEL in header or (self._messages > 1 and not header.strip()):
            return []
        self._kind, self._messages = Text, self._messages + 1
        return self._say(header)

    # content

    def _feed_within(self, piece: str) -> list[Event]:
        """Feeds content. A header may begin although the message has not ended; other special tokens are ignored."""
        if piece in (START, CHANNEL):
            events = self._end_message()
            self._header = piece
            return events
        return [] if piece in HARMONY_MARKS else self._feed_content(piece)

    def _end_message(self, cut_off: bool = False) -> list[Event]:
        """Ends the open header or message. A call that the model ended without content has no arguments.

        cut_off: whether the output has ended
        """
        if self._header is not None:
            return self._end_header()
        self._header = ""
        events: list[Event] = []
        if self._calls.open:
            events += self._calls.held()
            if not cut_off:
                self._calls.drop()
        elif self._feed_content == self._feed_call and not cut_off:
            events += self._feed_call("{}")
        return events

    def _say(self, text: str) -> list[Event]:
        if not text:
            return []
        again = self._said.get(self._kind, self._messages) != self._messages
        self._said[self._kind] = self._messages
        return [self._kind("\n" + text if again else text)]

    def _feed_call(self, text: str) -> list[Event]:
        """Feeds the content of a call up to its first character, which shows whether arguments follow."""
        if not (text := text.lstrip()):
            return []
        if text[0] != "{":
            self._feed_content = self._say
            return self._say(f"to=functions.{self._name} {text}")
        self._feed_content = self._feed_arguments
        return [self._calls.begin(self._name), *self._feed_arguments(text)]

    def _feed_arguments(self, text: str) -> list[Event]:
        events, rest = self._calls.feed(text)
        if self._calls.open:
            return events
        self._feed_content = self._say if self._calls.broke else self._skip_blanks
        return events + self._feed_content(rest)

    def _skip_blanks(self, text: str) -> list[Event]:
        if text := text.lstrip():
            self._feed_content = self._say
        return self._say(text)


class UserText:
    """Blanks out everything except text for the user, so that stop strings are found there only. Keeps the length.

    A malformed message is blanked out, too.
    """

    def __init__(self, parser_config: ParserConfig) -> None:
        self._shows_reasoning = parser_config.reasoning_is_text
        begins = parser_config.reasoning
        self._header = "" if begins is Reasoning.UNDECIDED else None
        self._shown = begins is Reasoning.DONE or (begins is Reasoning.OPEN and self._shows_reasoning)

    def __call__(self, text: str) -> str:
        return "".join(map(self._blanked, HARMONY_PIECES.findall(text)))

    def _blanked(self, piece: str) -> str:
        if piece in ENDS:
            self._header, self._shown = "", False
        elif piece == MESSAGE and self._header is not None:
            header, self._header = self._header, None
            self._shown = (_channel(header) != ANALYSIS or self._shows_reasoning) and not _recipient(header)
        elif piece in (START, CHANNEL) and (self._header is None or _begins_again(self._header, piece)):
            self._header, self._shown = piece, False
        elif self._header is not None:
            self._header += piece
        return piece if self._shown and piece not in HARMONY_MARKS else BLANK * len(piece)


MISTRAL_MARKS = "".join(MISTRAL_ARGS.values())
MISTRAL_PIECES = re.compile(f"[{MISTRAL_MARKS}]|[^{MISTRAL_MARKS}]+")


class MistralParser:
    """Parses one output, whose special tokens are stand-ins (`marks`)."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._names = parser_config.function_names
        self._reasoning: Kind = Text if parser_config.reasoning_is_text else ReasoningText
        self._kind = self._reasoning if parser_config.reasoning is Reasoning.OPEN else Text
        self._head: str | None = None  # the text after [TOOL_CALLS]; None outside of a call
        self._name = ""  # the function whose arguments may follow
        self._after_call = False  # whether no text has followed the last call, so that blanks are dropped
        self._calls = Calls()

    @property
    def reasoning(self) -> Reasoning:
        """Whether the parser is inside reasoning, or may still see it begin."""
        return Reasoning.OPEN if self._kind is ReasoningText else Reasoning.UNDECIDED

    @property
    def called(self) -> bool:
        """Whether the output has a complete call and no incomplete call."""
        return self._calls.called

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        for piece in MISTRAL_PIECES.findall(text):
            events += self._feed_mark(piece) if piece in MISTRAL_MARKS else self._feed_text(piece)
        return events

    def finish(self) -> list[Event]:
        return self._calls.held()

    def _feed_mark(self, mark: str) -> list[Event]:
        if mark == CALL_ID and self._head is not None:
            self._head += mark
            return []
        events = self._calls.held()
        self._calls.drop()
        self._after_call, self._name = False, ""
        head, self._head = self._head, "" if mark == TOOL_CALLS else None
        if head is not None and mark == ARGS:
            self._name = head.partition(CALL_ID)[0].strip()
        elif head is not None:
            events += self._say(head.replace(CALL_ID, " "))
        self._kind = self._reasoning if mark == THINK_MARK else Text
        return events

    def _feed_text(self, text: str) -> list[Event]:
        if self._head is not None:
            self._head += text
            return []
        if self._name:
            return self._feed_beginning(text)
        if not self._calls.open:
            return self._say(text)
        events, rest = self._calls.feed(text)
        self._after_call = not self._calls.open and not self._calls.broke
        return events + self._say(rest)

    def _feed_beginning(self, text: str) -> list[Event]:
        """Feeds the first character of arguments, which shows whether they are an object."""
        if not (text := text.lstrip()):
            return []
        name, self._name = self._name, ""
        if text[0] == "{" and name in self._names:
            return [self._calls.begin(name), *self._feed_text(text)]
        return self._say(f"{name} {text}")

    def _say(self, text: str) -> list[Event]:
        text = text.lstrip() if self._after_call else text
        self._after_call = self._after_call and not text
        return [self._kind(text)] if text else []


class AnswerText:
    """Blanks out reasoning and calls, so that stop strings are found in text for the user only. Keeps the length."""

    def __init__(self, parser_config: ParserConfig) -> None:
        self._shown_after = {THOUGHT_MARK, THINK_MARK} if parser_config.reasoning_is_text else {THOUGHT_MARK}
        self._shown = parser_config.reasoning is not Reasoning.OPEN or parser_config.reasoning_is_text

    def __call__(self, text: str) -> str:
        return "".join(map(self._blanked, MISTRAL_PIECES.findall(text)))

    def _blanked(self, piece: str) -> str:
        if piece in MISTRAL_MARKS:
            self._shown = piece in self._shown_after
            return BLANK
        return piece if self._shown else BLANK * len(piece)
