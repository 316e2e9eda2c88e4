"""The scanner of arguments for each tool-call format."""

from frontend.output_parser.json_arguments import JsonObjectScanner, TaggedArguments
from frontend.output_parser.literal_arguments import LiteralArguments
from frontend.output_parser.model_format import Kind, ToolFormat
from frontend.output_parser.tool_calls import scanner_of
from frontend.output_parser.tool_syntax import SYNTAX, Form

SCANNERS = {
    Form.JSON: JsonObjectScanner, Form.TAGS: TaggedArguments, Form.PYTHON: LiteralArguments,
    Form.BARE: LiteralArguments,
}  # fmt: skip


def test_scanner_follows_from_the_form() -> None:
    for syntax in SYNTAX.values():
        assert type(scanner_of(syntax, {}, "f")) is SCANNERS[syntax.form]


def test_scanner_knows_the_kinds_of_its_function() -> None:
    scanner = scanner_of(SYNTAX[ToolFormat.QWEN_XML], {"f": {"n": Kind.JSON}, "g": {}}, "f")
    assert scanner.feed("<parameter=n>\n1\n</parameter>\n</function>") == '{"n": 1}'
    scanner = scanner_of(SYNTAX[ToolFormat.QWEN_XML], {"f": {"n": Kind.JSON}, "g": {}}, "g")
    assert scanner.feed("<parameter=n>\n1\n</parameter>\n</function>") == '{"n": "1"}'
