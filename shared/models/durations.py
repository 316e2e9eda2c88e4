"""Parses how long a model stays loaded, as users write it: `300`, `90s`, `10m`, `2h`, `1h30m`; `-1` is for ever."""

import math
import re

UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
MOST_S = 1e9  # seconds, some thirty years; the end of a longer duration might not fit into a date

_PART = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ms|s|m|h)")


def seconds_of(value: str | float) -> float:
    """Returns the duration in seconds; math.inf for any negative one. A number without a unit counts seconds.

    Raises ValueError, whose message continues a sentence that begins with the name of the field or flag.
    """
    if isinstance(value, str):
        value = _parse(value.strip())
    if math.isnan(value):
        raise ValueError("must be a duration like 300, 90s, 10m or -1")
    if value < 0:
        return math.inf
    if value > MOST_S:
        raise ValueError(f"must be at most {MOST_S:g} seconds")
    return float(value)


def _parse(text: str) -> float:
    if re.fullmatch(r"-?\d{1,12}(\.\d{1,9})?", text):
        return float(text)
    sign, body = (-1.0, text[1:]) if text.startswith("-") else (1.0, text)
    parts = _PART.findall(body)
    if not parts or "".join(number + unit for number, unit in parts) != body:
        raise ValueError(f"must be a duration like 300, 90s, 10m or -1, not {text!r:.40}")
    return sign * sum(float(number) * UNITS[unit] for number, unit in parts)
