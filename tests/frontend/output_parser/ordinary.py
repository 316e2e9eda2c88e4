"""Ordinary answers with prose, code and JSON, as models give them while tools are offered: none of them is a call."""

import json
import random
from collections.abc import Iterator

WORDS = ("the", "file", "has", "a", "list", "of", "names", "and", "values", "which", "you", "can", "read", "here")
NAMES = ("my-package", "get_wind", "addition", "Ulm", "get_weather", "add", "weather", "get_weather_v2", "main")
KEYS = ("version", "description", "args", "argument", "parameters_schema", "value", "input", "type")
LANGUAGES = ("python", "json", "", "js", "bash", "jsonc", "yaml", "html", "jsonl", "xml")
TAGS = (
    "<tools>",
    "<function>",
    "<function=NAME>",
    "`<tool_call>`",
    "<tool>",
    "</tools>",
    "`{`",
    "<think>",
    "`<function=add>`",
)


def ordinary_answers(count: int) -> Iterator[str]:
    """Yields answers, always the same. No answer begins or ends with white space."""
    chance = random.Random(53)
    for _ in range(count):
        parts = [chance.choice(PARTS)(chance) for _ in range(chance.randint(1, 5))]
        yield chance.choice(("\n", "\n\n")).join(parts).strip()


def _prose(chance: random.Random) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(3, 12))).capitalize() + chance.choice(".:!")


def _prose_with_tags(chance: random.Random) -> str:
    return f"{_prose(chance)} {chance.choice(TAGS)} {_prose(chance)}"


def _object(chance: random.Random) -> dict[str, object]:
    """Returns an object that is no call: the name may be a function's, but then no arguments follow."""
    found: dict[str, object] = {"name": chance.choice(NAMES)}
    for _ in range(chance.randint(0, 3)):
        found[chance.choice(KEYS)] = chance.choice(("1.0", 3, None, {"a": 1}, [1, {"name": "add"}]))
    if found["name"] not in ("get_weather", "add") and chance.random() < 0.5:
        found["arguments"] = {"city": "Ulm"}
    elif chance.random() < 0.5:
        found = {"id": 1, **found, "arguments": {"city": "Ulm"}}  # a record of a call, not a call
    return found


def _value(chance: random.Random) -> str:
    one = _object(chance)
    value = chance.choice((one, [one, _object(chance)], {"tools": [one]}, {"type": "function", "function": one}))
    return json.dumps(value, indent=chance.choice((None, 2, 4)))


def _json_block(chance: random.Random) -> str:
    return f"```{chance.choice(('json', 'json', '', 'jsonc'))}\n{_value(chance)}\n```"


def _bare_json(chance: random.Random) -> str:
    return _value(chance)


def _code(chance: random.Random) -> str:
    name = chance.choice(NAMES).replace("-", "_")
    lines = [
        f"def {name}(city):", f'    return {{"name": "{name}", "arguments": city}}', f"print({name}('Ulm'))",
        'call = {"name": "get_weather", "arguments": {"city": "Ulm"}}', "<tools></tools>", "<function>f</function>",
        'if x < 3 and y > "a":', "    {", "}", "curl -d '{\"name\": \"add\"}' http://x",
    ]  # fmt: skip
    body = "\n".join(chance.choice(lines) for _ in range(chance.randint(1, 6)))
    return f"```{chance.choice(LANGUAGES)}\n{body}\n```"


def _inline(chance: random.Random) -> str:
    return f"{_prose(chance)} `{json.dumps(_object(chance))}` {_prose(chance)}"


def _list(chance: random.Random) -> str:
    return "\n".join(f"{chance.choice(('-', '1.', '*'))} {_prose(chance)}" for _ in range(3))


PARTS = (_prose, _prose, _prose_with_tags, _json_block, _json_block, _bare_json, _code, _code, _inline, _list)
