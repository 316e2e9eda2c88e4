"""Functions that make parts of a Lark grammar: escaped texts, words, rules, text until a tag."""

import re

import pytest

from frontend.structured_output.tool_arguments import ANY, Rules, W, either, escaped, joined, words


@pytest.mark.parametrize("text", ['a.b\n"/', "<|x|>", "[{(^$*+?)}]", "｜▁ü -&~#"])
def test_escaped_text_matches_itself_alone(text: str) -> None:
    assert re.fullmatch(escaped(text).replace(r"\/", "/"), text) and not re.fullmatch(escaped(text), text + "x")
    assert re.fullmatch(either([text, "b"]), "b")


def test_words_have_white_space_between_them_and_special_tokens_are_ids() -> None:
    assert words('{ "name" : "NAME"', {}, "f") == rf"/{W}\{{{W}\"name\"{W}:{W}\"f\"/"
    assert words("<a> fNAME:INDEX <b>", {"<a>": 7}, "g", before="") == rf"<[7]> /{W}fg:[0-9]{{1,4}}{W}<b>/"
    assert words("", {}) == "" and words("<a>x", {"<a>": 7}, before="") == "<[7]> /x/"


def test_joined_texts_have_nothing_between_them() -> None:
    assert joined(("<p=", "a.b", ">"), {}, W) == rf"/{W}<p=a\.b>/"
    assert joined(("\n", "<a>"), {"<a>": 7}) == r"/\n/ <[7]>" and joined(("", ""), {}) == ""


def test_rules_are_written_once() -> None:
    rules = Rules({"</a>": 7})
    assert rules.add("x", '"a"') == rules.add("y", '"a"') != rules.add("x", '"b"')
    assert len(rules.lines) == 2 and rules.name("x") != rules.name("x")
    assert rules.until("</a>").endswith(" <[7]>") and "[lazy]" in Rules({}).add("x", "/a/", "[lazy]") + "[lazy]"


def test_text_until_a_tag_is_lazy() -> None:
    rules = Rules({})
    name = rules.until("</a>")
    assert rules.lines == [rf"{name}[lazy]: /{ANY}<\/a>/"]
    limited = rules.until("</a>", "(?s:.{2})")
    assert any(line.startswith(f"{limited}[lazy]: TEXT") for line in rules.lines)
