"""The arguments that a grammar allows in forms other than JSON. test_tool_grammar.py tests all formats."""

from pathlib import Path
from typing import Any

import pytest

from frontend.errors import Unprocessable
from frontend.output_parser.model_format import Mode, ToolFormat
from tests.frontend.output_parser.examples import function
from tests.frontend.structured_output.test_tool_grammar import accepts, grammar_of, tokenizer_of

QWEN, GEMMA, LFM = ToolFormat.QWEN_XML, ToolFormat.GEMMA4, ToolFormat.LFM2
WRAPPED = {
    QWEN: "<tool_call>\n<function=f>\n{}\n</function>\n</tool_call>",
    GEMMA: "<|tool_call>call:f{{{}}}<tool_call|>",
    LFM: "<|tool_call_start|>[f({})]<|tool_call_end|>",
}
TREE = {"type": "object", "properties": {"v": {"type": "integer"}, "l": {"$ref": "#/$defs/T"}}, "required": ["v"]}


def xml(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>"


def of(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


CASES: list[tuple[ToolFormat, dict[str, Any], list[str], list[str]]] = [
    (QWEN, of("a", a={"enum": ["x", "y.z", 3]}), [xml("a", "x"), xml("a", "y.z"), xml("a", "3")],
     [xml("a", "w"), xml("a", "yaz"), "", xml("b", "x")]),
    (QWEN, of("a", a={"type": "string", "maxLength": 3, "minLength": 2}), [xml("a", "ab"), xml("a", "a\nb")],
     [xml("a", "a"), xml("a", "abcd")]),
    (QWEN, of("b", a={"type": "string"}, b={"type": "integer", "maximum": 9}),
     [xml("b", "5"), xml("a", "any <b>\n text") + "\n" + xml("b", "0")],
     [xml("b", "10"), xml("b", "x"), xml("a", "x")]),
    (QWEN, {"type": "object"}, ["", xml("any", "thing"), xml("a", "1") + xml("b", "2")], ["x"]),
    (QWEN, of(a={"type": "string"}) | {"additionalProperties": {"type": "string"}},
     [xml("a", "1") + xml("b", "2")], ["x"]),
    (QWEN, of("a", a={"$ref": "#/$defs/T"}) | {"$defs": {"T": TREE}}, [xml("a", '{"v": 1, "l": {"v": 2}}')],
     [xml("a", '{"l": 2}')]),
    (GEMMA, of("a", a={"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}),
     ['a:[<|"|>x<|"|>]', 'a:[<|"|>x<|"|>,<|"|>y, "z"<|"|>]'],
     ["a:[]", "a:[1]", 'a:[<|"|>x<|"|>,<|"|>x<|"|>,<|"|>x<|"|>]']),
    (GEMMA, of("a", a={"$ref": "#/$defs/T"}) | {"$defs": {"T": TREE}}, ["a:{v:1}", "a:{v:1,l:{v:2,l:{v:3}}}"],
     ["a:{l:{v:1}}", 'a:{"v":1}']),
    (GEMMA, of("b", a={"enum": ["x", 2]}, b={"type": ["integer", "null"]}), ['a:<|"|>x<|"|>,b:1', "a:2,b:null", "b:3"],
     ["a:3,b:1", "b:1,a:2", 'b:<|"|>1<|"|>']),
    (GEMMA, {"type": "object"}, ["", "x:1,y:[{z:true}]"], ["x"]),
    (LFM, of("b", a={"type": "string"}, b={"type": "boolean"}, c={"type": "string", "maxLength": 2}),
     ['a="x", b=true', "a='it\\'s', b=True", "b=False", 'b=false, c="xy"'],
     ["a='x'", "b=1", 'b=true, c="xyz"', "b=true, c='x'"]),
    (LFM, {"type": "object"}, ["", 'x=[1, {"a": null}], y="z"'], ["x"]),
    (LFM, of(a={"type": "integer"}, b={"type": "integer"}), ["", "a=1", "b=1", "a=1, b=2"], ["a=1 b=2", ", b=2"]),
]  # fmt: skip


@pytest.mark.parametrize(("tool_format", "schema", "good", "bad"), CASES)
def test_arguments_that_the_schema_allows_are_accepted_and_no_others(
    tmp_path: Path, tool_format: ToolFormat, schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    tokenizer = tokenizer_of(tmp_path, [])
    grammar = grammar_of(tool_format, Mode.REQUIRED, {}, functions=(function("f", schema),))
    assert [one for one in good if not accepts(tokenizer, grammar, WRAPPED[tool_format].format(one))] == []
    assert [one for one in bad if accepts(tokenizer, grammar, WRAPPED[tool_format].format(one))] == []


@pytest.mark.parametrize("tool_format", [QWEN, GEMMA])
@pytest.mark.parametrize(
    "schema", [of(a={"type": "string", "pattern": "a+"}), {**of(a={}), "allOf": [of(b={"type": "string"})]}]
)
def test_what_cannot_be_enforced_is_refused_for_a_strict_function_only(
    tool_format: ToolFormat, schema: dict[str, Any]
) -> None:
    assert grammar_of(tool_format, Mode.REQUIRED, {}, functions=(function("f", schema),))
    with pytest.raises(Unprocessable, match="cannot be enforced"):
        grammar_of(tool_format, Mode.REQUIRED, {}, functions=(function("f", schema, strict=True),))
