"""The fingerprint: a short hash of everything that decides the bytes of an answer.

A worker hashes what it computes with (worker/engine/fingerprint.py). A frontend adds how it makes prompts
(frontend/api/fingerprint.py). Two servers with equal fingerprints give equal answers to equal requests.
"""

import dataclasses
import hashlib
import json
from typing import Any

DIGITS = 16  # hexadecimal digits of a fingerprint


def fingerprint_of(facts: Any) -> str:
    """Returns the fingerprint of `facts`, which may be dataclasses, containers, texts and numbers."""
    text = json.dumps(_described(facts), sort_keys=True, default=str)
    return f"fp_{hashlib.sha256(text.encode()).hexdigest()[:DIGITS]}"


def _described(value: Any) -> Any:
    """Returns a value for JSON. Fields with their default value are left out, so that a new option does not change the
    fingerprint of servers that do not use the option."""
    if dataclasses.is_dataclass(value):
        fields = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        return {field.name: _described(getattr(value, field.name)) for field in fields}
    if isinstance(value, dict):
        return {str(key): _described(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_described(item) for item in value]
    return value
