"""Parameters between tags become JSON, however they are cut. test_call_parser.py tests all formats."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from frontend.output_parser.json_arguments import TaggedArguments
from frontend.output_parser.model_format import Kind, ToolFormat
from frontend.output_parser.tool_syntax import SYNTAX, ParameterTags
from tests.frontend.output_parser.joining import cut

QWEN = SYNTAX[ToolFormat.QWEN_XML].tags
GLM = SYNTAX[ToolFormat.GLM].tags
KINDS = {"n": Kind.JSON, "e": Kind.EITHER}
assert QWEN is not None and GLM is not None


def scanned(tags: ParameterTags, *pieces: str) -> tuple[str, TaggedArguments]:
    scanner, found = TaggedArguments(tags, KINDS), ""
    for i, piece in enumerate(pieces):
        found += scanner.feed(piece)
        if scanner.done or scanner.broken:
            scanner.rest += "".join(pieces[i + 1 :])
            break
    return found, scanner


VALUES = st.text(st.sampled_from('a<>/ \n"\\ü&p'), max_size=12).filter(lambda text: "</p" not in text)


@settings(max_examples=200, deadline=None)
@given(st.lists(VALUES, max_size=3), st.lists(st.integers(1, 7), max_size=30))
def test_any_strings_come_back(values: list[str], sizes: list[int]) -> None:
    parameters = "\n".join(f"<parameter=k{i}>\n{value}\n</parameter>" for i, value in enumerate(values))
    found, scanner = scanned(QWEN, *cut(f"\n{parameters}\n</function> more", sizes))
    assert scanner.done and scanner.rest == " more"
    assert json.loads(found) == {f"k{i}": value for i, value in enumerate(values)}


def test_strings_stream_and_other_values_wait_for_their_end() -> None:
    scanner = TaggedArguments(QWEN, KINDS)
    assert scanner.feed("<parameter=s>\nab") == '{"s": "ab' and scanner.feed('"\n</para') == '\\"'
    assert scanner.feed("meter><parameter=n>\n[1,") == '", "n": ' and scanner.held == "[1,"
    assert scanner.feed(" 2]\n</parameter>") == "[1, 2]" and scanner.feed("</function>") == "}" and scanner.done


def test_values_without_lines_keep_their_line_breaks() -> None:
    found, scanner = scanned(GLM, "<arg_key>s</arg_key>\n<arg_value>\na\n</arg_value><arg_key>n</arg_key>"
                                  "<arg_value> 1 </arg_value></tool_call>")  # fmt: skip
    assert scanner.done and json.loads(found) == {"s": "\na\n", "n": 1}


def test_beginning_of_a_value_is_held_for_an_output_that_ends() -> None:
    found, scanner = scanned(QWEN, "<parameter=s>\na\n</pa")
    assert found + scanner.held == '{"s": "a'
    found, scanner = scanned(QWEN, "<parameter=e>\nnul")
    assert found + scanner.held == '{"e": "nul'
    assert scanned(QWEN, "<parameter=s")[1].held == ""


def test_what_is_no_parameter_breaks_the_arguments() -> None:
    found, scanner = scanned(QWEN, "<parameter=s>\na\n</parameter> b </function>")
    assert scanner.broken and not scanner.done and (found, scanner.rest) == ('{"s": "a"', " b </function>")
    assert scanned(GLM, "<arg_key>s</arg_key> x")[1].broken
