"""The input of a custom tool is decoded alike however its JSON is cut into fragments."""

import json

import pytest

from frontend.api.openai.chat import CustomInput, input_of

TEXTS = (
    "",
    "abc",
    'a "quoted" \\ back\nslash\ttab',
    "é€😀",
    '*** Begin Patch\n+ x = "\\u00e9"\n*** End Patch',
    "\u2028/\b\f",
)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("escaped", [True, False])
def test_input_is_decoded_in_any_fragments(text: str, escaped: bool) -> None:
    for separators in ((",", ":"), (", ", ": ")):
        arguments = " " + json.dumps({"input": text}, ensure_ascii=escaped, separators=separators) + "\n"
        assert input_of(arguments) == text
        for size in (1, 2, 3, 5, 7):
            decoder = CustomInput()
            assert "".join(decoder.feed(arguments[i : i + size]) for i in range(0, len(arguments), size)) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [('{"input": "ab', "ab"), ('{"input": "ab\\', "ab"), ('{"input": "ab\\u00', "ab"), ('{"input": "\\ud83dx"}', ""),
     ('{"input": 5}', ""), ("{}", ""), ('{"inp', "")],
)  # fmt: skip
def test_input_that_is_cut_off_ends_there(arguments: str, text: str) -> None:
    assert input_of(arguments).replace("\ufffdx", "") == text
