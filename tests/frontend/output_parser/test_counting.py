"""Counting reasoning tokens while an output is parsed."""

import pytest

from frontend.output_parser.model_format import ParserConfig, Reasoning
from frontend.output_parser.parser import ParsedOutput, feed_counting, output_parser

TEXTS = ["<think>", "\n", "Hm", ".", "</think>", "\n", "Yes", "."]


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tokens_up_to_the_end_of_reasoning_count(size: int) -> None:
    parser, thought = output_parser(ParserConfig(Reasoning.UNDECIDED)), 0
    for at in range(0, len(TEXTS), size):
        piece = TEXTS[at : at + size]
        thought += feed_counting(parser, piece, len(piece))[1]
    assert thought == 5


def test_text_after_the_last_token_counts_as_no_token() -> None:
    assert ParsedOutput.parse(["Hm", "."], ParserConfig(Reasoning.OPEN), 1).reasoning_tokens == 1
    parsed = ParsedOutput.parse(TEXTS, ParserConfig(Reasoning.UNDECIDED), len(TEXTS))
    assert (parsed.reasoning_tokens, parsed.reasoning, parsed.text) == (5, "Hm.", "Yes.")
    assert ParsedOutput.parse(TEXTS, ParserConfig(Reasoning.DONE), len(TEXTS)).reasoning_tokens == 0
