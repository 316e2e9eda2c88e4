"""What a grammar enforces of a JSON schema, what it drops or refuses, and the schemas that programs generate."""

import json
import random
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator, validator_for

from bench.schema_suite import answer, finite, fits
from frontend.errors import Unprocessable
from frontend.request import Notes, notes
from frontend.structured_output import grammar as build
from frontend.structured_output.patterns import Unsupported, translated
from tests.frontend.structured_output.generated import ANSWERS, D7, PARAMETERS

Schema = Any
D4 = "http://json-schema.org/draft-04/schema#"
A, B = {"required": ["a"]}, {"required": ["b"]}
AB = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}


def dropped(schema: Schema, *, lenient: bool = True) -> list[str]:
    """Returns the paths of the keywords that a schema loses when it becomes a grammar."""
    found = Notes()
    before = notes.set(found)
    try:
        build.json_schema(schema, "x", lenient=lenient)
    finally:
        notes.reset(before)
    return list(found.not_enforced or ())


# schema, values that its strict grammar allows, values that it does not allow
ENFORCED: list[tuple[Schema, list[Any], list[Any]]] = [
    ({"not": {"type": "string"}}, [1, None, []], ["a"]),
    ({"not": {"enum": ["ab", 3]}}, ["a", "abc", "", 2, 4, None], ["ab", 3]),
    ({"type": "integer", "not": {"minimum": 3, "maximum": 5}}, [2, 6], [3, 5]),
    ({**AB, "not": A}, [{}, {"b": 1}], [{"a": 1}]),
    ({"not": {"not": {"type": "null"}}}, [None], [1]),
    ({**AB, "dependentRequired": {"a": ["b"]}}, [{}, {"b": 1}, {"a": 1, "b": 1}], [{"a": 1}]),
    (
        {**AB, "dependentSchemas": {"a": {"properties": {"b": {"minimum": 5}}}}},
        [{"b": 1}, {"a": 1, "b": 5}],
        [{"a": 1, "b": 1}],
    ),
    ({**AB, "oneOf": [A, B]}, [{"a": 1}, {"b": 1}], [{}, {"a": 1, "b": 1}]),
    ({"oneOf": [{"type": "integer"}, {"minimum": 2}]}, [1, "a"], [3]),
    (
        {**AB, "if": {"properties": {"a": {"const": 1}}, "required": ["a"]}, "then": B},
        [{}, {"a": 2}, {"a": 1, "b": 0}],
        [{"a": 1}],
    ),
    ({"if": {"type": "integer"}, "then": {"minimum": 3}, "else": {"type": "string"}}, [3, "a"], [2, None, 1.5]),
    ({"if": {"type": "string"}, "else": {"type": "null"}}, ["a", None], [1]),
    ({"contains": {"const": 1}}, [[1], [1, 2], "a"], [[], [2]]),
    ({"contains": {"const": 1}, "maxContains": 1}, [[1, 2]], [[1, 1], [2]]),
    ({"contains": True, "minContains": 2}, [[1, 2]], [[1]]),
    ({"propertyNames": {"enum": ["a"]}}, [{}, {"a": 1}], [{"b": 1}]),
    ({"propertyNames": {"pattern": "^a+$"}}, [{"aa": 1}], [{"b": 1}]),
    ({"propertyNames": {"maxLength": 1}}, [{"a": 1}], [{"ab": 1}]),
    ({"type": "object", "propertyNames": False}, [{}], [{"a": 1}]),
    (
        {"propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "integer"}},
        [{"a": 1}],
        [{"a": "x"}, {"b": 1}],
    ),
    (
        {"allOf": [{"properties": {"a": True}}], "properties": {"b": True}, "unevaluatedProperties": False},
        [{"a": 1, "b": 1}],
        [{"c": 1}],
    ),
    (
        {"anyOf": [{"properties": {"a": True}, **A}, {"properties": {"b": True}, **B}], "unevaluatedProperties": False},
        [{"a": 1}, {"b": 1}],
        [{"c": 1}],
    ),
    (
        {"$ref": "#/$defs/p", "unevaluatedItems": False, "$defs": {"p": {"prefixItems": [{"type": "null"}]}}},
        [[], [None]],
        [[None, 1]],
    ),
    ({"$schema": D7, "items": [{"type": "null"}], "additionalItems": False}, [[None]], [[None, 1], [1]]),
    ({"$ref": "#here", "$defs": {"a/b": {"$anchor": "here", "type": "null"}}}, [None], [1]),
    ({"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}}}, [None], [1]),
    (
        {
            "$id": "http://x/a",
            "$ref": "b#c",
            "$defs": {"b": {"$id": "b", "$defs": {"d": {"$anchor": "c", "type": "null"}}}},
        },
        [None],
        [1],
    ),
    ({"$schema": D7, "$ref": "#/definitions/a", "minLength": 9, "definitions": {"a": {"type": "string"}}}, ["a"], [1]),
    (
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
        [0, 2**63 - 1, -(2**62)],
        [2**63, -(2**63) - 1, 1.5],
    ),
    ({"type": "number", "maximum": 1e19}, [1, -1.5, 8500000000000000000], [10**19 + 1]),
    ({"type": "integer", "exclusiveMinimum": 2.5, "maximum": 4.0}, [3, 4], [2, 5]),
    ({"$schema": D4, "minimum": 3, "exclusiveMinimum": True, "type": "integer"}, [4], [3]),
    ({"maximum": 2**53 + 1, "type": "integer"}, [2**53], [2**53 + 1024]),
    ({"maxLength": 2.0, "minLength": 1e0}, ["ab"], ["", "abc"]),
    ({"maxItems": 1.0}, [[1]], [[1, 2]]),
    ({"pattern": r"^(?!\.)(?!.*\.\.)[a-z.]+$"}, ["a.b"], [".a", "a..b", ""]),
    ({"pattern": r"^(?=.*\d)(?=.*[A-Z]).{3,}$"}, ["a1B"], ["a1b", "1B"]),
    ({"pattern": r"^(?!^[-+.]*$)[+-]?\d*\.?\d*$"}, ["-1.5", "3"], ["", "-", "+."]),
    ({"pattern": r"^[\w-]{2}\x41\u0042$"}, ["a-AB"], ["aAB"]),
    ({"pattern": r"^(?!a|b$).*$"}, ["c", "bc", ""], ["ab", "b"]),
    ({"type": "string", "format": "date"}, ["2024-02-29", "2023-12-31"], ["2023-02-29", "0000-01-01", "1900-02-29"]),
    (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T10:00:00Z", "2023-01-01T23:59:59.5+02:00"],
        ["2023-01-01T10:00:60Z"],
    ),
    ({"$dynamicRef": "#n", "$defs": {"n": {"$dynamicAnchor": "n", "type": "null"}}}, [None], [1]),
]


@pytest.mark.parametrize(("schema", "good", "bad"), ENFORCED, ids=range(len(ENFORCED)))
def test_strict_grammar_allows_only_valid_values(schema: Schema, good: list[Any], bad: list[Any]) -> None:
    made = build.json_schema(schema, "x")
    texts = {json.dumps(one): one for one in [*good, *bad]}
    assert [one for text, one in texts.items() if fits(made, text)] == good
    draw, checks = random.Random(str(schema)), validator_for(schema, validate_formats=True)
    found = [one for one in (answer(made, draw) for _ in range(5)) if one is not None]
    assert [one for one in found if not checks.is_valid(json.loads(one, parse_float=finite))] == []


# These mean nothing where they stand, so that a strict schema may have them.
MEANINGLESS: list[Schema] = [
    {"uniqueItems": False},
    {"minContains": 3},
    {"maxContains": 0},
    {"then": False},
    {"else": False},
    {"if": False},
    {"propertyNames": True},
    {"propertyNames": {"type": "string"}},
    {"not": False},
    {"unevaluatedProperties": True},
    {"unevaluatedItems": {}},
    {"format": "password"},
    {"format": "ipv4network"},
    {"format": "idn-email"},
    {"nullable": True},
    {"type": "string", "pattern": "x", "minimum": "no number", "uniqueItems": True},
    {"additionalItems": False},
    {"contentSchema": {"type": "x"}, "x-order": 3, "discriminator": {"propertyName": "a"}},
    {"minItems": 0},
    {"type": "array", "maxItems": 1, "uniqueItems": True},
    {"dependentRequired": {"a": []}},
    {"minContains": 0, "contains": False},
]


@pytest.mark.parametrize("schema", MEANINGLESS, ids=str)
def test_keyword_that_means_nothing_is_not_refused(schema: Schema) -> None:
    assert dropped(schema, lenient=False) == []


# schema, the paths that a strict schema is refused for and another one drops
DROPPED: list[tuple[Schema, list[str]]] = [
    ({"properties": {"a": {"pattern": r"(a)\1"}}}, ["x.properties.a.pattern"]),
    ({"pattern": r"\bno"}, ["x.pattern"]),
    ({"pattern": "("}, ["x.pattern"]),
    ({"pattern": "[]a]"}, ["x.pattern"]),
    ({"pattern": "a(?<!b)"}, ["x.pattern"]),
    ({"items": {"type": "any"}}, ["x.items.type"]),
    ({"type": []}, ["x.type"]),
    ({"properties": 3}, ["x.properties"]),
    ({"anyOf": [{"uniqueItems": True}, {"type": "null"}]}, ["x.anyOf[0].uniqueItems"]),
    ({"enum": [2**64 - 1]}, ["x.enum"]),
    ({"$ref": "https://x.y/z.json"}, ["x.$ref"]),
    ({"$ref": "#/$defs/none"}, ["x.$ref"]),
    ({"maxLength": -1}, ["x.maxLength"]),
    ({"$defs": {"a": {"multipleOf": 0.07}}, "items": {"$ref": "#/$defs/a"}}, ["x.$defs.a.multipleOf"]),
    ({"patternProperties": {"^a": True, "b$": {"type": "null"}}}, ["x.patternProperties"]),
    ({"properties": {"a b": {"not": {"pattern": "x"}}}}, ['x.properties["a b"].not']),
    ({"propertyNames": {"minLength": 2, "pattern": "x"}}, ["x.propertyNames"]),
    ({**AB, "additionalProperties": True, "maxProperties": 1}, ["x.maxProperties"]),
    ({"minProperties": 3}, ["x.minProperties"]),
    ({"oneOf": [{"pattern": "a"}, {"pattern": "b"}]}, ["x.oneOf"]),
    ({"properties": {"a": 3}}, ["x.properties.a"]),
]


@pytest.mark.parametrize(
    ("schema", "paths"), DROPPED, ids=[str(paths[0]) + str(i) for i, (_, paths) in enumerate(DROPPED)]
)
def test_keyword_that_cannot_be_enforced_is_refused_or_dropped_by_its_path(schema: Schema, paths: list[str]) -> None:
    assert dropped(schema) == paths
    with pytest.raises(Unprocessable) as refused:
        build.json_schema(schema, "x")
    assert refused.value.param == paths[0] and f"`{paths[0]}`" in refused.value.message


# Without `strict`, keywords that could only be enforced by allowing less are dropped.
@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ({"contains": {"const": 1}}, "x.contains"),
        ({"type": "integer", "maximum": 1.8446744073709552e19}, "x.maximum"),
        ({"type": "number", "minimum": -1e300}, "x.minimum"),
    ],
)
def test_lenient_schema_is_not_narrowed(schema: Schema, path: str) -> None:
    assert dropped(schema) == [path] and dropped(schema, lenient=False) == []


# schema, the path for which it is refused with and without `strict`
IMPOSSIBLE: list[tuple[Schema, str]] = [
    ({"enum": []}, "x.enum"),
    ({"type": "string", "const": 3}, "x.const"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "x.minimum"),
    ({"type": "integer", "minimum": 1, "maximum": 4, "multipleOf": 5}, "x.minimum"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "x.maxLength"),
    (
        {
            "type": "object",
            "properties": {"a": {"type": "object", "properties": {"b": False}, "required": ["b"]}},
            "required": ["a"],
        },
        "x.properties.a.properties.b",
    ),
    ({"type": "array", "items": {"enum": []}, "minItems": 1}, "x.items.enum"),
    ({"not": {}}, "x.not"),
    ({"allOf": [{"type": "string"}, False]}, "x.allOf[1]"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "x"),
    ({"type": "string", "pattern": "^a$", "minLength": 2}, "x"),
    ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "x.$defs.a"),
    ({"anyOf": [False]}, "x.anyOf"),
    ({"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}, "x.properties.next"),
    ({"minLength": 10**12, "type": "string"}, "x.minLength"),
]


@pytest.mark.parametrize(("schema", "path"), IMPOSSIBLE, ids=[f"{path} {i}" for i, (_, path) in enumerate(IMPOSSIBLE)])
def test_schema_that_allows_nothing_is_refused_by_the_path(schema: Schema, path: str) -> None:
    for lenient in (False, True):
        with pytest.raises(Unprocessable) as refused:
            build.json_schema(schema, "x", lenient=lenient)
        assert refused.value.param == path


def test_deep_and_cyclic_schemas_are_refused_or_read_in_time() -> None:
    deep: Schema = {}
    for _ in range(500):
        deep = {"items": deep}
    with pytest.raises(Unprocessable, match="nested more than 100 deep"):
        build.json_schema(deep, "x")
    ring = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + 1) % 50}"}, {"type": "null"}]} for i in range(50)}
    assert dropped({"$ref": "#/$defs/d0", "$defs": ring}, lenient=False) == []


@pytest.mark.parametrize("schema", [*PARAMETERS, *ANSWERS], ids=range(len(PARAMETERS) + len(ANSWERS)))
def test_generated_schema_is_taken_and_its_answers_are_valid(schema: Schema) -> None:
    build.json_schema(schema, "x", lenient=True)
    try:
        made = build.json_schema(schema, "x")
    except Unprocessable as error:
        assert error.param in dropped(schema)
        return
    draw, checks = random.Random(str(schema)), validator_for(schema, validate_formats=False)
    found = [one for one in (answer(made, draw) for _ in range(3)) if one is not None]
    assert [one for one in found if not checks.is_valid(json.loads(one, parse_float=finite))] == []


def test_translated_patterns_mean_the_same_to_all_libraries() -> None:
    assert translated("^a.b$") == (r"^a[^\n\r\u{85}\u{2028}\u{2029}]b$",)
    assert not Draft202012Validator({"pattern": r"^\s$"}).is_valid("\u0085") or "85" not in translated(r"\s")[0]
    assert translated(r"[^]\cA\u{42}{") == (r"[\x{0}-\x{10ffff}][\x{1}]B\{",)
    for pattern in ("a**", "x{,3}", r"\A", r"\ud800", "(?>a)", "(a", "a)", "[b-a]"):
        with pytest.raises(Unsupported):
            translated(pattern)
