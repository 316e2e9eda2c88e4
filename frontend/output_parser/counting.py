"""Counts the tokens of reasoning while an output is parsed."""

from collections.abc import Sequence

from frontend.output_parser.events import Event
from frontend.output_parser.formats import Reasoning
from frontend.output_parser.parser import OutputParser


def feed_counting(parser: OutputParser, texts: Sequence[str], tokens: int) -> tuple[list[Event], int]:
    """Feeds the texts of the next tokens to a parser. Returns its events, and how many of the tokens are reasoning.

    texts: a text for each of `tokens` tokens, and perhaps, after the last token of the output, one more text that
        was left over from earlier tokens

    Tokens of the tags around reasoning count, too, except tokens that leave the opening tag incomplete. After
    reasoning, a call of this function costs one check.
    """
    if len(texts) == 1:
        before, events = parser.reasoning, parser.feed(texts[0])
        return events, tokens if before is Reasoning.OPEN or parser.reasoning is Reasoning.OPEN else 0
    events, thought = [], 0
    for position, text in enumerate(texts):
        before = parser.reasoning
        if before is Reasoning.DONE:
            return events + parser.feed("".join(texts[position:])), thought
        events += parser.feed(text)
        if (before is Reasoning.OPEN or parser.reasoning is Reasoning.OPEN) and position < tokens:
            thought += 1
    return events, thought
