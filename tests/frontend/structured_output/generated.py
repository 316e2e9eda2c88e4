"""Schemas in the form in which programs generate them, one a line: for the parameters of functions, and for answers.

`as by` names the program whose form a schema has; the contents are made up.
"""

import json
from pathlib import Path
from typing import Any

D7 = "http://json-schema.org/draft-07/schema#"


def _read(name: str) -> list[Any]:
    text = (Path(__file__).parent / name).read_text(encoding="utf-8")
    return [json.loads(line)["schema"] for line in text.splitlines()]


PARAMETERS = _read("parameters.jsonl")
ANSWERS = _read("answers.jsonl")
