"""The text around the arguments of a call."""

import pytest

from frontend.output_parser.model_format import HARMONY, MISTRAL_ARGS, TEMPLATE_WORDS, THINK, ToolFormat
from frontend.output_parser.tool_syntax import SYNTAX, Form, specials_of


@pytest.mark.parametrize("tool_format", SYNTAX)
def test_every_head_names_the_function_once_and_a_tag_begins_the_first_one(tool_format: ToolFormat) -> None:
    syntax = SYNTAX[tool_format]
    assert all(head.count("NAME") == 1 for head in syntax.heads)
    assert bool(syntax.tag) == syntax.inline and f"{syntax.opening} {syntax.heads[0]}".strip().startswith(syntax.tag)
    assert (syntax.tags is not None) == (syntax.form is Form.TAGS)


def test_every_format_can_be_detected_and_parsed() -> None:
    assert {one for one, _ in TEMPLATE_WORDS} == set(ToolFormat) - {ToolFormat.NONE}
    assert set(SYNTAX) == set(ToolFormat) - {ToolFormat.NONE, ToolFormat.HARMONY, ToolFormat.MISTRAL_ARGS}


def test_special_tokens_of_a_format_are_its_words_and_tags() -> None:
    assert set(specials_of(ToolFormat.HARMONY, THINK)) == set(HARMONY)
    assert set(specials_of(ToolFormat.MISTRAL_ARGS, THINK)) == set(MISTRAL_ARGS)
    assert {"<tool_call>", "</tool_call>", *THINK} <= set(specials_of(ToolFormat.HERMES, THINK))
    assert {'<|"|>', "<|channel>"} <= set(specials_of(ToolFormat.GEMMA4, ("<|channel>thought", "<channel|>")))
    assert set(specials_of(ToolFormat.NONE, THINK)) == {*THINK}
