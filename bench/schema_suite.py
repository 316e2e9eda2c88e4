"""Measures how much of the JSON Schema test suite structured output takes, and whether an answer can be invalid.

    python -m bench.schema_suite FOLDER [--answers 20]

FOLDER: the tests of one draft, such as `tests/draft2020-12` of https://github.com/json-schema-org/JSON-Schema-Test-Suite.
It counts the schemas that are taken with `strict: true`, and those that are taken without. In each strict grammar, it
tries the suite's own values (a wrong one must not fit), and draws random answers, which must be valid. Refusals are
printed with the path that they name. Ends with status 1 if an answer was invalid, or if a grammar led nowhere.
"""

import argparse
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from frontend.errors import Unprocessable
from frontend.structured_output.grammar import json_schema

BYTES = LLTokenizer("byte")
SOON, LONGEST = 60, 600  # bytes after which an answer hurries to its end, and after which it is given up
CLOSING = b'"]}'
VALIDATORS = {
    "draft4": jsonschema_rs.Draft4Validator, "draft6": jsonschema_rs.Draft6Validator,
    "draft7": jsonschema_rs.Draft7Validator, "draft2019-09": jsonschema_rs.Draft201909Validator,
}  # fmt: skip


SCHEMA_OF = {name: f"http://json-schema.org/draft-0{name[-1]}/schema#" for name in ("draft4", "draft6", "draft7")}


def finite(text: str) -> float:
    """Returns a number, also one beyond a double, which JSON and JSON Schema know: 1e999."""
    return min(max(float(text), -1e308), 1e308)


def groups(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the content of each group of tests, which share one schema."""
    for file in sorted(folder.glob("*.json")):
        for group in json.loads(file.read_text()):
            yield f"{file.stem}: {group['description']}", group


def fits(grammar: str, text: str) -> bool:
    matcher, data = LLMatcher(BYTES, grammar, log_level=0), text.encode()
    return bool(matcher.try_consume_tokens(list(data)) == len(data) and matcher.is_accepting())


def answer(grammar: str, draw: random.Random) -> str | None:
    """Returns a random answer, byte by byte; None if it did not end. Raises ValueError if the grammar leads nowhere."""
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    said = bytearray()
    while len(said) < LONGEST:
        if matcher.is_stopped() or (matcher.is_accepting() and draw.random() < 0.5):
            return said.decode()
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = [int(one) for one in np.flatnonzero(np.unpackbits(bits, bitorder="little")) if one < 256]
        if not allowed:
            if matcher.is_accepting():
                return said.decode()
            raise ValueError(f"nothing may follow {said!r}")
        plain = [one for one in allowed if one < 128] or allowed
        closing = [one for one in allowed if one in CLOSING]
        one = draw.choice(closing if closing and len(said) > SOON else plain if draw.random() < 0.95 else allowed)
        matcher.consume_token(one)
        said.append(one)
    return None


def main() -> int:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--answers", type=int, default=20)
    asked = options.parse_args()
    validator = VALIDATORS.get(asked.folder.name, jsonschema_rs.Draft202012Validator)
    count: Counter[str] = Counter()
    wrong: list[str] = []
    for name, group in groups(asked.folder):
        schema = group["schema"]
        if isinstance(schema, dict) and asked.folder.name in SCHEMA_OF:
            schema = {"$schema": SCHEMA_OF[asked.folder.name], **schema}
        count["schemas"] += 1
        try:
            json_schema(schema, "schema", lenient=True)
            count["without strict"] += 1
        except Unprocessable as error:
            print(f"refused without strict: {name}: {error.message:.160}")
        try:
            grammar = json_schema(schema, "schema")
        except Unprocessable as error:
            print(f"refused: {name}: {error.message:.160}")
            continue
        count["strict"] += 1
        for test in group["tests"]:
            taken = fits(grammar, json.dumps(test["data"], ensure_ascii=False, separators=(",", ":")))
            count[f"{'valid' if test['valid'] else 'invalid'} values"] += 1
            count[f"{'valid' if test['valid'] else 'invalid'} values that fit"] += taken
            if taken and not test["valid"]:
                wrong.append(f"{name}: {test['data']!r} fits {schema}")
        draw = random.Random(name)
        try:
            checks = validator(schema, validate_formats=False)
            answers = [answer(grammar, draw) for _ in range(asked.answers)]
        except Exception as error:
            wrong.append(f"{name}: {error}")
            continue
        for one in answers:
            count["answers that ended"] += one is not None
            if one is not None and not checks.is_valid(json.loads(one, parse_float=finite)):
                wrong.append(f"{name}: {one!r} is invalid for {schema}")
    if not count["schemas"]:
        options.error(f"{asked.folder} has no tests of the suite (*.json)")
    print(", ".join(f"{key}: {value}" for key, value in count.items()))
    share = count["strict"] / count["schemas"], count["without strict"] / count["schemas"]
    print(f"taken with strict {share[0]:.1%}, without {share[1]:.1%}; wrong: {len(wrong)}")
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
