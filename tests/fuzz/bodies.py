"""Makes JSON bodies for every route from its OpenAPI description, with wrong or extreme values in a few fields.

The work that a body asks for stays small: few tokens, few choices.
"""

import json
import random
from functools import cache
from typing import Any

from frontend.routes.openapi import document
from tests.fuzz.fuzzer import Fuzzer, Input
from tests.fuzz.posts import posting

CHAT = {"messages": [{"role": "user", "content": "a"}]}
NEEDED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a", "max_tokens": 2},
    "/v1/chat/completions": {**CHAT, "max_tokens": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 2},
    "/v1/messages": {**CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "a"},
    "/invocations": {"prompt": "a", "max_tokens": 2},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
    "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
    "/api/chat": {**CHAT, "options": {"num_predict": 2}},
    "/completion": {"prompt": "a", "max_tokens": 2},
    "/completions": {"prompt": "a", "max_tokens": 2},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "max_tokens": 2},
}
SKIPPED = ("/reset_prefix_cache",)  # this route has no body
WORK = {
    "max_tokens",
    "max_completion_tokens",
    "max_output_tokens",
    "num_predict",
    "n_predict",
    "n_cmpl",
    "n",
    "best_of",
    "min_tokens",
    "options",
}
BAD_WORK = (0, -1, -(2**63), 2**63, 2**64, "3", 1.5, True, [], {}, 2)
TEXTS = (
    "", "a", "\0", "\ud800", "\udfff\ud800", "\ufeff", "\u202e", "\U0010ffff", "é" * 3000, "a" * 100_000,
    "\U0001f468\u200d" * 500,
    "e" + "\u0301" * 2000, "<|im_start|>", "<tool_call>", "{{ x }}", "{% for a in b %}", "\x1b[31m", "../../etc/passwd",
    "auto", "none", "user", "json_object", "text", "function", "m", "data:image/png;base64,AAAA", "\r\n\r\n",
)  # fmt: skip
NUMBERS = (
    0,
    1,
    -1,
    2,
    127,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**53 + 1,
    2**63,
    2**64,
    -(2**63) - 1,
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
)
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1e400",
    "-1e999",
    "01",
    "1.",
    "'a'",
    "undefined",
    '"\\ud800"',
    '"\\u0000"',
    "\xff",
    "9" * 5000,
)
MARK = "\u2062RAW\u2062"
MAX_BODY = 16 << 20  # approximate; twice the default limit of a server


@cache
def described() -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
    """Returns the schema of each route's body, and the schemas to which these refer."""
    whole, found = document(), {}
    for path, item in whole["paths"].items():
        content = item.get("post", {}).get("requestBody", {}).get("content", {})
        if path not in SKIPPED and "application/json" in content:
            found[path] = content["application/json"]["schema"]
    return found, whole["components"]["schemas"]


def make(rng: random.Random) -> Input:
    schemas, _ = described()
    path = rng.choice(sorted(schemas))
    needed = NEEDED.get(path) or NEEDED.get(f"/v1{path}", {})  # llama.cpp's API also has OpenAI's routes without /v1
    body: Any = json.loads(json.dumps(needed))
    fields = _resolved(schemas[path]).get("properties", {})
    for name in rng.sample(sorted(fields), min(len(fields), rng.choice([0, 1, 1, 1, 2, 3, 6]))):
        body[name] = _work(rng, name) if name in WORK else _value(rng, fields[name])
    if rng.random() < 0.05:
        body[rng.choice(TEXTS)] = _wrong(rng)
    if rng.random() < 0.03:
        body = _wrong(rng)
    text = json.dumps(body, ensure_ascii=rng.random() < 0.5)
    while f'"{MARK}"' in text:
        text = text.replace(f'"{MARK}"', rng.choice(RAW), 1)
    data = text.encode("utf-8", "surrogatepass")
    if rng.random() < 0.1 and len(data) > 2:
        data = _damaged(rng, data)
    return {"path": path, "body": data.decode("latin-1")}


def _work(rng: random.Random, name: str) -> Any:
    if name == "options":
        return {"num_predict": 2, "top_k": _wrong(rng)}
    # -1 in these fields means no limit
    return rng.choice([value for value in BAD_WORK if value != -1 or not name.endswith(("predict", "tokens"))])


def _resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = described()[1][schema["$ref"].rpartition("/")[2]]
    return schema


def _value(rng: random.Random, schema: dict[str, Any], depth: int = 0) -> Any:
    """Returns a value that fits the schema or, occasionally and at any depth, a wrong value."""
    if rng.random() < 0.2 or depth > 6:
        return _wrong(rng)
    schema = _resolved(schema)
    for word in ("anyOf", "oneOf"):
        if word in schema:
            return _value(rng, rng.choice(schema[word]), depth + 1)
    if "enum" in schema or "const" in schema:
        return rng.choice([*schema.get("enum", []), *([schema["const"]] if "const" in schema else [])])
    kind = schema.get("type", "object")
    match rng.choice(kind) if isinstance(kind, list) else kind:
        case "object":
            fields = schema.get("properties", {})
            names = {*schema.get("required", []), *rng.sample(sorted(fields), min(len(fields), 2))}
            return {
                name: _work(rng, name) if name in WORK else _value(rng, fields.get(name, {}), depth + 1)
                for name in sorted(names)
            }
        case "array":
            return [_value(rng, schema.get("items", {}), depth + 1) for _ in range(rng.choice([0, 1, 1, 2, 5]))]
        case "string":
            return rng.choice(TEXTS)
        case "integer" | "number":
            limits = [schema[word] for word in ("minimum", "maximum") if word in schema]
            near = [limit + step for limit in limits for step in (-1, 0, 1)]
            return rng.choice(near or NUMBERS)
        case "boolean":
            return rng.choice([True, False])
        case _:
            return None


def _wrong(rng: random.Random) -> Any:
    """Returns a value of any type, usually an extreme one."""
    match rng.randrange(8):
        case 0:
            return rng.choice(TEXTS)
        case 1:
            return rng.choice(NUMBERS)
        case 2:
            return rng.choice([None, True, False, [], {}, [[]], [None], {"": None}])
        case 3:
            return MARK
        case 4:
            return _deep(rng)
        case 5:
            text = rng.choice(TEXTS[:10])
            return [text] * min(rng.choice([1, 100, 5000]), 1 + MAX_BODY // max(1, len(text)))
        case 6:
            return {f"{i}": rng.choice(NUMBERS) for i in range(rng.choice([1, 300, 5000]))}
        case _:
            return list(range(rng.choice([1, 2000, 50_000])))


def _deep(rng: random.Random) -> Any:
    value: Any = rng.choice([None, 1, "a"])
    for _ in range(rng.choice([5, 60, 250])):
        value = [value] if rng.random() < 0.5 else {rng.choice(["type", "content", "items", "properties", "a"]): value}
    return value


def _damaged(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return rng.choice([data[:at], data[:at] + rng.randbytes(3) + data[at + 1 :], data + data,
                       b"\xef\xbb\xbf" + data,
                       data.decode("utf-8", "replace").encode("utf-16"),
                       data[:at] + b"[" * rng.choice([10, 100_000])])  # fmt: skip


BODIES = Fuzzer("bodies", make, posting)
