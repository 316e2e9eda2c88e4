"""The bounds of numbers, as llguidance can enforce them.

llguidance computes with 64 bits: with integers from -(2^63 - 1024) to 2^63 - 1, which it reads as doubles, and with the
digits of doubles below about 9.2e18. A bound between two doubles becomes the nearest double inside: up to 1,023 numbers
next to it cannot be written. A bound outside is one that a grammar cannot enforce.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, inf, isfinite, nextafter
from typing import Any

LEAST, MOST = -(2**63 - 1024), 2**63 - 1
FURTHEST = 9e18  # of numbers with a fraction
OPEN_ENDED = 10**18  # a lone bound of this size needs a bound on the other side, too
MAX_FACTOR = 2**32 - 1
WORDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum", "multipleOf")


class Invalid(ValueError):
    """The value of a keyword is no number. Its arguments are the keyword and the reason."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The keywords of llguidance, and what they lack.

    words: the keywords; narrowed: the keywords that allow less than the schema, with the reasons
    beyond: the keywords that cannot be enforced, with the reasons; empty: why no number is allowed, or ""
    """

    words: dict[str, int | float]
    narrowed: dict[str, str]
    beyond: dict[str, str]
    empty: str = ""


def bounds(schema: Mapping[str, Any], integer: bool) -> Bounds:
    """Reads the bounds of a number, or of an integer. Raises Invalid."""
    values = {word: _number(schema, word) for word in WORDS if word in schema}
    low, low_word, above = _tightest(values, "minimum", "exclusiveMinimum", schema, max)
    high, high_word, below = _tightest(values, "maximum", "exclusiveMaximum", schema, min)
    if integer:
        low = low if low == -inf else (floor(low) + 1 if above else ceil(low))
        high = high if high == inf else (ceil(high) - 1 if below else floor(high))
        above = below = False
    step = values.get("multipleOf")
    if low > high or (low == high and (above or below)):
        return Bounds({}, {}, {}, f"no number is between {_shown(low)} and {_shown(high)}")
    made = _within(low, high, low_word, high_word, integer)
    words = dict(made.words)
    for old, new, strict in (("minimum", "exclusiveMinimum", above), ("maximum", "exclusiveMaximum", below)):
        if strict and old in words:
            words[new] = words.pop(old)
    beyond = dict(made.beyond)
    if isinstance(step, int | float):
        if step <= 0:
            raise Invalid("multipleOf", "it is not above 0")
        if reason := _unlike_decimal(step):
            beyond["multipleOf"] = reason
        else:
            words["multipleOf"] = step
            if _no_multiple(low, high, above, below, Fraction(repr(step))):
                return Bounds({}, {}, {}, f"no multiple of {step} is between {_shown(low)} and {_shown(high)}")
    return Bounds(words, made.narrowed, beyond)


def exact(value: int | float) -> bool:
    """Whether a grammar writes exactly this number."""
    if isinstance(value, float):
        return isfinite(value)
    return LEAST <= value <= MOST and (int(float(value)) == value or value == MOST)


def _number(schema: Mapping[str, Any], word: str) -> int | float | bool:
    value = schema[word]
    if isinstance(value, bool) and word.startswith("exclusive"):  # as in draft 4
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
        raise Invalid(word, "it is not a number")
    return value


def _tightest(
    values: Mapping[str, Any], at: str, past: str, schema: Mapping[str, Any], pick: Any
) -> tuple[int | float, str, bool]:
    """Returns the bound of one side, its keyword, and whether the bound itself is left out."""
    found = values.get(at, -inf if pick is max else inf)
    beyond = values.get(past)
    if isinstance(beyond, bool):
        return found, at, beyond and at in values
    if beyond is None or (beyond != found and pick(beyond, found) == found):
        return found, at, False
    return beyond, past, True


def _within(low: Any, high: Any, low_word: str, high_word: str, integer: bool) -> Bounds:
    least, most = (LEAST, MOST) if integer else (-FURTHEST, FURTHEST)
    words: dict[str, Any] = {}
    narrowed: dict[str, str] = {}
    beyond: dict[str, str] = {}
    reason = "numbers of more than 64 bits cannot be bounded"
    if low > most or high < least:
        beyond |= {word: reason for word, value in ((low_word, low), (high_word, high)) if isfinite(value)}
        return Bounds({}, {}, beyond)
    if high != inf:
        words["maximum"] = most if high > most else _inside(high, -inf, integer)
        if high > most:
            narrowed[high_word] = reason
    elif low >= OPEN_ENDED:
        words["maximum"] = most
        narrowed[low_word] = reason
    if low != -inf:
        words["minimum"] = least if low < least else _inside(low, inf, integer)
        if low < least and low != -(2**63):
            narrowed[low_word] = reason
    elif high <= -OPEN_ENDED:
        words["minimum"] = least
        narrowed[high_word] = reason
    return Bounds(words, narrowed, beyond)


def _inside(value: int | float, towards: float, integer: bool) -> int | float:
    """Returns the nearest double to a bound that is not outside of it."""
    if isinstance(value, float) or exact(value):
        return value
    near = float(value)
    if (near > value) == (towards < 0):
        near = nextafter(near, towards)
    return int(near) if integer else near


def _unlike_decimal(step: int | float) -> str:
    """Returns why llguidance cannot take a factor, which it multiplies by ten until it is whole; empty if it can."""
    value, places = float(step), 0
    while value % 1 and value <= MAX_FACTOR:
        value, places = value * 10, places + 1
    if value > MAX_FACTOR or Fraction(int(value), 10**places) != Fraction(repr(step)):
        return "the factor has too many digits"
    return ""


def _no_multiple(low: Any, high: Any, above: bool, below: bool, step: Fraction) -> bool:
    if low == -inf or high == inf:
        return False
    first = ceil(Fraction(low) / step) * step
    if above and first == low:
        first += step
    return first > high or (below and first == high)


def _shown(value: int | float) -> str:
    return "-∞" if value == -inf else "∞" if value == inf else f"{value}"
