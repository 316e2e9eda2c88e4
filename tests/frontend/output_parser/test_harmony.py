"""Messages of gpt-oss become reasoning, text and calls, however they are cut, cut off, or malformed."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.events import CallArguments, CallStart, Event, ReasoningText, Text
from frontend.output_parser.harmony import UserText
from frontend.output_parser.model_format import BLANK, HARMONY, ParserConfig, Reasoning, ToolFormat, spelled
from frontend.output_parser.parser import output_parser
from tests.frontend.output_parser.joining import NAMES, called, check_order, cut, events_of

CONFIG = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HARMONY, NAMES)
ARGUMENTS = '{"city": "São \\"P\\" |end|>", "days": [1, -2.5e3, {"x": null}], "ok": true}'


def marked(text: str) -> str:
    """Returns `text` with special tokens replaced by their stand-ins."""
    for spelling, mark in HARMONY.items():
        text = text.replace(spelling, mark)
    return text


THOUGHT = "<|channel|>analysis<|message|>We need it.\n<|end|>"
NEXT = "<|start|>assistant"
ADD = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
WEATHER = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"

WELL_FORMED: dict[str, tuple[str, list[Event]]] = {
    "an answer": ("<|channel|>final<|message|> Hi <b>\n<|return|>", [Text(" Hi <b>\n")]),
    "a thought and an answer": (
        f"{THOUGHT}{NEXT}<|channel|>final<|message|>Four.<|return|>",
        [ReasoningText("We need it.\n"), Text("Four.")],
    ),
    "a call": (WEATHER, called(0, "get_weather", ARGUMENTS)),
    "a recipient before the channel": (
        " to=functions.add<|channel|>commentary json<|message|>{}<|call|>",
        called(0, "add", "{}"),
    ),
    "a recipient in the role": (
        f"{THOUGHT}{NEXT} to=functions.add<|channel|>analysis<|message|>{{}}<|call|>",
        [ReasoningText("We need it.\n"), *called(0, "add", "{}")],
    ),
    "no blank and no namespace": (
        "<|channel|>commentary to=add<|constrain|>json<|message|>{}<|call|>",
        called(0, "add", "{}"),
    ),
    "thought, preamble, two calls": (
        f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{WEATHER}{NEXT}{ADD} {{}}\n<|call|>",
        [
            ReasoningText("We need it.\n"), Text("I look."), *called(0, "get_weather", ARGUMENTS),
            *called(1, "add", "{}"),
        ],
    ),
    "several messages of one kind": (
        f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}<|channel|>commentary<|message|>a<|end|>{NEXT}<|channel|>final<|message|>b",
        [ReasoningText("We need it.\n\nWe need it.\n"), Text("a\nb")],
    ),
    "the whole turn": (f"{NEXT}{THOUGHT}", [ReasoningText("We need it.\n")]),
    "no end": ("<|channel|>analysis<|message|>a<|start|>assistant<|channel|>final<|message|>b",
               [ReasoningText("a"), Text("b")]),
    "no end and no start": ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b",
                            [ReasoningText("a"), Text("b")]),
    "a call without content": (f"{ADD}<|call|>", called(0, "add", "{}")),
}  # fmt: skip

MALFORMED: dict[str, tuple[str, list[Event]]] = {
    "no header": ("Hello you", [Text("Hello you")]),
    "nothing": (" \n", [Text(" \n")]),
    "nearly a header": (" to", [Text(" to")]),
    "no channel": ("<|message|>Hi<|end|>", [Text("Hi")]),
    "an unknown channel": ("<|channel|>aside<|message|>Hi<|end|>", [Text("Hi")]),
    "another role": ("<|start|>user<|channel|>final<|message|>Hi<|end|>", [Text("Hi")]),
    "no message mark": ("<|channel|>analysis I need it<|end|>", [ReasoningText("I need it")]),
    "no message mark in a call": ('<|channel|>commentary to=functions.add {"a": 1}<|call|>',
                                  [Text('to=functions.add {"a": 1}')]),
    "an unknown function": ('<|channel|>commentary to=functions.sub json<|message|>{"a": 1}<|call|>',
                            [Text('to=functions.sub {"a": 1}')]),
    "another tool": ("<|channel|>analysis to=python code<|message|>print()<|call|>",
                     [ReasoningText("to=python print()")]),
    "arguments that are none": (f"{ADD}[1]<|call|>", [Text("to=functions.add [1]")]),
    "arguments that break": (f'{ADD}{{"a": 1, b: 2}}<|call|>',
                             [CallStart(0, "add"), CallArguments(0, '{"a": 1, '), Text("b: 2}")]),
    "arguments that end": (f'{ADD}{{"a": 12<|end|>{NEXT}<|channel|>final<|message|>b',
                           [CallStart(0, "add"), CallArguments(0, '{"a": 12'), Text("b")]),
    "more than arguments": (f"{ADD}{{}} done<|call|>", [*called(0, "add", "{}"), Text("done")]),
    "text after an end": ("<|channel|>final<|message|>a<|end|>\n<|end|>So it is", [Text("a\nSo it is")]),
    "the channel twice": ("<|channel|>analysis<|channel|>final<|message|>a", [Text("a")]),
    "stray marks": ("<|channel|>final<|message|>a<|message|>b<|constrain|>c", [Text("abc")]),
    "a header of many words": (f"{NEXT} I see it<|end|>", [Text("I see it")]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "events"), (WELL_FORMED | MALFORMED).values(), ids=WELL_FORMED | MALFORMED)
def test_events_of_messages_do_not_depend_on_their_cuts(text: str, events: list[Event]) -> None:
    text = marked(text)
    assert events_of(CONFIG, text) == events
    assert events_of(CONFIG, *text) == events
    for at in range(1, len(text)):
        assert events_of(CONFIG, text[:at], text[at:]) == events


def shown(events: list[Event]) -> str:
    """Returns the text of all events, in order."""
    parts = []
    for event in events:
        match event:
            case Text(text) | ReasoningText(text):
                parts.append(text)
            case CallStart(index, name):
                parts.append(f"[{index} {name}]")
            case CallArguments(_, fragment):
                parts.append(fragment)
    return "".join(parts)


@pytest.mark.parametrize("text", [text for text, _ in WELL_FORMED.values() if text[0] != " "])
def test_output_that_is_cut_off_says_the_beginning_of_the_whole(text: str) -> None:
    text = marked(text)
    whole = shown(events_of(CONFIG, text))
    for at in range(len(text)):
        part = shown(events_of(CONFIG, text[:at]))
        assert whole.startswith(part), spelled(text[:at])


def test_mark_written_letter_by_letter_is_text() -> None:
    explained = "A message ends with <|end|> or <|return|>."
    text = marked("<|channel|>final<|message|>") + explained + marked("<|return|>")
    assert events_of(CONFIG, text) == events_of(CONFIG, *text) == [Text(explained)]


def test_call_that_is_cut_off_is_not_complete() -> None:
    for text, complete in ((WEATHER, True), (WEATHER[:-10], False), (f"{WEATHER}{NEXT}{ADD}{{", False)):
        parser = output_parser(CONFIG)
        parser.feed(marked(text))
        parser.finish()
        assert parser.called == complete


def test_parser_knows_whether_it_is_inside_reasoning() -> None:
    parser = output_parser(CONFIG)
    states = []
    for piece in [THOUGHT[:-10], "<|end|>", NEXT, "<|channel|>final<|message|>", "Four."]:
        parser.feed(marked(piece))
        states.append(parser.reasoning)
    assert states == [Reasoning.OPEN] + [Reasoning.UNDECIDED] * 4


def test_output_that_continues_a_message_begins_with_its_content() -> None:
    more = marked(f" and<|end|>{NEXT}<|channel|>final<|message|>b")
    answer, thought = (ParserConfig(begins, ToolFormat.HARMONY) for begins in (Reasoning.DONE, Reasoning.OPEN))
    assert events_of(answer, more) == [Text(" and\nb")]
    assert events_of(thought, more) == [ReasoningText(" and"), Text("b")]


def test_reasoning_without_a_format_is_text() -> None:
    config = ParserConfig(Reasoning.UNDECIDED, ToolFormat.HARMONY, reasoning_is_text=True)
    text = marked(f"{THOUGHT}{NEXT}<|channel|>final<|message|>Four.<|return|>")
    assert events_of(config, text) == [Text("We need it.\n\nFour.")]
    assert output_parser(config).reasoning is Reasoning.UNDECIDED


PIECES = [
    *HARMONY, "analysis", "commentary", "final", "assistant", " ", "\n", "to=", " to=functions.add", "to=x", "json",
    '{"a": 1}', "{}", "{", "}", "Hello", "a b", "é",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=14).map("".join).map(marked)
CONFIGS = st.builds(
    ParserConfig, st.sampled_from(Reasoning), st.just(ToolFormat.HARMONY), st.sampled_from([NAMES, frozenset[str]()])
)


@settings(max_examples=300, deadline=None)
@given(CONFIGS, TEXTS, st.lists(st.integers(1, 9), max_size=30))
def test_random_messages_have_the_same_events_in_any_pieces(config: ParserConfig, text: str, sizes: list[int]) -> None:
    pieces = cut(text, sizes)
    whole = events_of(config, text)
    assert events_of(config, *pieces) == whole == events_of(config, *text)
    check_order(whole)
    assert spelled(shown(whole)) == shown(whole)
    blanked = UserText(config)(text)
    by_piece = UserText(config)
    assert "".join(map(by_piece, [*pieces])) == blanked and len(blanked) == len(text)


@settings(max_examples=300, deadline=None)
@given(TEXTS, st.sampled_from(["analysis", "commentary", "final", "aside"]))
def test_content_of_a_message_is_never_lost(text: str, channel: str) -> None:
    content = "".join(char for char in text if char not in HARMONY.values()).strip()
    events = events_of(CONFIG, marked(f"<|channel|>{channel}<|message|>{content}<|end|>{THOUGHT}"))
    assert "".join(event.text for event in events if isinstance(event, Text | ReasoningText)).startswith(content)


def test_stop_strings_are_searched_in_text_for_the_user() -> None:
    text = f"{THOUGHT}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}{WEATHER}"
    blanked = UserText(CONFIG)(marked(text + f"{NEXT}<|channel|>final<|message|>Four."))
    assert blanked.replace(BLANK, "") == "I look.Four."
    continued = UserText(ParserConfig(Reasoning.DONE, ToolFormat.HARMONY))
    assert continued("a") + continued(marked("b<|end|>")) == f"ab{BLANK}"
