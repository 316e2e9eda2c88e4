"""Makes JSON schemas, regular expressions, choices, Lark grammars and tools; many are wrong, deep, cyclic or large.

Requests with them have answers of a few tokens.
"""

import json
import random
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

from shared.grammar_trial import SECONDS
from tests.fuzz.fuzzer import HANG_S, Fuzzer, Input
from tests.fuzz.posts import posting

DEEP = "a schema that is nested deeply"
COUNTS = (0, 1, 2, 3, 10, 100, 1000, 10_000, 2**31, 2**63, -1)
NAMES = ("a", "b c", "é", "", '"', "\\", "$ref", "\0", "\U0001f468\u200d", "a" * 300, "type", "__proto__")
WORDS: dict[str, tuple[Any, ...]] = {
    "minLength": COUNTS, "maxLength": COUNTS, "minItems": COUNTS, "maxItems": COUNTS, "minProperties": COUNTS,
    "maxProperties": COUNTS, "minimum": (0, -1e308, 10**40, "1"), "maximum": (0, 5e-324, -(10**40)),
    "multipleOf": (0, 1, 0.01, 1e-300, -3),
    "format": ("date", "uuid", "email", "ipv6", "regex", "x"),
    "additionalProperties": (True, False, {}), "uniqueItems": (True, 1),
    "type": ("string", "integer", "number", "array", "object", "null", "x", ["string", "null"], [], 3),
    "enum": ([], [1, "a", None], list(range(3000)), "a"), "const": (None, {"a": [1]}, 0.1),
    "required": ([], ["a"], ["missing"] * 3, [str(i) for i in range(1000)], 1),
    "$ref": ("#", "#/$defs/a", "#/$defs/b", "#/$defs/missing", "http://other/a.json", "#/properties/a", "",
             "#/" + "a/" * 500),
    "$dynamicRef": ("#a",), "unevaluatedProperties": (False,), "contains": ({"type": "null"},),
}  # fmt: skip


def schema(rng: random.Random, depth: int = 0) -> Any:
    """Makes a schema with cycles, long chains, wide objects or deep nesting."""
    match rng.randrange(10) if depth < 5 else 9:
        case 0:
            names = [f"d{i}" for i in range(rng.choice([2, 20, 300]))]
            turn = rng.choice([0, 1])  # with 1 the chain is a cycle
            chain = {a: {"$ref": f"#/$defs/{b}"} for a, b in pairwise(names)}
            return {
                "$ref": "#/$defs/d0",
                "$defs": {**chain, names[-1]: {"$ref": "#/$defs/d0"} if turn else {"type": "null"}},
            }
        case 1:
            names = [f"d{i}" for i in range(rng.choice([2, 8, 25]))]
            graph = {n: {"anyOf": [{"$ref": f"#/$defs/{rng.choice(names)}"} for _ in range(3)]} for n in names}
            return {"$ref": "#/$defs/d0", "$defs": {**graph, names[-1]: {"type": "integer"}}}
        case 2:
            return _nested(rng, rng.choice([3, 30, 100, 200]))
        case 3:
            count = rng.choice([3, 50, 1000])
            return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)},
                    "required": [f"p{i}" for i in range(0, count, rng.choice([1, 2]))],
                    "additionalProperties": False}  # fmt: skip
        case 4:
            return {rng.choice(["allOf", "anyOf", "oneOf"]): [schema(rng, depth + 1) for _ in range(rng.randrange(5))]}
        case 5:
            return {
                "type": "array",
                rng.choice(["items", "prefixItems", "not"]): schema(rng, depth + 1),
                "maxItems": rng.choice(COUNTS),
            }
        case 6:
            return {"type": "object", "properties": {name: schema(rng, depth + 1) for name in rng.sample(NAMES, 2)}}
        case 7:
            return {"type": "string", "pattern": regex(rng)}
        case 8:
            return rng.choice([True, False, {}, [], None, "a", "{", 1])
        case _:
            return {word: rng.choice(WORDS[word]) for word in rng.sample(sorted(WORDS), rng.randint(1, 4))}


def _nested(rng: random.Random, depth: int) -> Any:
    inner: Any = rng.choice([{"type": "integer"}, {"type": "integer"}, DEEP])
    for _ in range(depth):
        inner = rng.choice([
            {"type": "array", "items": inner}, {"anyOf": [inner]}, {"type": "object", "properties": {"a": inner}},
            {"allOf": [inner]}, {"not": inner},
        ])  # fmt: skip
    return inner


def regex(rng: random.Random) -> str:
    """Makes a regular expression with nested repeats, large counts or rarely supported constructs."""
    text = rng.choice(
        ["a", "[a-z]", ".", "\\w", "\\p{L}", "é", "(?i)a", "[^\\n]", "\\d", "(?=a)", "\\1", "(?<n>a)", "[", "\\b", "$^"]
    )
    for _ in range(rng.choice([0, 1, 3, 6, 200])):
        repeat = rng.choice(
            ["*", "+", "?", "{2,}", "{3}", "{10}", "{100}", "{0,1000}", "{1000,1}", "{99999999999}", "|b", "*?", "++"]
        )
        text = f"({text}){repeat}"
        if len(text) > 3000:
            break
    return text if rng.random() < 0.9 else "|".join([text] * rng.choice([10, 300]))


def lark(rng: random.Random) -> str:
    """Makes a Lark grammar with chains and cycles of rules or terminals."""
    count = rng.choice([1, 3, 20, 300, 3000])
    name = rng.choice(["r{}", "T{}"]).format
    last = rng.choice(['"a"', "/a+/", f"/{regex(rng)}/", name(0), "", "%json {}", "<[1-9]>", '"a"..."z"', "%regex {"])
    many = rng.choice(["{}", "{} {}", "{}*", "({} | {})", '"x" {} "y"', "{}{{3,1000}}", "{}~3..500", "[{}]"])
    rules = [f"{name(i)}: {many.format(name(i + 1), name(i + 1))}" for i in range(count)]
    text = "\n".join([f"start: {name(0)}", *rules, f"{name(count)}: {last}"])
    odd = rng.choice(
        ["", "", "", "%ignore /a*/\n", "%import common.WS\n", "// a\n", "\0", "%llguidance {}\n", "start: start\n"]
    )
    return rng.choice([odd + text, text, text[: rng.randrange(len(text))], "root ::= " + "(" * 200 + '"a"' + ")" * 200])


def tools(rng: random.Random) -> dict[str, Any]:
    names = [rng.choice(["f", "g", "a-b", "a" * 64, "é", "", "f"]) for _ in range(rng.choice([1, 1, 2, 20]))]
    function = [{"type": "function", "function": {"name": name, "parameters": schema(rng)}} for name in names]
    choice = rng.choice(["auto", "required", "none", {"type": "function", "function": {"name": names[0]}}])
    return {"tools": function, "tool_choice": choice, "parallel_tool_calls": rng.choice([True, False])}


def choices(rng: random.Random) -> Any:
    return rng.choice(
        [[], ["a"], ["a", "a"], [""], ["é" * 900], [str(i) for i in range(rng.choice([10, 4096, 4097]))], ["\0", "\n"]]
    )


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}


def _text(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": "a", "max_tokens": 3, **fields}


def _response(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": "a", "max_output_tokens": 3, **fields}


def _message(**fields: Any) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, **fields}


FORMS: tuple[Callable[[random.Random], tuple[str, dict[str, Any]]], ...] = (
    lambda rng: _chat(response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema(rng)}}),
    lambda rng: _text(structured_outputs={"json": schema(rng)}, stream=True),
    lambda rng: _text(guided_json=json.dumps(schema(rng)), stream_format="events"),
    lambda rng: _response(text={"format": {
        "type": "json_schema", "name": "a", "schema": schema(rng), "strict": rng.random() < 0.5}}),
    lambda rng: _message(tools=[{"name": "f", "input_schema": schema(rng)}], tool_choice={"type": "any"}),
    lambda rng: _response(tools=[{"type": "function", "name": "f", "parameters": schema(rng)}], tool_choice="required"),
    lambda rng: ("/api/chat", {
        "messages": [{"role": "user", "content": "a"}], "format": schema(rng), "options": {"num_predict": 3}}),
    lambda rng: _chat(**tools(rng)),
    lambda rng: _text(guided_regex=regex(rng)),
    lambda rng: _text(structured_outputs={"grammar": lark(rng)}),
    lambda rng: _chat(guided_grammar=lark(rng)),
    lambda rng: _text(guided_choice=choices(rng)),
    lambda rng: _text(structured_outputs={"structural_tag": {
        "structures": [{"begin": rng.choice(["<a>", "", "a" * 999]), "schema": schema(rng),
                        "end": rng.choice(["</a>", ""])}],
        "triggers": rng.choice([["<a"], [""], ["a"], []])}}),
)  # fmt: skip


def make(rng: random.Random) -> Input:
    path, body = rng.choice(FORMS)(rng)
    depth = rng.choice([300, 3000, 30_000])
    # written as text, because Python's JSON encoder refuses deep nesting
    deep = '{"items":' * depth + "{}" + "}" * depth
    quoted, text = json.dumps(deep)[1:-1], json.dumps(body)
    return {"path": path, "body": text.replace(f'"{DEEP}"', deep).replace(f'\\"{DEEP}\\"', quoted)}


PATIENCE_S = SECONDS + HANG_S  # a grammar that takes longer to compile is refused
GRAMMARS = Fuzzer("grammars", make, partial(posting, patience_s=PATIENCE_S), PATIENCE_S)
