"""Few cases in place of all combinations of parameters: every value of one meets every value of every other one.

A fault usually needs one value, or two together. A test whose cases are all combinations repeats each pair many times;
a test with `in_pairs` has each pair at least once, in nearly as few cases as can be. Values that must all meet, for
example because each combination of them is a function of its own in the C library, are one parameter:
`{"tier, dtype": itertools.product(HERE, DTYPES), ...}`.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest


def in_pairs(parameters: Mapping[str, Iterable[Any]], indirect: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Parametrizes a test with cases that have every pair of values of two parameters.

    Args:
        parameters: two or more: a name → its values. A name may be several, `"heads, size"`, whose values are tuples.
        indirect: the names that are fixtures.
    """
    cases = [
        [one for key, value in zip(parameters, case, strict=True) for one in (value if "," in key else [value])]
        for case in pairs(*(list(values) for values in parameters.values()))
    ]
    names = ", ".join(parameters)
    return pytest.mark.parametrize(names, cases, indirect=list(indirect), ids=_shown)


def pairs(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Returns cases, one value of each parameter in each, that have every pair of values of two parameters.

    parameters: the values of each of two or more. One without values leaves no case.
    """
    sizes = [len(values) for values in parameters]
    if not all(sizes):
        return []
    left = {  # pairs that no case has yet, in a fixed order: (parameter, number of its value) twice
        ((a, x), (b, y)): None
        for a, b in combinations(range(len(sizes)), 2)
        for x, y in product(range(sizes[a]), range(sizes[b]))
    }
    cases: list[tuple[Any, ...]] = []
    while left:
        case = dict(next(iter(left)))
        for parameter in sorted(range(len(sizes)), key=lambda parameter: -sizes[parameter]):
            if parameter not in case:
                case[parameter] = max(range(sizes[parameter]), key=lambda value: _new(case, parameter, value, left))
        for pair in combinations(sorted(case.items()), 2):
            left.pop(pair, None)
        cases.append(tuple(values[case[parameter]] for parameter, values in enumerate(parameters)))
    return cases


def _new(case: dict[int, int], parameter: int, value: int, left: Mapping[Any, None]) -> tuple[int, int]:
    """Returns how many pairs a value would add to a case, and then how many pairs still need the value."""
    added = sum(tuple(sorted((item, (parameter, value)))) in left for item in case.items())
    return added, sum((parameter, value) in pair for pair in left) if added else 0


def _shown(value: Any) -> str:
    return str(getattr(value, "name", value))
